"""Options that are declared once: values are converted and checked, by any way they come."""

import math
import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from math import inf, nan
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from gpt_cli.errors import InputError
from gpt_cli.options.declare import (
    AT_LEAST_1,
    BIASES,
    NUMBER,
    PATH,
    SWITCH,
    TEXT,
    TEXTS,
    WHOLE,
    Declared,
    Option,
    OptionError,
    OptionTypeError,
    at_least,
    between,
    check,
    option,
)
from gpt_cli.options.request import Options, SamplingParams, draw_seed


@dataclass(frozen=True, kw_only=True)
class Group(Declared):
    count: int = option(
        3,
        "A count.",
        AT_LEAST_1,
        flag="--n",
        aliases=("-c",),
        old_flag="--m",
        excludes=("--words",),
        needs="--rate 1",
        hidden=True,
    )
    rate: float = option(0.5)
    on: bool = option(False, row=False)
    name: str = option("x")
    words: Sequence[str] = option(())
    maybe: int | None = option(None)
    file: Path | None = option(None, row=False)
    biases: Sequence[tuple[int, float]] = option((), kind=BIASES, row=False)
    colour: Literal["red", "green"] | None = option(None, row=False)


@pytest.mark.parametrize(
    ("kind", "value", "converted"),
    [
        (WHOLE, np.int64(3), 3),
        (WHOLE, 10**30, 10**30),
        (WHOLE, 4.0, 4),
        (NUMBER, 3, 3),
        (NUMBER, Fraction(1, 2), Fraction(1, 2)),
        (SWITCH, False, False),
        (TEXT, "", ""),
        (PATH, "a/b", Path("a/b")),
        (TEXTS, "ab", ("ab",)),
        (TEXTS, ["a", ""], ("a", "")),
        (BIASES, {"7": 1, 3: -1}, ((3, -1.0), (7, 1.0))),
        (BIASES, ["7=1", "3=-1e1"], ((3, -10.0), (7, 1.0))),
        (BIASES, [(7, 1), (7, 2)], ((7, 2.0),)),
        (
            BIASES,
            ["b=1", " 5==-2", "10=1", "9=1"],
            ((9, 1.0), (10, 1.0), (" 5=", -2.0), ("b", 1.0)),
        ),
        (BIASES, {" a": 1, np.int64(3): 2}, ((3, 2.0), (" a", 1.0))),
    ],
)
def test_a_value_is_converted(kind, value, converted):
    result = kind.convert(value)
    assert (result, type(result)) == (converted, type(converted))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((WHOLE, value) for value in (True, 1.5, 2.0**60, math.inf, "1", None)),
        *((NUMBER, value) for value in (True, "1", Decimal(1), None)),
        *((SWITCH, value) for value in (1, "true", None)),
        *((TEXT, value) for value in (1, b"a", None)),
        *((TEXTS, value) for value in (1, ["a", 1], [b"a"])),
        *(
            (BIASES, value)
            for value in (1, ["1"], ["=1"], {"": 1}, {1.5: 1}, [(inf, 1)], {1: 10**400})
        ),
    ],
)
def test_a_value_of_another_type_is_refused(kind, value):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        kind.convert(value)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("count", "many", "must be a whole number, not 'many'"),
        ("count", True, "must be a whole number, not True"),
        ("count", 0, "must be 1 or more"),
        ("rate", "x" * 99, "must be a number, not '" + "x" * 36 + "..."),
        ("on", 1j, "must be true or false, not 1j"),
        ("file", "", "must be a path, not ''"),
        ("name", None, "must be a string, not None"),
        ("words", 1, "must be a string or a list of strings, not 1"),
        ("colour", "blue", "must be one of red, green, not 'blue'"),
        ("colour", 1, "must be one of red, green, not 1"),
        ("biases", {1: 10**400}, f"must be {BIASES.name}, not {{1: 1" + "0" * 32 + "..."),
        ("biases", {(1, 2): 3}, f"must be {BIASES.name}, not {{(1, 2): 3}}"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(name, value, complaint):
    with pytest.raises(OptionError) as caught:
        Group(**{name: value})
    of_another_type = value not in (0, "", "blue", {1: 10**400})
    assert isinstance(caught.value, OptionTypeError) == of_another_type
    assert str(caught.value) == f"{name} {complaint}"
    assert pickle.loads(pickle.dumps(caught.value)).args == (name, complaint)


@pytest.mark.parametrize(
    ("range", "inside", "outside", "complaint"),
    [
        (AT_LEAST_1, [1, 1.5, 10**30], [0, -1, nan], "1 or more"),
        (at_least(0), [0, 2], [-1], "0 or more"),
        (between(2, 5), [2, 5], [1, 6, nan], "from 2 to 5"),
    ],
)
def test_a_keyword_is_checked_against_a_range(range, inside, outside, complaint):
    for value in inside:
        check("count", value, range)
    for value in outside:
        with pytest.raises(OptionError, match=f"^count must be {complaint}$"):
            check("count", value, range)


def test_a_group_holds_converted_values():
    assert Group(words="ab", count=np.int64(1)) == Group(words=("ab",), count=1)
    assert Group().maybe is None
    assert (Group(maybe=2).maybe, Group(colour="red").colour) == (2, "red")


def test_a_row_has_options_of_its_own():
    group = Group(rate=2, words="a")
    assert group.with_row({"count": 5, "rate": None}) == Group(rate=2, words="a", count=5)
    assert group.with_row({}) == group
    for value, shown in ((True, "true"), (1j, '"1j"'), ({1j: None}, "{}")):
        with pytest.raises(OptionTypeError, match=f"^count must be a whole number, not {shown}$"):
            group.with_row({"count": value})
    assert Group.row_fields() == ("count", "rate", "name", "words", "maybe")
    known = "the options of a row are count, rate, name, words, maybe"
    for name, hint in (("on", ""), ("shade", ""), ("word", r" \(did you mean words\?\)"), (3, "")):
        with pytest.raises(InputError, match=f"^unknown field {name!r}{hint}; {known}$"):
            group.with_row({"count": 1, name: True})


def test_a_declaration_has_everything_about_a_flag():
    count, rate, *others = Group.declarations()
    typer = {"hidden": True}
    flags = ("--n", ("-c",), "--m", None, ("--words",), "--rate 1")
    assert count == Option(3, "A count.", AT_LEAST_1, True, *flags, typer, "count", WHOLE)
    unset = (None, (), None, None, (), None, {})
    assert rate == Option(0.5, "", None, True, *unset, "rate", NUMBER)
    *others, biases, colour = (declared.kind for declared in others)
    assert others == [SWITCH, TEXT, TEXTS, WHOLE, PATH]
    assert [kind.flag_type for kind in others] == [bool, str, list[str], str, str]
    assert [kind.flag_type for kind in (NUMBER, biases)] == [str, list[str]]
    assert (colour.name, colour.flag_type) == ("one of red, green", str)
    assert colour.values == ("red", "green")
    assert (PATH.name, biases.name) == (
        "a path",
        "a number for each token, an id or a text (such as 452=-100)",
    )


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        ("count", "3", 3),
        ("rate", "1e-1", 0.1),
        ("name", "3", "3"),
        ("colour", "red", "red"),
        ("biases", ["7=1", "3=-1e1"], ((3, -10.0), (7, 1.0))),
    ],
)
def test_the_text_of_a_flag_is_a_value(name, flag, value):
    (declared,) = (option for option in Group.declarations() if option.name == name)
    assert declared.parse(flag) == value


