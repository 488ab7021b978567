import hashlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.base_tokenizer import Stream
from gpt_cli.folder.tokenizer import read_tokenizer
from support.checkpoints import ALPHABET, END, END_ID, MERGES, VOCAB, write_tokenizer

TINY = Path(__file__).parents[2] / "weights" / "tiny"

characters = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(" \n\t'\u200d\u0301\u00a0\u3000😀the0"),
)
any_text = st.text(characters, max_size=60)
any_bytes = st.one_of(st.binary(max_size=40), any_text.map(str.encode))
# Invalid in UTF-8: continued wrongly, not continued, overlong, a surrogate.
INVALID = [b"\xff", b"\x80", b"\xc3", b"\xf0\x9f\x98", b"\xc0\xaf", b"\xed\xa0\x80"]


def ids_of_bytes(data: bytes) -> list[int]:
    """Return one id for every byte."""
    return [VOCAB[ALPHABET[byte]] for byte in data]


def write_single(folder: Path, **changes) -> Path:
    """Write tokenizer.json alone, as the tokenizers library does; changes are of its top level."""
    value = {
        "version": "1.0",
        "added_tokens": [{"id": END_ID, "content": END, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": VOCAB, "merges": MERGES},
    }
    (folder / "tokenizer.json").write_text(json.dumps(value | changes), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


# --- encoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["small", "tiny"])
def test_ids_are_those_of_transformers(tokenizer, golden, model):
    reference = golden("tokenizer.json")
    if model == "tiny":
        merges = (TINY / "merges.txt").read_bytes()
        if hashlib.sha256(merges).hexdigest() != reference["tiny_merges"]:
            pytest.fail("the bundled vocabulary is another one: run tools/make_golden.py")
        tokenizer = read_tokenizer(TINY)
    for text, ids in zip(reference["texts"], reference[model], strict=True):
        assert tokenizer.encode(text) == ids, ascii(text)
        assert tokenizer.decode(ids) == text


@given(text=any_text)
def test_decoding_gives_back_every_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=any_text)
def test_special_or_not_a_text_without_special_tokens_has_the_same_ids(tokenizer, text):
    assert tokenizer.encode(text, special=True) == tokenizer.encode(text)


@pytest.mark.parametrize("unit", [" ", "a", "\n", "é", "\t ", "0", "!", "😀"])
def test_long_runs_do_not_take_quadratic_time(tokenizer, unit):
    text = unit * (300_000 // len(unit))
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - start < 5
    assert tokenizer.decode(ids) == text


def test_the_name_of_a_special_token_is_text_unless_special_is_set(tokenizer):
    text = f"a{END}b"
    assert END_ID not in tokenizer.encode(text)
    assert tokenizer.encode_bytes(text.encode()) == tokenizer.encode(text)
    assert tokenizer.encode(text, special=True) == [VOCAB["a"], END_ID, VOCAB["b"]]
    assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.decode([64, END_ID, 65]) == text


@pytest.mark.parametrize(("text", "position"), [("\ud800", 0), ("ab\udc00c", 2)])
def test_half_of_a_surrogate_pair_is_refused(tokenizer, text, position):
    with pytest.raises(InputError, match=f"not valid Unicode at character {position}"):
        tokenizer.encode(text)


@given(data=any_bytes)
@pytest.mark.parametrize("special", [False, True])
def test_the_tokens_of_any_bytes_have_these_bytes(tokenizer, data, special):
    ids = tokenizer.encode_bytes(data, special=special)
    assert b"".join(map(tokenizer.token_bytes, ids)) == data


@given(text=any_text, end=st.sampled_from(["", END]))
@pytest.mark.parametrize("special", [False, True])
def test_the_bytes_of_a_text_have_the_ids_of_the_text(tokenizer, text, end, special):
    ids = tokenizer.encode(text + end, special=special)
    assert tokenizer.encode_bytes((text + end).encode(), special=special) == ids


@given(stretches=st.lists(st.tuples(any_text, st.sampled_from(INVALID))))
def test_an_invalid_byte_is_a_token_between_texts(tokenizer, stretches):
    data = b"".join(text.encode() + lone for text, lone in stretches)
    assume(b"\xc3\x80" not in data and b"\xf0\x9f\x98\x80" not in data)  # which are valid
    ids = []
    for text, lone in stretches:
        ids += tokenizer.encode(text) + ids_of_bytes(lone)
    assert tokenizer.encode_bytes(data) == ids


def test_the_ids_of_bytes_may_have_another_order(folder):
    vocab = VOCAB | {ALPHABET[0xFF]: VOCAB[ALPHABET[0xFE]], ALPHABET[0xFE]: VOCAB[ALPHABET[0xFF]]}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    other = read_tokenizer(folder)
    assert other.encode_bytes(b"\xff") == [VOCAB[ALPHABET[0xFE]]]
    assert other.decode([VOCAB[ALPHABET[0xFE]], VOCAB["a"]]) == "\ufffda"


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", [-1, len(VOCAB), 10**12])
def test_an_unknown_id_is_refused(tokenizer, id):
    with pytest.raises(InputError, match=f"^{id} is not a token id"):
        tokenizer.decode([0, id])


def test_invalid_bytes_become_replacement_characters(tokenizer):
    assert tokenizer.decode(ids_of_bytes(b"a\xff\xe4b")) == "a\ufffd\ufffdb"


def test_the_bytes_of_a_token_may_be_a_part_of_a_character(tokenizer):
    assert tokenizer.token_bytes(VOCAB[ALPHABET[0xE4]]) == b"\xe4"
    assert tokenizer.token_bytes(END_ID) == END.encode()


def test_missing_ids_have_no_token(tokenizer):
    assert tokenizer.missing_ids(len(VOCAB)) == []
    assert tokenizer.missing_ids(len(VOCAB) + 2) == [len(VOCAB), len(VOCAB) + 1]


@given(data=any_bytes)
def test_pieces_joined_are_the_text_of_all_ids(tokenizer, data):
    decoder, ids = Stream(tokenizer), ids_of_bytes(data)
    pieces = [decoder.push(id) for id in ids]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)


@given(text=any_text)
def test_a_character_comes_out_with_its_last_byte(tokenizer, text):
    decoder = Stream(tokenizer)
    for character in text:
        pieces = [decoder.push(id) for id in ids_of_bytes(character.encode())]
        assert pieces == [""] * (len(pieces) - 1) + [character]
    assert decoder.flush() == ""


def test_a_character_that_never_ends_is_flushed_as_a_replacement_character(tokenizer):
    decoder = Stream(tokenizer)
    assert [decoder.push(id) for id in ids_of_bytes("😀".encode()[:3])] == ["", "", ""]
    assert decoder.flush() == "\ufffd"


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("merges", [MERGES, [merge.split(" ") for merge in MERGES]])
def test_tokenizer_json_alone_gives_the_same(tmp_path, tokenizer, golden, merges):
    model = {"type": "BPE", "vocab": VOCAB, "merges": merges}
    single = read_tokenizer(write_single(tmp_path, model=model))
    for text in golden("tokenizer.json")["texts"]:
        assert single.encode(text) == tokenizer.encode(text)
        assert single.encode(text, special=True) == tokenizer.encode(text, special=True)
    assert single.special == tokenizer.special == {END: END_ID}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.removesuffix("\n"),
        lambda text: text.split("\n", 1)[1],
        lambda text: text + "\n\n",
    ],
    ids=["CRLF", "no trailing newline", "no header", "empty lines at the end"],
)
def test_merges_may_be_written_in_other_ways(folder, tokenizer, golden, change):
    path = folder / "merges.txt"
    path.write_text(change(path.read_text("utf-8")), encoding="utf-8", newline="")
    other = read_tokenizer(folder)
    for text in golden("tokenizer.json")["texts"]:
        assert other.encode(text) == tokenizer.encode(text)


