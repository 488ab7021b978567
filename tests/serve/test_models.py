"""Several models in one server: who answers, whose turn it is, and what is refused."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import gpt_cli
from gpt_cli import loading
from gpt_cli.errors import InputError
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.options.request import Options
from gpt_cli.texts.text import Text
from support.answers import computed, texts_of, told
from support.checkpoints import CONFIG, write_checkpoint
from support.in_process import refusal, run_here
from support.processes import posix
from support.server_process import COMPLETIONS, serving

pytest.importorskip("uvicorn")
from gpt_cli.serve import Settings, scheduler
from gpt_cli.serve.app import application
from gpt_cli.serve.front.keys import Keys
from gpt_cli.serve.prompts import PendingText
from gpt_cli.serve.scheduler import Turns

BODY = {"prompt": ["Once upon a time", "The fox"], "n": 2, "max_tokens": 30, "logprobs": 2}

NO_KEYS = Keys(None, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("of") / "small", CONFIG)


# --- requests ------------------------------------------------------------------------------------


@posix
@pytest.mark.usefixtures("library")
def test_each_request_gets_its_model_however_many_come_at_once(folder, tiny):
    engines = {
        "tiny": tiny,
        "tiny@int8": gpt_cli.load("tiny", dtype="int8"),
        "small": gpt_cli.load(folder),
    }
    with serving("-m", "tiny@int8", "-m", folder, "--threads", 2) as server:
        requests = [
            (name, BODY | {"seed": seed, "model": name}) for seed in range(4) for name in engines
        ]
        with ThreadPoolExecutor(len(requests)) as clients:
            answers = [*clients.map(lambda request: server.complete(**request[1]), requests)]
        for (name, body), answer in zip(requests, answers, strict=True):
            del body["model"]
            assert answer["model"] == name
            assert told(answer["choices"]) == texts_of(computed(engines[name], **body))
        check_paths(server, engines, str(folder))
        assert server.ask("/health").status == 200


def check_paths(server, engines, folder):
    """Check that all paths choose a model by its name, and refuse other names with the list."""
    listed = server.ask("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [*engines]
    assert [server.ask(f"/v1/models/{name}").json() for name in engines] == listed
    sizes = [len(answer["data"][0]["embedding"]) for answer in embedded(server, *engines)]
    assert sizes == [engine.model.config.n_embd for engine in engines.values()]
    for name in (None, *engines, folder):  # by default, the first; a folder also by its path
        engine = engines.get(name or "tiny", engines["small"])
        ids = engine.encode("One fox")
        assert server.ask("/tokenize", {"prompt": "One fox", "model": name}).json() == {
            "tokens": ids, "count": len(ids), "max_model_len": engine.model.config.n_positions,
        }  # fmt: skip
        text = server.ask("/detokenize", {"tokens": ids, "model": name}).json()
        assert text == {"prompt": "One fox"}
        query = f"?model={name}" if name else ""
        known = server.ask(f"/tokenizer_info{query}").json()["model_max_length"]
        assert known == engine.model.config.n_positions
    bodies = {COMPLETIONS: {}, "/v1/embeddings": {"input": "a"}, "/tokenize": {"prompt": "a"}}
    paths = [(path, body | {"model": "gpt-4"}) for path, body in bodies.items()]
    for path, body in [*paths, ("/v1/models/gpt-4", None), ("/tokenizer_info?model=gpt-4", None)]:
        error = server.ask(path, body).error(404)
        assert error["code"] == "model_not_found"
        assert error["message"] == (
            "this server has no model 'gpt-4', only 'tiny', 'tiny@int8', 'small'"
        )
    metrics = server.ask("/metrics").body.decode()
    for name in engines:
        assert f'gpt_cli_generated_tokens_total{{model="{name}"}}' in metrics
        assert f'gpt_cli_texts_running{{model="{name}"}} 0.0' in metrics


def embedded(server, *names):
    return [server.ask("/v1/embeddings", {"input": "a", "model": name}).json() for name in names]


def test_a_mapping_of_engines_gives_the_names(tiny):
    _, service = application({"one": tiny, "two": tiny}, Settings(), NO_KEYS)
    assert [service.model(name).name for name in (None, "one", "two", "tiny")] == [
        "one", "one", "two", "one",
    ]  # fmt: skip
    service.stop()
    service.join()
    assert not any(model.scheduler._thread.is_alive() for model in service.models)
    with pytest.raises(InputError, match="name is the name of a single model"):
        application({"one": tiny, "two": tiny}, Settings(name="three"), NO_KEYS)
    with pytest.raises(InputError, match="there is none"):
        application({}, Settings(), NO_KEYS)


# --- turns ---------------------------------------------------------------------------------------


class Clock:
    """A clock that the one whose turn it is moves on."""

    def __init__(self):
        self.now = 0.0
        self.turns = []  # whose they were

    def __call__(self):
        return self.now


def run_turns(turns, clock, name, seconds, until):
    """Take turns of so many seconds each, until the clock says so."""
    turns.begin(name)
    while clock.now < until:
        clock.turns.append(name)
        clock.now += seconds
        turns.begin(name)
    turns.end(name)


def run_together(turns, clock, passes, until):
    """Let several take turns that all begin to wait for the first at the same time."""
    turns.begin("other")
    threads = [
        threading.Thread(target=run_turns, args=[turns, clock, name, seconds, until])
        for name, seconds in passes.items()
    ]
    for thread in threads:
        thread.start()
    while len(turns._busy) <= len(threads):
        threading.Event().wait(0.001)
    turns.end("other")
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_those_that_are_busy_share_the_time_whatever_a_pass_takes():
    clock = Clock()
    turns = Turns(3, clock)
    run_together(turns, clock, {"large": 8.0, "small": 1.0}, until=160)
    assert clock.turns.count("large") == 10
    assert clock.turns.count("small") == 80
    # The large one waits for its share, and the small one for one pass.
    assert clock.turns[:20] in (
        ["large", *["small"] * 8] * 2 + ["large", "small"],
        ["small", "large", *["small"] * 7, "large", *["small"] * 8, "large", "small"],
    )


def test_nobody_saves_up_time_or_loses_it_by_being_idle():
    clock = Clock()
    turns = Turns(3, clock)
    run_turns(turns, clock, "first", 1.0, until=100)
    clock.turns.clear()
    run_together(turns, clock, {"first": 1.0, "late": 1.0}, until=120)
    assert abs(clock.turns.count("first") - clock.turns.count("late")) <= 1
    clock.turns.clear()
    turns.begin("late")  # computes alone, and then nobody does
    clock.now += 50
    turns.end("late")
    run_together(turns, clock, {"first": 10.0, "late": 10.0}, until=clock.now + 100)
    assert abs(clock.turns.count("first") - clock.turns.count("late")) <= 1


def test_a_scheduler_computes_only_in_its_turn(tiny):
    _, service = application({"one": tiny, "two": tiny}, Settings(), NO_KEYS)
    events = queue.Queue()
    schedulers = [model.scheduler for model in service.models]
    (turns,) = {scheduler._turns for scheduler in schedulers}
    turns.begin("other")
    for shared in schedulers:
        shared.submit([PendingText(Request(Text([1]), Options(max_tokens=2)), events.put)])
    with pytest.raises(queue.Empty):
        events.get(timeout=0.2)
    turns.end("other")
    assert [events.get(timeout=60).finish_reason for _ in range(4)].count("length") == 2
    service.stop()
    service.join()
    assert turns._computing is None


# --- memory and refusals -------------------------------------------------------------------------


def test_schedulers_share_the_memory(tiny, monkeypatch):
    free = 10 * scheduler.cache_budget(tiny.model)
    monkeypatch.setattr(type(tiny.model.ops), "free_memory", lambda ops: free)
    one, two = (scheduler._fitting(tiny.model, 10_000, count) for count in (1, 2))
    assert 1 < two < one / 2


def test_models_that_do_not_fit_together_are_refused_before_one_is_loaded(
    tiny, folder, monkeypatch
):
    sizes = [weights_bytes(tiny.model.config, tiny.model.ops.dtype)]
    sizes.append(weights_bytes(gpt_cli.load(folder).model.config, "float32"))
    ops = type(tiny.model.ops)
    monkeypatch.setattr(ops, "free_memory", lambda ops: sum(sizes))
    assert [*loading.load_all(["tiny", str(folder)])] == ["tiny", "small"]
    monkeypatch.setattr(ops, "free_memory", lambda ops: sum(sizes) - 1)
    assert [*loading.load_all(["tiny"])] == ["tiny"]
    monkeypatch.setattr(loading.assembly, "assemble", None)
    error = refusal("serve", "-m", "tiny", "-m", folder, "--port", 0, code=5)
    assert f" and {folder} in float32 take {sum(sizes) / 1e6:,.0f} MB of memory" in error


@pytest.mark.usefixtures("library")
def test_what_does_not_fit_several_models_is_refused(folder):
    two = ["serve", "--port", 0, "-m", "tiny", "-m"]
    for flags, expected in {
        ("tiny",): "two models have the name tiny: leave one out, or rename a folder",
        (folder, "-m", folder): "two models have the name small",
        ("no/model", "--offline"): "no/model",
        (
            "tiny@int9",
        ): "--model tiny@int9: the dtype must be one of auto, float32, bfloat16, float16",
        (folder, "--name", "x"): "--name is the name of a single model",
        (folder, "--revision", "x"): "--revision is for a single model",
        (folder, "--adapter", "x"): "--adapter is for a single model",
        (folder, "--bos-token", "0"): "--bos-token is for a single model",
        (folder, "--edit", "hook_embed=0"): "--edit is for a single model",
    }.items():
        assert expected in refusal(*two, *flags, code=3 if "--offline" in flags else 2)


def test_other_commands_have_one_model(folder, monkeypatch):
    complaint = '--model must be one model (only serve has several), not ["tiny", "gpt2"]'
    for command in (["generate", "x"], ["score", "x"], ["show", "lens", "x"], ["verify"]):
        assert complaint in refusal(*command, "-m", "tiny", "-m", "gpt2")
    generate = ["generate", "Once", "-n", 2, "-s", 1]
    once = run_here(*generate, "-m", "tiny")
    assert run_here(*generate, "-m", "tiny", "-m", "tiny") == once
    with_space = folder.parent / "a small one"
    with_space.symlink_to(folder)
    named = run_here(*generate, "-m", folder)
    assert run_here(*generate, GPT_CLI_MODEL=str(with_space)) == named
