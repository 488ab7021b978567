"""Ray Data and clusters compute the same rows as one machine."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import gpt_cli
from gpt_cli.errors import InputError
from gpt_cli.records import of_ranking
from gpt_cli.system.machine import cores
from support.classifiers import write_classifier
from support.processes import COMMAND, LimitedProcess, posix

pa = pytest.importorskip("pyarrow")
pytest.importorskip("ray.data")

from gpt_cli.ray import Activations, Classifier, Generator, Ranker, Scorer  # noqa: E402 (needs both)

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # Ray's own

OPTIONS = {"max_tokens": 9, "seed": 5}
ROWS = [
    {"index": index, "prompt": " ".join(["Once upon a time"] * (index % 5 + 1))}
    | {"id": f"row {index}", "max_tokens": None, "seed": None, "temperature": None}
    for index in range(40)
]
ROWS[3]["temperature"] = -1.0
ROWS[7]["max_tokens"] = 3
ROWS[11]["seed"] = 77
ROWS[13]["prompt"] = "Once " * 600
ROWS[17]["prompt"] = None
TEXTS = ["Once upon a time, there was a girl.", "x", "", None, "The moon was round. " * 200]


@pytest.fixture(scope="module")
def tiny():
    return gpt_cli.load("tiny")


@pytest.fixture(scope="module")
def cluster():
    """A cluster on this machine: a head with two CPUs, and a node with one CPU and a fake GPU."""
    from ray.cluster_utils import Cluster

    # Detect a dead node sooner than Ray's half a minute.
    patience = {f"health_check_{name}_ms": 500 for name in ("initial_delay", "period", "timeout")}
    head = {"num_cpus": 2, "num_gpus": 0, "_system_config": patience}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, num_gpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def ray(cluster):
    """Ray, connected to the cluster."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def local(tiny):
    """Compute the rows on one machine."""
    fields = ("prompt", "max_tokens", "seed", "temperature")
    rows = [{name: row[name] for name in fields} for row in ROWS]
    return list(tiny.batch(rows, gpt_cli.Options(**OPTIONS)))


SUMS = ("total_logprob", "perplexity", "bits_per_byte")


def rounded(record, *without):
    """Return a record to compare with another, whose numbers are equal within rounding."""
    exact = {name: value for name, value in record.items() if name not in without}
    for name in {*SUMS, "probability", "logprob"} & exact.keys():
        rel = 1e-5 if name in SUMS else 1e-4
        exact[name] = exact[name] and pytest.approx(exact[name], rel=rel)
    return exact


def check(actual, tiny):
    """Check that each row came back once, with the result of one machine."""
    actual = sorted(actual, key=lambda row: row["index"])
    assert [row["index"] for row in actual] == [row["index"] for row in ROWS]
    for row, source, expected in zip(actual, ROWS, local(tiny), strict=True):
        assert (row["id"], row["prompt"]) == (source["id"], source["prompt"])
        if isinstance(expected, InputError):
            assert row["error"] == {"code": expected.code, "message": str(expected)}
            assert row["text"] is row["seed"] is row["completion_tokens"] is None
        else:
            assert row["error"] is None
            assert (row["text"], row["finish_reason"]) == (expected.text, expected.finish_reason)
            assert (row["seed"], row["prompt_tokens"]) == (expected.seed, expected.prompt_tokens)
            assert row["completion_tokens"] == len(expected.ids)
    assert sum(row["error"] is not None for row in actual) == 3


def test_a_table_gets_columns_of_completions(tiny):
    generate = Generator("tiny", OPTIONS)
    table = pa.Table.from_pylist(ROWS)
    parts = [generate(table.slice(start, 16)) for start in (32, 0, 16)]
    check([row for part in parts for row in part.to_pylist()], tiny)
    assert parts[0].schema == parts[1].schema  # also where no row has failed


