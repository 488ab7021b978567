"""Parquet by pyarrow: the rows of tables, and records as tables."""

import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gpt_cli.errors import InputError, import_extra
from gpt_cli.jobs.jsonl import RecordFormat, Streams
from gpt_cli.jobs.layout import Layout
from gpt_cli.jobs.storage import open_file, reading
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    import pyarrow
    from numpy.typing import NDArray
    from pyarrow.parquet import ParquetFile

_TEXTS = ("string", "large_string", "string_view")
_MANIFEST = b"gpt_cli.job"  # a key of the schema's metadata
_EXACT = 2**53  # floats represent every integer up to this one


class Survey(NamedTuple):
    """The facts about a table that are read before its rows."""

    group_sizes: list[int]  # the number of rows in each row group
    ignored: list[str]  # columns that are not read
    whole_ids: bool  # whether all ids are integers
    checksum: int  # of the metadata, which have statistics of the columns


def survey(file: str, layout: Layout) -> Survey:
    """Return the survey of a table; raise InputError if it does not suit a layout.

    It must have a column of strings for the text, or of strings or numbers for a template.
    """
    types = library().types
    _group.cache_clear()  # another file may have had this name
    with _opened(file) as (table, stream):
        schema = table.schema_arrow
        columns = schema.names if layout.all_columns else ("id", *layout.columns)
        for name in columns:
            if schema.names.count(name) > 1:
                raise InputError(f"{file} has several columns {name!r}: keep one of them")
        for text in layout.texts:
            if text not in schema.names and layout.joins_words and "words" in schema.names:
                continue
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
        return Survey(sizes, ignored, whole_ids, zlib.crc32(stream.read()))


def read(
    file: str, group: int, start: int, end: int, fields: Sequence[str] | None
) -> Iterator[Record]:
    """Yield rows of a group with the fields, by default all, that they have."""
    rows = _group(file, group, None if fields is None else tuple(fields))
    for row in rows.slice(start, end - start).to_pylist():
        values = {name: _json_value(value) for name, value in row.items()}
        yield {name: value for name, value in values.items() if value is not None}


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


# A row group can only be read as a whole, and several ranges are in it.
@lru_cache(maxsize=1)
def _group(file: str, group: int, fields: tuple[str, ...] | None) -> "pyarrow.Table":
    pyarrow = library()
    with _opened(file) as (table, _):
        names = table.schema_arrow.names
        columns = [name for name in names if fields is None or name in ("id", *fields)]
        rows = table.read_row_group(group, columns)
    for index, (name, column) in enumerate(zip(rows.column_names, rows.columns, strict=True)):
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if str(column.type) in _TEXTS:
            column = column.cast(pyarrow.large_binary())
        rows = rows.set_column(index, name, column)
    return rows


class Parquet(RecordFormat):
    """Tables of records."""

    def write(self, records: Sequence[Record], schema: Schema, stream: BinaryIO) -> None:
        """Write records as a table."""
        table = table_of(records, schema)
        library().parquet.write_table(table, stream)

    def count(self, stream: BinaryIO) -> tuple[int, int]:
        """Return the numbers of rows of the input and of errors."""
        table = library().parquet.read_table(stream, columns=["index", "error"])
        failed = table.filter(table["error"].is_valid())
        return len(table["index"].unique()), len(failed["index"].unique())

    def join(self, streams: Streams, schema: Schema, target: BinaryIO, manifest: bytes) -> None:
        """Write one table of several, with a manifest in its metadata.

        A table may lack columns in which it would have only nulls.
        """
        pyarrow = library()
        schemas = [pyarrow.parquet.read_schema(stream) for stream in streams()]
        schemas = schemas or [arrow_schema(schema)]
        try:
            unified = pyarrow.unify_schemas(schemas, promote_options="permissive")
        except pyarrow.ArrowException as error:
            cure = "write FOLDER/*.parquet, or give its column one type"
            raise InputError(f"the parts cannot be joined: {error!s:.200}; {cure}") from None
        unified = unified.with_metadata({_MANIFEST: manifest})
        with pyarrow.parquet.ParquetWriter(target, unified) as writer:
            for stream in streams():
                tables = [unified.empty_table(), pyarrow.parquet.read_table(stream)]
                writer.write_table(pyarrow.concat_tables(tables, promote_options="permissive"))

    def manifest(self, stream: BinaryIO) -> bytes | None:
        """Return the manifest in the metadata of a table; None if there is none."""
        metadata = library().parquet.read_schema(stream).metadata or {}
        return metadata.get(_MANIFEST)


