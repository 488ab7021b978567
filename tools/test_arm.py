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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
PROCESSORS = {"max": "neondot", "cortex-a53": "neon"}  # for the emulator, and their levels
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
    here = Python([sys.executable])
    expected = here.texts() | here.digests()
    for processor, level in PROCESSORS.items():
        arm = Python.for_arm(processor)
        if arm.level() != level:
            sys.exit(f"test-arm: {processor} computes at the level {arm.level()}, not {level}")
        # `verify` compares all levels of a processor.
        found = arm.texts() | (arm.digests() if level == "neondot" else {})
        for name in found:
            if found[name] != expected[name]:
                sys.exit(f"{level}: {name} differs\nARM:  {found[name]}\nhere: {expected[name]}")
        print(f"{level}: the same as on this machine: {', '.join(found)}", flush=True)
    pytest, tests = ["-m", "pytest", "-p", "no:cacheprovider"], sys.argv[1:] or TESTS
    sys.exit(Python.for_arm("max").run(*pytest, *tests).returncode)


@dataclass
class Python:
    """A Python that has the package."""

    command: list[str]
    folders: Sequence[Path] = ()  # where it finds the package and others

    @classmethod
    def for_arm(cls, processor: str) -> Self:
        """Return the arm64 Python on a processor."""
        python = [EMULATOR, "-cpu", processor, "-L", str(SYSTEM), str(SYSTEM / "usr/bin/python3")]
        return cls(python, [FOLDER, PACKAGES])

    def run(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run it with arguments."""
        given = {"GPT_CLI_OPS": "native"}
        if self.folders:
            given["PYTHONPATH"] = os.pathsep.join(map(str, self.folders))
        # Not what lies in this folder: -P.
        command = [*self.command, "-P", *arguments]
        return subprocess.run(command, cwd=ROOT, env=os.environ | given, text=True, **how)

    def _json(self, *arguments: str) -> Any:
        """Return what a command of the package prints."""
        done = self.run("-m", "gpt_cli", *arguments, "--json", stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"test-arm: exit code {done.returncode} of {' '.join(done.args)}")
        return json.loads(done.stdout)

    def texts(self) -> dict[str, Any]:
        """Return texts of the bundled model, with log-probabilities."""
        texts = {}
        for dtype in ("float32", "int8"):
            for name, temperature in (("greedy", "0"), ("drawn", "1")):
                options = ["--dtype", dtype, "--temperature", temperature, "-s", "1", "-n", "60"]
                options += ["--logprobs", "3", "Once upon a time"]
                found = self._json("generate", "-m", "tiny", *options)
                texts[f"a {name} text in {dtype}"] = found | {"timing": None}
        return texts

    def digests(self) -> dict[str, Any]:
        """Return the digests of the logits of the bundled model."""
        checks = self._json("verify", "tiny")["checks"]
        return {check["name"]: check["digest"] for check in checks if check["digest"]}

    def level(self) -> str:
        """Return the level that the package chooses."""
        code = "from gpt_cli.ops.bindings import choose_level; print(choose_level())"
        return self.run("-c", code, stdout=subprocess.PIPE).stdout.strip()


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
        command = ["dpkg-deb", "--extract", str(archive), str(unpacked)]
        subprocess.run(command, check=True)
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
