"""The model `gpt-cli` of lm-evaluation-harness. `make test-eval` installs it."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from gpt_cli import Engine
from gpt_cli.errors import InputError
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text
from support.eval_tasks import PROMPTS, STORY, write_tasks

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from gpt_cli.lm_eval import EngineLM

pytestmark = pytest.mark.filterwarnings("ignore")  # those of lm-eval and its packages
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def requests(kind, *arguments):
    """Make requests as a task does."""
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def lines_of(folder, *arguments):
    """Run `python -m gpt_cli.lm_eval` in a process of its own; return its exit code and output."""
    command = [sys.executable, "-P", "-m", "gpt_cli.lm_eval", *arguments]
    env = os.environ | OFFLINE | {"HF_HOME": str(folder)}
    finished = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return finished.returncode, finished.stdout, finished.stderr


@pytest.fixture(scope="module")
def lm():
    return EngineLM("tiny")


@pytest.fixture(scope="module", params=["saved", "tiny"])
def actual(request, tmp_path_factory, case_folder):
    """Evaluate a model on all tasks; return its name and the results."""
    folder = tmp_path_factory.mktemp("eval") / "tasks"
    model = request.param if request.param == "tiny" else str(case_folder(request.param))
    names = write_tasks(folder, 512 if model == "tiny" else 80)
    results = simple_evaluate(
        "gpt-cli",
        {"model": model},
        names,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    return request.param, results


@pytest.mark.parametrize("task", ["choice", "target", "rolling", "continue"])
def test_answers_are_those_of_the_harness_own_model(actual, task, golden):
    model, results = actual
    expected = golden("lm_eval.json")[f"{model}/{task}"]
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    answers = [sample["resps"] for sample in samples]
    for answer, given in zip(answers, expected["answers"], strict=True):
        for (one,), (other,) in zip(answer, given, strict=True):
            if task in ("choice", "target"):
                assert one == (pytest.approx(other[0], rel=1e-5, abs=1e-4), other[1])
            else:
                assert one == (other if task == "continue" else pytest.approx(other, 1e-5))
    for name, value in expected["metrics"].items():
        assert results["results"][task][f"{name},none"] == pytest.approx(value, rel=1e-4)


def test_torch_is_not_imported():
    code = "import sys, gpt_cli.lm_eval; print({'torch', 'transformers'} & {*sys.modules})"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.stdout == "set()\n"


def test_the_models_of_the_harness_stay_known():
    assert get_model("gpt-cli") is EngineLM
    assert get_model("dummy").__name__ == "DummyLM"


def test_the_command_evaluates(tmp_path):
    write_tasks(tmp_path / "tasks", 512)
    arguments = ["--model", "gpt-cli", "--model_args", "model=tiny,dtype=float32,threads=1"]
    arguments += ["--tasks", "choice,continue", "--include_path", "tasks", "--output_path", "out"]
    code, out, error = lines_of(tmp_path, "run", *arguments, "--log_samples")
    assert code == 0, error
    assert "|choice  |" in out
    (file,) = tmp_path.glob("out/*/samples_continue_*.jsonl")
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [row["arguments"]["gen_args_0"]["arg_0"] for row in rows] == PROMPTS


def test_an_error_of_the_command_is_one_line(tmp_path):
    write_tasks(tmp_path / "tasks", 512)
    arguments = ["--model", "gpt-cli", "--model_args", "model=tiny,dtype=int4", "--tasks", "choice"]
    code, _, error = lines_of(tmp_path, "run", *arguments, "--include_path", "tasks")
    assert code == InputError.exit_code
    assert error.splitlines()[-1].startswith("gpt-cli: error: ")
    assert "int4" in error.splitlines()[-1]
    assert "Traceback" not in error


def test_arguments_of_the_model_are_those_of_load(library):
    more = {"batch_size": 1, "max_batch_size": 64, "device": "cpu"}
    lm = EngineLM.create_from_arg_string("model=tiny,dtype=int8,threads=1", more)
    ops = lm.engine.model.ops
    assert (ops.dtype, ops.threads, lm.tokenizer_name) == ("int8", 1, "tiny")
    with pytest.raises(InputError, match="cuda:3"):
        EngineLM.create_from_arg_obj({"model": "tiny"}, {"device": "cuda:3"})
    with pytest.raises(InputError, match=r"^pretrained is called model here"):
        EngineLM.create_from_arg_string("pretrained=tiny")


def test_likelihoods_are_those_of_score(lm):
    """Of texts in any order; the results are in the order of the requests."""
    texts = [STORY * 2, "Once upon a time", STORY, "The moon was round.", STORY * 6]
    scores = lm.engine.score_many(texts)
    first = [lm.engine.decode(score.ids[:1]) for score in scores]
    pairs = [(one, text[len(one) :]) for one, text in zip(first, texts, strict=True)]
    answers = lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (logprob, _), score in zip(answers, scores, strict=True):
        assert logprob == pytest.approx(score.total_logprob, rel=1e-6)


def test_a_row_is_the_same_in_any_company(lm):
    """With the library to the last bit."""
    rows = [lm.tok_encode(STORY * times) for times in (1, 7, 3, 20, 1, 2, 26)]
    starts = [3, 1, 30, 100, 17, 2, 490]
    texts = [Text(row, first=start) for row, start in zip(rows, starts, strict=True)]
    for text, (logprob, greedy) in zip(texts, lm._measured(texts), strict=True):
        ((alone, also),) = lm._measured([text])
        rel = 0 if lm.engine.model.ops.batch_invariant else 1e-5
        assert (logprob, greedy) == (pytest.approx(alone, rel=rel, abs=0), also)


def test_the_windows_of_a_long_text_are_full(lm, monkeypatch):
    seen = []

    def measured(loaded, texts, measures):
        seen.extend((text.ids, text.first) for text in texts)
        return [{"logprobs": [-1.0], "ranks": [2]} for _ in texts]

    monkeypatch.setattr("gpt_cli.lm_eval.measure_windows", measured)
    ids = lm.tok_encode(STORY * 60)
    (total,) = lm.loglikelihood_rolling(
        requests("loglikelihood_rolling", (STORY * 60,)), disable_tqdm=True
    )
    assert total == -len(seen)
    assert [len(row) for row, _ in seen] == [513] * math.ceil(len(ids) / 512)
    assert seen[0] == ([lm.eot_token_id, *ids[:512]], 1)
    assert [id for row, start in seen for id in row[start:]] == ids


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("loglikelihood", ("Once upon a", " time")),
        ("loglikelihood_rolling", ("Once upon a time",)),
        ("generate_until", ("Once upon a", {"until": ["."], "max_gen_toks": 3})),
    ],
)
def test_each_answer_goes_to_the_cache_and_the_progress_bar(
    lm, kind, arguments, monkeypatch, capsys
):
    kept = []

    class Hook:
        def add_partial(self, *parts):
            kept.append(parts)

    monkeypatch.setattr(lm, "cache_hook", Hook())
    (answer,) = getattr(lm, kind)(requests(kind, arguments))
    assert kept == [(kind, arguments, answer)]
    shown = capsys.readouterr().err
    assert "Running" in shown
    assert "1/1" in shown
    getattr(lm, kind)(requests(kind, arguments), disable_tqdm=True)
    assert capsys.readouterr().err == ""


def generate(lm, prompt, **options):
    return lm.generate_until(requests("generate_until", (prompt, options)), disable_tqdm=True)[0]


def test_a_task_without_options_gets_256_greedy_tokens(lm):
    expected = lm.engine.generate(["The fox"], max_tokens=256, temperature=0)[0]
    assert generate(lm, "The fox") == expected.text


def test_an_empty_stop_string_is_no_stop_string(lm):
    expected = generate(lm, "The fox", max_gen_toks=9, num_beams=1)
    assert generate(lm, "The fox", max_gen_toks=9, until=[""]) == expected


def test_an_empty_prompt_is_the_start_token(lm):
    expected = lm.engine.generate([""], max_tokens=9, temperature=0)[0]
    assert generate(lm, "", max_gen_toks=9) == expected.text


def test_sampling_has_the_options_of_transformers(lm, monkeypatch):
    monkeypatch.setattr("random.getrandbits", lambda bits: 77)
    options = {"max_tokens": 20, "seed": 77, "top_k": 50, "top_p": 0.9, "temperature": 9.0}
    (expected,) = lm.engine.generate(["The fox"], **options, repeat_penalty=1.2)
    own = {"do_sample": True, "temperature": 9.0, "top_p": 0.9, "repetition_penalty": 1.2}
    assert generate(lm, "The fox", max_gen_toks=20, **own) == expected.text
    (expected,) = lm.engine.generate(["The fox"], **options | {"temperature": 1.0, "top_p": 1.0})
    assert generate(lm, "The fox", max_gen_toks=20, do_sample=True) == expected.text


def test_samples_of_one_prompt_differ(lm):
    """Repeats of a request are requests with the same prompt."""
    arguments = ("The fox", {"do_sample": True, "temperature": 2.0, "max_gen_toks": 20})
    same = requests("generate_until", *[arguments] * 4)
    assert len({*lm.generate_until(same, disable_tqdm=True)}) == 4


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_gen_toks": 512}, "max_gen_toks is 512"),
        ({"max_gen_toks": 0}, "max_tokens must be 1 or more"),
        ({"num_beams": 4}, "unknown field 'num_beams'"),
        ({"do_sample": True, "temperature": -1.0}, "temperature must be"),
    ],
)
def test_wrong_options_of_a_task_are_errors(lm, options, what):
    with pytest.raises(InputError, match=what):
        generate(lm, "The fox", **options)


@pytest.mark.parametrize("pair", [("Once upon a tim", "e"), ("The fox", " a" * 513)])
def test_a_continuation_without_tokens_or_with_too_many_is_an_error(lm, pair):
    with pytest.raises(InputError, match="tokens of its own, and must have 1 to 512"):
        lm.loglikelihood(requests("loglikelihood", pair), disable_tqdm=True)


def test_white_space_as_a_context_is_part_of_the_continuation(lm):
    pairs = requests("loglikelihood", (" \n", "The fox"), ("", " \nThe fox"))
    one, other = lm.loglikelihood(pairs, disable_tqdm=True)
    assert one == other


def test_a_model_without_a_start_token_scores_what_has_a_context():
    lm = EngineLM("tiny")
    model = replace(lm.engine.model, config=replace(lm.engine.model.config, bos_token_id=None))
    lm.engine = Engine(LoadedModel(model, lm.engine.tokenizer), "tiny", 0)
    assert lm.loglikelihood(requests("loglikelihood", ("a", "b")))[0][0] < 0
    with pytest.raises(InputError, match="no start token"):
        lm.loglikelihood(requests("loglikelihood", ("", "b")))


def test_there_is_no_chat_template(lm):
    assert lm.chat_template(True) == ""
    with pytest.raises(InputError, match="leave out --apply_chat_template"):
        lm.apply_chat_template([{"role": "user", "content": "Hello"}])


def test_edits_are_refused():
    with pytest.raises(InputError, match="edits cannot be used with lm-eval"):
        EngineLM("tiny", edits=["hook_embed=0"])
