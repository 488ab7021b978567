"""`gpt-cli batch` as a user meets it: real processes, pipes, kills and a terminal."""

import json
import math
import random
import shlex
import shutil
import signal
import subprocess
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from processes import COMMAND, posix, run_on_terminal

import gpt_cli
from gpt_cli.cli import app, progress
from gpt_cli.errors import ContextError, InputError, ResourceError
from gpt_cli.generate import Options, Request, working_set
from gpt_cli.jobs import runner
from gpt_cli.jobs.sinks import JSONLines

# One thread: on a busy machine two wait for each other.
BATCH = [*COMMAND, "batch", "--model", "tiny", "--threads", "1"]
TINY_FOLDER = Path(__file__).parent.parent / "weights" / "tiny"
BOM = b"\xef\xbb\xbf"


def run(*arguments, **options):
    command = [*BATCH, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=60, **{"input": b"", **options})


def records_of(data):
    *lines, rest = data.split(b"\n")
    assert rest == b""
    records = [json.loads(line) for line in lines]
    assert all(isinstance(record, dict) for record in records)
    return records


def batch(*arguments, code=0, **options):
    finished = run(*arguments, **options)
    assert finished.returncode == code, finished.stderr
    return records_of(finished.stdout)


def texts(records):
    return [record["text"] for record in records]


def timeless(records):
    return [{key: record[key] for key in record if key != "timing"} for record in records]


def lines(*prompts):
    return "".join(f"{prompt}\n" for prompt in prompts).encode()


