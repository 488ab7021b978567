"""Compression: any bytes come back, at the price that `score` names, however they are computed."""

import io
import os
import random
from dataclasses import replace
from functools import cache
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.compression import archive
from gpt_cli.compression import codec as compress
from gpt_cli.compression.archive import ArchiveReader, Segment, check, end
from gpt_cli.compression.codec import Codec, intervals
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.gpt2 import digests as identity
from gpt_cli.ops import get_ops
from gpt_cli.ops.numpy_ops import NumPyOps
from support.checkpoints import END, VOCAB
from support.models import LEVELS, computing, model_of

pytestmark = pytest.mark.usefixtures("library")

N_POSITIONS = 24  # the context of the small models, which most texts fill several times
SHAPE = {"vocab_size": len(VOCAB), "n_positions": N_POSITIONS, "n_head": 2}


@pytest.fixture(scope="module")
def small(tokenizer):
    """Return a function that returns the codec of a random model, by its type of weights."""

    @cache
    def codec_of(dtype="float32", weights_of=None, seed=0, **changes):
        shape = SHAPE | changes
        model = model_of(get_ops("cpu", dtype), weights_of or dtype, seed, **shape)
        return Codec(model, tokenizer)

    return codec_of


def packed(codec, data, **options):
    return b"".join(codec.compress(io.BytesIO(data), **options))


def unpacked(codec, data, **how):
    return b"".join(codec.decompress(ArchiveReader(io.BytesIO(data), **how)))


def before_error(codec, data, match):
    """Check that decompression fails; return what comes before."""
    pieces = codec.decompress(ArchiveReader(io.BytesIO(data)))
    written = b""
    with pytest.raises(InputError, match=match):
        for piece in pieces:
            written += piece
    return written


# --- what goes in comes out ----------------------------------------------------------------------

data_of_all_kinds = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=200).map(str.encode),
    st.text("the and\n", max_size=300).map(str.encode),
    st.lists(st.sampled_from([END.encode(), b"\n", b" the", b"\xf0\x9f", b"\0"])).map(b"".join),
)


