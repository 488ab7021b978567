"""Parquet by pyarrow: the rows of tables, and records as tables."""

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from gpt_cli.errors import InputError, import_extra
from gpt_cli.jobs.layout import Layout
from gpt_cli.jobs.storage import open_file, reading
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

_TEXTS = ("string", "large_string", "string_view")
_MANIFEST = b"gpt_cli.job"  # a key of the schema's metadata
_EXACT = 2**53  # up to which floats represent every integer


def survey(file: str, layout: Layout) -> tuple[list[int], list[str], bool, int]:
    """Return sizes of row groups, unread columns, if there are only whole ids, and a checksum.

    The file must have a column of strings for the text, or of strings or numbers for a template.
    The checksum is that of the metadata, which has statistics of the columns.
    """
    types = library().types
    columns = ("id", *layout.columns)
    _group.cache_clear()  # another file may have had this name
    with _opened(file) as (table, stream):
        schema = table.schema_arrow
        for name in columns:
            if schema.names.count(name) > 1:
                raise InputError(f"{file} has several columns {name!r}: keep one of them")
        for text in layout.texts:
            if text not in schema.names:
                raise InputError(f"{file} has no column {text!r}; its columns are {schema.names}")
            kind = schema.field(text).type
            if types.is_dictionary(kind):
                kind = kind.value_type
            number = types.is_integer(kind) or types.is_floating(kind)
            if str(kind) not in (*_TEXTS, "null") and not (layout.template and number):
                raise InputError(f"{file}: the column {text!r} has the type {kind}, not string")
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        ignored = [name for name in schema.names if name not in columns]
        id_type = schema.field("id").type if "id" in schema.names else library().null()
        # Ids are written as int64, which does not hold all of uint64.
        whole_ids = types.is_integer(id_type) and not types.is_uint64(id_type)
        stream.seek(-8 - table.metadata.serialized_size, os.SEEK_END)
        return sizes, ignored, whole_ids, zlib.crc32(stream.read())


def read(file: str, group: int, start: int, end: int, fields: Sequence[str]) -> Iterator[Record]:
    """Yield rows of a group with the fields that they have."""
    for row in _group(file, group, tuple(fields)).slice(start, end - start).to_pylist():
        values = ((name, _json_value(value)) for name, value in row.items())
        yield {name: value for name, value in values if value is not None}


def _json_value(value: Any) -> Any:
    """Return a value as JSON has it; texts come as bytes, since they may not be UTF-8."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, str | int | float | list | dict | None):
        return whole(value)
    return str(value)  # dates and decimals


def whole(value: Any) -> Any:
    """Return an integral float as int, and NaN as None: pandas stores integers with nulls so."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() and abs(value) <= _EXACT else value


# A group can only be read as a whole, and has several pieces.
@lru_cache(maxsize=1)
def _group(file: str, group: int, fields: tuple[str, ...]) -> "pyarrow.Table":
    pyarrow = library()
    with _opened(file) as (table, _):
        columns = [name for name in ("id", *fields) if name in table.schema_arrow.names]
        rows = table.read_row_group(group, columns)
    for index, (name, column) in enumerate(zip(rows.column_names, rows.columns, strict=True)):
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if str(column.type) in _TEXTS:
            column = column.cast(pyarrow.large_binary())
        rows = rows.set_column(index, name, column)
    return rows


def write(records: Iterable[Record], schema: Schema, stream: BinaryIO) -> None:
    """Write records as a table."""
    pyarrow = library()
    rows = [dict(record) for record in records]
    # An id may be any JSON value; the number of a line is in the column of a template's {line}.
    for name in ("id", "line"):
        for row in rows if schema.get(name) == "string" else []:
            if not isinstance(row.get(name, ""), str):
                row[name] = json.dumps(row[name], ensure_ascii=False)
    try:
        table = pyarrow.Table.from_pylist(rows, arrow_schema(schema))
    except UnicodeEncodeError:  # a path may hold bytes that are not UTF-8
        text = json.dumps(rows, ensure_ascii=False).encode(errors="surrogateescape")
        rows = json.loads(text.decode(errors="replace"))
        table = pyarrow.Table.from_pylist(rows, arrow_schema(schema))
    pyarrow.parquet.write_table(table, stream)


def count(stream: BinaryIO) -> tuple[int, int]:
    """Return the number of records in a table, and the number of errors among them."""
    errors = library().parquet.read_table(stream, columns=["error"])["error"]
    return len(errors), len(errors) - errors.null_count


def join(
    streams: Iterable[BinaryIO], schema: Schema, target: BinaryIO, manifest: bytes = b""
) -> None:
    """Write one table of several with the same schema, and a manifest into its metadata."""
    pyarrow = library()
    described = arrow_schema(schema).with_metadata({_MANIFEST: manifest})
    with pyarrow.parquet.ParquetWriter(target, described) as writer:
        for stream in streams:
            writer.write_table(pyarrow.parquet.read_table(stream))


def manifest(stream: BinaryIO) -> bytes | None:
    """Return the manifest in the metadata of a table; None if there is none."""
    return (library().parquet.read_schema(stream).metadata or {}).get(_MANIFEST)


def arrow_schema(schema: Schema) -> "pyarrow.Schema":
    """Return the schema of pyarrow for one of `gpt_cli.records`."""
    return library().schema(list(_type(schema)))


def _type(kind: Any) -> "pyarrow.DataType":
    if isinstance(kind, str):
        return library().type_for_alias(kind)
    if isinstance(kind, list):
        return library().list_(_type(kind[0]))
    return library().struct([(name, _type(item)) for name, item in kind.items()])


@contextmanager
def _opened(file: str) -> "Iterator[tuple[ParquetFile, BinaryIO]]":
    pyarrow = library()
    with open_file(file) as stream, reading(file):
        try:
            yield pyarrow.parquet.ParquetFile(stream), stream
        except pyarrow.ArrowException as error:
            raise InputError(f"{file} cannot be read as Parquet: {error!s:.200}") from None


def library() -> ModuleType:
    """Return pyarrow; raise ResourceError if it is not installed."""
    return import_extra("Parquet needs pyarrow", "pyarrow", "pyarrow", "pyarrow.parquet")
