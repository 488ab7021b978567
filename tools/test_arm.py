"""Run the package on ARM, without a machine of that kind: `make test-arm`, on Debian.

The library is compiled for aarch64 by a cross compiler. An arm64 Python and what the package needs
are downloaded into build/arm, and run under qemu. Texts, log-probabilities and digests of the
bundled model must be those of this machine, at both levels of ARM processors. Then come the tests
of the kernels. Nothing is installed.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from tools.other_builds import BUILD, ROOT, copy_package

FOLDER = BUILD / "arm"
APT, SYSTEM, PACKAGES = FOLDER / "apt", FOLDER / "system", FOLDER / "packages"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
NEEDED = {  # programs, and the packages of Debian that have them
    COMPILER: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    EMULATOR: "qemu-user-static",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
LEVELS = {"neondot": "max", "neon": "cortex-a53"}  # and a processor that has no higher one
SYSTEM_PACKAGES = ["python3-minimal", "libpython3-stdlib", "libstdc++6"]
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)] + ["manylinux2014_aarch64"]
TEST_PACKAGES = ["pytest", "hypothesis"]
TESTS = ["tests/test_native.py", "tests/test_bits.py"]
APT_SETTINGS = f"""
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Install-Recommends "false";
Dir::State "{APT}";
Dir::State::status "{APT}/status";
Dir::Cache "{APT}";
"""


def main() -> None:
    """Compile, download, run and compare; then run the tests that are given, or the kernels'."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        packages = " ".join(NEEDED[name] for name in missing)
        sys.exit(f"test-arm: {', '.join(missing)} not found: on Debian, apt-get install {packages}")
    if not SYSTEM.exists():
        _download_system()
    if not PACKAGES.exists():
        _download_packages()
    copy_package(FOLDER, "linux_aarch64", [COMPILER])
    expected = dict(_results([sys.executable]))
    for level, processor in LEVELS.items():
        found = dict(_results(_python(processor), GPT_CLI_LEVEL=level))
        wrong = [name for name in expected if found[name] != expected[name]]
        for name in wrong:
            print(f"{level}: {name} differs:\n{found[name]}\n{expected[name]}")
        if wrong:
            sys.exit(1)
        print(f"{level}: as on this machine: {', '.join(expected)}", flush=True)
    pytest = ["-P", "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*_python(LEVELS["neondot"]), *pytest, *(sys.argv[1:] or TESTS)],
        cwd=ROOT,
        env=_variables(),
    )
    sys.exit(done.returncode)


def _python(processor: str) -> list[str]:
    """Return the command of the arm64 Python on a processor."""
    return [EMULATOR, "-cpu", processor, "-L", str(SYSTEM), str(SYSTEM / "usr/bin/python3")]


def _variables(**given: str) -> dict[str, str]:
    paths = os.pathsep.join(map(str, (FOLDER, PACKAGES)))
    return os.environ | {"PYTHONPATH": paths, "GPT_CLI_OPS": "native"} | given


def _results(python: Sequence[str], **given: str) -> Iterator[tuple[str, Any]]:
    """What a Python computes with the bundled model: texts with log-probabilities, digests."""
    variables = _variables(**given) if given else os.environ | {"GPT_CLI_OPS": "native"}

    def run(*arguments: str) -> dict[str, Any]:
        command = [*python, "-P", "-m", "gpt_cli", *arguments, "--json"]
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"test-arm: exit code {done.returncode} of {' '.join(command)}")
        return json.loads(done.stdout)

    for dtype in ("float32", "int8"):
        for name, options in (("greedy", ["--temperature", "0"]), ("drawn", [])):
            options += ["--dtype", dtype, "-n", "60", "-s", "1", "--logprobs", "3"]
            result = run("generate", "-m", "tiny", *options, "Once upon a time")
            yield f"{name} text in {dtype}", result | {"timing": None}
    for check in run("verify", "tiny")["checks"]:
        if check["digest"]:
            yield check["name"], check["digest"]


def _download_system() -> None:
    """Download and unpack a Python for arm64 and its libraries, from where this machine has its."""
    for folder in ("lists/partial", "archives/partial"):
        (APT / folder).mkdir(parents=True, exist_ok=True)
    (APT / "status").touch()  # nothing is installed there
    (APT / "settings").write_text(APT_SETTINGS)
    for arguments in (["update"], ["install", "--yes", "--download-only", *SYSTEM_PACKAGES]):
        command = ["apt-get", "--quiet=2", *arguments]
        subprocess.run(command, env=os.environ | {"APT_CONFIG": str(APT / "settings")}, check=True)
    unpacked = FOLDER / "system.part"
    shutil.rmtree(unpacked, ignore_errors=True)
    for archive in (APT / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", archive, unpacked], check=True)
    unpacked.rename(SYSTEM)
    shutil.rmtree(APT)


def _download_packages() -> None:
    """Download and unpack what the package and its tests need, for the Python of arm64."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = (SYSTEM / "usr/bin/python3").readlink().name.removeprefix("python")
    unpacked = FOLDER / "packages.part"
    shutil.rmtree(unpacked, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
    command += [f"--target={unpacked}", "--only-binary=:all:", f"--python-version={python}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([*command, *project["dependencies"], *TEST_PACKAGES], check=True)
    unpacked.rename(PACKAGES)


if __name__ == "__main__":
    main()
