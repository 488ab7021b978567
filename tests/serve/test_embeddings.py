"""`POST /v1/embeddings` of a real `gpt-cli serve`: the vectors of `scoring.activations`."""

from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gpt_cli.gpt2.hooks import hook_shapes, select_hooks
from gpt_cli.scoring.activations import activations
from gpt_cli.serve import protocol
from gpt_cli.serve.refusals import RequestError
from gpt_cli.texts.text import Text
from support.answers import computed, texts_of, told
from support.processes import posix
from support.server_process import serving

pytestmark = posix

EMBEDDINGS = "/v1/embeddings"
FINAL = "ln_final.hook_normalized"
STORY = "Once upon a time, there was a little girl named Emma. She loved the moon. "
TEXTS = ["Once upon a time", STORY * 10, "a", STORY * 10 + "The end", "L'été, 中 and 😀"]


@pytest.fixture(scope="module")
def server():
    with serving("--max-queue", 1000) as server:
        yield server


def vectors(server, **fields):
    answer = server.ask(EMBEDDINGS, fields)
    assert answer.status == 200, answer.body
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    assert {entry["object"] for entry in data} == {"embedding"}
    if fields.get("encoding_format") == "base64":
        return [np.frombuffer(b64decode(entry["embedding"]), "<f4") for entry in data]
    return [np.array(entry["embedding"]) for entry in data]


def expected_vectors(engine, texts, hook=FINAL, pool="mean"):
    def spans(text):
        end = len(text.ids)
        return [(0 if pool == "mean" else end - 1, end)]

    rows = activations(engine.model, [Text(engine.encode(text)) for text in texts], [hook], spans)
    return [row[hook][0].ravel() for row in rows]


def assert_same(engine, actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        if engine.model.ops.batch_invariant:
            assert np.array_equal(one, other)
        else:
            assert np.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
@pytest.mark.parametrize("pool", ["mean", "last"])
def test_vectors_are_those_of_activations(pool, encoding_format, server, tiny):
    fields = {"pool": pool, "encoding_format": encoding_format}
    for _ in range(2):  # then from the prefix cache
        actual = vectors(server, input=TEXTS, **fields)
        assert_same(tiny, actual, expected_vectors(tiny, TEXTS, pool=pool))


def test_each_hook_point_that_has_tokens_gives_vectors(server, tiny):
    for hook in select_hooks(tiny.model.config, ["hook_*", "blocks.2.*", "ln_final.*"]):
        if hook_shapes(tiny.model.config)[hook][0] == "T":
            actual = vectors(server, input=TEXTS, hook=hook)
            assert_same(tiny, actual, expected_vectors(tiny, TEXTS, hook))
        else:
            error = server.ask(EMBEDDINGS, {"input": "a", "hook": hook}).error(400)
            assert error["param"] == "hook"


def test_an_answer_has_the_shape_of_openais(server, tiny):
    before = server.wait_until_idle()
    answer = server.ask(EMBEDDINGS, {"input": TEXTS, "model": "tiny", "user": "me"}).json()
    tokens = sum(len(tiny.encode(text)) for text in TEXTS)
    assert answer.pop("usage") == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert len(answer.pop("data")) == len(TEXTS)
    assert answer == {"object": "list", "model": "tiny"}
    after = server.wait_until_idle()
    counted = "gpt_cli_prompt_tokens_total"
    assert after[counted] - before[counted] == tokens
    name = "gpt_cli_requests_total{path=/v1/embeddings,status=200}"
    assert after[name] - before.get(name, 0) == 1
    assert after["gpt_cli_first_token_seconds_count"] == before["gpt_cli_first_token_seconds_count"]


def test_ids_are_a_text_like_their_text(server, tiny):
    ids = [tiny.encode(text) for text in TEXTS]
    expected = vectors(server, input=TEXTS)
    assert_same(tiny, vectors(server, input=ids), expected)
    assert_same(tiny, vectors(server, input=ids[0]), expected[:1])
    assert_same(tiny, vectors(server, input=TEXTS[0]), expected[:1])


def test_vectors_and_texts_are_the_same_in_company(server, tiny):
    body = {"prompt": STORY, "seed": 3, "max_tokens": 60}
    completed = texts_of(computed(tiny, **body))
    hooks = [FINAL, "blocks.1.hook_resid_post"]
    expected = {hook: expected_vectors(tiny, TEXTS, hook) for hook in hooks}

    def ask(number):
        if number % 3 == 2:
            assert told(server.complete(**body)["choices"]) == completed
        else:
            hook = hooks[number % 3]
            assert_same(tiny, vectors(server, input=TEXTS, hook=hook), expected[hook])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))