@pytest.mark.parametrize(
    ("name", "flag", "shown"), [("count", "1.5", "1.5"), ("biases", ["7=1", "3"], "3")]
)
def test_the_text_of_a_flag_that_is_no_value_is_shown_alone(name, flag, shown):
    (declared,) = (option for option in Group.declarations() if option.name == name)
    with pytest.raises(OptionError, match=f'^{name} must be .*, not "{shown}"$'):
        declared.parse(flag)


def test_an_unknown_option_gets_the_nearest_name():
    with pytest.raises(TypeError, match=r"^unknown keyword cout \(did you mean count\?\)$"):
        Group(cout=1)


# --- the options of a request --------------------------------------------------------------------


def test_the_options_of_a_request_are_those_of_the_guide():
    sampling = asdict(SamplingParams())
    others = [declared for declared in Options.declarations() if declared.name not in sampling]
    assert asdict(Options()) == sampling | {
        "max_tokens": 128,
        "min_tokens": 0,
        "beams": None,
        "length_penalty": 1.0,
        "early_stopping": False,
        "seed": None,
        "stop": (),
        "include_stop": False,
        "bad_words": (),
        "stop_token_ids": (),
        "regex": None,
        "json_schema": None,
        "grammar": None,
        "choices": None,
        "edits": (),
        "use_cache": True,
        "ignore_eos": False,
        "special": False,
        "overflow": "error",
        "top_logprobs": 0,
    }
    rows = [declared.name for declared in others if declared.row]
    constraints = ["regex", "json_schema", "grammar", "choices"]
    search = ["beams", "length_penalty", "early_stopping"]
    drawn = ["seed", "stop", "include_stop", "bad_words", *constraints, "edits"]
    assert rows == ["max_tokens", "min_tokens", *search, *drawn]
    assert {declared.name: declared.flag for declared in others if declared.flag} == {
        "use_cache": "--cache/--no-cache"
    }
    aliases = {declared.name: declared.aliases for declared in others if declared.aliases}
    assert aliases == {"max_tokens": ("-n",), "seed": ("-s",)}
    without_flags = [declared.name for declared in others if not declared.help]
    assert without_flags == ["stop_token_ids", "edits", "top_logprobs"]