def jsonl(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def assert_error(code, expected, errors):
    assert code == expected, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("gpt-cli: error: ")


def assert_one_line_error(code, expected, errors):
    assert_error(code, expected, errors)
    assert len(errors.splitlines()) == 1, errors
    return errors


@pytest.fixture(scope="module")
def tiny():
    return gpt_cli.load("tiny")


# --- records -------------------------------------------------------------------------------------

KEYS = {"index", "prompt", "text", "finish_reason", "seed", "model", "usage", "timing"}


def test_each_line_becomes_a_record_that_says_how_it_came_about():
    prompts = ["Once upon a time", "The fox said"]
    records = batch("-s", 1, "-n", 8, input=lines(*prompts))
    for index, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
        assert set(record) == KEYS
        assert record["index"] == index
        assert record["prompt"] == prompt
        assert record["finish_reason"] == "length"
        assert record["seed"] == 1
        assert record["model"] == "tiny"
        assert record["usage"]["completion_tokens"] == 8
        assert set(record["timing"]) == {"load_s", "ttft_s", "decode_tok_s"}
    assert records[0]["usage"]["prompt_tokens"] == 4


def test_a_row_keeps_its_id_of_whatever_type():
    ids = [7, "7", "🦊", -1.5, ["a", {"b": None}], False, 0, ""]
    rows = [{"id": id, "prompt": "Once"} for id in ids]
    records = batch("-n", 1, input=jsonl(*rows, {"prompt": "Once"}))
    assert [record["id"] for record in records[:-1]] == ids
    assert set(records[-1]) == KEYS


@pytest.mark.parametrize("id", ["NaN", "-Infinity", "1e400"])
def test_an_id_that_json_cannot_write_is_an_error_of_its_row(id):
    rows = f'{{"prompt": "Once"}}\n{{"prompt": "Once", "id": {id}}}\n{{"prompt": "Once"}}\n'
    first, bad, last = batch("-n", 1, input=rows.encode(), code=6)
    assert bad["error"]["code"] == "invalid_input"
    assert bad["line"] == 2
    assert "text" in first
    assert "text" in last


def test_log_probabilities_are_of_the_tokens_that_make_the_text():
    flags = ["--logprobs", 3, "-s", 1, "-n", 12, "--ignore-eos"]
    for record in batch(*flags, input=lines("Once upon a time", "🦊 said")):
        tokens = record["logprobs"]
        assert len(tokens) == 12
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode() == record["text"]
        for token in tokens:
            assert set(token) == {"id", "token", "bytes", "logprob", "top"}
            assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
            top = {other["id"]: other["logprob"] for other in token["top"]}
            assert len(top) == len(token["top"]) == 3
            assert all(set(other) == set(token) - {"top"} for other in token["top"])
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert sum(map(math.exp, top.values())) < 1 + 1e-6
            assert top.get(token["id"], token["logprob"]) == token["logprob"]
            assert token["logprob"] <= max(top.values())


def test_log_probabilities_of_no_others_may_be_asked_for():
    (record,) = batch("--logprobs", 0, "-n", 3, input=b"Once\n")
    assert [token["top"] for token in record["logprobs"]] == [[], [], []]


# --- texts ---------------------------------------------------------------------------------------

RAGGED = [f"{'Once upon a time, ' * (place * 7 % 11)}number {place}" for place in range(20)]


@pytest.fixture(scope="module")
def ragged():
    return batch("-s", 3, "-n", 12, "--batch-size", 1, input=lines(*RAGGED))


def test_rows_come_in_the_order_of_the_input(ragged):
    assert [record["index"] for record in ragged] == list(range(20))
    assert [record["prompt"] for record in ragged] == RAGGED
    assert len({record["usage"]["prompt_tokens"] for record in ragged}) > 10


@pytest.mark.parametrize("size", [3, "auto"])
def test_the_size_of_a_batch_changes_nothing(ragged, size):
    records = batch("-s", 3, "-n", 12, "--batch-size", size, input=lines(*RAGGED))
    assert timeless(records) == timeless(ragged)


def test_each_row_may_end_at_another_length(tiny):
    rows = [{"prompt": RAGGED[i], "max_tokens": 1 + i * 5 % 13} for i in range(20)]
    records = batch("--temperature", 0, "--ignore-eos", "--batch-size", 3, input=jsonl(*rows))
    assert [record["prompt"] for record in records] == RAGGED
    for row, record in zip(rows, records, strict=True):
        assert record["usage"]["completion_tokens"] == row["max_tokens"]
        alone = tiny.generate(
            [row["prompt"]], max_tokens=row["max_tokens"], temperature=0.0, ignore_eos=True
        )
        assert record["text"] == alone[0].text


def test_a_greedy_row_is_that_of_generate(tiny):
    records = batch("--temperature", 0, "-n", 10, "--batch-size", 4, input=lines(*RAGGED))
    alone = [tiny.generate([row], temperature=0.0, max_tokens=10)[0].text for row in RAGGED]
    assert texts(records) == alone
    command = [*COMMAND, "generate", "-m", "tiny", "--temperature", "0", "-n", "10", RAGGED[5]]
    assert subprocess.check_output(command, timeout=60).decode() == records[5]["text"]


def test_a_row_with_a_seed_of_its_own_is_that_of_generate(ragged):
    rows = [{"prompt": prompt, "seed": 40 + place} for place, prompt in enumerate(RAGGED[:5])]
    records = batch("-s", 3, "-n", 12, input=jsonl(*rows))
    assert [record["seed"] for record in records] == [40, 41, 42, 43, 44]
    assert texts(records) != texts(ragged[:5])
    command = [*COMMAND, "generate", "-m", "tiny", "-s", "43", "-n", "12", RAGGED[3]]
    assert subprocess.check_output(command, timeout=60).decode() == records[3]["text"]


def test_equal_rows_are_the_samples_of_one_prompt(tiny):
    samples = tiny.generate(["Once"] * 4, seed=6, max_tokens=15)
    records = batch("-s", 6, "-n", 15, input=lines(*["Once"] * 4))
    assert texts(records) == [sample.text for sample in samples]
    assert len(set(texts(records))) > 1


def test_a_drawn_seed_is_told_and_gives_the_texts_again():
    first = batch("-n", 12, input=lines(*RAGGED[:4]))
    (seed,) = {record["seed"] for record in first}
    assert timeless(batch("-n", 12, "-s", seed, input=lines(*RAGGED[:4]))) == timeless(first)


def test_the_neighbours_of_a_row_change_nothing_of_it(ragged):
    prompts = [prompt if place % 4 == 1 else "🦊 " * place for place, prompt in enumerate(RAGGED)]
    prompts[0] = "another"
    records = batch("-s", 3, "-n", 12, "--batch-size", 5, input=lines(*prompts))
    assert timeless(records[1::4]) == timeless(ragged[1::4])


OWN_OPTIONS = {
    "max_tokens": 5,
    "temperature": 1.9,
    "top_k": 1,
    "top_p": 0.05,
    "min_p": 0.9,
    "repeat_penalty": 3.0,
    "seed": 99,
    "stop": ["never written", "e"],
}


@pytest.fixture(scope="module")
def own_options():
    rows = [{name: value} for name, value in OWN_OPTIONS.items()]
    rows += [{}, {"stop": "e"}, {"temperature": 0}, {"top_k": 10**30, "max_tokens": 10**30}]
    rows = [{"prompt": "One day,", "seed": 1} | row for row in rows]
    return batch("-n", 30, input=jsonl(*rows))


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_an_option_of_a_row_is_that_of_generate(name, own_options, tiny):
    own = {"max_tokens": 30, "seed": 1, name: OWN_OPTIONS[name]}
    text = own_options[list(OWN_OPTIONS).index(name)]["text"]
    assert text == tiny.generate(["One day,"], **own)[0].text
    assert text != own_options[len(OWN_OPTIONS)]["text"]


def test_values_of_other_types_that_mean_the_same_are_taken(own_options, tiny):
    usual, stop, greedy, huge = own_options[len(OWN_OPTIONS) :]
    assert stop["finish_reason"] == "stop"
    assert stop["text"] == usual["text"][: usual["text"].index("e")]
    assert greedy["text"] == tiny.generate(["One day,"], temperature=0.0, max_tokens=30)[0].text
    assert huge["finish_reason"] in ("eos", "context")


class Recorder:
    """Stands in for `gpt_cli.load` and for the engine; keeps what they are asked for."""

    name = "recorder"

    def load(self, name, **options):
        self.loaded = {"name": name} | options
        return self

    def batch(self, rows, options, **how):
        self.rows, self.options, self.how = list(rows), options, how
        raise KeyboardInterrupt


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(runner, "load", recorder.load)
    return recorder


def test_every_flag_arrives_where_it_has_its_effect(recorder, tmp_path):
    flags = (
        "-m some/model --max-tokens 5 --temperature 0.5 --top-k 6 --top-p 0.7 --min-p 0.08 "
        "--repeat-penalty 1.9 --stop a --stop b --seed 11 --no-cache --device cpu "
        "--dtype float16 --revision v1 --offline --overflow shift --ignore-eos --special -q "
        "--logprobs 4 --batch-size 9"
    )
    file = tmp_path / "in.txt"
    file.write_bytes(b"text\n")
    assert app.run(["batch", str(file), *flags.split()]) == 130
    assert recorder.loaded == {
        "name": "some/model",
        "device": "cpu",
        "dtype": "float16",
        "revision": "v1",
        "offline": True,
        "quiet": True,
    }
    assert recorder.rows == [{"prompt": "text"}]
    assert recorder.how["batch_size"] == 9
    assert recorder.options == Options(
        max_tokens=5,
        temperature=0.5,
        top_k=6,
        top_p=0.7,
        min_p=0.08,
        repeat_penalty=1.9,
        stop=["a", "b"],
        seed=11,
        use_cache=False,
        overflow="shift",
        ignore_eos=True,
        special=True,
        top_logprobs=4,
    )


def test_flags_that_are_not_given_have_the_defaults_of_the_library(recorder, tmp_path, monkeypatch):
    monkeypatch.delenv("GPT_CLI_MODEL", raising=False)
    file = tmp_path / "in.txt"
    file.write_bytes(b"text\n")
    assert app.run(["batch", str(file), "--seed", "1"]) == 130
    assert recorder.options == Options(seed=1)
    assert recorder.how["batch_size"] is None
    assert recorder.loaded["name"] == "gpt2"


# --- input ---------------------------------------------------------------------------------------

INPUTS = {
    "lines": (b"one\ntwo\n", ["one", "two"]),
    "no line end at the end": (b"one\ntwo", ["one", "two"]),
    "CRLF": (b"one\r\n\r\ntwo\r\n", ["one", "two"]),
    "blank lines": (b"\n \n\t\r\none\n\n\ntwo\n \n\n", ["one", "two"]),
    "spaces at both ends": (b"  one \n two\t\n", ["  one ", " two\t"]),
    "a byte order mark": (BOM + b"one\ntwo\n", ["one", "two"]),
    "emoji": ("👩‍🚀🦊\né\u2028\x0bz\n".encode(), ["👩‍🚀🦊", "é\u2028\x0bz"]),
    "a brace in a later line": (b'one\n{"prompt": "two"}\n', ["one", '{"prompt": "two"}']),
    "JSON": (b'{"prompt": "one"}\n{"prompt": "two"}\n', ["one", "two"]),
    "JSON, no line end at the end": (b'{"prompt": "one"}\n{"prompt": "two"}', ["one", "two"]),
    "JSON, CRLF": (b'{"prompt": "one"}\r\n\r\n{"prompt": "two"}\r\n', ["one", "two"]),
    "JSON, blank lines": (b'\n\n \t{"prompt": "one"} \n \n{"prompt": "two"}\n\n', ["one", "two"]),
    "JSON, a byte order mark": (BOM + b'{"prompt": "one"}\n', ["one"]),
    "JSON, an empty prompt": (b'{"prompt": ""}\n', [""]),
    "JSON, escapes": (rb'{"prompt": "a\n\ud83e\udd8a"}', ["a\n🦊"]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_every_line_that_is_not_blank_is_a_row(name, tmp_path):
    data, prompts = INPUTS[name]
    file, output = tmp_path / "in", tmp_path / "out"
    file.write_bytes(data)
    flags = [str(file), "-o", str(output), "-m", "tiny", "-n", "1"]
    assert app.run(["batch", *flags]) == 0
    records = records_of(output.read_bytes())
    assert [record["prompt"] for record in records] == prompts
    assert [record["index"] for record in records] == list(range(len(prompts)))


@pytest.mark.parametrize("form", ["lines", "jsonl"])
def test_the_format_can_be_said(form):
    row = b'{"prompt": "Once"}'
    (record,) = batch("--format", form, "-n", 1, input=row)
    assert record["prompt"] == ("Once" if form == "jsonl" else row.decode())


def test_the_format_jsonl_refuses_lines():
    data = b'Once\n{"prompt": "Once"}\n'
    records = batch("--format", "jsonl", "-n", 1, input=data, code=6)
    assert [record.get("prompt") for record in records] == [None, "Once"]


@pytest.mark.parametrize("data", [b"", b"\n\r\n \n", BOM])
def test_an_input_without_rows_gives_no_records(data):
    assert batch(input=data) == []


def test_an_empty_prompt_begins_a_text(tiny):
    (record,) = batch("-n", 5, "-s", 1, input=b'{"prompt": ""}')
    assert record["text"] == tiny.generate([""], max_tokens=5, seed=1)[0].text


def test_the_text_is_written_as_utf8():
    finished = run("-n", 1, input="Zoë 🦊\n".encode(), env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert '"Zoë 🦊"'.encode() in finished.stdout


def test_a_file_called_dash_does_not_hide_standard_input(tmp_path):
    (tmp_path / "-").touch()
    finished = run("-n", 1, input=b"one\ntwo\n", cwd=tmp_path)
    assert len(records_of(finished.stdout)) == 2


# --- rows that fail ------------------------------------------------------------------------------

GOOD = b'{"prompt": "Once upon a time"}\n'
BAD = {  # and the id that can be read all the same
    "not JSON": (b'{"prompt": "Once"', None),
    "a number": (b"17", None),
    "an array": (b'["Once"]', None),
    "null": (b"null", None),
    "no prompt": (b'{"id": 1}', 1),
    "a prompt that is a number": (b'{"id": "a", "prompt": 5}', "a"),
    "a prompt that is null": (b'{"id": "b", "prompt": null}', "b"),
    "a prompt that is a list": (b'{"id": [2], "prompt": ["Once"]}', [2]),
    "an unknown field": (b'{"id": 3, "prompt": "Once", "prefix": "x"}', 3),
    "temperature that is a word": (b'{"prompt": "Once", "temperature": "hot"}', None),
    "temperature that is NaN": (b'{"id": 4, "prompt": "Once", "temperature": NaN}', 4),
    "temperature below 0": (b'{"id": 5, "prompt": "Once", "temperature": -1}', 5),
    "temperature beyond all": (b'{"prompt": "Once", "temperature": 1' + b"0" * 400 + b"}", None),
    "no tokens": (b'{"prompt": "Once", "max_tokens": 0}', None),
    "max_tokens that is true": (b'{"prompt": "Once", "max_tokens": true}', None),
    "max_tokens that is a float": (b'{"prompt": "Once", "max_tokens": 1e99}', None),
    "a number of too many digits": (b'{"prompt": "Once", "seed": ' + b"1" * 9999 + b"}", None),
    "a seed below 0": (b'{"id": 6, "prompt": "Once", "seed": -1}', 6),
    "a seed of 65 bits": (b'{"prompt": "Once", "seed": 18446744073709551616}', None),
    "an empty stop": (b'{"prompt": "Once", "stop": [""]}', None),
    "an empty string as stop": (b'{"prompt": "Once", "stop": ""}', None),
    "a stop that is a number": (b'{"prompt": "Once", "stop": [3]}', None),
    "no UTF-8": (b'{"id": 7, "prompt": "Once \xff"}', None),
    "half a surrogate pair": (rb'{"id": 8, "prompt": "Once \ud800"}', 8),
    "half a surrogate pair as a field": (rb'{"id": 9, "prompt": "Once", "\ud800": 1}', 9),
    "half a surrogate pair as an id": (rb'{"id": "\ud800", "prompt": "Once"}', None),
    "deep nesting": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "a deep id": (b'{"prompt": "Once", "id": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001, None),
    "a text beyond the context": (b'{"id": 10, "prompt": "' + b"a " * 100_000 + b'"}', 10),
}


@pytest.fixture(scope="module")
def failures():
    """Good rows on the lines 2, 6, ..., bad ones on 4, 8, ...; blank lines between them."""
    data = b"".join(b"\n%s\n%s\n" % (GOOD, bad) for bad, _ in BAD.values())
    return run("--temperature", 0, "-n", 4, "--batch-size", 4, "-q", input=data)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_an_error_in_its_place(name, failures):
    index = 2 * list(BAD).index(name) + 1
    record = records_of(failures.stdout)[index]
    code = "context_overflow" if name == "a text beyond the context" else "invalid_input"
    message = record["error"].pop("message")
    id = BAD[name][1]
    expected = {"index": index, "line": 2 * index + 2, "error": {"code": code}}
    assert record == expected | ({} if id is None else {"id": id})
    assert message
    assert "\n" not in message


def test_the_rows_beside_bad_ones_are_done(failures, tiny):
    good = records_of(failures.stdout)[::2]
    text = tiny.generate(["Once upon a time"], temperature=0.0, max_tokens=4)[0].text
    assert texts(good) == [text] * len(BAD)


def test_rows_that_failed_are_counted_in_one_line_and_are_exit_code_6(failures):
    errors = failures.stderr.decode()
    assert_one_line_error(failures.returncode, 6, errors)
    assert f"{len(BAD)} of {2 * len(BAD)} rows" in errors


def test_lines_can_fail_too():
    data = b"Once\n\nOnce \xff\n" + b"a " * 100_000 + b"\nOnce\n"
    first, no_text, long, last = batch("-n", 2, "-q", input=data, code=6)
    assert (no_text["index"], no_text["line"], no_text["error"]["code"]) == (1, 3, "invalid_input")
    assert (long["index"], long["line"], long["error"]["code"]) == (2, 4, "context_overflow")
    assert (first["index"], last["index"]) == (0, 3)
    assert first["text"]
    assert last["text"]


def test_a_long_text_can_be_cut_instead():
    data = b"a " * 1000 + b"\nOnce\n"
    long, short = batch("-n", 3, "--overflow", "truncate", input=data)
    assert long["usage"]["prompt_tokens"] == 512 - 3
    assert short["usage"]["prompt_tokens"] == 1


# --- output files and --resume -------------------------------------------------------------------

ROWS = [{"id": place, "prompt": f"{'🦊' * place} said {place}"} for place in range(6)]


def batch_here(*arguments):
    """Run in this process, which is faster, where only files and errors are looked at."""
    return app.run(["batch", "-m", "tiny", "-s", "4", "-n", "6", *map(str, arguments)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An input, and the output that an uninterrupted run makes of it."""
    folder = tmp_path_factory.mktemp("whole")
    file, output = folder / "in.jsonl", folder / "out.jsonl"
    file.write_bytes(jsonl(*ROWS))
    assert run(file, "-o", output, "-s", 4, "-n", 6).returncode == 0
    return file, output


def write_output(path, data, whole):
    """Write the records of an earlier run, perhaps torn, with their manifest."""
    path.write_bytes(data)
    manifest = whole[1].with_name(f".{whole[1].name}.job.json")
    shutil.copy(manifest, path.with_name(f".{path.name}.job.json"))
    return path


def test_an_output_file_holds_what_standard_output_would(whole):
    file, output = whole
    finished = run(file, "-s", 4, "-n", 6)
    assert timeless(records_of(output.read_bytes())) == timeless(records_of(finished.stdout))


def test_with_an_output_file_standard_output_is_empty(tmp_path):
    finished = run("-n", 1, "-o", tmp_path / "out", input=b"Once\n")
    assert finished.stdout == b""
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("data", [b"", b"my own notes\n"])
def test_an_output_that_exists_is_refused(data, whole, tmp_path, capfd):
    output = tmp_path / "out"
    output.write_bytes(data)
    assert_one_line_error(batch_here(whole[0], "-o", output), 2, capfd.readouterr().err)
    assert output.read_bytes() == data


def test_resume_needs_an_output_file(whole, capfd):
    assert_one_line_error(batch_here(whole[0], "--resume"), 2, capfd.readouterr().err)


def test_resume_without_an_output_begins_one(whole, tmp_path):
    file, output = whole
    assert batch_here(file, "-o", tmp_path / "out", "--resume") == 0
    begun = records_of((tmp_path / "out").read_bytes())
    assert timeless(begun) == timeless(records_of(output.read_bytes()))


def test_resume_changes_nothing_of_a_finished_output(whole, tmp_path):
    output = write_output(tmp_path / "out", whole[1].read_bytes(), whole)
    assert batch_here(whole[0], "-o", output, "--resume") == 0
    assert output.read_bytes() == whole[1].read_bytes()


def test_resume_does_the_rows_that_were_added_to_the_input(whole, tmp_path):
    file, output = whole
    longer, again = tmp_path / "in", write_output(tmp_path / "out", output.read_bytes(), whole)
    longer.write_bytes(file.read_bytes() + jsonl({"prompt": "Once"}))
    assert batch_here(longer, "-o", again, "--resume") == 0
    *before, added = again.read_bytes().splitlines(keepends=True)
    assert b"".join(before) == output.read_bytes()
    assert json.loads(added)["prompt"] == "Once"


def line_start(data, line):
    return len(b"".join(data.splitlines(keepends=True)[:line]))


CUTS = {
    "nothing": lambda data: 0,
    "one byte": lambda data: 1,
    "the first line but its end": lambda data: line_start(data, 1) - 1,
    "the first line": lambda data: line_start(data, 1),
    "a brace": lambda data: line_start(data, 2) + 1,
    "a part of a character": lambda data: data.index("🦊".encode(), line_start(data, 3)) + 2,
    "half a line": lambda data: (line_start(data, 4) + line_start(data, 5)) // 2,
    "all but a line": lambda data: line_start(data, 5),
    "all but the last line end": lambda data: len(data) - 1,
}


@pytest.mark.parametrize("name", CUTS)
def test_resume_mends_an_output_of_which_there_is(name, whole, tmp_path):
    file, output = whole
    data = output.read_bytes()
    torn = tmp_path / "out"
    write_output(torn, data[: CUTS[name](data)], whole)
    kept = data[: data.rfind(b"\n", 0, CUTS[name](data)) + 1]
    assert batch_here(file, "-o", torn, "--resume", "--batch-size", 2) == 0
    assert torn.read_bytes().startswith(kept)
    assert timeless(records_of(torn.read_bytes())) == timeless(records_of(data))


def test_a_torn_line_goes_also_where_a_shorter_one_takes_its_place(whole, tmp_path):
    file, output = whole
    torn = tmp_path / "out"
    data = output.read_bytes()
    write_output(torn, data[: line_start(data, 5)] + b'{"index": 5, "x": "' + b"x" * 9999, whole)
    assert batch_here(file, "-o", torn, "--resume") == 0
    assert timeless(records_of(torn.read_bytes())) == timeless(records_of(data))


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["-n", 12], "max_tokens 6, not 12"),
        (["--temperature", 0], "temperature 0.8, not 0.0"),
        (["--stop", "x"], 'stop [], not ["x"]'),
        (["--logit-bias", "7=-1"], "logit_bias [], not [[7, -1.0]]"),
        (["--no-cache"], "use_cache true, not false"),
        (["--logprobs", 1], "top_logprobs 0, not 1"),
        (["--dtype", "float32"], 'dtype "auto", not "float32"'),
    ],
)
def test_resume_refuses_another_option_by_name(flags, difference, whole, tmp_path, capfd):
    data = whole[1].read_bytes()
    output = write_output(tmp_path / "out", data[: line_start(data, 2)], whole)
    error = assert_one_line_error(
        batch_here(whole[0], "-o", output, "--resume", *flags), 2, capfd.readouterr().err
    )
    assert f"out was made with {difference}: name another --output" in error
    assert output.read_bytes() == data[: line_start(data, 2)]


def test_resume_refuses_records_without_their_manifest(whole, tmp_path, capfd):
    output = Path(shutil.copy(whole[1], tmp_path / "out"))
    code = batch_here(whole[0], "-o", output, "--resume")
    error = assert_one_line_error(code, 2, capfd.readouterr().err)
    assert "out cannot be resumed without its manifest .out.job.json" in error


OTHER_INPUTS = {
    "other prompts": lambda rows: [row | {"prompt": "Once"} for row in rows],
    "other ids": lambda rows: [row | {"id": "x"} for row in rows],
    "no ids": lambda rows: [{"prompt": row["prompt"]} for row in rows],
    "another order": lambda rows: rows[::-1],
    "another last row": lambda rows: [*rows[:-1], {"id": 5, "prompt": "Once"}],
    "a row more at the start": lambda rows: [{"prompt": "Once"}, *rows],
    "a row less at the end": lambda rows: rows[:-1],
    "no rows": lambda rows: [],
}


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_resume_refuses_an_output_of_another_input(name, whole, tmp_path, capfd):
    data = whole[1].read_bytes()
    file, output = tmp_path / "in", tmp_path / "out"
    file.write_bytes(jsonl(*OTHER_INPUTS[name](ROWS)))
    write_output(output, data, whole)
    code = batch_here(file, "-o", output, "--resume")
    assert output.read_bytes() == data
    assert_error(code, 2, capfd.readouterr().err)


def test_resume_refuses_an_output_of_another_model(whole, case_folder, tmp_path, capfd):
    data = whole[1].read_bytes()
    output = tmp_path / "out"
    write_output(output, data, whole)
    code = batch_here(whole[0], "-o", output, "--resume", "-m", case_folder("saved"))
    assert output.read_bytes() == data
    assert_error(code, 2, capfd.readouterr().err)


def test_an_output_that_is_refused_keeps_also_its_torn_end(whole, tmp_path, capfd):
    data = whole[1].read_bytes() + b'{"index": 6, "pro'
    file, output = tmp_path / "in", tmp_path / "out"
    file.write_bytes(b"Once\n")
    write_output(output, data, whole)
    code = batch_here(file, "-o", output, "--resume")
    assert output.read_bytes() == data
    assert_error(code, 2, capfd.readouterr().err)


def test_an_output_that_is_refused_is_one_line(whole, tmp_path, capfd):
    file, output = tmp_path / "in", tmp_path / "out"
    write_output(output, whole[1].read_bytes(), whole)
    file.write_bytes(b"Once\n")
    code = batch_here(file, "-o", output, "--resume")
    assert_one_line_error(code, 2, capfd.readouterr().err)


NO_RECORDS = {
    "a text": b"my own notes\nand more\n",
    "a text that is no whole line": b"my own notes",
    "a blank line": b"\n",
    "bytes": bytes(range(256)) * 2 + b"\n",
    "bytes that are no whole line": b"\x89PNG\r",
    "a list": b"[]\n",
    "a number": b"0\n",
    "another object": b'{"prompt": "Once"}\n',
    "another object that is no whole line": b'{"prompt": "Once"}',
    "a record that begins later": b'{"index": 1, "prompt": "a", "model": "tiny"}\n',
    "a record without a model": b'{"index": 0, "prompt": "a"}\n',
    "deep nesting": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("name", NO_RECORDS)
def test_resume_refuses_a_file_that_holds_no_records(name, whole, tmp_path, capfd):
    output = tmp_path / "out"
    write_output(output, NO_RECORDS[name], whole)
    code = batch_here(whole[0], "-o", output, "--resume")
    assert output.read_bytes() == NO_RECORDS[name]
    assert_error(code, 2, capfd.readouterr().err)


def test_resume_refuses_an_output_that_lacks_a_line(whole, tmp_path, capfd):
    data = whole[1].read_bytes().splitlines(keepends=True)
    output = tmp_path / "out"
    write_output(output, b"".join(data[:2] + data[3:]), whole)
    assert_error(batch_here(whole[0], "-o", output, "--resume"), 2, capfd.readouterr().err)
    assert output.read_bytes() == b"".join(data[:2] + data[3:])


def test_rows_that_failed_earlier_count_when_a_run_is_resumed(tmp_path, capfd):
    file, output = tmp_path / "in", tmp_path / "out"
    file.write_bytes(b'{"id": 1}\n' + jsonl({"prompt": "Once"}, {"prompt": "One"}))
    assert batch_here(file, "-o", output) == 6
    data = output.read_bytes()
    output.write_bytes(data[: line_start(data, 2)])
    capfd.readouterr()
    for _ in range(2):  # to be completed, and complete
        code = batch_here(file, "-o", output, "--resume", "-q")
        errors = capfd.readouterr().err
        assert_one_line_error(code, 6, errors)
        assert "1 of 3 rows" in errors
        assert timeless(records_of(output.read_bytes())) == timeless(records_of(data))


@posix
def test_a_model_whose_path_is_no_unicode_can_be_resumed(tmp_path):
    folder = tmp_path / "m\udcff"
    try:
        shutil.copytree(TINY_FOLDER, folder)
    except OSError:
        pytest.skip("the file system takes only Unicode")
    output = tmp_path / "out"
    for rows in (1, 2):
        flags = ["-n", 1, "-o", output, "--resume", "-m", folder]
        finished = run(*flags, input=b"Once\n" * rows)
        assert finished.returncode == 0, finished.stderr
        assert len(output.read_bytes().splitlines()) == rows


# --- interrupted ---------------------------------------------------------------------------------

LONG_FLAGS = ["-s", "5", "-n", "40", "--ignore-eos", "--batch-size", "4"]
LONG_ROWS = 120


@pytest.fixture(scope="module")
def long_job(tmp_path_factory):
    """An input that takes a while, and the records that an uninterrupted run makes of it."""
    folder = tmp_path_factory.mktemp("long")
    file, output = folder / "in", folder / "out"
    file.write_bytes(lines(*(f"{'Once upon a time, ' * (i % 5)}{i}" for i in range(LONG_ROWS))))
    assert run(file, "-o", output, *LONG_FLAGS).returncode == 0
    return file, timeless(records_of(output.read_bytes()))


def start(*arguments, **options):
    command = [*BATCH, *map(str, arguments)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes | options)


def lines_in(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


@posix
def test_no_row_is_lost_and_none_is_there_twice_however_often_it_is_killed(long_job, tmp_path):
    file, expected = long_job
    output = tmp_path / "out"
    chance = random.Random(1)
    landed = 0
    for attempt in count():
        with start(file, "-o", output, "--resume", *LONG_FLAGS) as process:
            try:
                # Later and later, so that it comes to an end on a slow machine as well.
                process.wait(chance.uniform(0.2, 0.9) + 0.2 * attempt)
                break
            except subprocess.TimeoutExpired:
                process.kill()
        landed += 0 < lines_in(output) < LONG_ROWS
    assert process.returncode == 0
    assert landed > 0
    assert timeless(records_of(output.read_bytes())) == expected


@posix
def test_a_full_disk_is_exit_code_5_and_the_output_can_be_resumed(whole, tmp_path):
    file, expected = whole
    output = tmp_path / "out"
    job = [*BATCH, str(file), "-o", str(output), "-s", "4", "-n", "6"]
    limited = ["sh", "-c", 'ulimit -f 1 && exec "$@"', "sh", *job]  # a block: 512 or 1024 bytes
    finished = subprocess.run(limited, capture_output=True, timeout=60)
    assert_error(finished.returncode, 5, finished.stderr.decode())
    assert 0 < output.stat().st_size < expected.stat().st_size
    assert subprocess.run([*job, "--resume"], timeout=60, capture_output=True).returncode == 0
    assert timeless(records_of(output.read_bytes())) == timeless(records_of(expected.read_bytes()))


def wait_for(happened, process):
    end = time.monotonic() + 60
    while not happened():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)


@posix
def test_an_interrupt_leaves_whole_lines_and_can_be_resumed(long_job, tmp_path):
    file, expected = long_job
    output = tmp_path / "out"
    with start(file, "-o", output, *LONG_FLAGS) as process:
        wait_for(lambda: lines_in(output) > 0, process)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in errors
    records = timeless(records_of(output.read_bytes()))
    assert 0 < len(records) < LONG_ROWS
    assert records == expected[: len(records)]
    assert run(file, "-o", output, "--resume", *LONG_FLAGS).returncode == 0
    assert timeless(records_of(output.read_bytes())) == expected


@posix
def test_a_reader_that_leaves_ends_it_quietly(long_job):
    file, expected = long_job
    with start(file, *LONG_FLAGS) as process:
        first = process.stdout.readline()
        assert process.poll() is None
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        errors = process.stderr.read().decode()
    assert timeless(records_of(first)) == expected[:1]
    assert "error" not in errors
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 1  # how far it was


@posix
def test_a_program_that_keeps_the_pipe_open_gets_each_record_before_it_writes_the_next_row():
    rows = [{"prompt": "Once"}, {"id": 7}, {"id": 8, "prompt": "🦊\nOne day"}]
    with start("-n", 3, "-q", stdin=subprocess.PIPE) as process:
        guard = threading.Timer(60, process.kill)  # else a row without an answer would never end
        guard.start()
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
        guard.cancel()
    assert out == b""
    assert_one_line_error(process.returncode, 6, errors.decode())


@posix
def test_a_row_is_in_the_output_file_as_soon_as_it_is_done(tmp_path):
    output = tmp_path / "out"
    with start("-n", 3, "-o", output, stdin=subprocess.PIPE) as process:
        for rows in (1, 2):
            process.stdin.write(b"Once\n")
            process.stdin.flush()
            wait_for(lambda rows=rows: lines_in(output) == rows, process)
        process.communicate(timeout=60)
    assert process.returncode == 0


# --- progress ------------------------------------------------------------------------------------


def test_quiet_is_quiet():
    assert run("-n", 2, "-q", input=b"Once\nOne\n").stderr == b""


def test_at_the_end_a_line_tells_how_much_was_done(tmp_path):
    file = tmp_path / "in"
    file.write_bytes(b"Once\nOne\n\nThe\n")
    for source in ([file], []):
        finished = run(*source, "-n", 2, "--ignore-eos", input=file.read_bytes())
        (line,) = finished.stderr.decode().splitlines()
        assert line.startswith("gpt-cli: 3 of 3 rows" if source else "gpt-cli: 3 rows")
        assert " 6 tokens" in line
        assert len(records_of(finished.stdout)) == 3


@posix
def test_on_a_terminal_a_line_renews_itself(long_job, tmp_path):
    file, output = tmp_path / "in", tmp_path / "out"
    file.write_bytes(b"".join(long_job[0].read_bytes().splitlines(keepends=True)[:30]))
    flags = ["-m", "tiny", "--threads", "1", *LONG_FLAGS]
    code, shown = run_on_terminal("batch", str(file), "-o", str(output), *flags)
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


@posix
def test_on_a_terminal_records_are_not_mixed_with_progress(tmp_path):
    file = tmp_path / "in"
    file.write_bytes(b"Once\nOne\n")
    code, shown = run_on_terminal("batch", str(file), "-m", "tiny", "-n", "2")
    assert code == 0
    assert len(records_of(shown.replace("\r\n", "\n").encode())) == 2


# --- what cannot be used -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag",
    [
        *(f"--batch-size={size}" for size in ("0", "-1", "many", "", "1.5", "²", "9" * 5000)),
        "--format=xml",
        "--temperature=nan",
        "--stop=",
        "--logprobs=-1",
        "--seed=-1",
    ],
)
def test_bad_flags_are_known_before_a_model_is_looked_for(flag, whole, tmp_path, capfd):
    output = tmp_path / "out"
    flags = ["--model", "no/model", "--offline", "-o", str(output), flag]
    code = app.run(["batch", str(whole[0]), *flags])
    assert_one_line_error(code, 2, capfd.readouterr().err)
    assert not output.exists()


def test_a_row_may_have_null_for_what_it_does_not_say():
    row = {"id": None, "prompt": "Once", "seed": None, "max_tokens": None, "stop": None}
    plain = batch("-s", 1, "-n", 8, input=jsonl({"prompt": "Once"}, {"prompt": "Once"}))
    same = batch("-s", 1, "-n", 8, input=jsonl(row, row))
    assert timeless(same) == timeless(plain)


def test_a_dash_for_the_output_is_standard_output(tmp_path):
    assert len(batch("-n", 1, "-o", "-", input=b"Once\n", cwd=tmp_path)) == 1
    assert not list(tmp_path.iterdir())


# --- a seed that is not given --------------------------------------------------------------------


def test_resume_without_a_seed_goes_on_with_that_of_the_first_run(tmp_path):
    rows = [{"prompt": "Once"}, {"prompt": "One", "seed": 3}, *[{"prompt": "The"}] * 4]
    output = tmp_path / "out"
    assert run("-n", 8, "-o", output, input=jsonl(*rows)).returncode == 0
    whole = records_of(output.read_bytes())
    for kept in (1, 2, 5):
        part = output.read_bytes().splitlines(keepends=True)[:kept]
        output.write_bytes(b"".join(part))
        assert run("-n", 8, "-o", output, "--resume", input=jsonl(*rows)).returncode == 0
        assert timeless(records_of(output.read_bytes())) == timeless(whole)


def test_resume_refuses_another_seed(tmp_path):
    output = tmp_path / "out"
    assert run("-s", 1, "-n", 2, "-o", output, input=b"Once\n").returncode == 0
    before = output.read_bytes()
    finished = run("-s", 2, "-n", 2, "-o", output, "--resume", input=b"Once\nOne\n")
    assert_one_line_error(finished.returncode, 2, finished.stderr.decode())
    assert b"seed 1, not 2" in finished.stderr
    assert output.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("redirection", "code"), [(">/dev/full", 5), ("2>/dev/full", 0)])
def test_a_full_disk_behind_an_output_changes_no_other_exit_code(redirection, code):
    command = f"{shlex.join([*BATCH, '-n', '2'])} {redirection}"
    finished = subprocess.run(command, shell=True, input=b"Once\n", capture_output=True)
    assert finished.returncode == code, finished.stderr
    assert finished.stderr.count(b"\n") == (code != 0)


@posix
def test_two_runs_do_not_write_one_output(tmp_path):
    output = tmp_path / "out"
    with JSONLines(output, "prompt", {}) as sink:
        sink.resume()
        sink.write({"index": 0})
        finished = run("-n", 1, "-o", output, "--resume", input=b"Once\n")
    assert_one_line_error(finished.returncode, 5, finished.stderr.decode())
    assert output.read_bytes() == b'{"index": 0}\n'


# --- how far it is -------------------------------------------------------------------------------


def test_the_time_that_is_left_is_told_when_the_rate_has_settled(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    with progress.Progress(shown=True) as told:
        told.start(40, 10, 1)
        for now in (102.0, 131.0, 140.0, 3760.0):
            told.advance(50, failed=now == 140.0)
    assert capsys.readouterr().err.splitlines() == [
        "gpt-cli: 12 of 40 rows (1 failed), 100 tokens, 3 a second, 7:14 left",
        "gpt-cli: 14 of 40 rows (2 failed), 200 tokens, 0 a second, 6:36:30 left",
        "gpt-cli: 14 of 40 rows (2 failed), 200 tokens, 0 a second, 6:36:30 left",
    ]


def test_a_batch_beyond_all_is_as_large_as_the_input():
    assert len(batch("-n", 1, "--batch-size", 10**30, input=b"Once\nOne\n")) == 2


@pytest.mark.parametrize(
    ("source", "output", "code"),
    [("missing", "out", 2), ("empty", "out", 2), ("in", "missing/out", 2), ("in", ".", 2)],
)
def test_files_that_cannot_be_used_are_one_line(source, output, code, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "in").write_bytes(b"Once\n")
    finished = run(source, "-n", 1, "-o", output, cwd=tmp_path)
    errors = finished.stderr.decode()
    assert finished.stdout == b""
    assert (source if output == "out" else output) in errors
    assert_one_line_error(finished.returncode, code, errors)


@pytest.mark.parametrize(("source", "model"), [("missing", "tiny"), ("in", "no/model")])
def test_what_cannot_begin_leaves_no_output(source, model, tmp_path):
    (tmp_path / "in").write_bytes(b"Once\n")
    flags = ["-o", str(tmp_path / "out"), "-m", model, "--offline"]
    assert app.run(["batch", str(tmp_path / source), *flags]) in (2, 3)
    assert not (tmp_path / "out").exists()


def test_the_help_needs_no_numpy():
    code = (
        "import sys; from gpt_cli.cli import app; code = app.run(['batch', '--help']);"
        "assert 'numpy' not in sys.modules; sys.exit(code)"
    )
    finished = subprocess.run([*COMMAND[:1], "-c", code], capture_output=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert b"gpt-cli batch" in finished.stdout


# --- in Python -----------------------------------------------------------------------------------


def test_engine_batch_takes_texts_mappings_and_errors(engine):
    error = InputError("kept out")
    rows = [
        "He said",
        {"prompt": "it is", "max_tokens": 3},
        error,
        {"text": "no prompt"},
        "a" * 999,
    ]
    results = list(engine.batch(rows, Options(temperature=0.0, max_tokens=5, ignore_eos=True)))
    alone = engine.generate(["He said"], temperature=0.0, max_tokens=5, ignore_eos=True)
    assert results[0].text == alone[0].text
    assert len(results[1].ids) == 3
    assert results[2] is error
    assert isinstance(results[3], InputError)
    assert isinstance(results[4], ContextError)
    assert len(results) == 5


def test_engine_batch_without_options_draws_one_seed(engine):
    first, second = engine.batch([{"prompt": "a", "max_tokens": 2}] * 2)
    assert first.seed == second.seed


def test_engine_batch_is_lazy(engine):
    taken = count()
    rows = (f"row {next(taken)}" for _ in count())
    results = engine.batch(rows, Options(max_tokens=2), batch_size=2)
    assert next(taken) == 0
    assert len(next(results).ids) <= 2
    assert next(taken) < 50


@pytest.mark.parametrize("size", [0, -1])
def test_engine_batch_refuses_a_batch_of_no_rows(engine, size):
    with pytest.raises(InputError, match="batch_size"):
        engine.batch(["a"], batch_size=size)


def test_engine_batch_keeps_an_index_for_each_row(engine):
    options = Options(seed=1, max_tokens=20)
    texts = [result.text for result in engine.batch(["a"] * 6, options, batch_size=2)]
    rest = engine.batch(["a"] * 3, options, indices=[3, 4, 5])
    assert [result.text for result in rest] == texts[3:]
    assert len(set(texts)) > 1


def test_too_little_memory_is_known_before_and_told_in_numbers(engine, monkeypatch):
    monkeypatch.setattr(engine.model.ops, "free_memory", lambda: 2_000_000)
    options = Options(max_tokens=70)
    requests = [Request(engine.encode("a"), options)] * 64
    with pytest.raises(ResourceError) as caught:
        list(engine.batch(["a"] * 64, options, batch_size=64))
    assert f"{working_set(engine.model.config, requests) / 1e6:,.0f} MB" in str(caught.value)
    assert "2 MB" in str(caught.value)


def test_with_little_memory_rows_are_computed_one_by_one(engine, monkeypatch):
    options = Options(max_tokens=20, seed=1)
    expected = [result.text for result in engine.batch(["a"] * 5, options)]
    one = working_set(engine.model.config, [Request(engine.encode("a"), options)])
    monkeypatch.setattr(engine.model.ops, "free_memory", lambda: one)  # two would be refused
    assert [result.text for result in engine.batch(["a"] * 5, options)] == expected
    with pytest.raises(ResourceError):
        list(engine.batch(["a"] * 5, options, batch_size=2))
