"""The arrays of records as `.safetensors` files, or as `.npz` files, which can also hold texts.

A file has one array per name. The first axis of an array is the tokens, words or means of all
rows; for each of them, `row` has the index of its row, and `line` the number of its line in its
file. Other axes are as long as the longest value, filled up with NaN. The metadata are JSON values,
such as the errors of rows.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO, TypeAlias
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from gpt_cli.jobs.jsonl import RecordFormat, Streams
from gpt_cli.records import Record, Schema

Arrays: TypeAlias = dict[str, NDArray[Any]]

_DTYPES = {"int64": "I64", "float32": "F32", "float16": "F16"}
_UNIX = 3  # the system of an archive, on every system: equal arrays are equal files
_MOST_ERRORS = 1000  # in one file; readers of safetensors limit the size of metadata


class _ArrayFormat(RecordFormat):
    """A format of named arrays with metadata."""

    @abstractmethod
    def save(self, arrays: Arrays, metadata: Mapping[str, Any], stream: BinaryIO) -> None:
        """Write a file."""

    @abstractmethod
    def arrays(self, stream: BinaryIO) -> Arrays:
        """Return the arrays of a file, in its order."""

    @abstractmethod
    def metadata(self, stream: BinaryIO) -> dict[str, Any]:
        """Return the metadata of a file; raise ValueError if it is damaged."""

    def write(self, records: Sequence[Record], schema: Schema, stream: BinaryIO) -> None:
        """Write records, and remove their arrays from them."""
        tables: list[Arrays] = [{"row": np.empty(0, np.int64), "line": np.empty(0, np.int64)}]
        errors = []
        for record in records:
            arrays = record.pop("arrays", None)
            if arrays:
                length = len(next(iter(arrays.values())))
                origin = self._origin(record, schema)
                table = {name: np.full(length, value) for name, value in origin.items()}
                tables.append(table | arrays)
            if "error" in record:
                errors.append({name: record[name] for name in record if name in schema})
        metadata = {"rows": len(records), "failed": len(errors), "errors": errors[:_MOST_ERRORS]}
        self.save(_concatenated(tables), metadata, stream)

    def _origin(self, record: Record, schema: Schema) -> Record:
        """Return the values that all items of the arrays of a record have."""
        line = "line_number" if schema["line"] == "string" else "line"  # of a template with {line}
        return {"row": record["index"], "line": record[line]}

    def count(self, stream: BinaryIO) -> tuple[int, int]:
        """Return the numbers of records and of errors."""
        metadata = self.metadata(stream)
        return metadata["rows"], metadata["failed"]

    def join(self, streams: Streams, schema: Schema, target: BinaryIO, manifest: bytes) -> None:
        """Write one file of several, which must fit the memory, with a manifest."""
        parts = [self.metadata(stream) for stream in streams()]
        errors = list(chain.from_iterable(part["errors"] for part in parts))
        metadata = {
            "rows": sum(part["rows"] for part in parts),
            "failed": sum(part["failed"] for part in parts),
            "errors": errors[:_MOST_ERRORS],
            "job": json.loads(manifest),
        }
        self.save(_concatenated([self.arrays(stream) for stream in streams()]), metadata, target)

    def manifest(self, stream: BinaryIO) -> bytes | None:
        """Return the manifest in the metadata of a file; None if there is none."""
        metadata = self.metadata(stream)
        return json.dumps(metadata["job"]).encode() if "job" in metadata else None


class Safetensors(_ArrayFormat):
    """Files of the library `safetensors`, with numbers only."""

    def save(self, arrays: Arrays, metadata: Mapping[str, Any], stream: BinaryIO) -> None:
        """Write a file, with one copy of an array at a time; `safetensors` would copy all twice."""
        numbers = {name: array for name, array in arrays.items() if array.dtype.kind != "U"}
        header: dict[str, Any] = {
            "__metadata__": {name: json.dumps(value) for name, value in metadata.items()}
        }
        begin = 0
        for name, array in numbers.items():
            end = begin + array.nbytes
            header[name] = {
                "dtype": _DTYPES[array.dtype.name],
                "shape": array.shape,
                "data_offsets": [begin, end],
            }
            begin = end
        data = json.dumps(header).encode()
        data += b" " * (-len(data) % 8)
        stream.write(len(data).to_bytes(8, "little") + data)
        for array in numbers.values():
            stream.write(array.tobytes())

    def arrays(self, stream: BinaryIO) -> Arrays:
        """Return the arrays of a file, in its order, which `safetensors` does not keep."""
        names = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        stream.seek(0)
        arrays = load(stream.read())
        return {name: arrays[name] for name in names if name in arrays}

    def metadata(self, stream: BinaryIO) -> dict[str, Any]:
        """Return the metadata of a file; raise ValueError if it is damaged."""
        length = int.from_bytes(stream.read(8), "little")
        end = stream.seek(0, 2)
        stream.seek(8)
        header = json.loads(stream.read(min(length, end)))
        texts = header.pop("__metadata__")
        if 8 + length + max(entry["data_offsets"][1] for entry in header.values()) != end:
            raise ValueError("it has another size than its header says")
        return {name: json.loads(text) for name, text in texts.items()}


class Npz(_ArrayFormat):
    """Files of `numpy.savez`; the array "metadata" is one text, JSON."""

    def save(self, arrays: Arrays, metadata: Mapping[str, Any], stream: BinaryIO) -> None:
        """Write a file as `numpy.savez` does, which does not accept an array named "file"."""
        with ZipFile(stream, "w") as target:
            for name, value in ({"metadata": json.dumps(metadata)} | arrays).items():
                about = ZipInfo(f"{name}.npy")
                about.create_system = _UNIX
                with target.open(about, "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(value), allow_pickle=False)

    def _origin(self, record: Record, schema: Schema) -> Record:
        """Return also the id and the file, if there are any, as texts."""
        origin = super()._origin(record, schema)
        for name in ("id", "file"):
            if name in record:
                value = record[name]
                origin[name] = value if isinstance(value, str) else json.dumps(value)
        return origin

    def arrays(self, stream: BinaryIO) -> Arrays:
        """Return the arrays of a file."""
        with np.load(stream) as arrays:
            return {name: arrays[name] for name in arrays if name != "metadata"}

    def metadata(self, stream: BinaryIO) -> dict[str, Any]:
        """Return the metadata of a file; raise ValueError if it is damaged."""
        try:
            with np.load(stream) as arrays:
                return dict(json.loads(arrays["metadata"].item()))
        except (BadZipFile, EOFError) as error:
            raise ValueError(str(error)) from None


def _concatenated(tables: Sequence[Arrays]) -> Arrays:
    """Return the concatenation of the arrays of each name, which are removed from the tables.

    A table may lack texts, such as the ids of rows: they are then empty.
    """
    columns: Arrays = {}
    sizes = [len(table["row"]) for table in tables]
    for name in list(dict.fromkeys(chain.from_iterable(tables))):
        arrays = []
        for table, size in zip(tables, sizes, strict=True):
            if name in table:
                arrays.append(table.pop(name))
            elif size:
                arrays.append(np.full(size, ""))
        shapes = [array.shape[1:] for array in arrays]
        widest = tuple(max(lengths) for lengths in zip(*shapes, strict=True))
        for number, array in enumerate(arrays):
            if array.shape[1:] != widest:
                arrays[number] = np.full((len(array), *widest), np.nan, array.dtype)
                arrays[number][tuple(map(slice, array.shape))] = array
        columns[name] = np.concatenate(arrays)
    return columns
