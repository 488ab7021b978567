"""Change one detail of the C code at a time, and report the changes that no test notices.

    python -m tools.mutants_c [COUNT]

COUNT mutants (20 by default) are drawn from kernels.c and pack.c. Each is compiled into a copy of
the package, for the highest processor level, and the tests of the compiled operations run there, up
to the first that fails.
"""

import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Iterator

import hatch_build
from gpt_cli.ops import bindings
from tools.other_builds import BUILD, ROOT, copy_package

FOLDER = BUILD / "mutants_c"
SOURCES = ("kernels.c", "pack.c")
TESTS = [f"tests/ops/test_native_{topic}.py" for topic in ("products", "attention", "rows")]
PLATFORM = f"linux_{platform.machine()}"
COMPILER = ["cc"]
SECONDS = 300  # that the tests may take
SEED = 1

# Comments, texts and preprocessor lines are not changed.
SKIPPED = re.compile(r'/\*.*?\*/|"[^"]*"|^#.*?$', re.DOTALL | re.MULTILINE)
CHANGES = {
    " + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ",
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ",
    " && ": " || ", " || ": " && ", " += ": " -= ", " |= ": " &= ", "smaller(": "larger(",
}  # fmt: skip
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the position, the old text and the new text of each change."""
    skipped = {at for match in SKIPPED.finditer(source) for at in range(*match.span())}
    for old, new in CHANGES.items():
        for match in re.finditer(re.escape(old), source):
            if match.start() not in skipped:
                yield match.start(), old, new
    for match in NUMBER.finditer(source):
        if match.start() not in skipped:
            yield match.start(), match[0], str(int(match[0]) + 1)


class Build:
    """A copy of the package; its library is linked of objects, only one of them recompiled."""

    def __init__(self) -> None:
        copy_package(FOLDER, PLATFORM, COMPILER, "-O1")
        self._native = FOLDER / hatch_build.NATIVE
        levels = next(
            found for name, found in hatch_build.LEVELS.items() if PLATFORM.endswith(name)
        )
        kernels = str(self._native / "kernels.c")
        self._sources = {
            path.stem: [str(path)] for path in self._native.glob("*.c") if path.stem != "kernels"
        }
        for name, flags in levels.items():
            self._sources[name] = [kernels, f"-DLEVEL={name}", *flags.split()]
        self._highest = bindings.levels()[0]
        for name in self._sources:
            self._compile(name)

    def _compile(self, name: str) -> bool:
        flags = hatch_build.FLAGS.replace("-O3", "-O1").split()
        command = [*COMPILER, *flags, "-c", *self._sources[name], "-o", str(FOLDER / f"{name}.o")]
        return subprocess.run(command, capture_output=True).returncode == 0

    def kills(self, file: str, mutant: str) -> bool:
        """Return whether a changed file does not compile, or fails a test."""
        path, name = self._native / file, "pack" if file == "pack.c" else self._highest
        source = path.read_text()
        path.write_text(mutant)
        compiled = self._compile(name)
        path.write_text(source)
        passed = compiled and self._passes()
        self._compile(name)
        return not passed

    def _passes(self) -> bool:
        library = self._native / hatch_build.LIBRARIES["linux"]
        library.unlink()
        objects = [str(FOLDER / f"{name}.o") for name in self._sources]
        link = [*COMPILER, "-shared", *objects, "-o", str(library), "-pthread", "-lm"]
        subprocess.run(link, check=True)
        env = os.environ | {"PYTHONPATH": str(FOLDER), "GPT_CLI_OPS": "native"}
        pytest = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            command = [*pytest, *TESTS]
            tests = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
        return tests.returncode == 0


def main(count: int) -> int:
    """Test a sample of the mutants; print those that pass, and how many do not."""
    build = Build()
    if not build._passes():
        print("the tests fail without any mutant")
        return 1
    texts = {file: (ROOT / hatch_build.NATIVE / file).read_text() for file in SOURCES}
    changes = [(file, *change) for file in SOURCES for change in mutants(texts[file])]
    sample, killed = random.Random(SEED).sample(changes, min(count, len(changes))), 0
    for file, start, old, new in sample:
        text = texts[file]
        is_killed = build.kills(file, text[:start] + new + text[start + len(old) :])
        killed += is_killed
        line = text.count("\n", 0, start)
        word = "killed" if is_killed else "PASSES"
        print(
            f"{word} {file}:{line + 1}: {old!r} -> {new!r}: {text.splitlines()[line].strip()}",
            flush=True,
        )
    print(f"{len(changes)} mutants, {len(sample)} tested, {killed} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 20))
