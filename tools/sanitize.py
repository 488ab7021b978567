"""Run the C code under sanitizers: `make sanitize`. It needs GCC with its sanitizers, on Linux.

First the test of the thread pool, alone and beside twice as many busy processes as there are cores.
Then the tests of the kernels, by Python, in a copy of the package: under ThreadSanitizer, and under
AddressSanitizer and UndefinedBehaviorSanitizer. There, fresh memory is filled with 0xff, so that
floats are NaN in it and a result that depends on what was never written is seen.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

from tools.other_builds import BUILD, ROOT, copy_package

FOLDER = BUILD / "sanitize"
SECONDS = 20  # for the pool, each time
TESTS = ["test_native.py", "test_bits.py"]

# What the kernels are tested under: the library that is preloaded, and more for pytest.
KERNELS = {
    "thread": ("libtsan.so", []),
    "address,undefined": ("libasan.so", ["-p", "guarded_memory"]),
}
OPTIONS = {
    # Threads that are started after a fork are what is tested.
    "TSAN_OPTIONS": "die_after_fork=0:halt_on_error=1",
    # Python itself leaks.
    "ASAN_OPTIONS": f"detect_leaks=0:max_malloc_fill_size={2**31 - 1}:malloc_fill_byte=255",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
FLAGS = ["-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]


def main() -> None:
    """Run everything; arguments are for pytest, in place of the kernels' tests."""
    if sys.platform != "linux":
        sys.exit("sanitize: only on Linux")
    gcc = os.environ.get("CC", "gcc")
    FOLDER.mkdir(parents=True, exist_ok=True)
    preloaded = {name: _library(gcc, name) for name, _ in KERNELS.values()}
    # Found by the sanitizers only if it is loaded before Python is.
    cpp = _library(gcc, "libstdc++.so.6")
    for sanitizer in ("thread", "undefined"):
        _test_pool(gcc, sanitizer)
    for sanitizer, (name, more) in KERNELS.items():
        _test_kernels(gcc, sanitizer, f"{preloaded[name]} {cpp}", more)


def _test_pool(gcc: str, sanitizer: str) -> None:
    """Compile the test of the pool with a sanitizer, and run it in quiet and beside others."""
    program = FOLDER / f"pool_test_{sanitizer}"
    source = ROOT / "tests" / "native" / "pool_test.c"
    flags = ["-std=c11", "-O2", *FLAGS, f"-fsanitize={sanitizer}", "-Igpt_cli/ops/native"]
    _run([gcc, *flags, str(source), "-o", str(program), "-pthread"])
    for busy in (0, 2 * len(os.sched_getaffinity(0))):
        print(f"the pool under -fsanitize={sanitizer} beside {busy} busy processes", flush=True)
        _run([str(program), str(SECONDS), str(busy)])


def _test_kernels(gcc: str, sanitizer: str, preloaded: str, more: list[str]) -> None:
    """Compile the library with a sanitizer, and run the tests with it."""
    print(f"the kernels under -fsanitize={sanitizer}", flush=True)
    # -O3 takes minutes with so many checks in the unrolled loops.
    compiler = [gcc, *FLAGS, f"-fsanitize={sanitizer}"]
    copy_package(FOLDER, f"linux_{platform.machine()}", compiler, "-O1")
    given = {
        "PYTHONPATH": os.pathsep.join(map(str, (FOLDER, ROOT / "tests" / "native"))),
        "PYTHONMALLOC": "malloc",  # Python's own allocator would hide where its memory ends
        "GPT_CLI_OPS": "native",
        "LD_PRELOAD": preloaded,
    }
    # What a sanitizer prints when it ends the process must not be kept by pytest: --capture=sys.
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
        sys.exit(f"sanitize: {gcc} has no {name}: take GCC with its sanitizers")
    return str(path.resolve())


def _run(command: list[str], given: dict[str, str] | None = None) -> None:
    """Run a command; end with its exit code if that is not 0."""
    done = subprocess.run(command, cwd=ROOT, env=os.environ | OPTIONS | (given or {}))
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
