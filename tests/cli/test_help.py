"""The layout of `--help`, and its examples in a shell."""

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from gpt_cli.cli import app
from gpt_cli.cli.help import GROUPS
from support.in_process import run_here
from support.processes import path_with_command, posix


def names(group, *above):
    """Yield the names of all commands, such as ("show", "tree")."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from names(command, *above, name)
        else:
            yield (*above, name)


NAMES = list(names(get_command(app.application())))


def read_help(*name, columns=80):
    out, errors = run_here(*name, "--help", COLUMNS=str(columns))
    assert errors == ""
    return out.decode()


def examples(text):
    """Return the examples, which are at the end."""
    return [line.strip() for line in text.partition("\n  Examples:\n")[2].splitlines()]


@pytest.mark.parametrize("name", [("show",), *NAMES], ids=" ".join)
def test_help_fits_a_terminal_and_ends_with_one_to_three_examples(name):
    lines = examples(read_help(*name))
    assert 1 <= len(lines) <= 3
    for line in lines:
        assert f"gpt-cli {' '.join(name)} " in f"{line} "


@pytest.mark.parametrize("name", [(), ("show",), *NAMES], ids=" ".join)
def test_help_fits_a_terminal_and_on_a_narrow_one_breaks_no_word(name):
    wide, narrow = (
        read_help(*name, columns=columns).partition("\n  Examples:\n") for columns in (80, 40)
    )
    assert max(map(len, "".join(wide).splitlines())) < 80
    assert max(map(len, "".join(narrow).splitlines())) < 40
    # Undo breaks after hyphens.
    joined = [re.sub(r"(?<=\w-)\n +", "", text).split() for text in (wide[0], narrow[0])]
    assert joined[0] == joined[1]
    assert re.sub(r"\\\n +", "", narrow[2]) == wide[2]  # an example can still be pasted
    assert not re.search(r"\w(\.\.\.|…)", "".join(narrow))


def test_options_are_in_the_same_groups_in_the_same_order():
    groups = {title: [f"--{name}" for name in names.split()] for title, names in GROUPS.items()}
    groups["Other"] = ["--quiet", "--verbose", "--help"]  # so an option without a group fails
    used, order = set(), [*groups]
    for name in NAMES:
        sections = re.findall(r"(?m)^(\S.*):\n((?:  .*\n)+)", read_help(*name))
        flags = {
            title: re.findall(r"(?m)^  (?:-\w, )?(--[\w-]+)", text) for title, text in sections
        }
        shown = [title for title in flags if title != "Arguments"]
        assert shown == sorted(shown, key=order.index)
        for title in shown:
            assert flags[title] == [flag for flag in groups[title] if flag in flags[title]]
            used.update(flags[title])
    assert used == set().union(*groups.values())


def test_the_width_is_that_of_the_terminal_also_in_a_pipe_to_a_pager(monkeypatch):
    def get_terminal_size(number):
        if number == sys.__stdout__.fileno():
            raise OSError("not a terminal")
        return os.terminal_size((40, 24))

    monkeypatch.setattr("os.get_terminal_size", get_terminal_size)
    assert read_help("generate", columns="") == read_help("generate", columns=40)


def test_only_commands_that_draw_speak_of_a_seed():
    drawing = {name for name in NAMES if "seed" in read_help(*name)}
    assert drawing == {("generate",), ("batch",)}


def test_the_descriptions_of_commands_are_complete():
    text = read_help()
    assert "..." not in text.partition("Commands:")[2]
    for name in app.COMMANDS:
        assert f"\n  {name} " in text


QUICK = [("generate",), ("batch",), ("score",), ("rank",), ("compress",)]  # for every change


@posix
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=" ".join(name), marks=[] if name in QUICK else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_examples_without_a_network_work(name, tmp_path, request, prepared_command):
    if name == ("compress",):
        request.getfixturevalue("library")
    # The others need a published model or files, or do not end.
    lines = [line for line in examples(read_help(*name)) if "gpt2" not in line]
    assert lines or name in (("download",), ("serve",), ("vector",))
    path = path_with_command(tmp_path / "bin", prepared_command)
    env = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    for line in lines:
        finished = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            timeout=60,
        )
        assert finished.returncode == 0, finished.stderr
        assert b"error" not in finished.stderr
        assert finished.stdout or list(tmp_path.glob("new*"))
