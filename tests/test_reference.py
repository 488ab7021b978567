"""docs/reference.md lists the variables, the exit codes and the JSON fields of the program."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt_cli import errors
from gpt_cli.folder.config import GPT2Config
from support.classifiers import write_classifier
from support.in_process import finished, run_here
from support.reference import exit_codes, names_of, tables_of

ROOT = Path(__file__).parents[1]
# Read by Python, huggingface_hub, httpx and Rich, not by code in gpt_cli.
OF_LIBRARIES = {"HF_TOKEN", "HF_HUB_DISABLE_XET", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE"}
OF_LIBRARIES |= {"HF_HUB_DOWNLOAD_TIMEOUT", "NO_COLOR", "COLUMNS"}
CHOICES, MEASUREMENTS = "Choices: `rank`", "Measurements: `bench --json`"
VARIABLE = re.compile(
    r"(?:environ(?:\.get|\.setdefault|\.pop|\[)?|getenv)\(?\s*[\"'](\w+)"
    r"|[\"'](_?(?:GPT_CLI|HF|OMP|OPENBLAS|MKL|VECLIB|RAY)_\w+)[\"']"
)


def test_environment_variables():
    sources = [*ROOT.glob("gpt_cli/**/*.py"), ROOT / "hatch_build.py"]
    matches = VARIABLE.findall("\n".join(path.read_text("utf-8") for path in sources))
    variables = {name for names in matches for name in names if name}
    assert names_of("Environment variables") - OF_LIBRARIES == variables


def test_exit_codes():
    codes = exit_codes()
    listed = {(name, code) for code, names in codes.items() for name in names}
    kinds = [errors.ContextError, *errors.GPTCLIError.__subclasses__()]
    raised = {
        (kind.__name__, kind.exit_code) for kind in kinds if kind.__module__ == errors.__name__
    }
    assert listed == raised
    assert {*codes} == {code for _, code in raised} | {0, 129, 130, 141, 143}


def fields_of(value: Any, objects: Sequence[set[str]], path: str = "") -> Iterator[str]:
    """Return the fields of a record as the page writes them.

    Args:
        value: a record, or a value in it.
        objects: the fields of objects with a table of their own. They are left out where all of
            them are in an object; only a token may lack its log-probability.
        path: where the value is.
    """
    first = value
    while isinstance(first, list) and first:
        first, path = first[0], f"{path}[]"
    if not isinstance(first, dict):
        yield re.sub(r"(\[\])+$", "", path)
        return
    known = set().union(*(names for names in objects if names - {"logprob"} <= set(first)))
    if known:
        yield path
    for name in first.keys() - known:
        if name == "branches" and path:  # the same fields again
            yield f"{path}.branches[]"
        else:
            yield from fields_of(first[name], objects, f"{path}.{name}" if path else name)


def fields_of_output(
    *arguments: object, model: object = "tiny", input: bytes = b"", code: int = 0
) -> set[str]:
    """Run a command that prints JSON Lines; return the fields in all of them."""
    out, _ = run_here(*arguments, "--model", model, input=input, code=code)
    tables = [names_of("A token"), tables_of(CHOICES)[0], tables_of(MEASUREMENTS)[1]]
    objects = [{name.removesuffix("[]") for name in names} for names in tables]
    lines = [json.loads(line) for line in out.decode().split("\n")[:-1]]
    return {name for line in lines for name in fields_of(line, objects)} - {""}


def test_fields_of_texts():
    row = b'{"id": 1, "prompt": "Once"}'
    options = ["--logprobs", 1, "-n", 2, "--beams", 2]
    generated = fields_of_output("generate", "--json", *options, "Once")
    names = names_of("Texts: `generate --json`, `batch`")
    assert generated | {"id", "sample", "samples"} == names
    assert fields_of_output("batch", "-q", *options, input=row) == generated | {"id"}
    assert fields_of_output("batch", "-q", *options, "--samples", 2, input=row) == names


def test_fields_of_scores():
    names = names_of("Scores: `score --json`, `score --output`, `score --format`")
    row = b'{"id": 1, "text": "Once upon"}'
    more = ["--layers", "--min-k", 20]
    tokens, words = (
        fields_of_output("score", "-q", "--format", "jsonl", option, *more, input=row)
        for option in ("--tokens", "--words")
    )
    assert tokens | words == names
    one = fields_of_output("score", "--json", "--tokens", *more, input=b"Once upon")
    assert one == tokens - {"id"}


def test_fields_of_comparisons():
    out, _ = run_here("compare", "--json", "tiny", "tiny@float32", input=b"Once upon a time")
    assert {*fields_of(json.loads(out), [])} == names_of("Comparisons: `compare --json`")


def test_fields_of_choices():
    choice, row = tables_of(CHOICES)
    more = ["--calibrate", "", "--tokens"]
    out, _ = run_here("rank", "--json", "-m", "tiny", "--choices", "a,b", *more, "Once")
    first = json.loads(out.splitlines()[0])
    assert {name + "[]" * isinstance(first[name], list) for name in first} == choice
    plain, _ = run_here("rank", "--json", "-m", "tiny", "--choices", "a,b", "Once")
    assert set(json.loads(plain.splitlines()[0])) == choice - {"neutral_logprob", "logprobs[]"}
    written = b'{"id": 1, "prompt": "Once", "choices": ["a", "b"]}'
    assert fields_of_output("rank", "-q", "--json", *more, input=written) == row


def test_fields_of_labels(tmp_path):
    model = write_classifier(tmp_path, "padded")
    row = b'{"id": 1, "text": "the and"}'
    shown = fields_of_output("classify", "-q", "--json", model=model, input=row)
    names = {name.partition(".")[0] for name in shown}  # labels are names, too
    assert names == names_of("Labels: `classify`") - {"null"}


def test_fields_of_rows_that_failed(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"id": 1, "prompt": 2}\n')
    failed = fields_of_output("batch", "-q", tmp_path, code=6)
    lines = fields_of_output("batch", "-q", "--template", "{line}", input=b"\xff\n", code=6)
    assert failed == names_of("Rows that failed")
    assert lines - failed == {"line_number"}


def test_fields_of_tokens():
    (names,) = tables_of("Tokens: `next --json`, `tokenize --json`")
    shown = fields_of_output("next", "--json", "Once")
    assert shown | fields_of_output("tokenize", "--json", "Once") == names
    out, _ = run_here("next", "--json", "-m", "tiny", "Once")
    assert set(json.loads(out.splitlines()[0])) - shown == names_of("A token")


def test_fields_of_hook_points():
    names = names_of("Hook points: `activations --hooks --json`")
    assert fields_of_output("activations", "--hooks", "--json") == names


def test_fields_of_vectors(tmp_path):
    (tmp_path / "a").write_text("The rain fell.\nA wet day.\n")
    (tmp_path / "b").write_text("Warm sun.\nA sunny day.\n")
    files = tmp_path / "a", tmp_path / "b", "-o", tmp_path / "v.safetensors"
    shown = fields_of_output("vector", "--json", *files, "--hook", "hook_embed")
    assert shown == names_of("Vectors: `vector --json`")


def test_fields_of_views():
    views = ("attention", "lens", "surprise", "tree")
    shown = [fields_of_output("show", view, "--json", "Once upon") for view in views]
    answers = "--json", "--answer", " Emma"
    shown.append(fields_of_output("show", "attribution", *answers, "Once"))
    shown.append(fields_of_output("show", "patch", *answers, "The fox", "The moon"))
    assert set().union(*shown) == names_of("Views: `show --json`")


def test_fields_of_models():
    config = {field.name for field in dataclasses.fields(GPT2Config)} - {"dtype"}
    info, models = fields_of_output("info", "--json") - config, run_here("models", "--json")[0]
    names = set(json.loads(models.splitlines()[0]))
    assert info | names == names_of("Models: `info --json`, `models --json`")


def test_fields_of_checks(case_folder):
    verify, doctor = tables_of("Checks: `verify --json`, `doctor --json`")
    assert fields_of_output("verify", "--json", model=case_folder("saved")) == verify
    done = finished("doctor", "--json", HF_HUB_OFFLINE="1")
    assert set(json.loads(done.stdout.splitlines()[0])) == doctor


def test_fields_of_measurements():
    names, mode = tables_of(MEASUREMENTS)
    out, _ = run_here("bench", "--json", "-m", "tiny", "-p", 4, "-n", 3, "-r", 1)
    record = json.loads(out)
    assert set(record) == names
    assert set(record["cache_on"]) == mode
    spreads = {name for name in mode if isinstance(record["cache_on"][name], dict)}
    assert mode - spreads == {"token_s", "growth"}
    assert all(set(record["cache_on"][name]) == {"median", "min", "max"} for name in spreads)
