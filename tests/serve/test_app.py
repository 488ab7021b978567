"""Answers of a real `gpt-cli serve` process: fields, equal bits, and other clients beside them."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt_cli.serve.protocol import read_completions
from support.answers import choices_of, computed, texts_of, told
from support.processes import posix
from support.server_process import COMPLETIONS, serving

pytestmark = posix

STORY = "Once upon a time, there was a little girl named Emma. She loved the moon. "
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def server():
    with serving("--max-queue", 1000) as server:
        yield server


def same(engine, actual, expected):
    """Return whether log-probabilities are equal: to the last bit, if the engine's are."""
    if engine.model.ops.batch_invariant:
        return actual == expected
    return actual == pytest.approx(expected, rel=1e-4, abs=1e-5)


def name_of(engine, id):
    """Return the name of a token in an answer."""
    data = engine.tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# --- fields --------------------------------------------------------------------------------------

# fmt: off
BODIES = {
    "text": {"prompt": "Once upon a time", "seed": 1},
    "one text in a list": {"prompt": ["Once upon a time"], "seed": 1},
    "texts": {"prompt": ["Once", "The fox", "The old woman was"], "seed": 2, "max_tokens": 20},
    "choices": {"prompt": "Once", "n": 3, "seed": 3},
    "texts and choices": {"prompt": ["Once", "The fox"], "n": 2, "seed": 2**64 - 1},
    "no text": {"prompt": "", "seed": 5, "max_tokens": 30},
    "text in any script": {"prompt": "L'été, 中 and 😀\0", "seed": 5},
    "the name of a token": {"prompt": f"The end.{END}Once", "seed": 5},
    "greedy": {"prompt": STORY, "temperature": 0, "max_tokens": 40},
    "hot": {"prompt": "Once", "temperature": 1.8, "seed": 6, "max_tokens": 60},
    "top_p": {"prompt": "Once", "top_p": 0.7, "seed": 7, "max_tokens": 60},
    "top_k": {"prompt": "Once", "top_k": 3, "seed": 8, "max_tokens": 60},
    "min_p": {"prompt": "Once", "min_p": 0.2, "seed": 9, "max_tokens": 60},
    "typical_p": {"prompt": "Once", "typical_p": 0.4, "seed": 9, "max_tokens": 60},
    "no_repeat_ngram": {"prompt": STORY, "no_repeat_ngram": 2, "temperature": 0, "max_tokens": 40},
    "repeat_penalty": {"prompt": STORY, "repeat_penalty": 1.3, "temperature": 0},
    "presence_penalty": {"prompt": "Once", "presence_penalty": 1.5, "seed": 10, "max_tokens": 60},
    "frequency_penalty": {"prompt": "Once", "frequency_penalty": -0.5, "temperature": 0},
    "logit_bias": {"prompt": "Once", "logit_bias": {"11": -100, "262": 2.5}, "seed": 11},
    "a stop string": {"prompt": "Once upon a time", "stop": " was", "seed": 12, "max_tokens": 100},
    "stop strings": {"prompt": ["Once", "The"], "stop": ["\n", ". S", "the"], "seed": 13},
    "a full context": {"prompt": STORY * 20, "seed": 14, "max_tokens": 1000, "ignore_eos": True},
    "the end": {"prompt": STORY, "seed": 15, "max_tokens": 400, "n": 4},
    "ignore_eos": {"prompt": STORY, "seed": 15, "max_tokens": 400, "ignore_eos": True},
    "log-probabilities": {"prompt": "Once 😀", "seed": 16, "logprobs": 5, "temperature": 2.0},
    "log-probabilities of texts": {"prompt": ["a", STORY * 3], "seed": 17, "logprobs": 0, "n": 2},
    "all options": {"prompt": ["Once", "The fox"], "n": 2, "seed": 18, "max_tokens": 50,
                    "temperature": 1.2, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "logprobs": 3,
                    "repeat_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2,
                    "logit_bias": {"5": 1.5}, "stop": ["zebra"], "ignore_eos": True},
}
# fmt: on


@pytest.fixture(scope="module")
def completions(tiny):
    """Return what the engine computes for each of `BODIES`."""
    return {name: computed(tiny, **body) for name, body in BODIES.items()}


