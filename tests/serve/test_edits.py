"""Edits of requests: the engine's bits beside other texts, and files in one folder alone."""

import numpy as np
import pytest

pytest.importorskip("uvicorn")
from gpt_cli.gpt2.edits import ModelEdit
from gpt_cli.serve.protocol import read_completions
from gpt_cli.serve.refusals import RequestError
from gpt_cli.serve.responses import Service
from gpt_cli.serve.settings import Settings
from support.in_process import refusal
from support.scores import same

STORY = "Once upon a time, there was a little girl named Emma. She loved the moon. "
HOOK = "blocks.2.hook_resid_pre"


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A folder of edits beside a file outside of it."""
    outside = tmp_path_factory.mktemp("edits")
    folder = outside / "allowed"
    (folder / "sub").mkdir(parents=True)
    (outside / "allowed2").mkdir()
    vector = 20 * np.sin(np.arange(tiny.model.config.n_embd))
    for file in (folder / "v.npy", folder / "sub" / "v.npy", outside / "v.npy",
                 outside / "allowed2" / "v.npy"):  # fmt: skip
        np.save(file, vector)
    (folder / "link.npy").symlink_to(outside / "v.npy")
    (folder / "up").symlink_to(outside)
    (folder / "circle.npy").symlink_to(folder / "circle.npy")
    return folder


@pytest.fixture
def service(tiny, folder):
    service = Service.start({"tiny": tiny}, Settings(allow_edits=folder))
    yield service
    service.stop()
    service.join()


def answer(service, bodies):
    """Return the texts and log-probabilities of requests that are computed side by side."""
    choices = [body["choices"][0] for body in answers_of(service, bodies)]
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in choices]


def answers_of(service, bodies):
    """Return the JSON of the answers to requests that are computed side by side."""
    import asyncio
    import json

    from gpt_cli.serve.responses import CompletionResponse

    async def ask(body):
        request = read_completions(service.models[0].engine, body, service.folder)
        whole = CompletionResponse(service, service.models[0], request)
        sent = []

        async def send(message):
            sent.append(message)

        await asyncio.wait_for(whole({"type": "http", "asgi": {"spec_version": "2.3"}},
                                     asyncio.Event().wait, send), 60)  # fmt: skip
        return json.loads(b"".join(m.get("body", b"") for m in sent))

    async def everything():
        return await asyncio.gather(*map(ask, bodies))

    return asyncio.run(everything())


EDITS = [[], [f"{HOOK}+=v.npy"], [], [f"{HOOK}@-3:+=-1*sub/v.npy", "blocks.0.attn.hook_z[1]=0"],
         ["blocks.1.attn.hook_pattern[0]@prompt*=0.5"], []]  # fmt: skip


@pytest.mark.parametrize(
    "more", [{}, {"echo": True}, {"use_beam_search": True, "best_of": 3}], ids=str
)
def test_texts_with_edits_are_the_engines_beside_texts_without(tiny, service, folder, more):
    draws = {"beams": 3} if "best_of" in more else {"temperature": 1, "top_k": 0, "top_p": 1}
    bodies = [
        {"prompt": STORY * 2, "max_tokens": 12, "seed": seed, "edits": edits, "logprobs": 0,
         **more}
        for seed, edits in enumerate(EDITS)
    ]  # fmt: skip
    answers = answer(service, bodies)
    expected = same(tiny.model, answers)
    assert answer(service, bodies) == expected  # prompts without edits are known now
    assert answer(service, bodies[::-1]) == expected[::-1]
    for body, (text, logprobs) in zip(bodies, answers, strict=True):
        edits = [edit.replace("+=v", f"+={folder}/v").replace("*sub", f"*{folder}/sub")
                 for edit in body["edits"]]  # fmt: skip
        (done,) = tiny.generate([body["prompt"]], edits=edits, max_tokens=12, seed=body["seed"],
                                **draws)  # fmt: skip
        assert text == ("echo" in more) * body["prompt"] + done.text
        assert logprobs[-12:] == same(tiny.model, done.logprobs)
    same_edits = EDITS.count([]) if "beams" in draws else 1  # no draw tells these apart
    if tiny.model.ops.batch_invariant:
        assert len({*map(str, answers)}) == len(EDITS) + 1 - same_edits


def test_prompts_are_scored_with_edits_and_with_those_of_the_server(tiny, service):
    edit = "blocks.1.hook_mlp_out=0"
    body = {"prompt": STORY, "max_tokens": 0, "echo": True, "logprobs": 0, "edits": [edit]}
    ((_, logprobs),) = answer(service, [body])
    ((_, plain),) = answer(service, [body | {"edits": []}])
    assert logprobs != plain
    edited = tiny.with_edits([edit])
    always = Service.start({"tiny": edited}, Settings())
    assert answer(always, [body | {"edits": []}])[0][1] == logprobs
    always.stop()
    always.join()


@pytest.mark.parametrize("echo", [False, True])
def test_an_edit_that_makes_values_overflow_ends_its_text_alone(service, echo):
    body = {"prompt": STORY, "max_tokens": 5, "seed": 1, "logprobs": 0, "echo": echo}
    bad, good = answers_of(service, [body | {"edits": ["hook_embed=3e38"]}, body])
    assert bad["error"]["type"] == "invalid_request_error"
    assert "edits make values overflow" in bad["error"]["message"]
    (alone,) = answers_of(service, [body])
    assert good["choices"] == alone["choices"]


@pytest.mark.parametrize(
    "name",
    ["../v.npy", "../allowed2/v.npy", "/etc/passwd.npy", "link.npy", "up/v.npy", "circle.npy",
     "sub/../../v.npy", "gone.npy", "../gone.npy", "sub.npy/..", "s3://bucket/v.npy",
     "../allowed/v.npy",
     "http://127.0.0.1/v.npy", "file:///etc/v.npy", "a\0.npy", "\ud800.npy", "x" * 5000 + ".npy",
     "~/v.npy", "%2e%2e/v.npy", "..\\v.npy", "/v.npy", "//v.npy", "./../v.npy"],
)  # fmt: skip
def test_a_file_outside_of_the_folder_is_refused_as_if_missing(tiny, folder, name):
    absolute = str(folder.parent / "v.npy")
    for file in (name, absolute):
        with pytest.raises(RequestError) as refused:
            read_completions(tiny, {"prompt": "a", "edits": [f"{HOOK}+={file}"]}, folder)
        assert refused.value.status == 400 and refused.value.field == "edits"
        message = str(refused.value)
        if file.endswith(".npy"):
            assert "is not a file in the folder for edits" in message
        assert str(folder) not in message.replace(absolute, "")


@pytest.mark.parametrize(
    ("edits", "problem"),
    [
        (["blocks.99.hook_resid_pre=0"], "the last one is"),
        ([f"{HOOK}@16=0", f"{HOOK}@17=0"], "@17 is not in a text of 1 token and 16 new"),
        ([f"{HOOK}[0:999999999]=0"], "[0:999999999] must be dimensions from 0 to "),
        ([1], "edits must be a list of texts"),
        ({"a": 1}, "edits must be a list of texts"),
        ([f"{HOOK}=0"] * 257, "edits must be at most 256 texts"),
        (["x" * 40_000], "edits must be at most 256 texts, 32,768 characters"),
    ],
)
def test_a_wrong_edit_is_refused(tiny, folder, edits, problem):
    with pytest.raises(RequestError) as refused:
        read_completions(tiny, {"prompt": "a", "edits": edits}, folder)
    assert problem in str(refused.value) and refused.value.status == 400


def test_edits_are_off_by_default(tiny, monkeypatch):
    monkeypatch.setattr(ModelEdit, "of", None)  # nothing is read
    with pytest.raises(RequestError, match="started with --allow-edits DIR") as refused:
        read_completions(tiny, {"prompt": "a", "edits": ["hook_embed=0"]})
    assert (refused.value.status, refused.value.field) == (400, "edits")
    assert read_completions(tiny, {"prompt": "a", "edits": []}).texts[0].edits == []


def test_the_folder_must_exist(tmp_path):
    error = refusal("serve", "-m", "tiny", "--allow-edits", tmp_path / "gone")
    assert "--allow-edits" in error and "must be a folder" in error