def table_of(records: Sequence[Record], schema: Schema) -> "pyarrow.Table":
    """Return records as a table.

    The arrays of a record have a row of the table for each of their items, such as words. Other
    "columns" of the input follow the schema; values of several types become JSON.
    """
    repeated: list[Record] = []  # once for each item of their arrays
    for record in records:
        arrays = record.get("arrays", {})
        repeated += [record] * max(map(len, arrays.values()), default=1)
    table = _scalars(repeated, schema)
    array_names = dict.fromkeys(name for record in records for name in record.get("arrays", {}))
    column_names = dict.fromkeys(name for record in records for name in record.get("columns", {}))
    for name in column_names:
        if name not in table.column_names and name not in array_names:
            values = [record.get("columns", {}).get(name) for record in repeated]
            table = table.append_column(name, _column(values))
    for name in array_names:
        if name in schema:  # as nulls
            table = table.drop_columns(name)
        arrays = [record.get("arrays", {}).get(name) for record in records]
        table = table.append_column(name, _items(arrays))
    return table


def _column(values: Sequence[Any]) -> "pyarrow.Array":
    """Return values as an array, or their JSON if they have several types."""
    pyarrow = library()
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        return pyarrow.array([None if value is None else json.dumps(value) for value in values])


def _items(arrays: "Sequence[NDArray[Any] | None]") -> "pyarrow.Array":
    """Return the items of arrays, or a null for None; items with axes are lists of one size."""
    pyarrow = library()
    first = next(array for array in arrays if array is not None)
    kind = pyarrow.from_numpy_dtype(first.dtype)
    if first.ndim == 1:
        items = ([None] if array is None else array.tolist() for array in arrays)
    else:
        kind = pyarrow.list_(kind, first[0].size)
        items = ([None] if array is None else array.reshape(len(array), -1) for array in arrays)
    return pyarrow.array(list(chain.from_iterable(items)), kind)


def _scalars(records: Sequence[Record], schema: Schema) -> "pyarrow.Table":
    """Return a table of the fields of records that are in the schema."""
    pyarrow = library()
    rows = [{name: record[name] for name in schema if name in record} for record in records]
    # An id may be any JSON value; the number of a line is in the column of a template's {line}.
    names = [name for name in ("id", "line") if schema.get(name) == "string"]
    for row in rows:
        for name in names:
            if not isinstance(row.get(name, ""), str):
                row[name] = json.dumps(row[name], ensure_ascii=False)
    try:
        return pyarrow.Table.from_pylist(rows, arrow_schema(schema))
    except UnicodeEncodeError:  # a path may hold bytes that are not UTF-8
        text = json.dumps(rows, ensure_ascii=False).encode(errors="surrogateescape")
        rows = json.loads(text.decode(errors="replace"))
        return pyarrow.Table.from_pylist(rows, arrow_schema(schema))


def arrow_schema(schema: Schema) -> "pyarrow.Schema":
    """Return the schema of pyarrow for one of `gpt_cli.records`."""
    return library().schema(list(_type(schema)))  # the fields of a struct


def _type(kind: Any) -> "pyarrow.DataType":
    """Return the type of pyarrow for a type of a schema: see `records.Schema`."""
    if isinstance(kind, str):
        return library().type_for_alias(kind)
    if isinstance(kind, list):
        return library().list_(_type(kind[0]))
    if isinstance(kind, tuple) and isinstance(kind[1], str):
        return library().map_(_type(kind[0]), _type(kind[1]))
    if isinstance(kind, tuple):
        return library().list_(_type(kind[0]), kind[1])
    return library().struct([(name, _type(item)) for name, item in kind.items()])


@contextmanager
def _opened(file: str) -> "Iterator[tuple[ParquetFile, BinaryIO]]":
    pyarrow = library()
    with open_file(file) as stream, reading(file):
        try:
            yield pyarrow.parquet.ParquetFile(stream), stream
        except pyarrow.ArrowException as error:
            cure = "copy or write it again, or set its format"
            reason = str(error).rstrip(".")[:200]
            raise InputError(f"{file} cannot be read as Parquet ({reason}): {cure}") from None


def library() -> ModuleType:
    """Return pyarrow; raise ResourceError if it is not installed."""
    return import_extra("Parquet needs pyarrow", "pyarrow", "pyarrow", "pyarrow.parquet")