@pytest.mark.parametrize("name", BODIES)
def test_texts_are_those_of_the_engine_streamed_or_not(name, server, tiny, completions):
    body, expected = {"seed": 1} | BODIES[name], completions[name]
    answer = server.complete(**body)
    assert told(answer["choices"]) == texts_of(expected)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    prompt_tokens = sum(len(tiny.encode(prompt)) or 1 for prompt in prompts)
    completion_tokens = sum(len(completion.ids) for completion in expected)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    for choice, completion in zip(answer["choices"], expected, strict=True):
        assert (choice["logprobs"] is None) == ("logprobs" not in body)
        if "logprobs" in body:
            check_logprobs(tiny, choice["logprobs"], completion, body["logprobs"])
    check_stream(server.ask(COMPLETIONS, body | {"stream": True}), answer)


def check_stream(streamed, whole):
    """Check that a stream says what the whole answer does."""
    assert streamed.status == 200
    assert streamed.headers["Content-Type"].startswith("text/event-stream")
    assert streamed.headers["X-Accel-Buffering"] == "no"  # nginx passes every event on at once
    chunks = streamed.events()
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    for chunk in chunks:
        assert chunk.keys() - {"usage"} == whole.keys() - {"usage"}
        assert len(chunk["choices"]) == 1
    assert choices_of(streamed) == whole["choices"]


def check_logprobs(engine, actual, completion, count):
    """Check the log-probabilities of the tokens of a completion."""
    assert actual["tokens"] == [name_of(engine, id) for id in completion.ids]
    assert same(engine, actual["token_logprobs"], completion.logprobs)
    for top, expected in zip(actual["top_logprobs"], completion.top_logprobs, strict=True):
        likeliest = dict(list((top or {}).items())[:count])
        assert [*likeliest] == [name_of(engine, id) for id, _ in expected]
        assert same(engine, [*likeliest.values()], [logprob for _, logprob in expected])


@pytest.mark.parametrize("include", [True, False])
def test_the_usage_of_a_stream_comes_if_asked_for(include, server):
    body = {"prompt": ["Once", "The fox"], "n": 2, "seed": 1}
    more = {"stream": True, "stream_options": {"include_usage": include}}
    chunks = server.ask(COMPLETIONS, body | more).events()
    if include:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == server.complete(**body)["usage"]
        chunks.pop()
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks)


def test_an_answer_has_the_shape_of_openais(server):
    answer = server.complete(prompt="Once", seed=7)
    assert answer.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason", "seed"}
    assert choice["seed"] == 7


def test_a_drawn_seed_gives_the_same_choices_again(server):
    first = server.complete(prompt="Once", n=2, max_tokens=30)["choices"]
    again = server.complete(prompt="Once", n=2, max_tokens=30, seed=first[0]["seed"])["choices"]
    assert again == first
    other = server.complete(prompt="Once", n=2, max_tokens=30)["choices"]
    assert told(other) != told(first)


@pytest.mark.parametrize("prompt", ["Once upon a time", f"The end.{END}Once", "中😀"])
def test_token_ids_are_a_prompt_like_their_text(prompt, server, tiny):
    ids = tiny.encode(prompt)
    expected = told(server.complete(prompt=prompt, seed=1)["choices"])
    assert told(server.complete(prompt=ids, seed=1)["choices"]) == expected
    assert told(server.complete(prompt=[ids], seed=1)["choices"]) == expected
    both = server.complete(prompt=[ids, tiny.encode("The fox")], seed=1)["choices"]
    assert told(both) == told(server.complete(prompt=[prompt, "The fox"], seed=1)["choices"])


@pytest.mark.parametrize(
    "body", [{}, *({"prompt": empty} for empty in (None, "", [], [""], [[]], [[2047]]))]
)
def test_no_prompt_is_the_start_token(body, server, tiny):
    answer = server.complete(**body, seed=3)
    assert told(answer["choices"]) == texts_of(computed(tiny, "", seed=3))
    assert answer["usage"]["prompt_tokens"] == 1


