"""The part of pandas that the guide uses, for tests on machines without it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


class DataFrame:
    """A table by columns; as in pandas, its items are their names."""

    def __init__(self, values: Mapping[str, Sequence[Any]]):
        self._values = {name: list(column) for name, column in values.items()}

    @property
    def columns(self) -> list[str]:
        return list(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(next(iter(self._values.values()), ()))

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getitem__(self, names: Any) -> Any:
        if isinstance(names, list):
            return DataFrame({name: self._values[name] for name in names})
        return self._values[names]

    def __setitem__(self, name: str, column: Sequence[Any]) -> None:
        self._values[name] = list(column)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        rows = zip(*self._values.values(), strict=True)
        return [dict(zip(self._values, row, strict=True)) for row in rows]

    def to_json(self, path: str, *, orient: str, lines: bool) -> None:
        assert lines
        rows = [json.dumps(row) + "\n" for row in self.to_dict(orient)]
        Path(path).write_text("".join(rows))


def read_json(path: str, *, lines: bool) -> DataFrame:
    """Return the table of a file of JSON Lines."""
    assert lines
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return DataFrame({name: [row[name] for row in rows] for name in rows[0]})
