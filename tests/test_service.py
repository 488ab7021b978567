"""docs/service.md: the units, the compose file and the flags in them are valid."""

import re
import shutil
import subprocess

import pytest

from gpt_cli.errors import CheckpointError, InputError, ModelNotFoundError
from support.in_process import run_here
from support.service_page import PAGE, shown_files

FILES = shown_files()


def test_the_page_shows_these_files():
    units = {"gpt-cli.socket", "gpt-cli.service", "gpt-cli@.service"}
    assert FILES.keys() == units | {"gpt-cli.conf", "compose.yaml"}


def test_every_flag_of_a_server_exists():
    lines = re.findall(r"(?:gpt-cli serve|command: serve) (.*)", PAGE.read_text("utf-8"))
    flags = {word for line in lines for word in line.split() if word.startswith("-")}
    assert {"--api-key-file", "--trusted-proxy", "--grace"} <= flags
    known = run_here("serve", "--help", COLUMNS="200")[0].decode()
    assert [flag for flag in flags if not re.search(rf"{flag}\b", known)] == []


def test_systemd_and_docker_wait_longer_than_the_grace():
    for name in ("gpt-cli.service", "gpt-cli@.service", "compose.yaml"):
        (grace,) = map(int, re.findall(r"--grace (\d+)", FILES[name]))
        (limit,) = map(
            int, re.findall(r"(?:TimeoutStopSec=|stop_grace_period: )(\d+)", FILES[name])
        )
        assert limit > grace + 5


def test_systemd_does_not_restart_what_cannot_start():
    never = {error.exit_code for error in (InputError, ModelNotFoundError, CheckpointError)}
    for name in ("gpt-cli.service", "gpt-cli@.service"):
        (codes,) = re.findall(r"RestartPreventExitStatus=(.*)", FILES[name])
        assert {*map(int, codes.split())} == never


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_knows_the_lines_of_the_units(tmp_path):
    for name, text in FILES.items():
        if name.startswith("gpt-cli") and "conf" not in name:
            # It must be there; the template needs an instance.
            text = text.replace("/opt/gpt-cli/bin/gpt-cli", "/bin/true")
            (tmp_path / name.replace("@", "@8001")).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(tmp_path.iterdir()))]
    finished = subprocess.run(command, capture_output=True, text=True)
    ours = [line for line in finished.stderr.splitlines() if "gpt-cli" in line]
    assert (finished.returncode, ours) == (0, [])
