"""The arrays of records as `.safetensors` files, or as `.npz` files, which also hold texts.

A file has an array per name. Along their first axes are the tokens, words or means of all rows, and
`row` has the index of the row of each. Other axes are as long as the longest, filled up with NaN.
The metadata has the errors of rows. `Safetensors` and `Npz` have the functions of `parquet`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, BinaryIO, TypeAlias
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from gpt_cli.records import Record, Schema

Form: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]  # dtype and shape of an array

_MOST_ERRORS = 1000  # in one file; those who read safetensors limit the metadata
_DTYPES = {"I64": np.dtype("<i8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_METADATA = "metadata"  # the name of an array in .npz


@dataclass(frozen=True)
class _Column:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    parts: Iterator[NDArray[Any]]  # which the array is the concatenation of

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the array."""
        for part in self.parts:
            if part.shape[1:] != self.shape[1:]:
                filled = np.full((len(part), *self.shape[1:]), np.nan, self.dtype)
                filled[tuple(map(slice, part.shape))] = part
                part = filled
            yield part.astype(self.dtype, copy=False).tobytes()


def _columns(
    forms: Sequence[Mapping[str, Form]], read: Callable[[str], Iterator[NDArray[Any]]]
) -> Iterator[_Column]:
    """Yield the concatenations of arrays of the same name, of which `read` yields the parts."""
    for name in dict.fromkeys(chain.from_iterable(forms)):
        dtypes, shapes = zip(*(form[name] for form in forms if name in form), strict=True)
        rest = map(max, *(shape[1:] for shape in shapes), (0,) * len(shapes[0][1:]))
        shape = (sum(shape[0] for shape in shapes), *rest)
        yield _Column(name, np.result_type(*dtypes), shape, read(name))


class _ArrayFiles(ABC):
    """A format of files with arrays."""

    @abstractmethod
    def _save(
        self, stream: BinaryIO, columns: Iterator[_Column], metadata: Mapping[str, Any]
    ) -> None:
        """Write a file; the metadata are JSON values."""

    @abstractmethod
    def _open(self, stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Form]]:
        """Return the metadata and the arrays of a file; raise ValueError if it is damaged."""

    @abstractmethod
    def _read(self, stream: BinaryIO, name: str) -> NDArray[Any]:
        """Return an array of a file."""

    def write(self, records: Sequence[Record], schema: Schema, stream: BinaryIO) -> None:
        """Write the arrays of records."""
        tables: list[dict[str, NDArray[Any]]] = [{"row": np.empty(0, np.int64)}]
        for record in records:
            if arrays := record.get("arrays"):
                length = len(next(iter(arrays.values())))
                tables.append({"row": np.full(length, record["index"])} | arrays)
        forms = [{name: (a.dtype, a.shape) for name, a in table.items()} for table in tables]
        columns = _columns(forms, lambda name: (t[name] for t in tables if name in t))
        errors = [{n: v for n, v in r.items() if n != "columns"} for r in records if "error" in r]
        metadata = {"rows": len(records), "failed": len(errors), "errors": errors[:_MOST_ERRORS]}
        self._save(stream, columns, metadata)

    def count(self, stream: BinaryIO) -> tuple[int, int]:
        """Return the number of records in a file, and the number of errors among them."""
        metadata, _ = self._open(stream)
        return int(metadata["rows"]), int(metadata["failed"])

    def join(
        self,
        streams: Callable[[], Iterable[BinaryIO]],
        schema: Schema,
        target: BinaryIO,
        manifest: bytes = b"",
    ) -> None:
        """Write one file of several, array by array, with a manifest."""
        known, forms = zip(*map(self._open, streams()), strict=True) if any(streams()) else ((), ())

        def read(name: str) -> Iterator[NDArray[Any]]:
            for stream, form in zip(streams(), forms, strict=True):
                if name in form:
                    yield self._read(stream, name)

        metadata = {name: sum(part[name] for part in known) for name in ("rows", "failed")}
        errors = chain.from_iterable(part["errors"] for part in known)
        metadata |= {"errors": list(islice(errors, _MOST_ERRORS)), "job": json.loads(manifest)}
        self._save(target, _columns(forms, read), metadata)

    def manifest(self, stream: BinaryIO) -> bytes | None:
        """Return the manifest of a joined file; None if there is none."""
        metadata, _ = self._open(stream)
        return json.dumps(metadata["job"]).encode() if "job" in metadata else None


