"""Clients of others with a real `gpt-cli serve`. `make test-serve` installs them.

Each gives what the engine gives: the server's answers are exact, and so is what clients read.
"""

import base64
import json
import math
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from gpt_cli.scoring.activations import activations
from gpt_cli.texts.text import Text
from support.eval_tasks import write_tasks
from support.processes import posix
from support.server_process import serving, write_slow_model

pytestmark = [posix, pytest.mark.filterwarnings("ignore")]  # warnings of clients

PROMPT = "Once upon a time"
OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}  # the defaults of a request


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def socket_server(tmp_path_factory):
    with serving("--unix-socket", tmp_path_factory.mktemp("socket") / "gpt-cli") as server:
        yield server


def computed(engine, prompt=PROMPT, **options):
    return engine.generate([prompt], **OPENAI | {"max_tokens": 16} | options)[0]


# --- openai --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openai():
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai, server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openai_completes(client, tiny):
    found = client.completions.create(model="tiny", prompt=PROMPT, seed=1, max_tokens=40)
    expected = computed(tiny, seed=1, max_tokens=40)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 40
    assert found.usage.prompt_tokens == len(tiny.encode(PROMPT))


def test_openai_streams(client, tiny):
    options = {"include_usage": True}
    with client.completions.create(
        model="tiny", prompt=PROMPT, seed=1, max_tokens=40, stream=True, stream_options=options
    ) as stream:
        *chunks, last = stream
    assert len(chunks) > 1
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == computed(tiny, seed=1, max_tokens=40).text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.completion_tokens) == ([], 40)


def test_openai_gets_log_probabilities(client, tiny):
    found = client.completions.create(model="tiny", prompt=PROMPT, seed=1, logprobs=3)
    expected = computed(tiny, seed=1, top_logprobs=3)
    logprobs = found.choices[0].logprobs
    assert logprobs.tokens == [tiny.decode([id]) for id in expected.ids]
    assert logprobs.token_logprobs == pytest.approx(expected.logprobs, rel=1e-12)
    assert [len(top) >= 3 for top in logprobs.top_logprobs] == [True] * 16
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]


def test_openai_gets_several_choices(client, tiny):
    found = client.completions.create(model="tiny", prompt=[PROMPT, "The fox"], n=2, seed=5)
    expected = tiny.generate([PROMPT] * 2 + ["The fox"] * 2, **OPENAI, max_tokens=16, seed=5)
    assert [choice.text for choice in found.choices] == [each.text for each in expected]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]


def test_openai_scores_a_prompt(client, tiny):
    found = client.completions.create(
        model="tiny", prompt=PROMPT, echo=True, max_tokens=0, logprobs=1
    )
    score = tiny.score(PROMPT)
    logprobs = found.choices[0].logprobs
    assert found.choices[0].text == PROMPT
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(score.token_logprobs[1:], rel=1e-12)


def test_openai_takes_our_own_fields(client, tiny):
    own = {"top_k": 5, "min_p": 0.02, "repeat_penalty": 1.2, "ignore_eos": True}
    found = client.completions.create(model="tiny", prompt=PROMPT, seed=2, extra_body=own)
    assert found.choices[0].text == computed(tiny, seed=2, **own).text


def test_openai_gets_the_likeliest_texts(client, tiny):
    search = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    found = client.completions.create(
        model="tiny", prompt=PROMPT, n=2, best_of=4, max_tokens=12, extra_body=search
    )
    (best,) = tiny.generate(
        [PROMPT], beams=4, length_penalty=0.5, early_stopping="never", max_tokens=12
    )
    expected = [(done.text, pytest.approx(done.score)) for done in (best, best.others[0])]
    assert [(choice.text, choice.score) for choice in found.choices] == expected


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CONSTRAINED = {
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ),
    "structured_outputs": ({"regex": " [a-z]+ [0-9]{4}"}, {"regex": " [a-z]+ [0-9]{4}"}),
    "guided_choice": ([" cat", " dog"], {"choices": [" cat", " dog"]}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("field", CONSTRAINED)
def test_openai_gets_constrained_texts(field, stream, client, tiny):
    pytest.importorskip("llguidance")
    value, options = CONSTRAINED[field]
    fields = {"prompt": PROMPT, "seed": 2, "max_tokens": 60}
    expected = computed(tiny, **fields, **options)
    found = client.completions.create(
        model="tiny", **fields, stream=stream, extra_body={field: value}
    )
    pieces = [chunk.choices[0] for chunk in found] if stream else found.choices
    assert "".join(piece.text for piece in pieces) == expected.text
    ended = expected.finish_reason in ("complete", "eos")
    assert pieces[-1].finish_reason == ("stop" if ended else "length")


def test_a_bad_constraint_is_an_exception_of_openai(client, openai):
    pytest.importorskip("llguidance")
    for value, param in (({"regex": "("}, "structured_outputs.regex"), ({}, "structured_outputs")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(
                model="tiny", prompt=PROMPT, extra_body={"structured_outputs": value}
            )
        assert caught.value.param == param


@pytest.mark.parametrize("format", ["base64", "float", None])
def test_openai_gets_embeddings(format, client, tiny):
    """Without a format, it asks for base64, and decodes it."""
    texts, hook = [PROMPT, "The fox"], "blocks.1.hook_resid_post"
    options = {"encoding_format": format} if format else {}
    own = {"hook": hook, "pool": "last"}
    given = {"model": "tiny", "input": texts, **options}
    for body, name, first in (({}, "ln_final.hook_normalized", 0), (own, hook, -1)):
        found = client.embeddings.create(**given, extra_body=body)
        rows = activations(
            tiny.model,
            [Text(tiny.encode(text)) for text in texts],
            [name],
            lambda text, first=first: [(first % len(text.ids), len(text.ids))],
        )
        for entry, row in zip(found.data, rows, strict=True):
            vector = entry.embedding
            if format == "base64":  # asked for, it is not decoded
                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            assert np.array_equal(vector, row[name][0])
        assert found.usage.prompt_tokens == found.usage.total_tokens > 0


def test_openai_says_that_dimensions_are_refused(client, openai):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input=PROMPT, dimensions=64)
    assert caught.value.param == "dimensions"


def test_openai_lists_the_models(client):
    (model,) = client.models.list()
    assert model.id == client.models.retrieve("tiny").id == "tiny"


def test_errors_are_the_exceptions_of_openai(client, openai):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="Once " * 1000)
    assert caught.value.param == "prompt"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