NEUTRAL = {
    "model": "tiny", "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": None,
    "logprobs": None, "max_tokens": 16, "n": 1, "presence_penalty": 0, "seed": 1, "stop": None,
    "stream": False, "stream_options": None, "suffix": None, "temperature": 1, "top_p": 1,
    "user": "me", "top_k": 0, "min_p": 0, "repeat_penalty": 1, "ignore_eos": False,
    "typical_p": 1, "no_repeat_ngram": 0, "use_beam_search": False, "length_penalty": 1,
    "early_stopping": False, "stop_token_ids": [], "repetition_penalty": 1,
    "include_stop_str_in_output": False,
}  # fmt: skip
# The other fields of vLLM's requests (CompletionRequest in version 0.26) and of llama.cpp's, each
# with its default there, as far as it is not null.
OF_OTHER_SERVERS = {
    "bad_words": [], "min_tokens": 0, "skip_special_tokens": True, "add_special_tokens": True,
    "spaces_between_special_tokens": True, "priority": 0, "return_token_ids": False,
    "return_tokens_as_token_ids": False, "return_token_offsets": False, "vllm_xargs": {},
    "watermarking": True, "routed_experts_prompt_start": 0, "return_mm_kwargs": True,
    "thinking_token_budget": -1, "repetition_penalty": 1.0, "length_penalty": 1.0,
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "n_indent": 0, "n_keep": 0, "n_cmpl": 1,
    "n_cache_reuse": 0, "typical_p": 1.0, "repeat_last_n": 64, "dry_multiplier": 0.0,
    "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"], "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "grammar": "", "logit_bias": [],
    "n_probs": 0, "min_keep": 0, "t_max_predict_ms": 0, "id_slot": -1, "cache_prompt": True,
    "return_tokens": False, "timings_per_token": False, "return_progress": False,
    "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "post_sampling_probs": False, "lora": [], "top_n_sigma": -1.0, "adaptive_target": -1.0,
    "adaptive_decay": 0.9, "response_fields": [], "seed": 1,
}  # fmt: skip


def test_the_defaults_of_other_servers_change_nothing(server):
    expected = server.complete(prompt="Once", seed=1)["choices"]
    assert server.complete(prompt="Once", **OF_OTHER_SERVERS)["choices"] == expected
    nulls = dict.fromkeys(OF_OTHER_SERVERS.keys() - {"seed"})
    assert server.complete(prompt="Once", seed=1, **nulls)["choices"] == expected


def test_a_bias_of_false_bans_a_token(tiny):
    for bias, expected in (
        ([[11, False], [" the", -1.5], [12, 0]], ((11, -100), (12, 0), (262, -1.5))),
        ({"11": False, " the": 2}, ((11, -100), (262, 2))),
    ):
        options = read_completions(tiny, {"logit_bias": bias}).options
        assert options.logit_bias == expected


def test_minus_1_is_no_limit_and_a_random_seed(server, tiny):
    ends = {"prompt": "Once", "temperature": 0, "logit_bias": {"2047": 8}}
    (expected,) = computed(tiny, **ends, max_tokens=512)
    assert expected.finish_reason == "eos"
    assert len(expected.ids) > 16
    for name in ("max_tokens", "n_predict"):
        assert told(server.complete(**ends, **{name: -1})["choices"]) == texts_of([expected])
    (full,) = server.complete(prompt=[5] * 500, max_tokens=-1, ignore_eos=True)["choices"]
    assert full["finish_reason"] == "length"
    seeds = {server.complete(prompt="Once", seed=-1)["choices"][0]["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_the_names_of_other_servers_are_those_of_this_one(server):
    for name, known, value in (
        ("repetition_penalty", "repeat_penalty", 1.3),
        ("n_predict", "max_tokens", 5),
    ):
        body = {"prompt": STORY, "seed": 1}
        expected = server.complete(**body, **{known: value})["choices"]
        assert server.complete(**body, **{name: value})["choices"] == expected
        assert server.complete(**body, **{name: value, known: value})["choices"] == expected
        both = body | {name: value, known: value + 1}
        assert server.ask(COMPLETIONS, both).error(400)["param"] == name
        error = server.ask(COMPLETIONS, body | {name: "x"}).error(400)
        assert error["param"] == name
        assert error["message"].startswith(f"{name} must be")


def test_an_answer_says_what_stopped_it(server, tiny):
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40}
    (whole,) = server.complete(**body)["choices"]
    assert whole["stop_reason"] is None
    stop = whole["text"][12:15]
    before = whole["text"].partition(stop)[0]
    for more, text in (({}, before), ({"include_stop_str_in_output": True}, before + stop)):
        stops = body | {"stop": ["\0", stop]} | more
        for answer in (server.ask(COMPLETIONS, stops | {"stream": s}) for s in (False, True)):
            (choice,) = choices_of(answer)
            assert (choice["text"], choice["stop_reason"]) == (text, stop)
            assert choice["finish_reason"] == "stop"


def test_a_token_may_stop_a_text(server, tiny):
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "logprobs": 0}
    (whole,) = computed(tiny, **body)
    id = whole.ids[5]
    before = tiny.decode(whole.ids[: whole.ids.index(id)])
    token = tiny.decode([id])
    for more, text in (({}, before), ({"include_stop_str_in_output": True}, before + token)):
        (choice,) = server.complete(**body, stop_token_ids=[0, id], **more)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert choice["stop_reason"] == id
        assert choice["logprobs"]["tokens"][-1] == token
    beams = {"use_beam_search": True, "best_of": 2, "n": 2}
    for choice in server.complete(**body, **beams, stop_token_ids=[id])["choices"]:
        assert (choice["stop_reason"] == id) == (choice["finish_reason"] == "stop")