def test_added_tokens_are_found_in_every_text_and_special_ones_on_request(folder):
    (folder / "added_tokens.json").write_text('{"<pad>": 300, "<sep>": 301}')
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
    extended = read_tokenizer(folder)
    assert extended.special == {END: END_ID, "<pad>": 300}
    assert extended.encode("<pad>a<sep>", special=True) == [300, VOCAB["a"], 301]
    assert extended.encode("<pad>a<sep>")[-2:] == [VOCAB["a"], 301]
    assert 300 not in extended.encode("<pad>")
    assert extended.decode([301, 300]) == "<sep><pad>"
    assert extended.missing_ids(303) == [*range(len(VOCAB), 300), 302]


def test_an_added_token_may_be_one_of_the_vocabulary(folder):
    plain = read_tokenizer(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"!": VOCAB["!"], "he": VOCAB["he"]}))
    (folder / "special_tokens_map.json").write_text('{"pad_token": "!"}')
    repeated = read_tokenizer(folder)
    assert repeated.special == plain.special
    assert repeated.encode("the!") == [VOCAB["t"], VOCAB["he"], VOCAB["!"]]
    assert repeated.decode(repeated.encode("the!", special=True)) == "the!"


def test_added_tokens_of_tokenizer_json_count_more_than_those_of_added_tokens_json(tmp_path):
    special = {"special": True}
    added = [{"id": END_ID, "content": END, **special}, {"id": 300, "content": "<pad>", **special}]
    folder = write_single(tmp_path, added_tokens=added)
    (folder / "added_tokens.json").write_text('{"<pad>": 300, "<sep>": 301}')
    extended = read_tokenizer(folder)
    assert extended.special == {END: END_ID, "<pad>": 300}
    assert extended.encode("<sep>") == [301]


