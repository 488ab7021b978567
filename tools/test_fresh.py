"""Test the package on fresh Debian systems: `make test-fresh`, as root on Debian.

debootstrap installs the present stable release and the next one into build/fresh, each once without
and once with a C compiler; without one, pip brings zig. There, a user without rights runs
`make demo` and `make test` in a clone of the last commit, and the library must compute; then pipx
and uv install the wheel of each release in the other one.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "fresh"
RELEASES = ["stable", "testing"]
PACKAGES = ["python3", "python3-venv", "make", "ca-certificates"]
COMPILER = ["gcc", "libc6-dev"]
NEEDED = {  # programs, and their Debian packages
    "debootstrap": "debootstrap",
    "git": "git",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
USER = "fresh"
HOME = f"home/{USER}"
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
# How to reach the network differs between machines: each system gets these of this machine.
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
NETWORK_FILES = ["etc/hosts", "etc/resolv.conf", CERTIFICATES]
NETWORK_VARIABLES = ["http_proxy", "https_proxy", "no_proxy"]
# Mounts and processes are in namespaces, which end with this program, however it ends.
ISOLATED = ["setpriv", "--pdeathsig=KILL"]
ISOLATED += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# The shell stays as process 1, to collect the processes that others leave.
INSIDE = ["sh", "-ec"]
INSIDE += [
    """
mount -t proc proc "$0/proc"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$0/dev/pts"
mount -t tmpfs -o mode=1777 shm "$0/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$0/tmp"
nice chroot "--userspec=$1" "$0" sh -ec "cd ~; $2" || exit
"""
]
LAST_LINES = 30  # of the output of a step that fails
GENERATE = 'GPT_CLI_OPS=native .local/bin/gpt-cli generate -m tiny -n 20 "Once upon a time"'
INSTALLERS = {"pipx": "pipx install --quiet --force", "uv": "uv tool install --quiet --force"}


def main() -> None:
    """Run all steps; with --quick, all but `make test`. Exit with 1 if one failed."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        packages = " ".join(NEEDED[name] for name in missing)
        sys.exit(f"test-fresh: {', '.join(missing)} not found: apt-get install {packages}")
    if os.getuid() != 0:
        sys.exit("test-fresh: debootstrap and chroot need root: run it as root")
    plain = {release: System(release, compiles=False) for release in RELEASES}
    compiling = {release: System(release, compiles=True) for release in RELEASES}
    systems = [*plain.values(), *compiling.values()]
    for system in systems:
        system.install()
        system.clone()
    passed = [system.make("demo") for system in systems]
    for release, other in (RELEASES, RELEASES[::-1]):
        passed += [compiling[release].make("wheel")]
        passed += plain[other].install_wheel_of(compiling[release])
    if sys.argv[1:] != ["--quick"]:
        passed += [system.make("test") for system in systems]
    failures = passed.count(False)
    sys.exit(f"test-fresh: {failures} of {len(passed)} steps failed" if failures else 0)


class System:
    """A Debian system in a folder."""

    def __init__(self, release: str, *, compiles: bool) -> None:
        self.release, self.compiles = release, compiles
        self.name = f"{release}-gcc" if compiles else release
        self.folder = FOLDER / self.name

    def install(self) -> None:
        """Install the system, unless an earlier run did; let it reach the network."""
        if not self.folder.exists():
            archives, unpacked = FOLDER / "archives", FOLDER / f"{self.name}.part"
            archives.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unpacked, ignore_errors=True)
            packages = ",".join(PACKAGES + (COMPILER if self.compiles else []))
            options = ["--variant=minbase", f"--include={packages}", f"--cache-dir={archives}"]
            command = ["debootstrap", *options, self.release, str(unpacked), _mirror()]
            if not _step(f"{self.name}: debootstrap", command):
                sys.exit(1)
            command = ["chroot", str(unpacked), "useradd", "--create-home", USER]
            subprocess.run(command, check=True)
            unpacked.rename(self.folder)
        for file in NETWORK_FILES:
            shutil.copy(Path("/", file), self.folder / file)

    def clone(self) -> None:
        """Empty the user's folder, and unpack the last commit into it."""
        home = self.folder / HOME
        shutil.rmtree(home)
        home.mkdir()
        pack = ["git", "archive", "--prefix=gpt-cli/", "HEAD"]
        unpack = ["tar", "--extract"]
        give = ["chroot", str(self.folder), "chown", "--recursive", f"{USER}:", f"/{HOME}"]
        with subprocess.Popen(pack, cwd=ROOT, stdout=subprocess.PIPE) as archive:
            subprocess.run(unpack, cwd=home, stdin=archive.stdout, check=True)
        subprocess.run(give, check=True)

    def make(self, target: str) -> bool:
        """Make a target in the clone; the kernels in C must compute."""
        expected = "" if target == "wheel" else "computed by native"
        return self.run(f"make {target}", f"make -C gpt-cli {target}", expected)

    def install_wheel_of(self, builder: "System") -> list[bool]:
        """Install the wheel that another system made, and generate text."""
        for wheel in (builder.folder / HOME / "gpt-cli" / "dist").glob("*.whl"):
            shutil.copy(wheel, self.folder / HOME)
        install = "python3 -m venv tools; tools/bin/pip install --quiet pipx uv"
        passed = [self.run("pip install pipx uv", install)]
        for name, command in INSTALLERS.items():
            step = f"{name}, the wheel of {builder.name}"
            passed += [self.run(step, f"tools/bin/{command} ./*.whl; {GENERATE}")]
        return passed

    def run(self, step: str, command: str, expected: str = "") -> bool:
        """Run a shell command as the user; return whether it passed and printed what it should."""
        return _step(f"{self.name}: {step}", [*INSIDE, str(self.folder), USER, command], expected)


def _step(name: str, command: list[str], expected: str = "") -> bool:
    """Run a command in its own namespaces; print its time and, if it fails, its last lines."""
    started = time.monotonic()
    log = FOLDER / "logs" / f"{name.translate(str.maketrans(': ,', '___'))}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        output = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        done = subprocess.run([*ISOLATED, *command], env=_environment(), **output)
    text = log.read_text(errors="replace")
    passed = done.returncode == 0 and expected in text
    seconds = time.monotonic() - started
    print(f"{'passed' if passed else 'FAILED'} {seconds:4.0f} s  {name}", flush=True)
    if not passed:
        print(*text.splitlines()[-LAST_LINES:], f"(all lines: {log})", sep="\n", flush=True)
    return passed


def _environment() -> dict[str, str]:
    """Return the environment of a fresh machine, and this machine's package index and proxy."""
    network = {name: os.environ[name] for name in NETWORK_VARIABLES if name in os.environ}
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if index := os.environ.get("PIP_INDEX_URL", index):
        network |= {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index}
    return network | {"HOME": f"/{HOME}", "PATH": PATH, "SSL_CERT_FILE": f"/{CERTIFICATES}"}


def _mirror() -> str:
    """Return the address of Debian's archive in the apt sources of this machine."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    command += ["Created-By: Packages", "Label: Debian"]
    addresses = subprocess.run(command, capture_output=True, text=True).stdout.split()
    if not addresses:
        sys.exit("test-fresh: no archive of Debian in the apt sources: run apt-get update")
    return addresses[0]


if __name__ == "__main__":
    main()
