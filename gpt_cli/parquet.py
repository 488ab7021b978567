"""Tables in Parquet, by pyarrow: their rows as JSON, and lines of JSON as tables."""

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.reading import open_file

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

_EXACT = 2**53  # up to which floats are exact


class Survey(NamedTuple):
    """What is in a file."""

    sizes: list[int]  # rows of each group
    ignored: list[str]  # columns that are not read
    whole_ids: bool  # whether it has ids, and they are integers
    sum: int  # of the description at its end


def require() -> None:
    """Raise ResourceError if pyarrow is missing."""
    _pyarrow()


def survey(file: str, fields: Sequence[str]) -> Survey:
    """Look what is in a file, of which an id and `fields` are to be read.

    Raises:
        InputError: it cannot be read, the first of the fields is no column of texts, or several
            columns have one name.
        ResourceError: pyarrow is missing.
    """
    pyarrow = _pyarrow()
    _group.cache_clear()  # another file may have had this name
    with _opened(file) as (table, stream):
        schema = table.schema_arrow
        for name in ("id", *fields):
            if schema.names.count(name) > 1:
                raise InputError(f"{file} has several columns {name!r}: leave one of them")
        text = fields[0]
        if text not in schema.names:
            raise InputError(f"{file} has no column {text!r}; its columns are {schema.names}")
        types = pyarrow.types
        kind = schema.field(text).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
        if not any(check(kind) for check in is_text):
            raise InputError(f"{file}: the column {text!r} holds {kind}, not texts")
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        ignored = [name for name in schema.names if name not in ("id", *fields)]
        id_type = schema.field("id").type if "id" in schema.names else pyarrow.null()
        # A column of int64, as which they are written, has no room for all of uint64.
        whole_ids = types.is_integer(id_type) and not types.is_uint64(id_type)
        stream.seek(-8 - table.metadata.serialized_size, os.SEEK_END)
        return Survey(sizes, ignored, whole_ids, zlib.crc32(stream.read()))


def read(file: str, group: int, start: int, end: int, fields: Sequence[str]) -> Iterator[bytes]:
    """Yield rows of a group, each as a JSON object of the fields that it has.

    Raises:
        InputError: the file cannot be read.
    """
    for row in _group(file, group, tuple(fields)).slice(start, end - start).to_pylist():
        told = {name: _said(value) for name, value in row.items()}
        told = {name: value for name, value in told.items() if value is not None}
        yield json.dumps(told, default=str).encode()


def _said(value: Any) -> Any:
    """Return what a value is in JSON; texts come as bytes, as they need not be UTF-8."""
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else whole(value)


def whole(value: Any) -> Any:
    """Return a value; of a float that is a whole number, that: pandas has no integers with gaps."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


# Pieces that follow one another are mostly of one group, which can only be read as a whole.
@lru_cache(maxsize=1)
def _group(file: str, group: int, fields: tuple[str, ...]) -> "pyarrow.Table":
    pyarrow = _pyarrow()
    with _opened(file) as (table, _):
        columns = [name for name in ("id", *fields) if name in table.schema_arrow.names]
        found = table.read_row_group(group, columns)
    types = pyarrow.types
    for place, kind in enumerate(found.schema.types):
        if types.is_dictionary(kind):
            kind = kind.value_type
            found = found.set_column(place, columns[place], found[place].cast(kind))
        if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
            binary = found[place].cast(pyarrow.large_binary())
            found = found.set_column(place, columns[place], binary)
    return found


def write(lines: Sequence[str], columns: Mapping[str, Any], stream: BinaryIO) -> None:
    """Write lines of JSON as a table, whose columns have these types."""
    pyarrow = _pyarrow()
    # What stands for bytes that are no UTF-8, as a path may have them, has no place in a table.
    texts = [line.encode(errors="surrogateescape").decode(errors="replace") for line in lines]
    rows = [json.loads(text) for text in texts]
    if columns["id"] == "string":
        for row in rows:
            if "id" in row and not isinstance(row["id"], str):
                row["id"] = json.dumps(row["id"], ensure_ascii=False)
    table = pyarrow.Table.from_pylist(rows, _schema(pyarrow, columns))
    pyarrow.parquet.write_table(table, stream)


def count(stream: BinaryIO) -> tuple[int, int]:
    """Return how many records a table has, and how many of them are errors."""
    errors = _pyarrow().parquet.read_table(stream, columns=["error"])["error"]
    return len(errors), len(errors) - errors.null_count


def join(streams: Iterable[BinaryIO], columns: Mapping[str, Any], target: BinaryIO) -> None:
    """Write one table of many that have these columns."""
    pyarrow = _pyarrow()
    with pyarrow.parquet.ParquetWriter(target, _schema(pyarrow, columns)) as writer:
        for stream in streams:
            writer.write_table(pyarrow.parquet.read_table(stream))


def _schema(pyarrow: ModuleType, columns: Mapping[str, Any]) -> "pyarrow.Schema":
    return pyarrow.schema(_fields(pyarrow, columns))


def _fields(pyarrow: ModuleType, columns: Mapping[str, Any]) -> "list[pyarrow.Field]":
    return [pyarrow.field(name, _type(pyarrow, kind)) for name, kind in columns.items()]


def _type(pyarrow: ModuleType, kind: Any) -> "pyarrow.DataType":
    if isinstance(kind, str):
        return pyarrow.type_for_alias(kind)
    if isinstance(kind, list):
        return pyarrow.list_(_type(pyarrow, kind[0]))
    return pyarrow.struct(_fields(pyarrow, kind))


@contextmanager
def _opened(file: str) -> "Iterator[tuple[ParquetFile, BinaryIO]]":
    pyarrow = _pyarrow()
    with open_file(file) as stream:
        try:
            yield pyarrow.parquet.ParquetFile(stream), stream
        except pyarrow.ArrowException as error:
            raise InputError(f"{file} cannot be read as Parquet: {error!s:.200}") from None


def _pyarrow() -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ResourceError("Parquet needs pyarrow: pip install pyarrow") from None
    return pyarrow
