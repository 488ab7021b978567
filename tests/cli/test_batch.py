"""`gpt-cli batch` as a user meets it: records, rows that fail, pipes and a terminal."""

import json
import math
import subprocess
from itertools import count

import pytest

from gpt_cli.cli import progress
from gpt_cli.errors import ContextError, InputError, ResourceError
from gpt_cli.generation.generate import working_set
from gpt_cli.generation.row import Request
from gpt_cli.options.request import Options
from gpt_cli.records import COMPLETION
from gpt_cli.texts.text import Text
from support.in_process import refusal, run_here, terminal_here
from support.processes import COMMAND, LimitedProcess, posix

# One thread: on a busy machine two would wait.
BATCH = ["batch", "--model", "tiny", "--threads", "1"]


def records_of(data):
    *lines, rest = data.split(b"\n")
    assert rest == b""
    records = [json.loads(line) for line in lines]
    assert all(isinstance(record, dict) for record in records)
    return records


def batch(*arguments, code=0, input=b""):
    return records_of(run_here(*BATCH, *arguments, code=code, input=input)[0])


def texts(records):
    return [record["text"] for record in records]


def timeless(records):
    return [{key: record[key] for key in record if key != "timing"} for record in records]


def lines(*prompts):
    return "".join(f"{prompt}\n" for prompt in prompts).encode()