def test_a_row_of_a_table_with_samples_becomes_several(tiny):
    rows = [{"index": 4, "prompt": "Once", "n": 2}, {"index": 9, "prompt": "The fox", "n": None}]
    table = Generator("tiny", OPTIONS)(pa.Table.from_pylist(rows))
    places = [(row["index"], row["sample"], row["n"]) for row in table.to_pylist()]
    assert places == [(4, 0, 2), (4, 1, 2), (9, None, None)]
    plain = [{"prompt": row["prompt"]} for row in rows]
    (first, other) = tiny.batch(plain, gpt_cli.Options(**OPTIONS), indices=[4, 9])
    texts = table["text"].to_pylist()
    assert (texts[0], texts[2]) == (first.text, other.text)
    assert texts[1] != texts[0]


def test_a_table_gets_columns_of_scores(tiny):
    table = Scorer("tiny")(pa.table({"text": pa.array(TEXTS, pa.string()), "kept": range(5)}))
    actual = table.to_pylist()
    assert [row["kept"] for row in actual] == [0, 1, 2, 3, 4]
    for row, text in zip(actual, TEXTS, strict=True):
        if text is None:
            assert row["error"]["code"] == "invalid_input"
            continue
        (score,) = tiny.score_many([text])
        expected = {"text": text, "tokens": len(score.ids), "tokens_scored": score.tokens_scored}
        expected |= {name: getattr(score, name) for name in SUMS}
        assert rounded(row, "kept") == rounded(expected | {"error": None})


def test_a_table_gets_columns_of_ranked_choices(tiny):
    prompts = ["The fox was", "The lamb was ", "The bear", None, "The fox " * 400]
    own = [None, None, ["ran", "sat", "flew"], ["ran"], None]
    table = pa.table({"prompt": prompts, "choices": own, "kept": range(5)})
    parts = [Ranker("tiny", ["big", "very old"], by="token")(table.slice(n, 3)) for n in (0, 3)]
    assert parts[0].schema == parts[1].schema  # also where all rows have failed
    actual = pa.concat_tables(parts).to_pylist()
    assert [row["kept"] for row in actual] == [0, 1, 2, 3, 4]
    whole = [[" big", " very old"], ["big", "very old"], [" ran", " sat", " flew"]]
    for row, prompt, choices in zip(actual[:3], prompts[:3], whole, strict=True):
        ranked = tiny.rank(prompt, choices, by="token")
        written = {text: text.strip() for text in choices}
        for choice, expected in zip(row["choices"], of_ranking(tiny, ranked, written), strict=True):
            assert rounded(choice) == rounded(expected)
        assert row["error"] is None
    assert [row["choices"] for row in actual[3:]] == [None, None]
    assert actual[3]["error"]["message"] == 'a row needs a string "prompt"'
    assert "more than the model's context" in actual[4]["error"]["message"]


def test_a_table_gets_columns_of_labels(tmp_path):
    folder = str(write_classifier(tmp_path, "padded"))
    table = pa.table({"text": ["the and", "in the ring", None, "a " * 200], "kept": range(4)})
    parts = [Classifier(folder)(table.slice(n, 2)) for n in (0, 2)]
    assert parts[0].schema == parts[1].schema  # also where all rows have failed
    rows = pa.concat_tables(parts).to_pylist()
    expected = gpt_cli.load(folder).classify(["the and", "in the ring"])
    for row, result in zip(rows[:2], expected, strict=True):
        assert (row["label"], dict(row["probabilities"])) == (result.label, result.probabilities)
        assert row["error"] is None
    assert [row["label"] for row in rows[2:]] == [None, None]
    assert "the model's context" in rows[3]["error"]["message"]
    (cut,) = Classifier(folder, overflow="truncate")(table.slice(3)).to_pylist()
    assert cut["tokens"] == 80


def test_a_table_gets_columns_of_pooled_values(tiny):
    hooks = ["*.1.hook_resid_post", "hook_embed"]
    texts = ["The fox ran", "", None, "Once"]
    table = pa.table({"text": texts, "kept": range(4)})
    actor = Activations("tiny", hooks, load_options={"threads": 1})
    parts = [actor(table.slice(n, 2)) for n in (0, 2)]
    assert actor(table.slice(1, 2)).schema == parts[0].schema  # also where all rows have failed
    rows = pa.concat_tables(parts).to_pylist()
    assert [(row["kept"], row["error"] is None) for row in rows] == [
        (0, True), (1, False), (2, False), (3, True)
    ]  # fmt: skip
    for row in (rows[0], rows[3]):
        (values,) = tiny.activations([row["text"]], hooks, pool="mean")
        for name in values:
            assert row[name] == pytest.approx(values[name].tolist(), abs=1e-4)
    words = Activations("tiny", hooks, "word", out_dtype="float16")(table).to_pylist()
    assert [(row["kept"], row["word"]) for row in words] == [
        *((0, word) for word in ("The", "fox", "ran")), (1, None), (2, None), (3, "Once")
    ]  # fmt: skip
    with pytest.raises(InputError, match="pool must be set"):
        Activations("tiny", hooks, None)


