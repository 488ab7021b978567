"""Change one detail of a module at a time, and report the changes that no test notices.

    python -m tools.mutants [MODULE ...]

The mutation operators are mutmut's. Each mutant runs in a fork, in a copy of this folder below
build/mutants: commands that a test starts see the mutant, too.
"""

import contextlib
import difflib
import itertools
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

import fsspec  # noqa: F401  these imports make the forks start fast
import huggingface_hub  # noqa: F401
import hypothesis.extra.numpy  # noqa: F401
import libcst as cst
import numpy as np  # noqa: F401
import pytest
import rich  # noqa: F401
import tiktoken  # noqa: F401
import typer  # noqa: F401
from hypothesis import Phase, settings
from mutmut.mutation.mutators import mutation_operators

# The tests that concern each module, the fastest first: a mutant ends at the first that fails.
TESTS = {
    "sampling": ["test_sampling.py"],
    "generate": ["test_engine.py", "test_generate.py"],
    "score": ["test_score.py"],
    "kv_cache": ["test_kv_cache.py"],
    "tokenizer": ["test_tokenizer.py"],
    "checkpoint": ["test_checkpoint.py", "test_model.py", "test_quantize.py"],
    "config": ["test_config.py"],
}

ROOT = Path(__file__).parents[1]
COPIES = ROOT / "build" / "mutants"
PROCESSES = 2
MEMORY = 8 << 30  # bytes of address space; a mutant must not take all of the machine's
PROSE = re.compile(r"\w+ [\w-]+ \w+")  # three words: a text for people
CALLS = {"len", "isinstance", "check"}  # a mutated argument fails always, or is a message
# Mutations that change nothing: the last axis of a matrix is its axis 1, and lengths do agree.
SAME = re.compile(r"axis=\+1|shape\[\+1\]|strict=(None|False)")


def is_skipped(node: cst.CSTNode) -> bool:
    """Return whether a node only has text for people, or types."""
    match node:
        case cst.Raise() | cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom():
            return True
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True  # a docstring
        case cst.SimpleString(value=text):
            return bool(PROSE.search(text))
        case cst.Assign(value=cst.Call(func=cst.Name(value="TypeVar"))):
            return True
        case cst.Assign(value=cst.SimpleString(value=text)):
            return bool(PROSE.search(text))
        case cst.AnnAssign(annotation=cst.Annotation(annotation=cst.Name(value="TypeAlias"))):
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
    return list(found)


def passes(folder: Path, tests: list[str], seconds: float) -> bool:
    """Run tests in a fork, up to the first that fails."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.alarm(int(seconds))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        os.chdir(folder)
        Path("build").mkdir(exist_ok=True)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        # Either way to compute shows a mutant of a module above `ops`; the library is faster.
        options = ["-x", "-k", "not numpy", "-p", "no:cacheprovider", "--basetemp", "build/tests"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        options += ["--hypothesis-profile", "mutants"]
        os._exit(pytest.main([*options, *(f"tests/{name}" for name in tests)]))
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests may have left
    return status == 0


def survivors(worker: int, name: str, some: list[tuple[int, str]], seconds: float) -> list[int]:
    """Return the numbers of the mutants that pass the tests."""
    folder = COPIES / str(worker)
    path = folder / "gpt_cli" / f"{name}.py"
    source = path.read_text()
    found = []
    for number, mutant in some:
        path.write_text(mutant)
        os.utime(path, (number, number))  # so that no bytecode of another mutant is taken for it
        if passes(folder, TESTS[name], seconds):
            found.append(number)
    path.write_text(source)
    return found


def diff(source: str, mutant: str) -> str:
    """Return the changed lines, with their numbers."""
    lines = difflib.unified_diff(source.splitlines(), mutant.splitlines(), n=0, lineterm="")
    return "\n".join("    " + line for line in list(lines)[2:])


def main(names: list[str]) -> int:
    """Test the named modules, or all of them; the exit code is 1 if a test fails unchanged."""
    settings.register_profile(  # as in conftest.py, but a failure is not made smaller
        "mutants", derandomize=True, deadline=None, max_examples=50,
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    skipped = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
    for worker in range(PROCESSES):
        shutil.rmtree(COPIES / str(worker), ignore_errors=True)
        shutil.copytree(ROOT, COPIES / str(worker), ignore=skipped)
    for name in names or TESTS:
        began = time.perf_counter()
        if not passes(COPIES / "0", TESTS[name], 600):
            print(f"{name}: the tests fail without any mutant")
            return 1
        seconds = 20 + 5 * (time.perf_counter() - began)
        source = (ROOT / "gpt_cli" / f"{name}.py").read_text()
        made = list(enumerate(mutants(source), 1))
        tasks = [(worker, name, made[worker::PROCESSES], seconds) for worker in range(PROCESSES)]
        with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
            left = sorted(itertools.chain(*pool.starmap(survivors, tasks, chunksize=1)))
        killed = len(made) - len(left)
        print(f"{name}: {len(made)} mutants, {killed} killed, {killed / len(made):.1%}")
        for number in left:
            print(diff(source, made[number - 1][1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
