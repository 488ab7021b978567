"""Bars of progress, by tqdm: a line on a terminal, a widget in a notebook."""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Item = TypeVar("Item")

# The bar of the texts that are computed, while there is one. A variable of the context, so that the
# functions between a method of the engine and its passes need not know of it.
_texts: ContextVar[Any] = ContextVar("_texts", default=None)


def new_bar(unit: str, total: int | None = None) -> Any:
    """Return a bar of tqdm."""
    from tqdm.auto import tqdm  # comes with huggingface_hub, and takes long to import

    return tqdm(total=total, unit=unit)


def counted_rows(results: Iterator[Item], rows: Iterable[Any]) -> Iterator[Item]:
    """Yield the results of rows, and count them in a bar."""
    with new_bar("row", len(rows) if isinstance(rows, Sized) else None) as bar:
        for result in results:
            bar.update()
            yield result


@contextmanager
def counted_texts(*, progress: bool) -> Iterator[None]:
    """Count the texts that are computed in the block in a bar, if `progress`."""
    if not progress:
        yield
        return
    with new_bar("text", 0) as bar:
        outer = _texts.set(bar)
        try:
            yield
        finally:
            _texts.reset(outer)


def expect_texts(count: int) -> Callable[[int], object] | None:
    """Add a number of texts to the present bar; return what counts them, or None without a bar."""
    bar = _texts.get()
    if bar is None:
        return None
    done = bar.n
    bar.reset(total=bar.total + count)  # a widget keeps its first total otherwise
    bar.update(done)
    update: Callable[[int], object] = bar.update
    return update