def test_a_bad_word_is_not_written(server, tiny):
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40}
    (whole,) = server.complete(**body)["choices"]
    words = [whole["text"].split()[2], "\0"]
    (expected,) = computed(tiny, **body, bad_words=words)
    (choice,) = server.complete(**body, bad_words=words)["choices"]
    assert choice["text"] == expected.text != whole["text"]
    assert words[0] not in choice["text"]


def test_a_text_may_end_only_after_some_tokens(server):
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40}
    (whole,) = server.complete(**body)["choices"]
    stop = whole["text"].split()[0]
    for tokens in (20, 40):
        answer = server.complete(**body, stop=[stop, " "], min_tokens=tokens)
        assert answer["usage"]["completion_tokens"] > 20
        assert whole["text"].startswith(answer["choices"][0]["text"])


def test_a_field_at_its_neutral_value_changes_nothing(server):
    expected = server.complete(prompt="Once", seed=1)["choices"]
    assert server.complete(prompt="Once", **NEUTRAL)["choices"] == expected
    body = {"prompt": "Once", **NEUTRAL, "stream": True}
    assert choices_of(server.ask(COMPLETIONS, body)) == expected
    nulls = dict.fromkeys(NEUTRAL.keys() - {"seed"})
    assert server.complete(prompt="Once", seed=1, **nulls)["choices"] == expected
    for empty in ({"logit_bias": {}}, {"stop": []}, {"suffix": ""}, {"top_k": -1}):
        assert server.complete(prompt="Once", seed=1, **empty)["choices"] == expected


BAD = [
    *(("prompt", value) for value in (3, True, {"a": 1}, ["a", 3], [1, "a"], [1.5], [None])),
    *(("prompt", value) for value in ([-1], [2048], [True], [[[1]]], "a" * 10_000, "\ud800")),
    *(("max_tokens", value) for value in (-2, 1.5, "3", True, [])),
    *(("temperature", value) for value in (-1, "1", math.inf, math.nan, True, 10**400)),
    *(("top_p", value) for value in (0, 1.1, -1, "x")),
    *(("top_k", value) for value in (-2, 1.5, "x")),
    *(("min_p", value) for value in (-0.1, 1.1, [])),
    *(("repeat_penalty", value) for value in (0, -1, {})),
    *(("typical_p", value) for value in (0, 1.1, "x")),
    *(("no_repeat_ngram", value) for value in (-1, 1.5, "2")),
    ("no_repeat_ngram_size", 2),
    *(("use_beam_search", value) for value in (1, "yes", [])),
    *(("length_penalty", value) for value in (2, 11, "x")),
    *(("early_stopping", value) for value in (True, "always", 1)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, "x")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, "x")),
    *(("n", value) for value in (0, -1, 1.5, "2", 10**9)),
    *(("best_of", value) for value in (0, -1, "2", 10**9, 1.5)),
    *(("logprobs", value) for value in (-1, 101, 1.5, "5")),
    *(("echo", value) for value in (1, "yes", [])),
    *(("stream", value) for value in (1, "yes", [])),
    *(("stream_options", value) for value in (1, [], {"include_usage": 3}, {"nope": 1})),
    *(("seed", value) for value in (-2, 2**64, 1.5, "7")),
    *(("stop", value) for value in (3, [3], "", [""], {}, {"a": 1})),
    *(
        ("logit_bias", value)
        for value in ([1], {"x y": 1}, {"": 1}, {"1": 101}, {"-1": 1}, {"1": "5"}, [[1, True]])
    ),
    ("logit_bias", {"2048": 1}),
    *(("user", value) for value in (3, [])),
    *(("ignore_eos", value) for value in (1, "no")),
    *(("stop_token_ids", value) for value in (3, "a", ["a"], [2048], [-1], {"1": 1})),
    *(("include_stop_str_in_output", value) for value in (1, "yes")),
    *(("bad_words", value) for value in (3, [3], "", [""], ["a"] * 65, ["a" * 4097])),
    *(("min_tokens", value) for value in (-1, 1.5, "3", [])),
    *(("mirostat", 1), ("n_predict", -2)),
    ("suffix", "the end"),
    ("temprature", 0.5),
    ("\ud800", 1),
]