@given(data=data_of_all_kinds, segment=st.sampled_from([1, 2, 7, 23, 24, 25, 60, 16_384]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_any_bytes_come_back(small, dtype, data, segment):
    codec = small(dtype)
    assert unpacked(codec, packed(codec, data, segment=segment)) == data


@pytest.mark.parametrize("most", [1, 3, 64])
@pytest.mark.parametrize("piece", [1, 10, 1000])
def test_segments_side_by_side_and_pieces_of_a_stream_change_nothing(
    small, monkeypatch, most, piece
):
    codec, data = small(), b"the end and\n" * 40 + bytes(range(256)) + os.urandom(30)
    expected = packed(codec, data, segment=30)
    monkeypatch.setattr(compress, "_SIDE_BY_SIDE", most)
    monkeypatch.setattr(archive, "_PIECE", piece)
    assert unpacked(codec, expected) == data
    monkeypatch.setattr(compress, "_PIECE", piece)
    assert unpacked(codec, packed(codec, data, segment=30)) == data


def test_a_stream_is_compressed_before_its_end(tiny):
    source = io.BytesIO(random.Random(1).randbytes(1_000_000))
    parts = tiny._codec.compress(source, segment=4096)
    assert next(parts) == tiny._codec.header.pack()
    assert next(parts)
    assert source.tell() <= 200_000


def test_each_token_is_counted_once(tiny):
    data, counts = b"Once upon a time, there was a fox. The fox had a red ball.\n", []
    file = b"".join(tiny._codec.compress(io.BytesIO(data), 5, counts.append))
    assert sum(counts) == len(tiny.encode(data.decode()))
    counts.clear()
    assert b"".join(tiny._codec.decompress(ArchiveReader(io.BytesIO(file)), counts.append)) == data
    coded = [item.size for item in ArchiveReader(io.BytesIO(file)).segments() if not item.stored]
    assert sum(counts) == sum(coded) > 0


@pytest.mark.parametrize("number", [1, 5, 64, 100])
def test_as_many_segments_are_decoded_at_a_time_as_memory_allows(small, monkeypatch, number):
    config, ops = small()._model.config, small()._model.ops
    of_a_segment = 2 * config.n_layer * config.n_embd * N_POSITIONS * 4 + 12 * len(VOCAB)
    enough = 2 * number * of_a_segment
    for free, segments in ((enough, number), (enough - 1, max(1, number - 1)), (None, 64)):
        monkeypatch.setattr(type(ops), "free_memory", lambda _, free=free: free)
        assert small()._side_by_side() == min(segments, 64)


def test_special_tokens_are_tokens(small):
    (segment,) = ArchiveReader(io.BytesIO(packed(small(), f"the{END} end".encode()))).segments()
    assert segment.size == len(small()._tokenizer.encode(f"the{END} end", special=True))


def test_every_block_ends_with_a_line_if_it_can(small):
    codec = small()
    ends = [len(ids) for ids in codec._segments(io.BytesIO(b"1234567\n" * 9), 20)]
    assert ends == [16, 16, 16, 16, 8]
    assert [len(ids) for ids in codec._segments(io.BytesIO(b"1" * 50), 20)] == [20, 20, 10]


def test_a_block_ends_where_the_model_would_begin(tiny):
    lines = b"Once upon a time, Tom saw a fox.\n" + b'"No," said Tom.\n' * 3
    first, *others = tiny._codec._segments(io.BytesIO(lines * 40), 185)
    assert len(others) > 2
    assert all(tiny.decode(ids).startswith("Once upon") for ids in [first, *others])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_another_level_with_other_threads_reads_the_same_file(small, level, dtype):
    codec, data = small(dtype), b"the end and in the end\n" * 20 + bytes(range(256))
    ops = codec._model.ops
    with computing(ops, 2, LEVELS[0]):
        expected = packed(codec, data, segment=50)
    with computing(ops, 1, level):
        assert unpacked(codec, expected) == data
        assert packed(codec, data, segment=50) == expected


def test_data_that_the_model_cannot_predict_is_stored(tiny, monkeypatch):
    data = random.Random(1).randbytes(20_000)
    monkeypatch.setattr(compress, "next_logits", None)  # nothing is computed
    monkeypatch.setattr(compress, "measure_texts", lambda loaded, texts, *_: list(texts))
    assert len(tiny.compress(data)) < len(data) + 80
    assert tiny.decompress(tiny.compress(data)) == data


def test_a_stored_block_may_have_more_bytes_than_tokens(tiny):
    data = random.Random(1).randbytes(100_000)
    assert len(tiny.tokenizer.encode_bytes(data[:65_537])) < 65_536
    assert tiny.decompress(tiny.compress(data, segment=65_536)) == data


def test_a_special_token_that_the_model_lacks_is_compressed_as_its_bytes(small):
    codec = small(vocab_size=len(VOCAB) - 1, bos_token_id=0)  # the end token is the last
    data = f"the{END}end".encode()
    assert unpacked(codec, packed(codec, data)) == data


# --- its price -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.2])
def test_a_file_costs_what_score_says(tiny, temperature):
    prompts = ["Once upon a time", "The fox", "One day, a girl"]
    texts = tiny.generate(prompts, max_tokens=250, seed=1, temperature=temperature)
    data = "\n".join(map(str.__add__, prompts, (item.text for item in texts))).encode()
    score = tiny.score(data.decode(), bos=True)
    expected = score.bits_per_byte * score.bytes_scored / 8
    assert expected <= len(tiny.compress(data)) <= 1.02 * expected + 64


@pytest.mark.parametrize("data", [b"", b"a", b"\xff"])
def test_a_file_has_less_than_64_bytes_of_its_own(tiny, data):
    assert len(tiny.compress(data)) <= len(data) + 64


def test_data_that_is_too_large_to_be_stored_is_computed():
    data = random.Random(1).randbytes(archive.MAX_CODE_BYTES + 1)
    assert not compress._may_be_text(data[:-1])
    assert compress._may_be_text(data)


# --- what is refused -----------------------------------------------------------------------------


def test_only_the_same_model_reads_a_file(small):
    data = packed(small(), b"the end")
    with pytest.raises(InputError, match="another model"):
        unpacked(small(seed=1), data)
    with pytest.raises(InputError, match="in float32, and this one is in int8"):
        unpacked(small("int8"), data)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_16_bits_and_their_copy_in_float32_read_the_same_files(small, dtype):
    stored, copy = small(dtype), small("float32", dtype)
    assert (stored.header.dtype, copy.header.dtype) == (dtype, "float32")
    assert stored.header.bits == copy.header.bits
    data = b"the end and in the end\n" * 9
    for one, other in ((stored, copy), (copy, stored)):
        assert unpacked(other, packed(one, data)) == data
        with pytest.raises(InputError, match="another model"):
            unpacked(small(), packed(one, data))
        with pytest.raises(InputError, match="another model"):
            unpacked(other, packed(small(), data))


def test_values_that_another_dtype_does_not_have_are_another_model(tokenizer):
    weights = model_of(get_ops("cpu", "float32"), "bfloat16", **SHAPE)
    weights.h[0].mlp.c_fc.weight.panels[0, 0, 0] = 1e30  # beyond float16
    dtypes = ["float32", "bfloat16", "float16"]
    digest = {dtype: identity.weights_digest(weights, tokenizer, dtype) for dtype in dtypes}
    assert digest["float32"] == identity.weights_digest(weights, tokenizer)
    assert len(set(digest.values())) == 3


def test_other_bits_are_refused_before_anything_is_computed(small, monkeypatch):
    codec = small()
    data = packed(codec, b"the end")
    monkeypatch.setattr(identity, "TEXT", "Another text, for other logits.")
    other = Codec(codec._model, codec._tokenizer)
    assert other.header == replace(codec.header, bits=other.header.bits)
    with pytest.raises(InputError, match="computes other bits"):
        unpacked(other, data)


def test_segments_of_another_file_are_found_by_the_checksum_of_all(small):
    codec = small()
    *start, one_end = codec.compress(io.BytesIO(b"the end"))
    *_, other_end = codec.compress(io.BytesIO(b"the and"))
    assert one_end != other_end
    with pytest.raises(InputError, match="the data does not have its checksum"):
        unpacked(codec, b"".join([*start, other_end]))


def test_a_block_of_other_data_costs_no_other(small):
    codec, data = small(), b"the end and in the end\n" * 9
    header, *_, last = codec.compress(io.BytesIO(data), 60)
    first, *others = ArchiveReader(io.BytesIO(packed(codec, data, segment=60))).segments()
    altered = [replace(first, check=first.check ^ 1), *others]
    file = b"".join([header, *(item.pack() for item in altered), last])
    with pytest.raises(
        InputError, match="segment 0 does not have its checksum: the file was alter"
    ):
        unpacked(codec, file)
    rest = unpacked(codec, file, salvage=True)
    assert others
    assert rest
    assert data.endswith(rest)


def test_codes_that_no_encoder_writes_and_ids_without_a_token_are_damage(small):
    size = len(VOCAB) + 1
    codec = small(vocab_size=size, bos_token_id=0)
    (of_last_id,) = codec._codes([[size - 1] * 3], [b""], lambda _: None)
    for code in (of_last_id, b"\xff" * 12):
        file = [codec.header, Segment(0, 3, False, check(code), code), end(1, 8, crc32(code))]
        with pytest.raises(InputError, match="segment 0 does not have its checksum"):
            unpacked(codec, b"".join(part.pack() for part in file))


def test_an_interval_begins_where_that_of_the_id_before_ends(small):
    model, ids = small()._model, np.arange(len(VOCAB))
    logits = np.random.default_rng(1).normal(size=len(VOCAB)).astype(np.float32)
    starts, ends, totals = intervals(model.ops, np.tile(logits, (len(ids), 1)), ids).T
    assert starts.tolist() == [0, *ends[:-1]]
    assert set(totals) == {ends[-1]}


def test_one_other_count_is_found_before_the_block_is_written(small, monkeypatch):
    codec, data = small(), b"the end and in the end\n" * 9
    file = packed(codec, data, segment=60)
    counts, calls = codec._model.ops.cumulative_counts, []

    def with_one_more(logits):
        sums = counts(logits)
        calls.append(1)
        if len(calls) == 70:  # in the second half of the first segments
            sums[0, 5:] += 1 << 29
        return sums

    monkeypatch.setattr(codec._model.ops, "cumulative_counts", with_one_more, raising=False)
    monkeypatch.setattr(compress, "_SIDE_BY_SIDE", 1)
    assert data.startswith(before_error(codec, file, "segment 1 does not have its checksum"))
    calls.clear()
    reader = ArchiveReader(io.BytesIO(file), salvage=True)
    rest = b"".join(codec.decompress(reader))
    assert 0 < len(rest) < len(data)
    assert len(reader.lost) == 1


def test_numpy_is_refused(tokenizer):
    with pytest.raises(ResourceError, match="numpy does not give them"):
        Codec(model_of(NumPyOps(), **SHAPE), tokenizer)


@pytest.mark.parametrize("start", [None, len(VOCAB)])
def test_a_model_without_a_start_token_is_refused(small, start):
    with pytest.raises(InputError, match="start token"):
        small(bos_token_id=start)


def test_data_after_another_start_token_is_refused(small):
    data = packed(small(), b"the end")
    with pytest.raises(InputError, match=r"or start token \(digest .*, and the same bos_token$"):
        unpacked(small(bos_token_id=0), data)


@pytest.mark.parametrize("segment", [0, -1, 65_537])
def test_a_block_out_of_range_is_refused(engine, segment):
    with pytest.raises(InputError, match="segment must be from 1 to 65536"):
        engine.compress(b"", segment=segment)


# --- what a model is -----------------------------------------------------------------------------


def test_the_digest_is_that_of_all_weights_and_tokens(tokenizer):
    def digest(weights_of=None, seed=0, tokenizer=tokenizer, **changes):
        model = model_of(get_ops("cpu", "float32"), weights_of, seed, **SHAPE | changes)
        return identity.weights_digest(model, tokenizer)

    same = digest()
    assert digest() == same
    changes = {"n_layer": 1, "layer_norm_epsilon": 1e-6, "activation_function": "relu"}
    changes |= {"tie_word_embeddings": False, "vocab_size": len(VOCAB) - 1, "seed": 1}
    others = [digest(**{name: value}) for name, value in changes.items()]
    assert len({same, *others, digest(n_head=1, head_size=16)}) == 8


def test_data_before_damage_comes_before_the_error(small):
    codec, data = small(), b"the end and in the end\n" * 9
    file = bytearray(packed(codec, data, segment=60))
    file[-30] ^= 1  # in the last segment
    written = before_error(codec, bytes(file), "is damaged")
    assert written
    assert data.startswith(written)