def test_a_wrong_key_is_an_exception_of_openai(openai):
    with serving("--api-key", "secret") as server:
        for key in ("secret", "wrong"):
            client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0)
            if key == "secret":
                assert client.completions.create(model="tiny", prompt=PROMPT).choices
            else:
                with pytest.raises(openai.AuthenticationError) as caught:
                    client.models.list()
                assert caught.value.code == "invalid_api_key"


def test_openai_comes_again_after_a_full_queue(openai, tmp_path):
    long = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    model = write_slow_model(tmp_path / "model")
    with serving("--batch-size", 1, "--max-queue", 1, model=model) as server:
        given = {"base_url": f"{server.address}/v1", "api_key": "any"}
        many = [server.begin(**long) for _ in range(2)]
        server.wait_for(lambda found: found["gpt_cli_texts_waiting"] == 1)
        with openai.OpenAI(**given, max_retries=0) as client:
            (model,) = client.models.list()
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model=model.id, prompt=PROMPT)
        assert caught.value.code == "server_busy"
        pause = int(caught.value.response.headers["Retry-After"])
        threading.Timer(pause / 2, lambda: [one.close() for one in many]).start()
        with openai.OpenAI(**given, max_retries=2) as client:
            # Without Retry-After, it would come again after half a second, and then after one.
            found = client.completions.with_raw_response.create(model=model.id, prompt=PROMPT)
        assert found.retries_taken == 1
        assert found.parse().usage.completion_tokens


def test_a_stream_that_openai_closes_is_ended(client, server):
    before = server.wait_until_idle()["gpt_cli_generated_tokens_total"]
    fields = {"ignore_eos": True}
    with client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=500, n=8, stream=True, extra_body=fields
    ) as stream:
        next(iter(stream))
    after = server.wait_until_idle()["gpt_cli_generated_tokens_total"]
    assert after - before < 8 * 500


# --- llm -----------------------------------------------------------------------------------------


@pytest.fixture
def llm(server, tmp_path):
    """Return a function that runs `llm`, which knows the server."""
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"""\
- model_id: gpt-cli
  model_name: tiny
  api_base: {server.address}/v1
  completion: true
""",
        encoding="ascii",
    )

    def run(*arguments):
        command = [sys.executable, "-m", "llm", *arguments]
        env = os.environ | {"LLM_USER_PATH": str(tmp_path)}
        finished = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout.decode()

    return run


@pytest.mark.parametrize("flags", [(), ("--no-stream",)], ids=["stream", "no stream"])
def test_llm_continues_a_prompt(flags, llm, tiny):
    options = ("-o", "seed", "1", "-o", "max_tokens", "40")
    found = llm("-m", "gpt-cli", *options, *flags, PROMPT)
    assert found == computed(tiny, seed=1, max_tokens=40).text + "\n"