@pytest.mark.parametrize(
    ("field", "value"), BAD, ids=lambda value: repr(value)[:30].replace("\\", "/")
)
def test_a_bad_value_is_refused_with_its_field(field, value, server):
    assert server.ask(COMPLETIONS, {"prompt": "Once", field: value}).error(400)["param"] == field


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temprature": 0.5}, "'temprature': there is no such field (did you mean temperature?)"),
        (
            {"repeat_penalty": 1.3, "repeat_last_n": 64},
            "'repeat_last_n': this server does not have this field: a penalty applies to the whole",
        ),
        ({"user": 5}, "user must be a string, not 5"),
        ({"suffix": "the end"}, "'suffix': this server does not have this field: leave it out"),
        ({"stream": True, "best_of": 2}, "best_of: the best of several texts cannot be streamed"),
        ({"use_beam_search": True}, "best_of is missing: it is the number of beams"),
        ({"prompt": [5] * 512}, "prompt: it has 512 tokens; shorten it to at most 511"),
        ({"max_tokens": True}, "max_tokens must be a whole number, not true"),
        ({"temperature": True}, "temperature must be a number, not true"),
        ({"prompt": [5] * 513, "max_tokens": 0}, "prompt: it has 513 tokens; shorten it to at"),
    ],
)
def test_a_refusal_says_what_to_do(body, message, server):
    actual = server.ask(COMPLETIONS, {"prompt": "Once"} | body).error(400)["message"]
    assert actual.startswith(message)


def test_another_model_is_not_found(server):
    error = server.ask(COMPLETIONS, {"prompt": "Once", "model": "gpt-4"}).error(404)
    assert error["param"] == "model"
    assert "tiny" in error["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 300, "n": 17, "logprobs": 100}, "logprobs"),
        ({"prompt": [[5] * 500] * 2000, "max_tokens": 0, "echo": True}, "prompt"),
        ({"prompt": ["Once"] * 2000, "max_tokens": 300}, "max_tokens"),
    ],
)
def test_an_answer_that_is_too_large_is_refused_with_its_field(body, field, server):
    error = server.ask(COMPLETIONS, {"prompt": "Once"} | body).error(400)
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: an answer may have 500000 tokens")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"3", b"null", b'"x"', b"\xff", b"{'a': 1}", b'{"n": 1, "n": }']
)
def test_a_body_that_is_no_json_object_is_refused(body, server):
    assert "JSON" in server.ask(COMPLETIONS, body).error(400)["message"]


@pytest.mark.parametrize(("texts", "more"), [(2049, {}), (1025, {"n": 2}), (17, {"best_of": 128})])
def test_too_many_texts_are_refused_before_they_are_looked_at(texts, more, server):
    error = server.ask(COMPLETIONS, {"prompt": [[-1]] * texts} | more).error(400)
    assert error["param"] == "prompt"
    assert "2048 texts" in error["message"]


@pytest.mark.parametrize("best_of", [1, 2, 3, 8])
def test_the_best_of_several_choices(best_of, server, tiny):
    """Of the highest mean log-probability of a token."""
    body = {"prompt": ["Once", "The fox"], "seed": 3, "max_tokens": 20}
    n = min(best_of, 2)
    every = computed(tiny, **body, n=best_of)
    expected = []
    for index in range(2):
        group = every[index * best_of : (index + 1) * best_of]
        if best_of > n:
            group.sort(key=lambda completion: -sum(completion.logprobs) / len(completion.logprobs))
        expected += texts_of(group[:n])
    answer = server.complete(**body, n=n, best_of=best_of)
    assert told(answer["choices"]) == expected
    assert answer["usage"]["completion_tokens"] == sum(len(completion.ids) for completion in every)


@pytest.mark.parametrize(
    "more", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 0}]
)
def test_a_best_that_cannot_be_is_refused(more, server):
    assert server.ask(COMPLETIONS, {"prompt": "Once"} | more).error(400)["param"] == "best_of"


# --- log-probabilities ---------------------------------------------------------------------------