def test_one_text_is_no_list_of_choices():
    with pytest.raises(TypeError, match="choices must be a list"):
        Ranker("tiny", "big")


def test_integers_may_be_floats(tiny):
    """Pandas makes floats of integers if a value is missing."""
    rows = {"prompt": ["Once"] * 4, "index": [0, 1, 2, 3]}
    rows |= {"max_tokens": [3.0, float("nan"), None, 2.5], "seed": [7.0, None, 2.0**60, None]}
    actual = Generator("tiny", OPTIONS)(pa.table(rows)).to_pylist()
    assert [row["completion_tokens"] for row in actual] == [3, 9, None, None]
    assert [row["seed"] for row in actual] == [7, 5, None, None]
    assert "seed must be a whole number" in actual[2]["error"]["message"]
    assert "max_tokens must be a whole number" in actual[3]["error"]["message"]


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"prompt": ["a"], "index": [0]}, "batch_format"),
        (pa.table({"prompt": ["a"]}), "'index'"),
        (pa.table({"text": ["a"], "index": [0]}), "'prompt'"),
    ],
)
def test_a_wrong_table_is_an_error(table, what):
    with pytest.raises(InputError, match=what):
        Generator("tiny", OPTIONS)(table)


@pytest.mark.parametrize(("blocks", "batch_size", "actors"), [(1, 64, 1), (7, 3, 2)])
def test_ray_has_the_results_of_one_machine(ray, tiny, blocks, batch_size, actors):
    rows = ray.data.from_arrow(pa.Table.from_pylist(ROWS)).repartition(blocks)
    arguments = {"model": "tiny", "options": OPTIONS}
    tables = {"batch_format": "pyarrow", "batch_size": batch_size}
    workers = {"concurrency": actors, "num_cpus": 0.5}
    done = rows.map_batches(Generator, fn_constructor_kwargs=arguments, **tables, **workers)
    check(done.take_all(), tiny)


def test_actors_need_a_seed():
    with pytest.raises(InputError, match="need a seed"):
        Generator("tiny", {"max_tokens": 9})


def test_no_row_is_lost_when_an_actor_dies(ray, tiny, tmp_path):
    sign = tmp_path / "died"

    class Mortal(Generator):
        """Its process dies once, in the middle of the job."""

        def __call__(self, table):
            if 20 in table["index"].to_pylist() and not sign.exists():
                sign.touch()
                os._exit(1)
            return super().__call__(table)

    rows = ray.data.from_arrow(pa.Table.from_pylist(ROWS)).repartition(8)
    tables, workers = (
        {"batch_format": "pyarrow", "batch_size": 5},
        {"concurrency": 1, "num_cpus": 1},
    )
    done = rows.map_batches(Mortal, fn_constructor_args=["tiny", OPTIONS], **tables, **workers)
    check(done.take_all(), tiny)
    assert sign.exists()


@pytest.mark.parametrize("ops", ["numpy", "native"])
def test_an_actor_takes_the_threads_of_its_share(ray, ops, request):
    if ops == "native":
        request.getfixturevalue("library")

    class Threads:
        def __init__(self):
            os.environ["GPT_CLI_OPS"] = ops
            # `make test` has set it, which has priority.
            os.environ.pop("OPENBLAS_NUM_THREADS", None)
            self._generate = Generator("tiny", OPTIONS)

        def __call__(self, table):
            threads = self._generate._engine.model.ops.threads
            return pa.table({"threads": [threads] * len(table)})

    rows = ray.data.from_arrow(pa.Table.from_pylist(ROWS[:2]))
    for share in (1, 2):
        done = rows.map_batches(Threads, batch_format="pyarrow", concurrency=1, num_cpus=share)
        assert {row["threads"] for row in done.take_all()} == {share}


