"""Errors of rows stay with their rows."""

import pytest

from gpt_cli.errors import InputError, compute_valid, counted

BAD = {number: InputError(str(number)) for number in range(-9, 0)}


def prepare(number):
    if number < 0:
        raise BAD[number]
    return number + 1


def squares(numbers):
    return (number**2 for number in numbers)


@pytest.mark.parametrize(
    "items", [[], [1], [-1], [1, 2], [-1, -2], [1, -2, 3], [-1, 2, -3], [1, -2, -3, 4, -5, -6]]
)
@pytest.mark.parametrize("ahead", [False, True])
def test_results_and_errors_come_in_the_order_of_the_items(items, ahead):
    def compute(numbers):
        return squares(list(numbers) if ahead else numbers)

    expected = [BAD.get(item, (item + 1) ** 2) for item in items]
    assert list(compute_valid(iter(items), prepare, compute)) == expected


def test_an_error_does_not_wait_for_the_results_after_it():
    read = []

    def items():
        for number in (1, -2, 3):
            read.append(number)
            yield number

    results = compute_valid(items(), prepare, squares)
    assert (next(results), read) == (4, [1])
    assert (next(results), read) == (16, [1, -2, 3]) or read == [1, -2, 3]


def test_errors_of_computing_are_not_those_of_an_item():
    def compute(numbers):
        yield next(numbers)
        raise InputError("all")

    results = compute_valid([1, 2], prepare, compute)
    assert next(results) == 2
    with pytest.raises(InputError, match="all"):
        next(results)


def test_one_is_singular():
    assert [counted(number, "row") for number in (0, 1, 2, 1000)] == [
        *("0 rows", "1 row", "2 rows", "1,000 rows")
    ]
