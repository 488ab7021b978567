"""The range coder: what is encoded is decoded, and takes as many bits as its odds say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.compression.range_coder import Decoder, Encoder

LARGEST = 2**47  # above the total of 2^30 for every token of any vocabulary of GPT-2's size


@st.composite
def symbols(draw):
    total = draw(st.sampled_from([1, 2, 256, 2**30 + 7, LARGEST]) | st.integers(1, LARGEST))
    start = draw(st.sampled_from([0, total - 1]) | st.integers(0, total - 1))
    end = draw(st.sampled_from([start + 1, total]) | st.integers(start + 1, total))
    return start, end, total


def check(drawn):
    encoder = Encoder()
    for symbol in drawn:
        encoder.encode(*symbol)
    code = encoder.finish()
    bits = sum(math.log2(total / (end - start)) for start, end, total in drawn)
    assert 8 * len(code) <= bits + 8 + len(drawn) * 2**-16
    decoder = Decoder(code)
    for start, end, total in drawn:
        assert start <= decoder.target(total) < end
        decoder.advance(start, end)
    return code


@given(st.lists(symbols(), max_size=60))
def test_what_is_encoded_is_decoded_from_as_many_bits_as_it_is_worth(drawn):
    check(drawn)


@pytest.mark.parametrize(
    "symbol", [(0, 1, LARGEST), (LARGEST - 1, LARGEST, LARGEST), (0, 3, 4), (3, 4, 4), (0, 5, 5)]
)
def test_a_long_run_of_one_symbol(symbol):
    check([symbol] * 2000)


def test_carries_pass_through_many_words():
    # Just below 1/3 in binary is 0.010101...: the sum is near a carry at every step.
    check([(1, 2, 3)] * 1000 + [(2, 3, 3)] * 1000 + [(0, 1, 3), (2, 3, 3)] * 500)
    # All ones, then a symbol that pushes the number over.
    check([(2**32 - 1, 2**32, 2**32)] * 50 + [(0, 1, 7), (6, 7, 7)] * 3)


def test_what_costs_nothing_takes_no_byte():
    assert check([]) == check([(0, 9, 9)] * 1000) == b""


@given(st.binary(max_size=40), st.lists(symbols(), max_size=40))
def test_any_bytes_decode_to_something_or_are_refused(code, drawn):
    decoder = Decoder(code)
    for _, _, total in drawn:
        try:
            target = decoder.target(total)
        except ValueError:
            return
        assert 0 <= target < total
        decoder.advance(target, target + 1)


def test_a_code_that_no_encoder_writes_is_refused():
    decoder = Decoder(b"\xff" * 12)  # the last of 2^96 numbers, of which 3 * unit are in use
    with pytest.raises(ValueError, match="damaged"):
        decoder.target(7 * 2**40 + 1)