def jsonl(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


# --- records -------------------------------------------------------------------------------------

KEYS = {"index", "prompt", "text", "finish_reason", "seed", "model", "adapter"}
KEYS |= {"usage", "timing"}


def test_each_line_has_a_record_with_its_settings():
    prompts = ["Once upon a time", "The fox said"]
    records = batch("-s", 1, "-n", 8, "--ignore-eos", input=lines(*prompts))
    for index, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
        assert set(record) == KEYS
        known = {"index": index, "prompt": prompt, "finish_reason": "length", "seed": 1}
        assert record.items() >= (known | {"model": "tiny"}).items()
        assert record["usage"]["completion_tokens"] == 8
        assert set(record["timing"]) == set(COMPLETION["timing"])
    assert records[0]["usage"]["prompt_tokens"] == 4


def test_the_id_of_a_row_may_be_any_json_value():
    ids = [7, "7", "🦊", -1.5, ["a", {"b": None}], False, 0, ""]
    rows = [{"id": id, "prompt": "Once"} for id in ids]
    records = batch("-n", 1, input=jsonl(*rows, {"prompt": "Once"}))
    assert [record["id"] for record in records[:-1]] == ids
    assert set(records[-1]) == KEYS


def test_log_probabilities_are_those_of_the_tokens_of_the_text():
    flags = ["--logprobs", 3, "-s", 1, "-n", 12, "--ignore-eos"]
    for record in batch(*flags, input=lines("Once upon a time", "🦊 said")):
        tokens = record["logprobs"]
        assert len(tokens) == 12
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == record["text"]
        for token in tokens:
            top = {other["id"]: other["logprob"] for other in token["top"]}
            assert len(top) == len(token["top"]) == 3
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert sum(map(math.exp, top.values())) < 1 + 1e-6
            assert top.get(token["id"], token["logprob"]) == token["logprob"]
            assert token["logprob"] <= max(top.values())
    (record,) = batch("--logprobs", 0, "-n", 3, input=b"Once\n")
    assert [token["top"] for token in record["logprobs"]] == [[], [], []]


# --- texts ---------------------------------------------------------------------------------------

RAGGED = [f"{'Once upon a time, ' * (index * 7 % 11)}number {index}" for index in range(20)]
RAGGED[8] = "🦊 " * 40


def test_records_do_not_depend_on_the_batch_size(tiny):
    first, *others = (
        batch("-s", 3, "-n", 12, "--batch-size", size, input=lines(*RAGGED))
        for size in (1, 3, "auto")
    )
    assert all(timeless(records) == timeless(first) for records in others)
    assert [record["index"] for record in first] == list(range(20))
    assert [record["prompt"] for record in first] == RAGGED
    assert len({record["usage"]["prompt_tokens"] for record in first}) > 10
    assert texts(first) == [done.text for done in tiny.generate(RAGGED, seed=3, max_tokens=12)]


def test_equal_prompts_have_different_texts():
    samples = texts(batch("-s", 6, "-n", 15, input=lines(*["Once"] * 4)))
    assert len(set(samples)) > 1


def test_a_drawn_seed_repeats_the_texts():
    first = batch("-n", 12, input=lines(*RAGGED[:4]))
    (seed,) = {record["seed"] for record in first}
    assert timeless(batch("-n", 12, "-s", seed, input=lines(*RAGGED[:4]))) == timeless(first)


OWN_OPTIONS = [
    {"max_tokens": 5},
    {"temperature": 1.9},
    {"temperature": 0},
    {"top_k": 1},
    {"top_p": 0.05},
    {"min_p": 0.9},
    {"typical_p": 0.01},
    {"repeat_penalty": 3.0},
    {"no_repeat_ngram": 1},
    {"beams": 3, "length_penalty": 2, "early_stopping": "never"},
    {"seed": 99},
    {"stop": ["never written", "e"]},
    {"stop": "e"},
]


def test_a_row_with_its_own_options_has_the_text_of_generate(tiny):
    usual = {"prompt": "One day,", "seed": 1}
    rows = [usual | options for options in OWN_OPTIONS]
    rows += [{"prompt": row, "seed": 40 + i, "max_tokens": 1 + i} for i, row in enumerate(RAGGED)]
    rows += [usual, usual | {"prompt": ""}, usual | {"top_k": 10**30, "max_tokens": 10**30}]
    records = batch("-n", 30, "--batch-size", 3, input=jsonl(*rows))
    *varied, plain, _, huge = records
    for row, record in zip(rows[:-1], records[:-1], strict=True):
        (alone,) = tiny.generate([row["prompt"]], **{"max_tokens": 30} | row_options(row))
        assert (record["text"], record["finish_reason"]) == (alone.text, alone.finish_reason)
        assert record["seed"] == row["seed"]
        assert record["usage"]["completion_tokens"] == len(alone.ids)
    assert all(record["text"] != plain["text"] for record in varied)
    assert huge["finish_reason"] in ("eos", "context")


def row_options(row):
    return {name: value for name, value in row.items() if name != "prompt"}


def test_samples_have_records_of_their_own(tiny):
    rows = jsonl({"id": "a", "prompt": "Once", "seed": 7, "n": 3}, {"prompt": "The fox"})
    records = batch("-s", 1, "-n", 8, "--samples", 2, input=rows)
    places = [(record["index"], record["sample"], record["samples"]) for record in records]
    assert places == [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 2), (1, 1, 2)]
    assert [record.get("id") for record in records] == ["a", "a", "a", None, None]
    flags = ["--threads", "1", "--json", "--samples", "3", "-s", "7", "-n", "8"]
    output, _ = run_here("generate", "-m", "tiny", *flags, "Once")
    assert texts(records[:3]) == texts(records_of(output))
    assert texts(records[3:4]) == texts(batch("-s", 1, "-n", 8, input=rows)[3:])