class Safetensors(_ArrayFiles):
    """Files with numbers only; arrays of texts are left out."""

    def _save(
        self, stream: BinaryIO, columns: Iterator[_Column], metadata: Mapping[str, Any]
    ) -> None:
        numbers = [column for column in columns if column.dtype.kind != "U"]
        names = {dtype: name for name, dtype in _DTYPES.items()}
        header: dict[str, Any] = {
            "__metadata__": {name: json.dumps(value) for name, value in metadata.items()}
        }
        end = 0
        for column in numbers:
            begin, end = end, end + column.dtype.itemsize * int(np.prod(column.shape, dtype=int))
            entry = {"dtype": names[column.dtype], "shape": column.shape}
            header[column.name] = entry | {"data_offsets": [begin, end]}
        data = json.dumps(header).encode()
        data += b" " * (-len(data) % 8)
        stream.write(len(data).to_bytes(8, "little") + data)
        for chunk in chain.from_iterable(column.chunks() for column in numbers):
            stream.write(chunk)

    def _header(self, stream: BinaryIO) -> tuple[dict[str, Any], int]:
        """Return the entries of arrays and metadata, and where the data begins."""
        size = stream.seek(0, 2)
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise ValueError("it ends in its header")
        header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        if 8 + length + max(ends) != size:
            raise ValueError("it has another size than its header says")
        return header, 8 + length

    def _open(self, stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Form]]:
        header, _ = self._header(stream)
        metadata = header.pop("__metadata__")
        forms = {name: (_DTYPES[e["dtype"]], tuple(e["shape"])) for name, e in header.items()}
        return {name: json.loads(text) for name, text in metadata.items()}, forms

    def _read(self, stream: BinaryIO, name: str) -> NDArray[Any]:
        header, begin = self._header(stream)
        entry = header[name]
        start, end = entry["data_offsets"]
        stream.seek(begin + start)
        data = np.frombuffer(stream.read(end - start), _DTYPES[entry["dtype"]])
        return data.reshape(entry["shape"])


class Npz(_ArrayFiles):
    """Files of `numpy.savez`, not compressed; the array `metadata` has one text, JSON."""

    def _save(
        self, stream: BinaryIO, columns: Iterator[_Column], metadata: Mapping[str, Any]
    ) -> None:
        text = np.array(json.dumps(metadata))
        last = _Column(_METADATA, text.dtype, (), iter([text]))
        with ZipFile(stream, "w") as archive:
            for column in chain(columns, [last]):
                # The time of ZipInfo is a constant: the same arrays have the same bytes.
                with archive.open(ZipInfo(f"{column.name}.npy"), "w", force_zip64=True) as file:
                    form = {"fortran_order": False, "shape": column.shape}
                    npy.write_array_header_2_0(
                        file, form | {"descr": npy.dtype_to_descr(column.dtype)}
                    )
                    for chunk in column.chunks():
                        file.write(chunk)

    def _open(self, stream: BinaryIO) -> tuple[dict[str, Any], dict[str, Form]]:
        try:
            with np.load(stream) as arrays:
                metadata = json.loads(arrays[_METADATA].item())
                names = [name for name in arrays if name != _METADATA]
                return metadata, {
                    name: (a.dtype, a.shape) for name in names for a in [arrays[name]]
                }
        except (BadZipFile, EOFError) as error:
            raise ValueError(str(error)) from None

    def _read(self, stream: BinaryIO, name: str) -> NDArray[Any]:
        with np.load(stream) as arrays:
            return np.asarray(arrays[name])
