"""Change one detail of a module at a time, and report the changes that no test notices.

    python -m tools.mutants [MODULE ...]

The mutation operators are mutmut's. Each mutant runs in a fork, in a copy of this folder below
build/mutants: commands that a test starts see the mutant, too.
"""

import contextlib
import difflib
import gc
import importlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
import pytest
from hypothesis import Phase, settings
from mutmut.mutation.mutators import mutation_operators

from tools.mutant_tests import TESTS

# Imported before the forks, so that these start fast.
for library in ("fsspec", "huggingface_hub", "hypothesis.extra.numpy", "numpy", "pyarrow.parquet"):
    importlib.import_module(library)

ROOT = Path(__file__).parents[1]
COPIES = ROOT / "build" / "mutants"
PROCESSES = int(os.environ.get("PROCESSES", 2))
EVERY = int(os.environ.get("EVERY", 1))  # test a sample: every n-th mutant
MEMORY = 8 << 30  # bytes of address space of a mutant
PROSE = re.compile(r"\w+ [\w-]+ \w+")  # three words: a text for people
CALLS = {"len", "isinstance", "check"}  # a mutated argument always fails, or is a message
# Mutations that change nothing: the last axis of a matrix is its axis 1, lengths do agree, None is
# false, and pyarrow ignores the case of types.
SAME = re.compile(
    r"axis=\+1|shape\[\+1\]|strict=(None|False)|(ensure_ascii|allow_nan)=None"
    r'|"(STRING|U?INT64|DOUBLE)"'
)


def is_skipped(node: cst.CSTNode) -> bool:
    """Return whether a node only has text for people, or types."""
    match node:
        case cst.SimpleString(value=text) | cst.Assign(value=cst.SimpleString(value=text)):
            return bool(PROSE.search(text))
        case (
            cst.Raise() | cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom()
            | cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString())  # a docstring
            | cst.Assign(value=cst.Call(func=cst.Name(value="TypeVar")))
            | cst.AnnAssign(annotation=cst.Annotation(annotation=cst.Name(value="TypeAlias")))
            | cst.If(test=cst.Name(value="TYPE_CHECKING"))
        ):  # fmt: skip
            return True
    return False


def changes(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Yield each node at or below this one, with each of its mutations."""
    if is_skipped(node):
        return
    match node:
        case cst.Call(func=cst.Name(value=name)) if name in CALLS:
            pass
        case _:
            for kind, operator in mutation_operators:
                if isinstance(node, kind):
                    yield from ((node, changed) for changed in operator(node))
    for child in node.children:
        yield from changes(child)


def mutants(source: str) -> list[str]:
    """Return every mutant of a module that compiles, once each."""
    module = cst.parse_module(source)
    found, same = {}, len(SAME.findall(source))
    for node, changed in changes(module):
        mutant = module.deep_replace(node, changed).code
        if len(SAME.findall(mutant)) > same or mutant.count("strict=") < source.count("strict="):
            continue
        try:
            compile(mutant, "mutant", "exec")
        except SyntaxError:
            continue
        found[mutant] = True
    found.pop(source, None)
    return list(found)[::EVERY]


def passes(folder: Path, tests: list[str], seconds: float) -> bool:
    """Run tests in a fork, up to the first that fails."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.alarm(int(seconds))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        os.chdir(folder)
        Path("build").mkdir(exist_ok=True)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        # Both implementations show a mutant of a module above `ops`, and the library is faster.
        options = ["-x", "-k", "not numpy", "--hypothesis-profile", "mutants", "--basetemp"]
        options += ["build/tests", "-p", "no:anyio", "-p", "no:cacheprovider"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = 1
        try:
            code = pytest.main([*options, *(f"tests/{name}" for name in tests)])
        finally:  # at its end, pytest raises warnings about open files
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that the tests have left
    return status == 0


def survivors(worker: int, name: str, seconds: float) -> int:
    """Test the mutants of one worker; print those that pass the tests, and return their number."""
    folder = COPIES / str(worker)
    path = folder / "gpt_cli" / f"{name}.py"
    source = path.read_text()
    found = 0
    for number, mutant in enumerate(mutants(source)[worker::PROCESSES], 1):
        path.write_text(mutant)
        os.utime(path, (number, number))  # so that Python reuses no bytecode of another mutant
        if passes(folder, TESTS[name], seconds):
            found += 1
            lines = difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm="")
            print("\n    ".join(["", *list(lines)[2:]]).lstrip("\n"), flush=True)
    path.write_text(source)
    return found


def main(names: list[str]) -> int:
    """Test the named modules, or all of them; the exit code is 1 if a test fails unchanged."""
    settings.register_profile(  # as in conftest.py, without minimizing failures
        "mutants", derandomize=True, deadline=None, max_examples=20,
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    skipped = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
    for worker in range(PROCESSES):
        shutil.rmtree(COPIES / str(worker), ignore_errors=True)
        shutil.copytree(ROOT, COPIES / str(worker), ignore=skipped)
    gc.freeze()  # the forks collect garbage in half of the time
    for name in names or TESTS:
        began = time.perf_counter()
        if not passes(COPIES / "0", TESTS[name], 600):
            print(f"{name}: the tests fail without any mutant")
            return 1
        seconds = 10 + 3 * (time.perf_counter() - began)
        count = len(mutants((ROOT / "gpt_cli" / f"{name}.py").read_text()))
        with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
            shares = [(worker, name, seconds) for worker in range(PROCESSES)]
            killed = count - sum(pool.starmap(survivors, shares, chunksize=1))
        print(f"{name}: {count} mutants, {killed} killed, {killed / count:.1%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