BAD = [
    *(("input", value) for value in (None, "", [], ["a", ""], [[1], []], 3, {}, ["a", 3], [[1.5]])),
    *(("input", value) for value in ([5000], "a " * 600, [5] * 513, ["a"] * 2049, "\ud800")),
    *(("dimensions", value) for value in (1, 192)),
    *(
        ("hook", value)
        for value in ("", "hook_*", "hook_resid_post", "blocks.9.hook_resid_post", 3)
    ),
    *(("pool", value) for value in ("word", "none", 1)),
    *(("encoding_format", value) for value in ("int8", 3)),
    ("user", 3),
    ("prompt", "a"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda value: repr(value)[:30])
def test_a_bad_value_is_refused_with_its_field(field, value, server):
    assert server.ask(EMBEDDINGS, {"input": "a", field: value}).error(400)["param"] == field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"hook": "blocks.0.hook_resid_pots"},
            "hook 'blocks.0.hook_resid_pots' is not a hook point "
            "(did you mean blocks.0.hook_resid_post?)",
        ),
        ({"hook": "hook_*"}, "hook 'hook_*' must name one hook point, without * and ?"),
        (
            {"hook": "blocks.0.attn.hook_pattern"},
            "hook blocks.0.attn.hook_pattern has no vector for each token",
        ),
        ({"input": None}, "input is missing: give a text, or a list of texts"),
        ({"input": []}, "input is an empty list: give a text, or a list of texts"),
        ({"input": ""}, "input: the text is empty: it has no tokens"),
        ({"input": ["a", ""]}, "input[1]: the text is empty: it has no tokens"),
        ({"input": [[5], [5] * 513]}, "input[1]: it has 513 tokens; shorten it to at most 512"),
        (
            {"dimensions": 64},
            "'dimensions': this server does not have this field: a vector has all numbers of its "
            "hook point, none of which can be left out",
        ),
    ],
)
def test_a_refusal_says_what_to_do(fields, message, tiny):
    with pytest.raises(RequestError) as error:
        protocol.read_embeddings(tiny, {"input": "a"} | fields)
    assert str(error.value) == message


def test_another_model_is_refused(server):
    assert server.ask(EMBEDDINGS, {"input": "a", "model": "gpt-4"}).error(404)["param"] == "model"


def test_the_numbers_of_an_answer_are_bounded(tiny, monkeypatch):
    monkeypatch.setattr(protocol, "MOST_ENTRIES", 192 * 3 // 4)
    request = protocol.read_embeddings(tiny, {"input": ["a"] * 3})
    assert request.entries == 192 * 3 // 4
    with pytest.raises(RequestError, match="input: up to 3 texts fit an answer"):
        protocol.read_embeddings(tiny, {"input": ["a"] * 4})


def test_a_start_token_of_the_tokenizer_is_no_part_of_a_mean(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny.loaded), "start", [2047])
    (text,) = protocol.read_embeddings(tiny, {"input": "Once"}).texts
    assert (text.ids[0], text.first) == (2047, 1)
    (text,) = protocol.read_embeddings(tiny, {"input": [5]}).texts
    assert (text.ids, text.first) == ([5], 0)
    with pytest.raises(RequestError, match="the text is empty"):
        protocol.read_embeddings(tiny, {"input": ""})
