"""Without the package llguidance, only constraints are missing."""

import subprocess
import sys

import pytest

import gpt_cli
from gpt_cli.errors import ResourceError
from support.in_process import refusal, run_here

GENERATE = ["generate", "--model", "tiny", "-n", "3", "--seed", "1", "Once"]


@pytest.fixture(autouse=True)
def without_llguidance(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)


@pytest.mark.parametrize(
    "flags",
    [
        ["--regex", "never seen before"],
        ["--json-schema", '{"const": "never seen before"}'],
        ["--choices", "never,seen,before"],
    ],
)
def test_a_constraint_names_the_package_that_it_needs(flags):
    says = refusal(*GENERATE, *flags, code=5)
    assert "a constraint needs llguidance (" in says
    assert says.endswith("): pip install llguidance\n")


def test_python_gets_the_same_error_when_the_constraint_is_used(tiny):
    options = gpt_cli.Options(regex="not seen before either")  # compiles nothing
    for use in (options.validate, lambda: tiny.run(["Once"], options)):
        with pytest.raises(ResourceError, match="pip install llguidance"):
            use()


def test_other_texts_do_not_need_it():
    assert run_here(*GENERATE)[0]


@pytest.mark.parametrize("arguments", [["generate", "--help"], GENERATE])
def test_it_is_not_imported_without_a_constraint(arguments):
    program = (
        "import sys; from gpt_cli.cli import app; code = app.run(sys.argv[1:]);"
        "assert 'llguidance' not in sys.modules;"
        "assert ('numpy' in sys.modules) == ('--help' not in sys.argv); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-P", "-c", program, *arguments], check=True, timeout=60)
