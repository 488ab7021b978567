"""What Ray Data computes: row for row what one machine does, whoever computes it."""

import os

import pytest

import gpt_cli
from gpt_cli.errors import InputError

pa = pytest.importorskip("pyarrow")
pytest.importorskip("ray.data")

from gpt_cli.ray import Generate, Score  # noqa: E402 (needs both)

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
def ray():
    """A cluster of one node on this machine."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def local(tiny):
    """What one machine makes of the rows."""
    fields = ("prompt", "max_tokens", "seed", "temperature")
    rows = [{name: row[name] for name in fields} for row in ROWS]
    return list(tiny.batch(rows, gpt_cli.Options(**OPTIONS)))


def check(found, tiny):
    """The rows that came back are all there, once, and as one machine has them."""
    found = sorted(found, key=lambda row: row["index"])
    assert [row["index"] for row in found] == [row["index"] for row in ROWS]
    for row, given, expected in zip(found, ROWS, local(tiny), strict=True):
        assert (row["id"], row["prompt"]) == (given["id"], given["prompt"])
        if isinstance(expected, InputError):
            assert row["error"] == {"code": expected.code, "message": str(expected)}
            assert row["text"] is row["seed"] is row["completion_tokens"] is None
        else:
            assert row["error"] is None
            assert (row["text"], row["finish_reason"]) == (expected.text, expected.finish_reason)
            assert (row["seed"], row["prompt_tokens"]) == (expected.seed, expected.prompt_tokens)
            assert row["completion_tokens"] == len(expected.ids)
    assert sum(row["error"] is not None for row in found) == 3


def test_a_table_gets_the_columns_of_what_follows(tiny):
    generate = Generate("tiny", OPTIONS)
    table = pa.Table.from_pylist(ROWS)
    parts = [generate(table.slice(start, 16)) for start in (32, 0, 16)]
    check([row for part in parts for row in part.to_pylist()], tiny)
    assert parts[0].schema == parts[1].schema  # also where no row has failed


def test_a_table_gets_the_columns_of_its_scores(tiny):
    table = Score("tiny")(pa.table({"text": pa.array(TEXTS, pa.string()), "kept": range(5)}))
    found = table.to_pylist()
    assert [row["kept"] for row in found] == [0, 1, 2, 3, 4]
    for row, text in zip(found, TEXTS, strict=True):
        if text is None:
            assert row["error"]["code"] == "invalid_input"
            continue
        (score,) = tiny.score_many([text])
        assert (row["tokens"], row["tokens_scored"]) == (len(score.ids), score.tokens_scored)
        for name in ("total_logprob", "perplexity", "bits_per_byte"):
            expected = getattr(score, name)
            assert row[name] == (expected if expected is None else pytest.approx(expected, 1e-4))
        assert row["error"] is None


def test_whole_numbers_may_come_as_floats(tiny):
    """As pandas has them where some rows have none."""
    rows = {"prompt": ["Once"] * 4, "index": [0, 1, 2, 3]}
    rows |= {"max_tokens": [3.0, float("nan"), None, 2.5], "seed": [7.0, None, 2.0**60, None]}
    found = Generate("tiny", OPTIONS)(pa.table(rows)).to_pylist()
    assert [row["completion_tokens"] for row in found] == [3, 9, None, None]
    assert [row["seed"] for row in found] == [7, 5, None, None]
    assert "seed must be a whole number" in found[2]["error"]["message"]
    assert "max_tokens must be a whole number" in found[3]["error"]["message"]


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"prompt": ["a"], "index": [0]}, "batch_format"),
        (pa.table({"prompt": ["a"]}), "'index'"),
        (pa.table({"text": ["a"], "index": [0]}), "'prompt'"),
    ],
)
def test_what_is_wrong_with_all_rows_is_an_error(table, what):
    with pytest.raises(InputError, match=what):
        Generate("tiny", OPTIONS)(table)


@pytest.mark.parametrize(("blocks", "batch_size", "actors"), [(1, 64, 1), (7, 3, 2)])
def test_ray_computes_what_one_machine_does(ray, tiny, blocks, batch_size, actors):
    rows = ray.data.from_arrow(pa.Table.from_pylist(ROWS)).repartition(blocks)
    done = rows.map_batches(
        Generate,
        fn_constructor_kwargs={"model": "tiny", "options": OPTIONS},
        batch_format="pyarrow",
        batch_size=batch_size,
        concurrency=actors,
        num_cpus=0.5,
    )
    check(done.take_all(), tiny)


def test_actors_must_not_draw_seeds_of_their_own():
    with pytest.raises(InputError, match="need a seed"):
        Generate("tiny", {"max_tokens": 9})


def test_an_actor_that_dies_takes_no_row_with_it(ray, tiny, tmp_path):
    sign = tmp_path / "died"

    class Mortal(Generate):
        """Its process dies once, in the middle of the job."""

        def __call__(self, table):
            if 20 in table["index"].to_pylist() and not sign.exists():
                sign.touch()
                os._exit(1)
            return super().__call__(table)

    rows = ray.data.from_arrow(pa.Table.from_pylist(ROWS)).repartition(8)
    done = rows.map_batches(
        Mortal,
        fn_constructor_args=["tiny", OPTIONS],
        batch_format="pyarrow",
        batch_size=5,
        concurrency=1,
        num_cpus=1,
    )
    check(done.take_all(), tiny)
    assert sign.exists()


@pytest.mark.parametrize("ops", ["numpy", "numba"])
def test_an_actor_takes_the_threads_of_its_share(ray, ops):
    pytest.importorskip(ops)

    class Threads:
        def __init__(self):
            os.environ["GPT_CLI_OPS"] = ops
            os.environ.pop(
                "OPENBLAS_NUM_THREADS", None
            )  # `make test` has set it, which counts more
            self._generate = Generate("tiny", OPTIONS)

        def __call__(self, table):
            threads = self._generate._engine.model.ops.threads
            return pa.table({"threads": [threads] * len(table)})

    rows = ray.data.from_arrow(pa.Table.from_pylist(ROWS[:2]))
    for share in (1, 2):
        done = rows.map_batches(Threads, batch_format="pyarrow", concurrency=1, num_cpus=share)
        assert {row["threads"] for row in done.take_all()} == {share}