def test_added_tokens_of_tokenizer_config_json_count_most(folder):
    listed = {"300": {"content": "<x>", "special": True}, "301": {"content": "<y>"}}
    config = {"added_tokens_decoder": listed, "eos_token": "<x>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text('{"<old>": 302}')
    extended = read_tokenizer(folder)
    assert extended.special == {END: END_ID, "<x>": 300}
    assert extended.special_ids.eos == 300
    assert extended.encode("<x><y>", special=True) == [300, 301]
    assert 302 not in extended.encode("<old>", special=True)


def test_what_a_tokenizer_json_leaves_out_has_its_usual_value(folder, tokenizer):
    write_single(folder, pre_tokenizer={"type": "ByteLevel"})
    path = folder / "tokenizer.json"
    single = json.loads(path.read_text())
    del single["added_tokens"], single["normalizer"]
    path.write_text(json.dumps(single))
    (folder / "merges.txt").unlink()
    assert read_tokenizer(folder).special == tokenizer.special


# A special token is added, has brackets, or is not two tokens in a row.
@pytest.mark.parametrize("name", ["<>", "[]", "<b>", "qqq"])
def test_a_token_that_no_merge_makes_is_special_in_brackets_or_without_parts(folder, name):
    vocab = VOCAB | {"a>": 300, name: 301}  # which is not a merge of < and b>
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "added_tokens.json").write_text('{"a>": 300}')
    assert read_tokenizer(folder).special == {END: END_ID, name: 301}


def changed_vocab(**changes):
    vocab = {token: id for token, id in (VOCAB | changes).items() if id is not None}
    return json.dumps(vocab).encode()


LINES = "\n".join(MERGES).encode()
NOT_OBJECTS = [b'{"a": 1', b"", b"\xff\xfe{}", b"[" * 200_000, b"[1, 2]", b"7", b'"abc"', b"null"]

DAMAGES = {
    **{f"vocab.json is {content[:9]}": {"vocab.json": content} for content in NOT_OBJECTS},
    "no tokens": {"vocab.json": b"{}"},
    "a byte of the merges missing": {"vocab.json": changed_vocab(h=None)},
    "a merged token missing": {"vocab.json": changed_vocab(he=None)},
    "two tokens of one id": {"vocab.json": changed_vocab(a=1, b=1)},
    **{f"an id {id}": {"vocab.json": changed_vocab(a=id)} for id in ("0", 1.5, [], -1, 2**40)},
    "an id beyond any vocabulary": {"vocab.json": changed_vocab(he=2**32 - 11)},
    "a special id beyond 32 bits": {"vocab.json": changed_vocab(x_y=2**40)},
    "a token that no merge makes": {"vocab.json": changed_vocab(hh=1000)},
    "a token that no merge makes, in half a bracket": {"vocab.json": changed_vocab(**{"<a": 1000})},
    "a long token that no merge makes": {"vocab.json": changed_vocab(hehe=1000)},
    "a token of no text": {"vocab.json": changed_vocab(**{"": 1000})},
    "an added token of no text": {"added_tokens.json": b'{"": 1000}'},
    "merges of no UTF-8": {"merges.txt": b"\xff\xff"},
    "merges of unknown tokens": {"merges.txt": b"q x\n"},
    "merges beyond the alphabet": {"merges.txt": "q 中\n".encode()},
    "added tokens that are a list": {"added_tokens.json": b"[1]"},
    "an added token with a used id": {"added_tokens.json": b'{"<pad>": 3}'},
    "an added token with a negative id": {"added_tokens.json": b'{"<pad>": -3}'},
    "an added token with no id": {"added_tokens.json": b'{"<pad>": "3"}'},
    "a list of added tokens": {"tokenizer_config.json": b'{"added_tokens_decoder": [1]}'},
    "an added token of no name": {"tokenizer_config.json": b'{"added_tokens_decoder": {"1": {}}}'},
    "special tokens that are a number": {
        "tokenizer_config.json": b'{"additional_special_tokens": 5}'
    },
    "an added token of no number": {
        "tokenizer_config.json": b'{"added_tokens_decoder": {"x": {"content": "x"}}}'
    },
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_in_one_line_that_names_the_folder(folder, damage):
    for name, content in DAMAGES[damage].items():
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


BPE = {"type": "BPE", "vocab": VOCAB, "merges": MERGES}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None},
        {"model": {}},
        {"model": BPE | {"merges": None}},
        {"model": BPE | {"merges": [1]}},
        {"model": BPE | {"vocab": []}},
        {"pre_tokenizer": "ByteLevel"},
        {"added_tokens": [{"content": "<pad>"}]},
        {"added_tokens": 5},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_a_damaged_tokenizer_json_is_refused(tmp_path, changes):
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(write_single(tmp_path, **changes))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_a_folder_without_tokenizer_says_what_is_needed(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        read_tokenizer(folder)