@posix
def test_the_samples_of_a_row_in_an_open_pipe_are_answered_at_once():
    command = [*COMMAND, *BATCH, "-s", "1", "-n", "4", "--samples", "2", "-q"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with LimitedProcess(command, **pipes) as process:
        for index in range(2):
            process.stdin.write(b"Once\n")
            process.stdin.flush()
            answers = [json.loads(process.stdout.readline()) for _ in range(2)]
            places = [(record["index"], record["sample"]) for record in answers]
            assert places == [(index, 0), (index, 1)]
        assert process.communicate(timeout=60) == (b"", b"")


# --- input and output ----------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["lines", "jsonl"])
def test_the_format_can_be_chosen(format):
    row = b'{"prompt": "Once"}'
    (record,) = batch("--format", format, "-n", 1, input=row)
    assert record["prompt"] == ("Once" if format == "jsonl" else row.decode())


@pytest.mark.parametrize("data", [b"", b"\n\r\n \n", b"\xef\xbb\xbf"])
def test_an_input_without_rows_has_no_records(data):
    assert batch(input=data) == []


def test_an_output_file_has_the_records_of_standard_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["-s", 4, "-n", 6, "-q"]
    expected = timeless(batch(*flags, "-o", "-", input=lines(*RAGGED[:4])))
    assert not list(tmp_path.iterdir())
    assert batch(*flags, "-o", "out", input=lines(*RAGGED[:4])) == []
    assert timeless(records_of((tmp_path / "out").read_bytes())) == expected


def test_a_process_reads_a_pipe_and_writes_utf8_in_any_locale(tmp_path):
    (tmp_path / "-").touch()  # does not hide standard input
    finished = subprocess.run(
        [*COMMAND, *BATCH, "-n", "1", "-q"],
        input="Zoë 🦊\ntwo\n".encode(),
        env={"LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert (finished.returncode, finished.stderr) == (0, b"")
    assert '"Zoë 🦊"'.encode() in finished.stdout
    assert len(records_of(finished.stdout)) == 2


@posix
def test_a_row_in_an_open_pipe_is_answered_before_the_next_is_written():
    rows = [{"prompt": "Once"}, {"id": 7}, {"id": 8, "prompt": "🦊\nOne day"}]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with LimitedProcess([*COMMAND, *BATCH, "-n", "3", "-q"], **pipes) as process:
        for index, row in enumerate(rows):
            process.stdin.write(jsonl(row))
            process.stdin.flush()
            (record,) = records_of(process.stdout.readline())
            assert [record.get(name) for name in ("index", "id", "prompt")] == [
                *(index, row.get("id"), row.get("prompt"))
            ]
        process.stdin.write(jsonl(*rows))  # together
        process.stdin.flush()
        together = [json.loads(process.stdout.readline()) for _ in rows]
        assert [record["index"] for record in together] == [3, 4, 5]
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (6, b"")
    assert errors == b"gpt-cli: error: 2 of 6 rows failed: the records say why\n"


# --- rows that fail ------------------------------------------------------------------------------

GOOD = b'{"prompt": "Once upon a time"}\n'
BAD = {  # the row, and the id that can be read
    "not JSON": (b'{"prompt": "Once"', None),
    "null": (b"null", None),
    "no prompt": (b'{"id": 1}', 1),
    "a prompt that is a number": (b'{"id": "a", "prompt": 5}', "a"),
    "a prompt that is null": (b'{"id": "b", "prompt": null}', "b"),
    "a prompt that is a list": (b'{"id": [2], "prompt": ["Once"]}', [2]),
    "a misspelled option": (b'{"id": 3, "prompt": "Once", "temprature": 1}', 3),
    "a temperature that is a word": (b'{"prompt": "Once", "temperature": "hot"}', None),
    "a temperature that is NaN": (b'{"id": 4, "prompt": "Once", "temperature": NaN}', 4),
    "a huge temperature": (b'{"prompt": "Once", "temperature": 1' + b"0" * 400 + b"}", None),
    "an id that is NaN": (b'{"id": NaN, "prompt": "Once"}', None),
    "an id that is infinite": (b'{"id": 1e400, "prompt": "Once"}', None),
    "a number of too many digits": (b'{"prompt": "Once", "seed": ' + b"1" * 9999 + b"}", None),
    "a seed of 65 bits": (b'{"prompt": "Once", "seed": 18446744073709551616}', None),
    "an empty stop string": (b'{"id": 6, "prompt": "Once", "stop": ""}', 6),
    "no UTF-8": (b'{"id": 7, "prompt": "Once \xff"}', None),
    "half a surrogate pair": (rb'{"id": 8, "prompt": "Once \ud800"}', 8),
    "half a surrogate pair as a field": (rb'{"id": 9, "prompt": "Once", "\ud800": 1}', 9),
    "half a surrogate pair as an id": (rb'{"id": "\ud800", "prompt": "Once"}', None),
    "deep nesting": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "a deep id": (b'{"prompt": "Once", "id": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001, None),
    "a text beyond the context": (b'{"id": 10, "prompt": "' + b"a " * 100_000 + b'"}', 10),
}


def test_a_bad_row_has_an_error_record_and_the_others_are_done(tiny):
    data = b"".join(b"\n%s\n%s\n" % (GOOD, bad) for bad, _ in BAD.values())
    flags = ["--temperature", 0, "-n", 4, "--batch-size", 4, "-q"]
    out, errors = run_here(*BATCH, *flags, input=data, code=6)
    failed = f"{len(BAD)} of {2 * len(BAD)} rows failed"
    assert errors == f"gpt-cli: error: {failed}: the records say why\n"
    records = records_of(out)
    text = tiny.generate(["Once upon a time"], temperature=0.0, max_tokens=4)[0].text
    assert texts(records[::2]) == [text] * len(BAD)
    for number, (name, (_, id)) in enumerate(BAD.items()):
        index, record = 2 * number + 1, records[2 * number + 1]
        message = record["error"].pop("message")
        code = "context_overflow" if name == "a text beyond the context" else "invalid_input"
        expected = {"index": index, "line": 2 * index + 2, "error": {"code": code}}
        assert record == expected | ({} if id is None else {"id": id}), name
        assert message
        assert "\n" not in message


@pytest.mark.parametrize(
    "flag",
    [
        *(f"--batch-size={size}" for size in ("0", "-1", "many", "", "1.5", "²", "9" * 5000)),
        "--format=xml",
        "--temperature=nan",
        "--stop=",
        "--logprobs=-1",
        "--seed=-2",
    ],
)
def test_a_bad_flag_is_refused_before_the_model_is_searched(flag, tmp_path):
    (tmp_path / "in").write_bytes(b"Once\n")
    refusal("batch", tmp_path / "in", "-m", "no/model", "--offline", "-o", tmp_path / "out", flag)
    assert not (tmp_path / "out").exists()


# --- progress ------------------------------------------------------------------------------------


def test_the_last_line_has_the_totals(tmp_path):
    file = tmp_path / "in"
    file.write_bytes(b"Once\nOne\n\nThe\n")
    for source in ([file], []):
        flags = ["-n", 2, "--ignore-eos"]
        out, errors = run_here(*BATCH, *source, *flags, input=file.read_bytes())
        (line,) = errors.splitlines()
        assert line.startswith("gpt-cli: 3 of 3 rows" if source else "gpt-cli: 3 rows")
        assert " 6 tokens" in line
        assert len(records_of(out)) == 3


def test_progress_on_a_terminal_is_a_line_that_is_renewed(tmp_path):
    file, output = tmp_path / "in", tmp_path / "out"
    file.write_bytes(lines(*RAGGED, *RAGGED[:10]))
    flags = ["-n", "40", "--ignore-eos", "--batch-size", "4"]
    code, shown = terminal_here(*BATCH, file, "-o", output, *flags)
    assert code == 0
    assert "\x1b" not in shown
    *renewed, last = (
        line.strip() for line in shown.replace("\r\n", "\r").split("\r") if line.strip()
    )
    assert renewed
    for line in renewed:
        assert " of 30 rows, " in line
        assert " tokens" in line
    assert last.startswith("gpt-cli: 30 of 30 rows, 1,200 tokens")
    assert shown.count("\n") == 1
    assert len(records_of(output.read_bytes())) == 30


def test_records_on_a_terminal_are_not_mixed_with_progress(tmp_path):
    file = tmp_path / "in"
    file.write_bytes(b"Once\nOne\n")
    code, shown = terminal_here(*BATCH, file, "-n", "2")
    assert code == 0
    assert len(records_of(shown.replace("\r\n", "\n").encode())) == 2


def test_the_time_left_is_shown_after_the_first_seconds_and_before_the_end(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    with progress.Progress(shown=True) as shown:
        shown.start(40, 10, 1)
        for now in (102.0, 131.0, 140.0, 3760.0):
            shown.advance(50, failed=now == 140.0)
    assert capsys.readouterr().err.splitlines() == [
        "gpt-cli: 12 of 40 rows (1 failed), 100 tokens, 3 a second, 7:14 left",
        "gpt-cli: 14 of 40 rows (2 failed), 200 tokens, 0 a second, 6:36:30 left",
        "gpt-cli: 14 of 40 rows (2 failed), 200 tokens, 0 a second",
    ]


@pytest.mark.parametrize("end", [29.0, 61.0])
def test_a_log_of_lines_has_a_row_every_half_minute_and_no_totals_of_a_short_job(
    end, monkeypatch, capsys
):
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    with progress.Progress(shown=True, totals=False) as shown:
        shown.start(None, 0, 0)
        for now in (3.0, 29.0, 31.0, 32.0, 60.0, 61.0):
            if now <= end:
                shown.advance(50, failed=False)
    lines = [
        "gpt-cli: 3 rows, 150 tokens, 5 a second",
        "gpt-cli: 6 rows, 300 tokens, 5 a second",
        "gpt-cli: 6 rows, 300 tokens, 5 a second",  # the totals
    ]
    assert capsys.readouterr().err.splitlines() == (lines if end == 61.0 else [])


NOT_UTF8 = "the row is not UTF-8 at byte 0: convert the file, such as by iconv -f CP1252 -t UTF-8"


@pytest.mark.parametrize(
    ("rows", "failed"),
    [
        (b"Once\n\xff\n", "1 of 2 rows failed: the records say why"),
        (b"\xff\n", f"1 of 1 row failed: {NOT_UTF8}"),
        (b"\xff\n\xff\n", f"2 of 2 rows failed: {NOT_UTF8}"),
        (b"\xff\na\xff\n", "2 of 2 rows failed: the records say why"),
    ],
)
def test_rows_are_counted(rows, failed):
    errors = run_here(*BATCH, "-n", "1", "-q", input=rows, code=6)[1]
    assert errors == f"gpt-cli: error: {failed}\n"


# --- in Python -----------------------------------------------------------------------------------


def test_engine_batch_takes_texts_and_mappings(engine):
    rows = ["He said", {"prompt": "it is", "max_tokens": 3}, {"text": "no prompt"}, "a" * 999]
    results = list(engine.batch(rows, Options(temperature=0.0, max_tokens=5, ignore_eos=True)))
    alone = engine.generate(["He said"], temperature=0.0, max_tokens=5, ignore_eos=True)
    assert results[0].text == alone[0].text
    assert len(results[1].ids) == 3
    assert isinstance(results[2], InputError)
    assert isinstance(results[3], ContextError)
    assert len(results) == 4
    (cut,) = engine.batch(
        ["a" * 999], Options(max_tokens=5, overflow="truncate"), batch_size=10**30
    )
    assert cut.prompt_tokens == engine.model.config.n_positions - 5


def test_engine_batch_without_options_draws_one_seed(engine):
    first, second = engine.batch([{"prompt": "a", "max_tokens": 2}] * 2)
    assert first.seed == second.seed


def test_engine_batch_is_lazy(engine):
    numbers = count()
    rows = (f"row {next(numbers)}" for _ in count())
    results = engine.batch(rows, Options(max_tokens=2), batch_size=2)
    assert next(numbers) == 0
    assert len(next(results).ids) <= 2
    assert next(numbers) < 50


@pytest.mark.parametrize("size", [0, -1])
def test_engine_batch_refuses_a_batch_of_no_rows(engine, size):
    with pytest.raises(InputError, match="batch_size"):
        engine.batch(["a"], batch_size=size)


def test_too_little_memory_is_an_error_with_both_numbers(engine, monkeypatch):
    monkeypatch.setattr(engine.model.ops, "free_memory", lambda: 2_000_000)
    options = Options(max_tokens=70)
    requests = [Request(Text(engine.encode("a")), options)] * 64
    with pytest.raises(ResourceError) as caught:
        list(engine.batch(["a"] * 64, options, batch_size=64))
    assert f"{working_set(engine.model, requests) / 1e6:,.0f} MB" in str(caught.value)
    assert "2 MB" in str(caught.value)


def test_with_little_memory_rows_are_computed_one_at_a_time(engine, monkeypatch):
    options = Options(max_tokens=20, seed=1)
    expected = [result.text for result in engine.batch(["a"] * 5, options)]
    one = working_set(engine.model, [Request(Text(engine.encode("a")), options)])
    monkeypatch.setattr(engine.model.ops, "free_memory", lambda: one)  # two would be refused
    assert [result.text for result in engine.batch(["a"] * 5, options)] == expected
    with pytest.raises(ResourceError):
        list(engine.batch(["a"] * 5, options, batch_size=2))
