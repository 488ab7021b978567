"""Requests in files get the answers of the server, one line each."""

import asyncio
import gzip
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpt_cli import jobs, serve
from gpt_cli.errors import CheckpointError, InputError, ResourceError
from gpt_cli.generation.decode import Batch
from gpt_cli.serve.protocol import read_completions
from support.in_process import records_here, refusal, run_here

COMPLETIONS = "/v1/completions"
LONG = "Once upon a time, there was a little girl named Emma. She loved the moon. " * 9


def request(body, url=COMPLETIONS, custom_id="x", method="POST"):
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


# fmt: off
GOOD = [
    request({"model": "tiny", "prompt": "Once upon a time", "max_tokens": 7, "seed": 1}),
    request({}),
    request({"prompt": ["Once", [464, 301]], "n": 2, "best_of": 3, "logprobs": 2, "seed": 2}),
    request({"prompt": LONG, "echo": True, "logprobs": 1, "max_tokens": 0}),
    request({"prompt": "L'été 😀", "echo": True, "logprobs": 0, "stop": [" a", "\n"], "seed": 5}),
    request({"prompt": "Once", "max_tokens": 0}),
    request({"prompt": "Once", "use_beam_search": True, "best_of": 4, "n": 2}),
    request({"prompt": LONG, "max_tokens": -1, "temperature": 0}),
    request({"input": ["The moon", LONG], "encoding_format": "base64"}, "/v1/embeddings"),
    request({"prompt": "<|endoftext|>"}, "/tokenize"),
    request({"tokens": [464, 301]}, "/detokenize"),
]
BAD = [
    request({"prompt": "Once", "max_tokens": -2}),
    request({"prompt": "Once", "temperatur": 1}),
    request({"prompt": "Once", "\ud800": 1}),
    request({"prompt": LONG * 9}),
    request({"prompt": "Once", "model": 5}),
    request(["Once"]),
    request({"input": []}, "/v1/embeddings"),
    request({"messages": []}, "/v1/chat/completions"),
    request({"input": "x"}, "/v1/responses"),
    request({"prompt": "Once"}, method="PUT"),
]
# Lines that are no requests, and what is said of them.
NONE = {
    "{": "line 1: the row is not valid JSON: Expecting property name",
    "[]": "line 1: a row must be a JSON object",
    '{"url": "/v1/completions", "method": "POST", "body": {}}': 'needs a string "custom_id"',
    '{"custom_id": "a", "method": "POST", "body": {}}': 'line 1: a request needs a string "url"',
    '{"custom_id": "a", "url": "/v1/completions", "body": {}}': 'needs a string "method"',
    '{"custom_id": "a", "url": "/v1/completions", "method": "POST"}': 'a request needs a "body"',
}
# fmt: on
ALL = [line | {"custom_id": f"row {number}"} for number, line in enumerate([*GOOD, *BAD])]


def write(path, lines):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    Path(path).write_text(text)
    return path


def answers(path):
    return [json.loads(line) for line in Path(path).read_bytes().split(b"\n")[:-1]]


def timeless(answer):
    """Return an answer of a file without its time."""
    answer = json.loads(json.dumps(answer))
    if answer["response"]:
        answer["response"]["body"].pop("created", None)
    return answer


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The answers to all requests."""
    folder = tmp_path_factory.mktemp("whole")
    summary = jobs.run(
        serve.Requests(seed=1), write(folder / "in", ALL), folder / "out", model="tiny"
    )
    assert (summary.rows, summary.failed) == (len(ALL), len(BAD))
    return answers(folder / "out")


@pytest.fixture(scope="module")
def server(tiny):
    """A function that returns the status and the JSON of the server's answer to a request."""
    pytest.importorskip("uvicorn")
    from gpt_cli.serve.app import application
    from gpt_cli.serve.front.keys import Keys

    app, scheduler = application(tiny, serve.Settings(), Keys(None, None))

    def ask(line):
        body = json.dumps(line["body"]).encode()
        sent = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "method": line["method"]}
        scope |= {"path": line["url"], "query_string": b"", "headers": [(b"host", b"localhost")]}
        asyncio.run(app(scope, receive, send))
        content = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(content)

    yield ask
    scheduler.stop()
    scheduler.join()