PROMPTS = ["Once upon a time", STORY * 3, "L'été, 中 and 😀", STORY * 24, "a", " "]


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
def test_an_echo_is_the_prompt_with_its_score(max_tokens, server, tiny):
    prompts = PROMPTS if max_tokens else [*PROMPTS, tiny.decode(tiny.encode(STORY * 40)[:512])]
    fields = {"max_tokens": max_tokens, "seed": 4}
    body = {"prompt": prompts, "echo": True, "logprobs": 2} | fields
    answer = server.complete(**body)
    completions = computed(tiny, prompts, logprobs=2, **fields) if max_tokens else []
    scores = tiny.score_many(prompts)
    for index, (choice, prompt) in enumerate(zip(answer["choices"], prompts, strict=True)):
        completion = completions[index] if max_tokens else None
        assert choice["text"] == prompt + (completion.text if completion else "")
        actual, count = choice["logprobs"], len(scores[index].ids)
        assert actual["tokens"][:count] == [name_of(tiny, id) for id in scores[index].ids]
        assert same(tiny, actual["token_logprobs"][1:count], scores[index].token_logprobs[1:])
        assert (actual["token_logprobs"][0], actual["top_logprobs"][0]) == (None, None)
        for logprob, top in zip(
            actual["token_logprobs"][1:], actual["top_logprobs"][1:], strict=True
        ):
            assert 2 <= len(top) <= 3
            assert logprob <= max(top.values())
        if completion:
            check_logprobs(
                tiny, {name: list[count:] for name, list in actual.items()}, completion, 2
            )
        else:
            assert len(actual["tokens"]) == count
            assert choice["finish_reason"] == "length"
        check_offsets(choice["text"], actual)
    assert answer["usage"]["prompt_tokens"] == sum(len(score.ids) for score in scores)
    assert choices_of(server.ask(COMPLETIONS, body | {"stream": True})) == answer["choices"]


def check_offsets(text, actual):
    """Check that every token is in the text at its offset, where it is whole characters."""
    offsets = actual["text_offset"]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(actual["tokens"])
    for token, offset in zip(actual["tokens"], offsets, strict=True):
        if not token.startswith("bytes:") and token != END:
            assert text[offset : offset + len(token)] == token


def test_without_an_echo_offsets_begin_with_the_text(server):
    (choice,) = server.complete(prompt=STORY, seed=4, logprobs=1, max_tokens=12)["choices"]
    check_offsets(choice["text"], choice["logprobs"])


def test_the_likeliest_tokens_of_an_echo_are_those_of_the_engine(server, tiny):
    ids = tiny.encode(STORY)
    body = {"prompt": ids, "echo": True, "logprobs": 5, "max_tokens": 0}
    (choice,) = server.complete(**body)["choices"]
    for index, top in enumerate(choice["logprobs"]["top_logprobs"][1:], 1):
        expected = tiny.next_tokens(tiny.decode(ids[:index]), 5)
        if tiny.encode(tiny.decode(ids[:index])) == ids[:index]:
            assert [*top][:5] == [name_of(tiny, id) for id, _ in expected]
            assert same(tiny, [*top.values()][:5], [logprob for _, logprob in expected])


def test_a_drawn_end_token_has_its_log_probability(server, tiny):
    body = {"prompt": "Once", "logit_bias": {"2047": 100}, "seed": 1, "logprobs": 1}
    (choice,) = server.complete(**body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["tokens"] == [END]
    (expected,) = computed(tiny, **body)
    assert same(tiny, choice["logprobs"]["token_logprobs"], expected.logprobs)


@pytest.fixture(scope="module")
def server_of_bytes(case_folder):
    """A server of a model whose vocabulary is hardly more than the bytes."""
    with serving(model=case_folder("saved")) as server:
        yield server


def test_parts_of_characters_do_not_collide(server_of_bytes, engine):
    """100 alternatives have 100 names, though many are a part of a character."""
    body = {"prompt": "Once", "logprobs": 100, "seed": 1, "temperature": 2.0}
    (choice,) = server_of_bytes.complete(**body)["choices"]
    (expected,) = computed(engine, **body)
    check_logprobs(engine, choice["logprobs"], expected, 100)
    for top in choice["logprobs"]["top_logprobs"]:
        assert len(top) in (100, 101)
        assert len([name for name in top if name.startswith("bytes:\\x")]) > 20
        assert not any("\ufffd" in name for name in top)


@pytest.mark.parametrize("seed", range(5))
def test_tokens_join_to_the_text(seed, server_of_bytes):
    body = {"prompt": "😀中", "temperature": 3, "max_tokens": 60, "logprobs": 0, "seed": seed}
    (choice,) = server_of_bytes.complete(**body, echo=True, ignore_eos=True)["choices"]
    data = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in choice["logprobs"]["tokens"]
    )
    assert data.decode(errors="replace") == choice["text"]
    check_offsets(choice["text"], choice["logprobs"])


