"""Run the C code under sanitizers: `make sanitize`. It needs Linux and GCC with its sanitizers.

First run the test of the thread pool, alone and beside two busy processes per core. Then run the
kernels' Python tests in a copy of the package, under ThreadSanitizer and under AddressSanitizer
with UndefinedBehaviorSanitizer. ASan fills fresh memory with 0xff, which is NaN in
floats, so that a result that depends on uninitialized memory shows.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

from tools.other_builds import BUILD, ROOT, copy_package

FOLDER = BUILD / "sanitize"
SECONDS = 20  # per run of the pool test
TESTS = [
    *(f"ops/test_native_{topic}.py" for topic in ("products", "attention", "rows", "pool")),
    *("gpt2/test_bits.py", "generation/test_drafts.py"),
]

# The sanitizers for the kernels: the library to preload, and arguments for pytest.
KERNELS = {
    "thread": ("libtsan.so", []),
    "address,undefined": ("libasan.so", ["-p", "guarded_memory"]),
}
OPTIONS = {
    # The tests start threads after a fork.
    "TSAN_OPTIONS": "die_after_fork=0:halt_on_error=1",
    # Python itself leaks memory.
    "ASAN_OPTIONS": f"detect_leaks=0:max_malloc_fill_size={2**31 - 1}:malloc_fill_byte=255",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
FLAGS = ["-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


def main() -> None:
    """Run everything; arguments replace the kernels' tests for pytest."""
    if sys.platform != "linux":
        sys.exit("sanitize: only on Linux")
    gcc = os.environ.get("CC", "gcc")
    FOLDER.mkdir(parents=True, exist_ok=True)
    preloaded = {name: _library(gcc, name) for name, _ in KERNELS.values()}
    # The sanitizers find it only if it is preloaded.
    cpp = _library(gcc, "libstdc++.so.6")
    for sanitizer in ("thread", "undefined"):
        _test_pool(gcc, sanitizer)
    for sanitizer, (name, more) in KERNELS.items():
        _test_kernels(gcc, sanitizer, f"{preloaded[name]} {cpp}", more)


def _test_pool(gcc: str, sanitizer: str) -> None:
    """Compile the pool test with a sanitizer; run it alone and beside busy processes."""
    program = FOLDER / f"pool_test_{sanitizer}"
    sources = ["tests/native/pool_test.c", "gpt_cli/ops/native/system.c"]  # pool.c is in the first
    flags = ["-std=c11", "-O2", *FLAGS, f"-fsanitize={sanitizer}", "-Igpt_cli/ops/native"]
    _run([gcc, *flags, *sources, "-o", str(program), "-pthread"])
    for busy in (0, 2 * len(os.sched_getaffinity(0))):
        print(f"pool test with -fsanitize={sanitizer}, {busy} busy processes", flush=True)
        _run([str(program), str(SECONDS), str(busy)])


def _test_kernels(gcc: str, sanitizer: str, preloaded: str, more: list[str]) -> None:
    """Compile the library with a sanitizer, and run the tests."""
    print(f"kernel tests with -fsanitize={sanitizer}", flush=True)
    # With -O3, the checks in the unrolled loops take minutes to compile.
    compiler = [gcc, *FLAGS, f"-fsanitize={sanitizer}"]
    copy_package(FOLDER, f"linux_{platform.machine()}", compiler, "-O1")
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, (FOLDER, ROOT / "tests" / "native"))),
        "PYTHONMALLOC": "malloc",  # Python's own allocator would hide buffer overflows
        "GPT_CLI_OPS": "native",
        "LD_PRELOAD": preloaded,
    }
    # --capture=sys: pytest must not swallow the report of a sanitizer that ends the process.
    pytest = ["pytest", "-p", "no:cacheprovider", "--capture=sys", *more]
    arguments = sys.argv[1:] or [str(Path("tests", name)) for name in TESTS]
    _run([sys.executable, "-P", "-m", *pytest, *arguments], given)


def _library(gcc: str, name: str) -> str:
    """Return the path of one of GCC's libraries."""
    try:
        asked = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"sanitize: {gcc}: {error.strerror}")
    path = Path(asked.stdout.strip())
    if not path.is_absolute():
        sys.exit(f"sanitize: {gcc} has no {name}: install GCC with its sanitizers")
    return str(path.resolve())


def _run(command: list[str], given: dict[str, str] | None = None) -> None:
    """Run a command; exit with its exit code if that is not 0."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | OPTIONS | (given or {}))
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