def test_the_answers_are_those_of_the_server(whole, server):
    assert [answer["custom_id"] for answer in whole] == [line["custom_id"] for line in ALL]
    for number, (line, answer) in enumerate(zip(ALL, map(timeless, whole), strict=True)):
        assert list(answer) == ["id", "custom_id", "response", "error"]
        assert answer["error"] is None
        response = answer["response"]
        body = response["body"]
        seeds = {choice["seed"] for choice in body.get("choices", [])}
        if seeds and "seed" not in line["body"]:
            line = line | {"body": line["body"] | {"seed": seeds.pop()}}
        status, expected = server(line)
        for changed in (body, expected):
            changed.pop("id", None)
        expected.pop("created", None)
        # ASCII in place of what is not Unicode.
        shown = json.loads(json.dumps(expected).replace('"\\ud800"', '"\\\\ud800"'))
        assert (response["status_code"], body) == (status, shown), line
        assert (status == 200) == (number < len(GOOD))


def test_a_line_that_is_no_request_has_an_error_in_its_place(here):
    for line, says in NONE.items():
        write("in.jsonl", [line + "\n", GOOD[0]])
        jobs.run(serve.Requests(), "in.jsonl", "out", model="tiny")
        bad, good = answers("out")
        Path("out").unlink()
        assert list(bad) == ["id", "custom_id", "response", "error"]
        assert (bad["response"], bad["error"]["code"]) == (None, "invalid_input")
        assert says in bad["error"]["message"]
        assert good["response"]["body"]["choices"][0]["text"] == ", there was a brave lamb named"


def test_neither_batches_nor_interruptions_nor_machines_change_an_answer(here, whole, tiny):
    write("in", ALL)
    expected = [*map(timeless, whole)]
    # A search with four beams needs room for them.
    jobs.run(serve.Requests(1, batch_size=4), "in", "out", model="tiny")
    assert [*map(timeless, answers("out"))] == expected
    data = Path("out").read_bytes()
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for size in (9, ends[8] + 25, ends[-2]):
        Path("out").write_bytes(data[:size])
        summary = jobs.run(serve.Requests(), "in", "out", model="tiny", resume=True)
        assert (summary.rows, summary.failed) == (len(ALL), len(BAD))
        assert [*map(timeless, answers("out"))] == expected
    task = pickle.loads(pickle.dumps(serve.Requests(1)))  # as Ray sends it
    rows = [
        jobs.InputRow(index, index + 1, None, task.layout.id_of(line), line)
        for index, line in enumerate(ALL)
    ]
    (last,) = [*task.records(tiny, rows[3:5], first=4)][-1]
    assert timeless(last) == expected[4]


def test_a_request_without_a_seed_has_one_of_its_row_and_the_job(here):
    write("in", [request({"prompt": "Once"}, custom_id=str(number)) for number in range(3)])
    drawn = {}
    for name, seed in {"a": 1, "b": 1, "c": 2, "d": None, "e": None}.items():
        jobs.run(serve.Requests(seed), "in", name, model="tiny")
        drawn[name] = [a["response"]["body"]["choices"][0]["seed"] for a in answers(name)]
    assert drawn["a"] == drawn["b"]
    different = [seed for name in "acde" for seed in drawn[name]]
    assert len({*different}) == 12 and max(different) < 2**53


@pytest.mark.parametrize("output", ["out.jsonl", "out/"])
def test_an_output_of_other_requests_is_not_continued(output, here):
    write("in.jsonl", ALL[:2])
    jobs.run(serve.Requests(), "in.jsonl", output, model="tiny")
    write("in.jsonl", [ALL[0] | {"body": {"prompt": "Another"}}, ALL[1]])
    with pytest.raises(InputError, match="was made from another input"):
        jobs.run(serve.Requests(), "in.jsonl", output, model="tiny", resume=True)
    write("in.jsonl", [request({"prompt": "Once", "stream": True}), ALL[1]])
    jobs.run(serve.Requests(), "in.jsonl", "more/", model="tiny")
    summary = jobs.run(serve.Requests(), "in.jsonl", "more/", model="tiny", resume=True)
    assert (summary.rows, summary.failed) == (2, 1)


