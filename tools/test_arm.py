"""Test the package on emulated ARM: `make test-arm`, on Debian.

A cross compiler builds the library for aarch64. An arm64 Python and the package's dependencies are
downloaded into build/arm and run under qemu; nothing is installed. Hashes of what each operation
returns, and texts, log-probabilities, compressed files and digests of the bundled model must equal
those of this machine, at both ARM levels. Then the kernels' tests run.
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

from hatch_build import LIBRARIES, NATIVE
from tools.other_builds import BUILD, ROOT, copy_package
from tools.test_systems import check, compile_driver

FOLDER = BUILD / "arm"
APT, SYSTEM, PACKAGES = FOLDER / "apt", FOLDER / "system", FOLDER / "packages"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
NEEDED = {  # programs, and their Debian packages
    COMPILER: "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    EMULATOR: "qemu-user-static",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
# Models of CPUs, and their levels, the highest first.
PROCESSORS = {"max": ["neondot", "neon"], "cortex-a53": ["neon"]}
SYSTEM_PACKAGES = ["python3-minimal", "libpython3-stdlib", "libstdc++6"]
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in (28, 27, 17)] + ["manylinux2014_aarch64"]
TEST_PACKAGES = ["pytest", "hypothesis"]
TESTS = [
    *(f"tests/ops/test_native_{topic}.py" for topic in ("products", "attention", "rows", "pool")),
    *("tests/gpt2/test_bits.py", "tests/generation/test_drafts.py"),
]
APT_SETTINGS = f"""
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Install-Recommends "false";
Dir::State "{APT}";
Dir::State::status "{APT}/status";
Dir::Cache "{APT}";
"""


def main() -> None:
    """Download, compile, run and compare; then run the given tests, or the kernels'."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        packages = " ".join(NEEDED[name] for name in missing)
        sys.exit(f"test-arm: {', '.join(missing)} not found: on Debian, apt-get install {packages}")
    if not SYSTEM.exists():
        _download_system()
    if not PACKAGES.exists():
        _download_packages()
    copy_package(FOLDER, "linux_aarch64", [COMPILER])
    driver, library = FOLDER / "driver", FOLDER / NATIVE / LIBRARIES["linux"]
    compile_driver([COMPILER], driver, "-ldl")
    for processor, levels in PROCESSORS.items():
        check(f"ARM ({processor})", [*emulated(processor), str(driver), str(library)], levels)
    here = Python([sys.executable])
    expected = here.texts() | here.digests() | here.compressed()
    for processor, (level, *_) in PROCESSORS.items():
        arm = Python.for_arm(processor)
        if arm.level() != level:
            sys.exit(f"test-arm: {processor} uses the level {arm.level()}, not {level}")
        # `verify` covers all levels of a processor, so run it once.
        found = arm.texts() | arm.compressed()
        if level == "neondot":
            found |= arm.digests()
        for name in found:
            if found[name] != expected[name]:
                sys.exit(f"{level}: {name} differs\nARM:  {found[name]}\nhere: {expected[name]}")
        print(f"{level}: same as on this machine: {', '.join(found)}", flush=True)
    pytest, tests = ["-m", "pytest", "-p", "no:cacheprovider"], sys.argv[1:] or TESTS
    sys.exit(Python.for_arm("max").run(*pytest, *tests).returncode)


def emulated(processor: str) -> list[str]:
    """Return the start of a command that runs an arm64 program on an emulated processor."""
    return [EMULATOR, "-cpu", processor, "-L", str(SYSTEM)]


@dataclass
class Python:
    """A Python interpreter that can import the package."""

    command: list[str]
    folders: Sequence[Path] = ()  # for PYTHONPATH

    @classmethod
    def for_arm(cls, processor: str) -> Self:
        """Return the arm64 Python on an emulated processor."""
        python = [*emulated(processor), str(SYSTEM / "usr/bin/python3")]
        return cls(python, [FOLDER, PACKAGES])

    def run(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[Any]:
        """Run the interpreter with arguments."""
        given = {"GPT_CLI_OPS": "native"}
        if self.folders:
            given["PYTHONPATH"] = os.pathsep.join(map(str, self.folders))
        # -P: do not import from the working directory.
        command = [*self.command, "-P", *arguments]
        how = {"text": True} | how
        return subprocess.run(command, cwd=ROOT, env=os.environ | given, **how)

    def _json(self, *arguments: str) -> Any:
        """Run a command of the package; return its JSON output."""
        done = self.run("-m", "gpt_cli", *arguments, "--json", stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"test-arm: exit code {done.returncode}: {' '.join(done.args)}")
        return json.loads(done.stdout)

    def texts(self) -> dict[str, Any]:
        """Return texts by the bundled model, with log-probabilities."""
        texts = {}
        for dtype in ("float32", "int8"):
            for name, temperature in (("greedy", "0"), ("drawn", "1")):
                options = ["--dtype", dtype, "--temperature", temperature, "-s", "1", "-n", "60"]
                options += ["--logprobs", "3", "Once upon a time"]
                found = self._json("generate", "-m", "tiny", *options)
                texts[f"a {name} text in {dtype}"] = found | {"timing": None}
        return texts

    def digests(self) -> dict[str, Any]:
        """Return the digests of the bundled model's logits."""
        checks = self._json("verify", "tiny")["checks"]
        return {check["name"]: check["digest"] for check in checks if check["digest"]}

    def compressed(self) -> dict[str, Any]:
        """Return files that `compress` writes with the bundled model, once they were read again."""
        data, found = (ROOT / "README.md").read_bytes()[:2000] + bytes(range(256)), {}
        for dtype in ("float32", "int8"):
            options = ["-m", "tiny", "--dtype", dtype, "--segment", "200"]
            file = self.pipe(data, "compress", *options)
            if self.pipe(file, "decompress", "-m", "tiny") != data:
                sys.exit("test-arm: decompress does not return what was compressed")
            found[f"a compressed file in {dtype}"] = file.hex()
        return found

    def pipe(self, data: bytes, *arguments: str) -> bytes:
        """Return what a command of the package makes of data."""
        how = {"input": data, "text": False, "stdout": subprocess.PIPE, "check": True}
        return self.run("-m", "gpt_cli", *arguments, **how).stdout

    def level(self) -> str:
        """Return the level that the package selects."""
        code = "from gpt_cli.ops.bindings import choose_level; print(choose_level())"
        return self.run("-c", code, stdout=subprocess.PIPE).stdout.strip()


def _download_system() -> None:
    """Download and unpack an arm64 Python and its libraries, from this machine's apt sources."""
    for folder in ("lists/partial", "archives/partial"):
        (APT / folder).mkdir(parents=True, exist_ok=True)
    (APT / "status").touch()  # no package is installed there
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
    """Download and unpack the dependencies of the package and its tests, for arm64."""
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
