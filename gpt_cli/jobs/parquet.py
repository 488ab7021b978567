"""Parquet by pyarrow: the rows of tables, and records as tables."""

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from gpt_cli.errors import InputError, import_extra
from gpt_cli.jobs.jsonl import RecordFormat, Streams
from gpt_cli.jobs.layout import Layout
from gpt_cli.jobs.storage import open_file, reading
from gpt_cli.options.declare import EXACT
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    import pyarrow
    from numpy.typing import NDArray
    from pyarrow.parquet import ParquetFile

_TEXTS = ("string", "large_string", "string_view")
_MANIFEST = b"gpt_cli.job"  # a key of the schema's metadata
_JSON = b"gpt_cli.json"  # a key of the metadata of columns


class Survey(NamedTuple):
    """The facts about a table that are read before its rows."""

    group_sizes: list[int]  # the number of rows in each row group
    columns: tuple[str, ...]  # those that are read
    ignored: list[str]  # columns that are not read
    whole_ids: bool  # whether all ids are integers
    checksum: int  # of the metadata, which have statistics of the columns


def survey(file: str, layout: Layout) -> Survey:
    """Return the survey of a table; raise InputError if it does not suit a layout.

    It must have a column of strings for the text, or of strings or numbers for a template. Columns
    with bytes are not read, unless they are needed: JSON has none.
    """
    types = library().types
    _group.cache_clear()  # another file may have had this name
    with _opened(file) as (table, stream):
        schema = table.schema_arrow
        try:
            strings = [field.name for field in schema if str(field.type) in _TEXTS]
            layout.check_columns(schema.names, strings)
        except InputError as error:
            raise InputError(f"{file} {error}") from None
        needed = {"id", *layout.options, *layout.sources(schema.names).values()}
        has_bytes = {field.name for field in schema if _has_bytes(field.type)}
        columns = [n for n in layout.columns_in(schema.names) if n in needed or n not in has_bytes]
        for name in columns:
            if columns.count(name) > 1:
                raise InputError(f"{file} has several columns {name!r}: keep one of them")
        for text in layout.sources(columns).values():
            if text not in columns:
                continue  # words have it
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
        return Survey(sizes, tuple(columns), ignored, whole_ids, zlib.crc32(stream.read()))


def _has_bytes(kind: "pyarrow.DataType") -> bool:
    """Return whether values of a type are bytes, or have some in them."""
    if library().types.is_dictionary(kind):
        kind = kind.value_type
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return "binary" in str(kind).partition("<")[0] or any(map(_has_bytes, inner))


def read(file: str, group: int, start: int, end: int, names: tuple[str, ...]) -> Iterator[Record]:
    """Yield rows of a group with some columns; raise InputError if one of these cannot be read."""
    columns = []
    rows = _group(file, group, names).slice(start, end - start)
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        try:
            columns.append([*map(_json_value, column.to_pylist())])
        except (ValueError, OverflowError) as error:  # such as a date in the year 10000
            raise InputError(
                f"{file}: the column {name!r} cannot be read: {error!s:.200}; leave it out"
            ) from None
    for values in zip(*columns, strict=True):
        yield dict(zip(rows.column_names, values, strict=True))


def _json_value(value: Any) -> Any:
    """Return a value as JSON has it; texts come as bytes, since they may not be UTF-8."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    return _inner_value(whole(value))


def _inner_value(value: Any) -> Any:
    if isinstance(value, list | tuple):  # a tuple is an entry of a map
        return [*map(_inner_value, value)]
    if isinstance(value, dict):
        return {name: _inner_value(inner) for name, inner in value.items()}
    if isinstance(value, str | int | float | None):
        return value
    return str(value)  # dates and decimals


def whole(value: Any) -> Any:
    """Return an integral float as int, and NaN as None: pandas stores integers with nulls so."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() and abs(value) <= EXACT else value


