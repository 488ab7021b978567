"""Wrong types of arguments and unknown keywords are TypeErrors that say what to do."""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from gpt_cli.options.arguments import checks_arguments
from gpt_cli.options.declare import Declared, option
from support.data_frames import DataFrame


@dataclass(frozen=True, kw_only=True)
class Group(Declared):
    count: int = option(3)
    rate: float = option(0.5)


@checks_arguments()
def plain(text: str, number: int | None = None, rows: Iterable[str] = (), *, on: bool = False):
    return text, number


@checks_arguments()
def listing(texts: Sequence[str] = (), ids: Sequence[Sequence[int]] = ()):
    return texts, ids


@checks_arguments(Group)
def grouped(text: str, *, model: str = "m", **options: object) -> str:
    return text if not options else Group(**options)


def test_a_signature_shows_the_options_of_a_group():
    signature = inspect.signature(grouped)
    assert list(signature.parameters) == ["text", "model", "count", "rate"]
    count = signature.parameters["count"]
    assert (count.kind, count.default) == (count.KEYWORD_ONLY, 3)
    assert count.annotation in (int, "int")
    assert signature.return_annotation is str


def test_arguments_of_their_types_pass():
    assert plain("a") == plain("a", None, on=True) == ("a", None)
    # The items of an iterable, which may be errors of their own, are not checked.
    assert plain("a", np.int64(3), rows=iter([5])) == ("a", 3)
    arrays = np.array(["a"]), np.ones((2, 3), int)
    for texts, ids in (([], ()), (("a", "b"), [(1, 2), [3]]), arrays):
        assert listing(texts, ids)[1] is ids
    assert grouped("a") == "a"
    assert grouped("a", count=1) == Group(count=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plain(5), "text must be a string, not 5"),
        (lambda: plain(text=b"a"), "text must be a string, not b'a'"),
        (lambda: plain("a", "x"), "number must be a whole number or None, not 'x'"),
        (lambda: plain("a", 1.5), "number must be a whole number or None, not 1.5"),
        (lambda: plain("a", nmber=1), "unknown keyword nmber (did you mean number?)"),
        (lambda: plain(), "missing a required argument: 'text'"),
        (lambda: grouped(5), "text must be a string, not 5"),
        (lambda: grouped("a", cont=1), "unknown keyword cont (did you mean count?)"),
        (lambda: plain("a", True), "number must be a whole number or None, not True"),
        (lambda: plain("a", on=1), "on must be true or false, not 1"),
        (lambda: plain("a", rows="a text"), "rows must be a list, not 'a text'"),
        (lambda: plain("a", rows=5), "rows must be a list, not 5"),
        (lambda: listing("a text"), "texts must be a list, not 'a text'"),
        (lambda: listing({"a": 1}), "texts must be a list, not {'a': 1}"),
        (lambda: listing(["a", 5]), "texts[1] must be a string, not 5"),
        (lambda: listing(ids=iter([])), "ids must be a list, not <list_iterator"),
        (lambda: listing(ids=[1]), "ids[0] must be a list, not 1"),
        (lambda: listing(ids=[[1], [2, 1.5]]), "ids[1][1] must be a whole number, not 1.5"),
    ],
)
def test_others_are_refused(call, message):
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).partition(" object at")[0] == message


class Rows(list):
    columns = ("text",)


@pytest.mark.parametrize("table", [DataFrame({"text": ["a"]}), DataFrame({}), Rows(["a"])])
def test_a_table_by_columns_is_no_list(table):
    for call in (lambda: plain("a", rows=table), lambda: listing(table)):
        with pytest.raises(
            TypeError, match=r'whose items are columns: .*df\["text"\], or its rows'
        ):
            call()


def test_rows_that_have_columns_are_a_list():
    rows = Rows([{"text": "a"}])
    assert plain("a", rows=rows)
    cursor = iter(rows)
    assert plain("a", rows=cursor)
    assert next(cursor) == {"text": "a"}  # it was not read
