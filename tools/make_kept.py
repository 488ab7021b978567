"""Write what every later version of 1.x must keep, into tests/kept: see docs/stability.md.

    python tools/make_kept.py          add new names to listing.json; run it for each release
    python tools/make_kept.py VERSION  also run the commands of the folder VERSION, for its files

A name that is missing or has changed is an error, because a release of 1.x may only add. For the
files, the folder needs commands.json and the inputs; files that exist are not written again. They
need the compiled library, and the extras of `dev`.
"""

import json
import os
import re
import shutil
import sys
from contextlib import chdir
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"HF_HUB_OFFLINE": "1", "GPT_CLI_OPS": "native"}
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from gpt_cli.cli.progress import Progress  # noqa: E402 (of this clone)
from support.checkpoints import CASES  # noqa: E402 (it is not installed)
from support.kept import KEPT, answer, digests, run, settled  # noqa: E402
from support.listing import changes, listing  # noqa: E402
from support.server_process import serving  # noqa: E402

_DONE = 3  # rows of an output when it is interrupted


def main() -> None:
    """Write the listing, and the files of a version."""
    path, names = KEPT / "listing.json", listing()
    kept = json.loads(path.read_bytes()) if path.exists() else {}
    if broken := [*changes(kept, names, lambda kept, now: kept == now)]:
        sys.exit("\n".join(["1.x must keep these:", *broken]))
    _write(path, names)
    for version in sys.argv[1:]:
        with chdir(KEPT / version):
            _write_files(json.loads(Path("commands.json").read_bytes()))


def _write_files(commands: dict[str, Any]) -> None:
    Path("half").mkdir()
    Path("records").mkdir()
    Path("printed").mkdir()
    CASES["saved"].write(Path("float32"))
    for command in commands["files"]:
        run(command)
    shutil.rmtree("float32")
    _write_outputs(commands["interrupted"])
    for name, command in (commands["records"] | commands["figures"]).items():
        Path("records", f"{name}.jsonl").write_bytes(run(command))
    Path("new.safetensors").unlink()
    for name, command in commands["printed"].items():
        Path("printed", f"{name}.txt").write_bytes(run(command))
    machine = commands["machine"].items()
    fields = {name: json.loads(run(command).splitlines()[0]) for name, command in machine}
    _write("fields.json", settled(fields, fields_only=True))
    _write("digests.json", digests())
    with serving("--allow-edits", ".") as server:
        requests = commands["requests"].items()
        _write("answers.json", {name: answer(server, *request) for name, request in requests})


def _write_outputs(commands: dict[str, str]) -> None:
    """Interrupt commands with outputs in the folder half, and resume them in the folder whole."""
    for name, command in commands.items():
        rows = count(1)

        def advance(self: Progress, tokens: int, failed: bool) -> None:
            if next(rows) == _DONE:  # noqa: B023 (it is called in this iteration alone)
                raise KeyboardInterrupt

        with mock.patch.object(Progress, "advance", advance):
            run(command, "-q", "-o", f"half/{name}", code=130)
    shutil.copytree("half", "copy")
    for name, command in commands.items():
        run(command, "-q", "-o", f"half/{name}", "--resume", code=6)  # one row is wrong
    Path("half").rename("whole")
    Path("copy").rename("half")


def _write(path: str | Path, value: Any) -> None:
    """Write a value as JSON, with a line for each object in which there is no other."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    text = re.sub(r"\{[^{}]*\}", lambda match: re.sub(r"\n\s*", " ", match[0]), text)
    Path(path).write_text(text + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