@pytest.mark.parametrize(
    ("name", "good", "bad", "complaint"),
    [
        ("max_tokens", [1, 10**9, -1], [0, -2, 1.5, None], "1 or more, or -1|a whole number"),
        ("min_tokens", [0, 128], [-1, 1.5, None], "0 or more|a whole number"),
        ("min_tokens", [], [129], "at most max_tokens, which is 128$"),
        ("beams", [None, 1, 128], [0, -1, 129, 1.5, True, "2"], "from 1 to 128|a whole number"),
        ("seed", [None, 0, 2**64 - 1, -1], [-2, 2**64, 1.5], "from 0 to|a whole number"),
        ("stop", ["a", (), ["a", "b"]], ["", ["a", ""], 1], "strings that are not|a string or"),
        (
            "bad_words",
            ["a", (), ["a", "b"]],
            ["", ["a", ""], 1, "\udcff"],
            "strings that|a string or",
        ),
        ("include_stop", [True], [1, None], "true or false"),
        ("stop_token_ids", [(), [3, 0]], ["3", ["3"], [1.5], 3], "a list of token ids"),
        ("use_cache", [False], [0, None], "true or false"),
        ("ignore_eos", [True], [1], "true or false"),
        ("special", [True], ["yes"], "true or false"),
        ("overflow", ["error", "truncate", "shift"], ["", "wrap"], "one of error, truncate, shift"),
        ("top_logprobs", [0, 5], [-1, 0.5], "0 or more|a whole number"),
    ],
)
def test_an_option_has_a_type_and_a_range(name, good, bad, complaint):
    for value in good:
        Options(**{name: value})
    for value in bad:
        with pytest.raises(InputError, match=f"^{name} must be ({complaint})"):
            Options(**{name: value})


def test_a_seed_that_is_not_set_is_the_argument_or_drawn():
    assert Options(seed=0).with_seed(5).seed == 0
    assert Options(top_k=3).with_seed(0) == Options(top_k=3, seed=0)
    seeds = {Options().with_seed().seed for _ in range(9)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_seed_of_minus_1_is_drawn_and_replaces_another():
    assert Options(seed=-1) == Options()
    assert Options(seed=7).with_row({"seed": -1}).seed is None


def test_minus_1_token_is_no_limit():
    assert Options(max_tokens=-1).max_tokens > 10**9
    assert Options().with_row({"max_tokens": -1}) == Options(max_tokens=-1)


def test_a_drawn_seed_has_32_bits(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: b"\1\2\3\4\5\6"[:count])
    assert draw_seed() == 0x04030201


def test_the_sampling_options_are_a_part():
    options = Options(temperature=0.25, top_k=3, max_tokens=2)
    assert options.sampling == SamplingParams(temperature=0.25, top_k=3)
    assert type(options.sampling) is SamplingParams