# --- the command line ----------------------------------------------------------------------------

PROMPTS = [
    {"id": index, "prompt": "Once upon a time " * (index % 4 + 1), "max_tokens": 1 + index % 3}
    for index in range(600)
]
PROMPTS[5]["prompt"] = 7
PROMPTS[300]["seed"] = 4
PROMPTS[599]["max_tokens"] = -2


def run(*arguments, code=0, **options):
    """Run a command; return its standard output, or its errors."""
    finished = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, timeout=120, **options
    )
    assert finished.returncode == code, finished.stderr
    told = finished.stderr.decode()
    assert all(line.startswith("gpt-cli: ") for line in told.splitlines()), told
    return finished.stdout.decode() if code in (0, 6) else told


def batch(*arguments, code=6, **options):
    model = () if "--model" in arguments else ("--model", "tiny")
    return run("batch", *model, "-s", 3, *arguments, code=code, **options)


def records_of(text):
    """Return records without their times."""
    records = map(json.loads, text.splitlines())
    return [{name: record[name] for name in record if name != "timing"} for record in records]


@pytest.fixture(scope="module")
def there(cluster):
    """Flags for one worker of the cluster, since each takes seconds to begin."""
    address = ["--engine", "ray", "--address", cluster.address]
    return [*address, "--threads", "1", "--workers", "1", "-q"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A folder of two files; the first ends within a window."""
    folder = tmp_path_factory.mktemp("rows")
    parts = {"a": PROMPTS[:350], "b": PROMPTS[350:]}
    for name, part in parts.items():
        lines = [json.dumps(row) for row in part] + (["", "{not JSON"] if name == "b" else [])
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def expected(rows):
    """The records of one machine."""
    records = records_of(batch(rows, "--threads", 1))
    assert len(records) == 601
    assert sum("error" in record for record in records) == 3
    return records


def test_the_engine_ray_gives_the_records_of_this_machine(rows, expected, there, tmp_path):
    assert records_of(batch("*.jsonl", *there, "--workers", 3, cwd=rows)) == [
        record | ({"file": record["file"].rpartition("/")[2]} if "file" in record else {})
        for record in expected
    ]
    batch(f"file://{rows}", *there, "-o", tmp_path / "*.parquet")
    (part,) = tmp_path.glob("*.parquet")
    actual = pa.parquet.read_table(part).to_pylist()
    assert [record["text"] for record in actual] == [record.get("text") for record in expected]
    assert [record["id"] for record in actual][:2] == ["0", "1"]


def test_tables_are_scored_by_workers(there, tmp_path):
    texts = [f"Once upon a time, there {word}" for word in ("was a fox.", "were. A", "")] * 100
    pa.parquet.write_table(
        pa.table({"id": range(300), "text": [*texts[:299], None]}), tmp_path / "in.parquet"
    )
    flags = ["score", tmp_path / "in.parquet", "--model", "tiny", "-o"]
    run(*flags, tmp_path / "one.parquet", "-q", code=6)
    run(*flags, tmp_path / "other.parquet", *there, code=6)
    files = (tmp_path / f"{name}.parquet" for name in ("one", "other"))
    one, other = (pa.parquet.read_table(file).to_pylist() for file in files)
    assert [row["id"] for row in other] == [*range(300)]
    assert other == list(map(rounded, one))


def test_rows_are_ranked_by_workers(there, tmp_path):
    rows = [{"id": n, "animal": ["fox", "lamb", "bear"][n % 3], "n": n} for n in range(300)]
    rows[7].pop("animal")
    rows[8]["choices"] = ["ran", "flew"]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["rank", tmp_path / "in.jsonl", "--model", "tiny", "--choices", "big,small,very old"]
    flags += ["--template", "Once upon a time, there was a {animal} of {n} years. It was", "-o"]
    run(*flags, tmp_path / "one.jsonl", "-q", code=6)
    run(*flags, tmp_path / "other.jsonl", *there, code=6)
    one, other = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("one", "other")
    )
    assert [row["id"] for row in other] == [*range(300)]
    assert {choice["choice"] for choice in other[8]["choices"]} == {"ran", "flew"}
    for row in one:
        row |= {"choices": list(map(rounded, row["choices"]))} if "choices" in row else {}
    assert other == one


def test_an_output_of_this_machine_is_resumed_by_workers(rows, expected, there, tmp_path):
    output = tmp_path / "out.jsonl"
    batch(rows, "--threads", 1, "-o", output, "-q")
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:300]) + lines[300][:20])
    flags = [rows, "-o", output, "--resume", *there]
    run("batch", "--model", "tiny", *flags, code=6)  # the seed is known from the output
    assert records_of(output.read_text()) == expected
    assert output.read_bytes().startswith(b"".join(lines[:300]))  # also their times
    assert f"--seed of {output} was 3, and is now 4" in batch("-s", 4, *flags, code=2)


def test_samples_of_workers_are_those_of_this_machine(there, tmp_path):
    rows = [{"prompt": f"Once upon a time, {number}", "n": 1 + number % 3} for number in range(20)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [tmp_path / "in.jsonl", "-n", 5, "--samples", 2]
    expected = batch(*flags, "--threads", 1, "-q", code=0)
    output = tmp_path / "out.jsonl"
    batch(*flags, "-o", output, *there, code=0)
    whole = output.read_bytes()
    assert records_of(whole.decode()) == records_of(expected)
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:8]))  # within a row
    batch(*flags, "-o", output, "--resume", *there, code=0)
    assert records_of(output.read_text()) == records_of(expected)


def start(*arguments):
    """Begin a job of many rows, and wait until some are done."""
    command = [*COMMAND, "batch", "--model", "tiny", "-s", "3", *map(str, arguments)]
    process = LimitedProcess(command, stderr=subprocess.PIPE)
    output = arguments[arguments.index("-o") + 1]
    wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") > 200, process)
    return process


def wait_until(condition, process):
    """Wait until a condition holds, while a process runs."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.stderr
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A job of some seconds for one process, and its records."""
    folder = tmp_path_factory.mktemp("many")
    rows = [
        {"id": index, "prompt": f"Once upon a time, {index}", "max_tokens": 1 + index % 16}
        for index in range(800)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = batch(folder / "in.jsonl", "--threads", 1, code=0)
    return folder / "in.jsonl", records_of(text)


WAITING = """
import sys, time
from dataclasses import dataclass
from pathlib import Path

import ray

from gpt_cli import Options
from gpt_cli.jobs import Cluster, Generation
from gpt_cli.jobs.cluster import compute
from gpt_cli.jobs.rows import Source

address, workers, input, folder = sys.argv[1:]
folder = Path(folder)

@dataclass(frozen=True)
class Waiting(Generation):
    def records(self, engine, rows, first=0):
        node = folder / ray.get_runtime_context().get_node_id()
        node.mkdir(exist_ok=True)
        while rows[0].index and not (folder / "go").exists():
            time.sleep(0.1)
        yield from ({"index": row.index} for row in rows)

task = Waiting(Options(seed=1))
source = Source([input], "auto", task.layout, task.rows_together)
cluster = Cluster(address, int(workers), threads=1)
with (folder / "out").open("w", buffering=1) as out:
    for record in compute(cluster, source, 0, task, "tiny", {"device": "cpu"}):
        out.write(f"{record['index']}\\n")
"""


@contextmanager
def waiting(cluster, workers, input, folder):
    """Begin a job that only does its first block until `folder`/go exists."""
    script = [sys.executable, "-c", WAITING, cluster.address, workers, input, folder]
    with LimitedProcess(list(map(str, script)), stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def test_records_come_when_they_are_done(cluster, rows, tmp_path):
    with waiting(cluster, 1, rows, tmp_path) as process:
        out = tmp_path / "out"
        wait_until(lambda: out.exists() and out.stat().st_size, process)
        (tmp_path / "go").touch()
        assert process.wait(60) == 0
    assert list(map(int, (tmp_path / "out").read_text().split())) == [*range(601)]


def test_no_row_is_lost_when_a_node_dies(cluster, tmp_path):
    (tmp_path / "in").write_text("Once\n" * 5 * 256)
    doomed = cluster.add_node(num_cpus=1)
    with waiting(cluster, 4, tmp_path / "in", tmp_path) as process:
        wait_until((tmp_path / doomed.node_id).is_dir, process)  # it has begun with a block
        cluster.remove_node(doomed, allow_graceful=False)
        (tmp_path / "go").touch()
        assert process.wait(60) == 0
    assert list(map(int, (tmp_path / "out").read_text().split())) == [*range(5 * 256)]


@posix
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_driver_that_dies_is_resumed(number, code, many, there, tmp_path):
    file, expected = many
    output = tmp_path / "out.jsonl"
    with start(file, *there, "-o", output) as process:
        process.send_signal(number)
        assert process.wait(60) == code
        assert process.stderr.read() == b""
    assert output.read_bytes().endswith(b"\n")
    batch(file, *there, "-o", output, "--resume", code=0)
    assert records_of(output.read_text()) == expected


def test_without_an_address_ray_is_started_and_ended(rows, expected):
    before = ray_processes()
    actual = records_of(batch(rows, "--engine", "ray", "-q"))
    assert [record.get("text") for record in actual] == [record.get("text") for record in expected]
    assert ray_processes() <= before


def ray_processes():
    """Return the ids of the processes that are nodes of Ray."""
    listed = subprocess.run(["ps", "-eo", "pid,comm"], capture_output=True, text=True, check=True)
    lines = [line.split() for line in listed.stdout.splitlines()]
    return {pid for pid, name, *_ in lines if name in ("raylet", "gcs_server")}


@pytest.mark.skipif(cores() < 2, reason="there is room for one worker")
def test_a_machine_downloads_the_weights_once(hub, tmp_path):
    repo = "acme/tiny"
    files = gpt_cli.hub.find("tiny").iterdir()
    hub.add(repo, {file.name: file.read_bytes() for file in files})
    (tmp_path / "in").write_text("Once upon a time\n" * 600)
    flags = [tmp_path / "in", "--model", repo, "--threads", 1, "-n", 2]
    there = records_of(batch(*flags, "--engine", "ray", "--workers", 2, "-q", code=0))
    assert {record["model"] for record in there} == {repo}
    assert hub.fetched().count("model.safetensors") == 1
    here = records_of(batch(*flags, code=0))
    assert there == here


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--workers", "9"], 2, "--workers must be at most 3 on this cluster with thr"),
        (["--gpus-per-worker", "0.4", "--workers", "2"], 2, "--workers must be at most 1 on"),
        (["--gpus-per-worker", "2"], 5, "threads 1 and gpus_per_worker 2"),
        (["--model", "no/model", "--offline"], 3, "no/model"),
        (["--dtype", "float7"], 2, "--dtype must be one of auto, float32"),
        (["--address", "127.0.0.1:1"], 5, "127.0.0.1:1"),
        (["--address", "ray://127.0.0.1:1"], 2, "--address ray:// is not supported"),
        (["--engine", "local"], 2, "--engine ray"),
    ],
)
def test_an_error_is_one_line(flags, code, says, rows, there, tmp_path):
    told = batch(rows, *there, *flags, "-o", tmp_path / "out", code=code)
    assert says in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_cluster_needs_a_file(there):
    assert "--engine ray" in batch(*there, code=2, input=b"Once\n")


def test_damaged_weights_are_the_same_error(there, rows, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in gpt_cli.hub.find("tiny").iterdir():
        data = file.read_bytes()
        (folder / file.name).write_bytes(data[:-9] if file.suffix == ".safetensors" else data)
    here = batch(rows, "--model", folder, code=4)
    assert batch(rows, "--model", folder, *there, code=4) == here


def test_a_worker_may_have_a_part_of_a_gpu(there, rows):
    actual = records_of(batch(rows, *there, "--gpus-per-worker", "0.5", "--device", "cpu"))
    assert len(actual) == 601


def test_the_error_of_a_missing_ray_has_a_remedy(rows):
    code = (
        "import sys; sys.modules['ray'] = None; from gpt_cli.__main__ import main;"
        f"sys.argv = ['gpt-cli', 'batch', {str(rows)!r}, '--engine', 'ray']; main()"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert finished.returncode == 5
    assert b"pip install 'ray[data]'" in finished.stderr