# --- other paths ---------------------------------------------------------------------------------


def test_the_models(server):
    models = server.ask("/v1/models").json()
    (model,) = models["data"]
    assert models == {"object": "list", "data": [model]}
    assert model["id"] == "tiny"
    assert (model["object"], model["owned_by"]) == ("model", "gpt-cli")
    assert (model["max_model_len"], model["adapter"]) == (512, None)
    assert isinstance(model["created"], int)
    assert server.ask("/v1/models/tiny").json() == model
    assert "gpt-4" in server.ask("/v1/models/gpt-4").error(404)["message"]


def test_health(server):
    assert server.ask("/health").json() == {"status": "ok"}


TEXTS = ["", "Once upon a time", "L'été, 中 and 😀", " \n\0", f"a{END}b", END]


@pytest.mark.parametrize("text", TEXTS)
def test_text_to_ids_and_back(text, server, tiny):
    answer = server.ask("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    ids = tiny.encode(text, special=True)
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 512}
    assert server.ask("/detokenize", {"tokens": ids}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [2048]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [10**400]}, "tokens"),
    ],
)
def test_what_is_no_text_and_no_ids_is_refused(path, body, field, server):
    assert server.ask(path, body).error(400)["param"] == field


def test_the_tokenizer(server):
    actual = server.ask("/tokenizer_info").json()
    assert (actual["eos_token"], actual["bos_token"], actual["pad_token"]) == (END, END, None)


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/nope", 404, "GET '/nope': there is no such path; OpenAI's begin with /v1"),
        ("GET", "/v1/nope", 404, "GET '/v1/nope': there is no such path"),
        ("POST", "/v1/chat/completions", 404, "GPT-2 is a base model and cannot chat"),
        ("GET", COMPLETIONS, 405, "GET '/v1/completions': use POST"),
        ("PUT", COMPLETIONS, 405, "use POST"),
        ("DELETE", "/v1/models", 405, "use "),
        ("POST", "/metrics", 405, "use "),
        ("GET", "/v1/completions/../../etc/passwd", 404, "there is no such path"),
        ("GET", "/%00", 404, "there is no such path"),
        ("GET", "/v1/models/%F0%28", 404, "this server has no model"),
    ],
)
def test_what_there_is_not(method, path, status, message, server):
    assert message in server.ask(path, method=method).error(status)["message"]


def test_the_page_is_one_file(server):
    answer = server.ask("/")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/html")
    assert "Content-Security-Policy" in answer.headers
    assert b"<!doctype html>" in answer.body[:200].lower()