def test_what_is_not_the_fault_of_a_request_ends_the_job(here, monkeypatch, tiny):
    def fail(*arguments):
        raise error

    write("in", ALL[:1])
    threads = {*threading.enumerate()}
    monkeypatch.setattr(Batch, "step", fail)
    for error in (CheckpointError("damaged"), ResourceError("full"), ZeroDivisionError()):
        with pytest.raises(type(error)):
            jobs.run(serve.Requests(), "in", "out", model="tiny")
        assert not [*here.glob("*out*")]
    monkeypatch.setattr("gpt_cli.options.constraint.import_llguidance", fail)
    monkeypatch.setattr("gpt_cli.serve.trial.import_llguidance", fail)
    error = ResourceError("pip install llguidance")
    write("in", [request({"guided_regex": "a"})])
    with pytest.raises(ResourceError, match="pip install llguidance"):
        jobs.run(serve.Requests(), "in", "out", model="tiny")
    assert threads.issuperset(threading.enumerate())


def test_a_search_has_no_more_beams_than_are_computed_at_a_time(here):
    write("in", [request({"use_beam_search": True, "best_of": 5})])
    jobs.run(serve.Requests(batch_size=4), "in", "out", model="tiny")
    (answer,) = answers("out")
    assert answer["response"]["status_code"] == 400
    message = answer["response"]["body"]["error"]["message"]
    assert message == "best_of: there is room for 4 beams at a time (--batch-size)"


# --- the command ---------------------------------------------------------------------------------

BATCH = ["batch", "-m", "tiny", "--threads", 1]


def test_batch_answers_requests_from_files_and_pipes(here, whole):
    write("in.jsonl", ["\n", *ALL[: len(GOOD)]])
    data = Path("in.jsonl").read_bytes()
    Path("in.jsonl.gz").write_bytes(gzip.compress(data))
    write("more.jsonl", ["{}\n"])
    expected = [*map(timeless, whole)][: len(GOOD)]
    for files, input in (["in.jsonl"], b""), (["in.jsonl.gz"], b""), ([], data):
        records = records_here(*BATCH, "-q", "-s", 1, *files, input=input)
        assert [*map(timeless, records)] == expected
    run_here(*BATCH, "-s", 1, "in.jsonl", "more.jsonl", "-o", "out.jsonl", code=6)
    *good, bad = answers("out.jsonl")
    assert [*map(timeless, good)] == expected
    assert bad["error"]["message"] == 'more.jsonl, line 1: a row needs a string "custom_id"'
    _, errors = run_here(*BATCH, "in.jsonl", "more.jsonl", "-o", "out.jsonl", "--resume", code=6)
    assert f"1 of {len(GOOD) + 1} rows failed" in errors


def test_another_model_may_be_named_and_the_answer_names_the_model(here):
    body = {"model": "gpt-3.5-turbo-instruct", "prompt": "Once"}
    (record,) = records_here(*BATCH, "-q", write("in.jsonl", [request(body)]))
    assert record["response"]["body"]["model"] == "tiny"


def test_requests_set_their_options_themselves(here):
    write("in.jsonl", ALL[:1])
    for flags in (["-n", 3], ["--stop", "x"], ["--samples", 2], ["--logprobs", 0],
                  ["--template", "{body}"], ["--ignore-eos"]):  # fmt: skip
        error = refusal(*BATCH, "in.jsonl", *flags)
        flag = "--max-tokens" if flags[0] == "-n" else flags[0]
        assert f"error: {flag} cannot be used with requests: set it in their bodies" in error
    assert "answers to requests are JSON Lines" in refusal(*BATCH, "in.jsonl", "-o", "out.csv")
    assert not Path("out.csv").exists()


def test_rows_with_other_fields_are_no_requests(here):
    lines = ['{"custom_id": "a", "prompt": "Once"}', '{"prompt": "Once"}', json.dumps(ALL[0])]
    write("in.jsonl", [f"{line}\n" for line in lines])
    _, errors = run_here(*BATCH, "-q", "in.jsonl", "-n", 2, "-o", "out", code=6)
    assert "1 of 3 rows failed" in errors
    assert [record["index"] for record in answers("out")] == [0, 1, 2]


def test_a_given_seed_is_that_of_requests_without_one(tiny):
    for body, seed in ({}, 7), ({"seed": 3}, 3), ({"seed": -1}, 7):
        assert read_completions(tiny, body, seed=7).options.seed == seed


def test_no_server_needs_to_be_installed():
    code = (
        "import sys\n"
        "for name in ('starlette', 'uvicorn', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "from gpt_cli.serve import Requests, answers, scheduler\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