# A row group can only be read as a whole, and several ranges are in it.
@lru_cache(maxsize=1)
def _group(file: str, group: int, columns: tuple[str, ...]) -> "pyarrow.Table":
    pyarrow = library()
    with _opened(file) as (table, _):
        rows = table.read_row_group(group, columns)
    for index, (name, column) in enumerate(zip(rows.column_names, rows.columns, strict=True)):
        if pyarrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if str(column.type) in _TEXTS:
            column = column.cast(pyarrow.large_binary())
        if str(column.type).startswith("timestamp[ns"):  # Python's times have no nanoseconds
            column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
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

        A table may lack columns in which it would have only nulls. A column that has several types
        in them becomes JSON, as in one table.
        """
        pyarrow = library()
        schemas = [pyarrow.parquet.read_schema(stream) for stream in streams()]
        unified = _unified(schemas or [arrow_schema(schema)]).with_metadata({_MANIFEST: manifest})
        with pyarrow.parquet.ParquetWriter(target, unified) as writer:
            for stream in streams():
                table = _with_json(pyarrow.parquet.read_table(stream), unified)
                tables = [unified.empty_table(), table]
                writer.write_table(pyarrow.concat_tables(tables, promote_options="permissive"))

    def manifest(self, stream: BinaryIO) -> bytes | None:
        """Return the manifest in the metadata of a table; None if there is none."""
        metadata = library().parquet.read_schema(stream).metadata or {}
        return metadata.get(_MANIFEST)


def table_of(records: Sequence[Record], schema: Schema) -> "pyarrow.Table":
    """Return records as a table.

    The arrays of a record have a row of the table for each of their items, such as words. Columns
    of fields that are not in the schema follow it; values of several types become JSON.
    """
    repeated: list[Record] = []  # once for each item of their arrays
    for record in records:
        arrays = record.get("arrays", {})
        repeated += [record] * max(map(len, arrays.values()), default=1)
    table = _scalars(repeated, schema)
    for name in dict.fromkeys(chain.from_iterable(records)):
        if name not in schema and name != "arrays":
            column, is_json = _column([record.get(name) for record in repeated])
            table = table.append_column(_field(name, column, is_json=is_json), column)
    for name in dict.fromkeys(name for record in records for name in record.get("arrays", {})):
        if name in schema:  # as nulls
            table = table.drop_columns(name)
        arrays = [record.get("arrays", {}).get(name) for record in records]
        table = table.append_column(name, _items(arrays))
    return table


def _column(values: Sequence[Any]) -> "tuple[pyarrow.Array, bool]":
    """Return values as an array, and whether that is their JSON: they may have several types."""
    pyarrow = library()
    with suppress(pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
        column = pyarrow.array(values)
        if not _has_empty_struct(column.type):
            return column, False
    return _json_column(values), True


def _has_empty_struct(kind: "pyarrow.DataType") -> bool:
    """Return whether a type is, or has inside, an object without fields: Parquet has none."""
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return (library().types.is_struct(kind) and not inner) or any(map(_has_empty_struct, inner))


def _json_column(values: Iterable[Any]) -> "pyarrow.Array":
    texts = [None if value is None else json.dumps(value) for value in values]
    return library().array(texts, "string")


def _field(name: str, column: "pyarrow.Array", *, is_json: bool) -> "pyarrow.Field":
    """Return the field of a column; its metadata say whether it has JSON."""
    return library().field(name, column.type, metadata={_JSON: b"true"} if is_json else None)


def _unified(schemas: "Sequence[pyarrow.Schema]") -> "pyarrow.Schema":
    """Return the schema for tables of several; columns that have no type in common get JSON."""
    pyarrow = library()
    fields: dict[str, list[Any]] = {}
    for field in chain.from_iterable(schemas):
        fields.setdefault(field.name, []).append(field)
    unified = []
    for name, of_tables in fields.items():
        json_fields = [field for field in of_tables if _JSON in (field.metadata or {})]
        try:
            tables = [pyarrow.schema([field]) for field in json_fields[:1] or of_tables]
            unified.append(pyarrow.unify_schemas(tables, promote_options="permissive").field(0))
        except pyarrow.ArrowException:
            unified.append(_field(name, _json_column([]), is_json=True))
    return pyarrow.schema(unified)


def _with_json(table: "pyarrow.Table", schema: "pyarrow.Schema") -> "pyarrow.Table":
    """Return a table whose columns have JSON where those of a schema have."""
    for index, field in enumerate(table.schema):
        as_json = schema.field(field.name)
        if _JSON in (as_json.metadata or {}) and _JSON not in (field.metadata or {}):
            column = _json_column(table[index].to_pylist())
            table = table.set_column(index, as_json, column)
    return table


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
