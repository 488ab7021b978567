"""Compute values inside the model for the texts of rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gpt_cli.errors import InputError
from gpt_cli.jobs.layout import InputRow, Template
from gpt_cli.jobs.task import Rows, TextTask
from gpt_cli.options.arguments import check_type
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpt_cli.engine import Engine
    from gpt_cli.scoring.activations import Pool, TextActivations

OutDtype: TypeAlias = Literal["float32", "float16"]

_UNPOOLED_TOGETHER = 64  # a worker of Ray returns the values of all their tokens at once


@dataclass(frozen=True)
class Activations(TextTask):
    """Compute `Engine.activations` of texts; they are the arrays of a record."""

    hooks: tuple[str, ...]
    pool: "Pool | None" = None
    bos: bool = False
    template: Template | None = None
    out_dtype: OutDtype = "float32"
    special: bool = False  # of rows without a field "special"

    has_lines = True

    def __post_init__(self) -> None:
        check_type("hooks", self.hooks, Sequence[str])

    @property
    def schema(self) -> Schema:
        schema = {"tokens": "int64"}
        # A template may have a {text}, which is then one of its fields.
        if self.template and "text" not in self.template.names:
            schema["text"] = "string"
        return schema

    @property
    def reserved(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of arrays, among them all hook points, and "arrays" itself."""
        items = {None: ("position", "token"), "word": ("word", "start", "end")}
        return "arrays", *items.get(self.pool, ()), "hook_*", "blocks.*", "ln_final.*"

    @property
    def endings(self) -> tuple[str, ...]:
        return (".safetensors", ".npz", ".parquet") if self.pool else (".safetensors", ".npz")

    @property
    def rows_together(self) -> int:
        return super().rows_together if self.pool else _UNPOOLED_TOGETHER

    @property
    def settings(self) -> dict[str, Any]:
        settings = super().settings
        return {"hook": settings.pop("hooks")} | settings  # "hook" is its name in manifests

    def results(self, engine: "Engine", rows: Rows) -> "Iterator[TextActivations | InputError]":
        texts = self.texts(rows)
        return engine.activation_rows(
            texts, self.hooks, self.pool, bos=self.bos, special=self.special
        )

    def record(self, engine: "Engine", row: InputRow, result: "TextActivations") -> Record:
        """Return a result with its text: words begin and end there, not in a field of its row."""
        try:
            arrays = self._arrays(result)
        except FloatingPointError:
            raise InputError("a value is too large for float16: choose float32") from None
        return {"tokens": len(result.ids), "arrays": arrays, "text": self.layout.text(row)}

    def _arrays(self, result: "TextActivations") -> "dict[str, NDArray[Any]]":
        """Return the arrays of a record; raise FloatingPointError if a value overflows."""
        from numpy import errstate

        from gpt_cli.gpt2.hooks import has_key_axis

        arrays = result.word_columns if self.pool else result.token_columns
        with errstate(over="raise"):
            for name, value in result.values.items():
                value = value.swapaxes(0, 1) if has_key_axis(name) else value
                arrays[name] = value.astype(self.out_dtype)
        return arrays

    def tokens(self, record: Record) -> int:
        return int(record["tokens"])