def test_what_was_done_is_counted(server):
    before = server.wait_until_idle()
    used = server.complete(prompt=["Once upon a time", "The fox"], n=2, seed=1)["usage"]
    server.ask(COMPLETIONS, {"prompt": "x", "n": 0}).error(400)
    server.ask(COMPLETIONS, {"prompt": "x"}, Host="evil.example").error(403)
    for path in ("/v1/nothing", "/v1/models/a/b", "/v1/models/tiny"):
        server.ask(path)
    answer = server.ask("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    after = server.wait_until_idle()

    def grown(name):
        return after.get(name, 0) - before.get(name, 0)

    assert grown("gpt_cli_prompt_tokens_total") == used["prompt_tokens"]
    assert grown("gpt_cli_generated_tokens_total") == used["completion_tokens"]
    assert grown("gpt_cli_requests_total{path=/v1/completions,status=400}") == 1
    assert grown("gpt_cli_requests_total{path=/v1/completions,status=200}") == 1
    assert grown("gpt_cli_requests_total{path=/v1/completions,status=403}") == 1
    assert grown("gpt_cli_requests_total{path=other,status=404}") == 1
    for status in (404, 200):
        assert grown(f"gpt_cli_requests_total{{path=/v1/models/{{model}},status={status}}}") == 1
    assert grown("gpt_cli_request_seconds_count") >= 1
    assert grown("gpt_cli_first_token_seconds_count") >= 1
    for name in ("reused", "drafted", "accepted"):
        assert after[f"gpt_cli_{name}_tokens_total"] >= 0


# --- odd bodies ----------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([0, 1, -1, 0.5, "Once", END, [1, 2], [[3], [4, 5]], ["a", "b"]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = [*NEUTRAL, "prompt", "nope"]
# A few tokens at most, and few texts: they are many bodies.
odd_bodies = st.dictionaries(st.sampled_from(NAMES), json_values, max_size=5).filter(
    lambda body: not isinstance(body.get("n"), int) or body["n"] < 20
)


@given(body=odd_bodies, stream=st.booleans())
@example(body={"prompt": "Once", "logit_bias": {"1" * 5000: 1}}, stream=False)
@example(body={"prompt": "Once", "max_tokens": int("9" * 4000)}, stream=False)
@example(body={"prompt": "Once", "stop": ["a"] * 3000}, stream=True)
@settings(max_examples=4 * settings.default.max_examples)
def test_any_body_has_an_answer(body, stream, server):
    answer = server.ask(COMPLETIONS, {"max_tokens": 2, "stream": stream} | body)
    if answer.status != 200:
        assert answer.status in (400, 404)
        answer.error(answer.status)
    elif body.get("stream", stream):
        answer.events()
    else:
        assert answer.json()["choices"]


@given(
    path=st.sampled_from(["/tokenize", "/detokenize", "/v1/embeddings"]),
    body=st.dictionaries(
        st.sampled_from(["prompt", "tokens", "input", "hook", "encoding_format", "nope"]),
        json_values,
        max_size=3,
    ),
)
@settings(max_examples=3 * settings.default.max_examples)
def test_any_text_or_ids_have_an_answer(path, body, server):
    answer = server.ask(path, body)
    if answer.status != 200:
        answer.error(400)


# --- company -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tiny, completions):
    """Return bodies with what they give alone: those of `BODIES`, and others like them."""
    others = [
        {"prompt": STORY * (seed % 7) + "The", "seed": seed, "max_tokens": 5 + 9 * (seed % 8)}
        for seed in range(100, 130)
    ]
    pairs = [(body, completions[name]) for name, body in BODIES.items()]
    pairs += [(body, computed(tiny, **body)) for body in others]
    return [
        (body | {"stream": index % 2 > 0}, texts_of(expected))
        for index, (body, expected) in enumerate(pairs)
    ]


def test_a_text_is_the_same_in_any_company(server, mixed):
    clients = 24

    def ask(body):
        return told(choices_of(server.ask(COMPLETIONS, body)))

    # In another order every time, and no two clients at the same body.
    order = mixed[clients:] + mixed[:clients]
    with ThreadPoolExecutor(clients) as pool:
        assert list(pool.map(ask, (body for body, _ in order))) == [texts for _, texts in order]
    server.wait_until_idle()


def test_scores_are_the_same_in_company(server, tiny):
    """Log-probabilities of prompts are to the bit those of a text alone."""
    texts = [STORY * times + "The moon" for times in range(1, 13)]
    expected = [score.token_logprobs for score in tiny.score_many(texts)]

    def ask(index):
        fields = {"echo": True, "logprobs": 1, "max_tokens": index % 3, "seed": 1}
        (choice,) = server.complete(prompt=texts[index], **fields)["choices"]
        return choice["logprobs"]["token_logprobs"][: len(expected[index])]

    with ThreadPoolExecutor(12) as pool:
        actual = list(pool.map(ask, range(12)))
    for one, other in zip(actual, expected, strict=True):
        assert same(tiny, one[1:], other[1:])


# --- clients that leave --------------------------------------------------------------------------

LONG = {"prompt": "Once", "n": 16, "max_tokens": 500, "ignore_eos": True, "seed": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(stream, server):
    before = server.wait_until_idle()["gpt_cli_generated_tokens_total"]
    connection = server.begin(**LONG, stream=stream)
    if stream:
        assert connection.recv(100)
    else:
        server.wait_for(lambda values: values["gpt_cli_texts_running"] > 0)
    connection.close()
    after = server.wait_until_idle()["gpt_cli_generated_tokens_total"]
    assert after - before < 16 * 500 / 2


def test_one_connection_serves_many_requests(server, tiny):
    client, (expected,) = server.client(), computed(tiny, "Once", seed=1)
    for _ in range(5):
        answer = server.ask(COMPLETIONS, {"prompt": "Once", "seed": 1}, client=client)
        assert answer.json()["choices"][0]["text"] == expected.text
        assert client.sock, "the server has closed the connection"
