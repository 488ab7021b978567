"""The files that version 1.x keeps reading: see tests/kept/README.md."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpt_cli
from gpt_cli.gpt2.digests import logits_digest
from gpt_cli.jobs.arrays import Npz, Safetensors
from support.in_process import run_here

if TYPE_CHECKING:
    from support.server_process import Server

KEPT = Path(__file__).parents[1] / "kept"
_FREE = {"timing", "created", "message", "notes"}  # fields whose values need not stay


def run(command: str, *arguments: str, code: int = 0) -> bytes:
    """Run a command of a version; return its standard output."""
    return run_here(*shlex.split(command), *arguments, code=code)[0]


def objects(lines: bytes) -> list[Any]:
    """Return the values of JSON Lines without those that may change."""
    return [settled(json.loads(line)) for line in lines.splitlines()]


def settled(value: Any, *, fields_only: bool = False) -> Any:
    """Return a JSON value without what may change, or only the fields, of first items."""
    if isinstance(value, dict):
        return {n: settled(v, fields_only=fields_only or n in _FREE) for n, v in value.items()}
    if isinstance(value, list):
        return [settled(v, fields_only=fields_only) for v in (value[:1] if fields_only else value)]
    return None if fields_only else value


def digests() -> dict[str, str]:
    """Return the digests of the logits of `tiny`, as `verify` prints them, by dtype."""
    engines = {dtype: gpt_cli.load("tiny", dtype=dtype) for dtype in ("float32", "int8")}
    return {dtype: logits_digest(e.model, e.tokenizer) for dtype, e in engines.items()}


def answer(server: "Server", path: str, body: Any) -> list[Any]:
    """Return the status and the JSON of an answer, or the names of metrics.

    The text of a stream is in one piece, since its pieces depend on the time.
    """
    if path == "/metrics":
        return [dict.fromkeys(sorted(name.partition("{")[0] for name in server.metrics()))]
    response = server.ask(path, body)
    if isinstance(body, dict) and body.get("stream"):
        *events, end = response.events()
        text = "".join(event["choices"][0]["text"] for event in events)
        events[-1]["choices"][0]["text"] = text
        values = [events[-1], end]
    else:
        values = [response.json()]
    for value in values:
        if str(value.get("id")).startswith("cmpl-"):
            value["id"] = "cmpl-"  # the rest is drawn
    return [response.status, *map(settled, values)]


def content(path: Path) -> Any:
    """Return the records or the arrays of an output, by the names of its files for a folder."""
    if path.is_dir():
        return {file.name: content(file) for file in path.iterdir() if file.name[0] not in "._"}
    if path.suffix in (".npz", ".safetensors"):
        form = Npz() if path.suffix == ".npz" else Safetensors()
        with path.open("rb") as stream:
            arrays = form.arrays(stream)
            stream.seek(0)
            metadata = form.metadata(stream) if "row" in arrays else {}
        shown = {name: [array.dtype.name, array.tolist()] for name, array in arrays.items()}
        return shown | {"metadata": settled(metadata) | {"job": None}}
    if path.suffix == ".parquet":
        from pyarrow.parquet import read_table

        table = read_table(path)
        types = {name: str(table.schema.field(name).type) for name in table.schema.names}
        return [types, *map(settled, table.to_pylist())]
    return objects(path.read_bytes())