def test_llm_has_all_options_that_it_knows(llm, tiny):
    known = {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    more = {"stop": ".", "logit_bias": {"262": -100}, "seed": 3, "max_tokens": 60}
    flags = []
    for name, value in (known | more).items():
        flags += ["-o", name, json.dumps(value) if isinstance(value, dict) else str(value)]
    expected = computed(tiny, **known, **more | {"stop": ["."], "logit_bias": [(262, -100.0)]})
    assert llm("-m", "gpt-cli", *flags, PROMPT) == expected.text + "\n"


def test_a_schema_of_llm_is_none_for_models_that_complete(llm):
    """It would have to be `response_format`, which openai's client takes for chats only."""
    with pytest.raises(AssertionError, match="does not support schemas"):
        llm("-m", "gpt-cli", "--schema", "name, age int", PROMPT)


def test_llm_keeps_the_log_probabilities(llm, tiny):
    found = llm("-m", "gpt-cli", "-o", "logprobs", "3", "-o", "seed", "1", PROMPT)
    (logged,) = json.loads(llm("logs", "--json", "-n", "1"))
    expected = computed(tiny, seed=1)
    assert found == expected.text + "\n"
    assert (logged["prompt"], logged["response"]) == (PROMPT, expected.text)


# --- curl ----------------------------------------------------------------------------------------


@pytest.fixture
def curl():
    """Return a function that runs `curl`."""
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")

    def run(*arguments):
        command = ["curl", "--silent", "--show-error", "--fail-with-body", *arguments]
        finished = subprocess.run(command, capture_output=True, timeout=60)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout.decode()

    return run


BODY = json.dumps({"prompt": PROMPT, "seed": 1, "max_tokens": 30})


def test_curl_posts_json(curl, server, tiny):
    for flags in (("--json", BODY), ("--data", BODY)):  # the second as a form
        found = json.loads(curl(f"{server.address}/v1/completions", *flags))
        assert found["choices"][0]["text"] == computed(tiny, seed=1, max_tokens=30).text


def test_curl_streams(curl, server, tiny):
    body = json.dumps(json.loads(BODY) | {"stream": True})
    found = curl("--no-buffer", f"{server.address}/v1/completions", "--json", body)
    lines = [line.removeprefix("data: ") for line in found.splitlines() if line]
    assert lines[-1] == "[DONE]"
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    assert text == computed(tiny, seed=1, max_tokens=30).text


def test_curl_speaks_through_a_socket(curl, socket_server, tiny):
    path = socket_server.address.removeprefix("unix:")
    flags = ("--unix-socket", path, "http://localhost/v1/completions", "--json", BODY)
    found = json.loads(curl(*flags))
    assert found["choices"][0]["text"] == computed(tiny, seed=1, max_tokens=30).text


def test_curl_may_compress_and_wait(curl, server):
    """`Expect: 100-continue`, which it sends before a large body, and what it can decode."""
    body = json.dumps({"prompt": "Once", "seed": 1, "user": "x" * 2_000_000})
    arguments = ("--compressed", "--header", "Expect: 100-continue", "--data-binary", "@-")
    finished = subprocess.run(
        ["curl", "--silent", *arguments, f"{server.address}/v1/completions"],
        input=body.encode(),
        capture_output=True,
        timeout=60,
    )
    assert json.loads(finished.stdout)["choices"]


# --- lm-evaluation-harness -----------------------------------------------------------------------

SCORES = ["choice", "target", "rolling"]


def evaluate(model, arguments, names, folder):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, arguments, names, bootstrap_iters=0, task_manager=manager)
    answers = {
        name: [
            sample["resps"]
            for sample in sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        ]
        for name in names
    }
    return found["results"], answers


@pytest.mark.parametrize("batch", [{}, {"batch_size": 4}, {"num_concurrent": 8}])
def test_lm_eval_finds_what_its_own_model_finds(batch, server, tmp_path, monkeypatch):
    """Log-likelihoods to the bit, texts, and so all figures.

    `local-completions` keeps a place of the context free for a token that it does not need, and
    another one for the start token of windows. The model `gpt-cli` does the same here.
    """
    pytest.importorskip("lm_eval")
    from gpt_cli.lm_eval import EngineLM

    folder = tmp_path / "tasks"
    names = write_tasks(folder, 512)
    given = {
        "model": "tiny",
        "base_url": f"{server.address}/v1/completions",
        "max_length": 512,
    } | batch
    results, answers = evaluate("local-completions", given, names, folder)
    for max_length, some in ((510, SCORES), (511, ["continue"])):
        monkeypatch.setattr(EngineLM, "max_length", max_length)
        expected, own = evaluate("gpt-cli", {"model": "tiny"}, some, folder)
        for name in some:
            assert flat(answers[name]) == [about(value) for value in flat(own[name])]
            assert results[name] == {
                metric: about(value) for metric, value in expected[name].items()
            }
    assert all(math.isfinite(value) for value in flat(answers["rolling"]))


def flat(nested):
    """Return the values in nested lists and tuples."""
    if isinstance(nested, list | tuple):
        return [value for each in nested for value in flat(each)]
    return [nested]


def about(value):
    """Return what equals a value, also if the same numbers were added in another order."""
    return pytest.approx(value, rel=1e-12, abs=0) if isinstance(value, float) else value
