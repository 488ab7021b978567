import json
import shutil
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.errors import CheckpointError, InputError, ResourceError
from gpt_cli.folder.byte_bpe import ByteBPE
from gpt_cli.folder.tokenizer import Tokenizer, read_tokenizer
from support.families import FAMILIES, PLAIN, REFERENCE, TEXTS, tokenizer_folder

pytest.importorskip("tokenizers")

GPT2S = ("german", "prefixed", "published", "words", "words_decoder", "prefixed_words")  # tiktoken
WITHOUT_BYTES = ("uer",)
FROM_SCRATCH = ("no_alphabet", "no_alphabet_files", "doubled", "dna")
WITHOUT_ALL_BYTES = ("goldfish", "uer", "rinna", "kogpt2", "xlm", *FROM_SCRATCH)
TOKENIZERS = {family: read_tokenizer(tokenizer_folder(family)) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def tokenizer(family) -> Tokenizer:
    return TOKENIZERS[family]


def copied(family: str, to: Path) -> Path:
    shutil.copytree(tokenizer_folder(family), to, dirs_exist_ok=True)
    return to


def change(folder: Path, name: str, **changes) -> Path:
    """Change the top level of a JSON file; None removes a key."""
    path = folder / name
    value = json.loads(path.read_bytes()) if path.exists() else {}
    value = {key: item for key, item in (value | changes).items() if item is not None}
    path.write_text(json.dumps(value))
    return folder


# --- as transformers -----------------------------------------------------------------------------


def test_ids_and_texts_are_those_of_transformers(family, tokenizer):
    expected = REFERENCE[family]
    assert isinstance(tokenizer, ByteBPE) == (family in GPT2S)
    columns = (expected[name] for name in ("ids", "special", "texts"))
    for text, ids, special, decoded in zip(TEXTS, *columns, strict=True):
        assert tokenizer.encode(text) == ids, ascii(text)
        assert tokenizer.encode(text, special=True) == special, ascii(text)
        assert tokenizer.decode(ids) == decoded
    before = expected["special"][1][-1:]
    for id, decoded in expected["words"].items():
        assert tokenizer.decode([*before, int(id)]) == decoded


def test_special_tokens_are_those_of_transformers(family, tokenizer):
    expected, ids = REFERENCE[family], tokenizer.special_ids
    assert expected["bos"] in (None, ids.bos)
    assert ids.eos in (None, expected["eos"])  # config.json has the end token of a kind
    assert expected["start"] == ([expected["bos"]] if ids.begins_texts else [])


def test_a_sentencepiece_file_of_no_known_class_is_read_by_its_rules():
    tokenizer = read_tokenizer(tokenizer_folder("plain"))
    for text, ids, decoded in zip(TEXTS, PLAIN["ids"], PLAIN["texts"], strict=True):
        if "<s>" not in text:  # transformers may find the names of control pieces in a text
            assert tokenizer.encode(text) == ids, ascii(text)
        if not text.startswith("\u2581"):  # sentencepiece drops several
            assert tokenizer.decode(ids) == decoded


def test_bytes_of_a_sentencepiece_file_become_the_text_that_sentencepiece_returns():
    tokenizer = read_tokenizer(tokenizer_folder("plain"))
    for ids, text in zip(PLAIN["byte_ids"], PLAIN["byte_texts"], strict=True):
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == text


# --- bytes ---------------------------------------------------------------------------------------


def test_tokens_have_bytes_or_names(family, tokenizer):
    assert tokenizer.has_bytes == (family not in WITHOUT_BYTES)
    assert bool(tokenizer.byte_ids) == (family not in WITHOUT_ALL_BYTES)
    assert [tokenizer.token_bytes(id) for id in tokenizer.byte_ids[65:67]] in ([], [b"A", b"B"])
    id = tokenizer.encode("the fox A")[-1]
    assert tokenizer.decode([id]).strip() in tokenizer.token_name(id)
    assert (tokenizer.token_bytes(id) is not None) == tokenizer.has_bytes


@given(ids=st.lists(st.integers(0, 99), max_size=20), cut=st.integers(0, 20))
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in GPT2S])
def test_pieces_are_what_tokens_add_to_the_decoded_prompt(name, ids, cut):
    tokenizer = TOKENIZERS[name]
    ids = [id % tokenizer.size for id in ids]
    prompt, new = ids[:cut], ids[cut:]
    stream = tokenizer.stream(prompt)
    text = "".join(map(stream.push, new)) + stream.flush()
    whole, before = tokenizer.decode(ids), tokenizer.decode(prompt)
    if whole.startswith(before):  # else the prompt ends within a character
        assert before + text == whole
    if "\ufffd" not in whole:
        assert b"".join(tokenizer.pieces(ids)).decode() == whole
        pieces = b"".join(tokenizer.pieces(new, prompt)).decode()
        assert pieces == whole.removeprefix(before)


def test_a_run_of_byte_tokens_is_judged_when_it_ends():
    tokenizer = TOKENIZERS["fallback"]
    letter, lone, word = (tokenizer.token_id(name) for name in ("<0x41>", "<0xFF>", "▁the"))
    stream = tokenizer.stream([word])
    assert [stream.push(id) for id in (letter, lone, word, letter)] == [
        "",
        "",
        "\ufffd\ufffd the",
        "",
    ]
    assert (stream.flush(), stream.flush()) == ("A", "")


@given(data=st.one_of(st.binary(max_size=30), st.sampled_from(TEXTS).map(str.encode)))
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_ALL_BYTES])
def test_any_bytes_have_tokens(name, data):
    tokenizer = TOKENIZERS[name]
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_bytes(data))) == data


def test_exact_bytes_still_have_whole_words():
    tokenizer = TOKENIZERS["fallback"]
    text = " the fox\nriver\n"
    assert len(tokenizer.encode_bytes(text.encode())) < len(text) - 4
    assert tokenizer.encode_bytes(b" the") == [tokenizer.token_id("▁the")]


def test_bytes_without_tokens_are_refused():
    with pytest.raises(InputError, match="no tokens for single bytes: give text in UTF-8"):
        TOKENIZERS["goldfish"].encode_bytes(b"a\xff")


def test_ids_without_tokens_are_refused_and_missing(tokenizer):
    size = len(tokenizer.missing_ids(1000))
    assert tokenizer.missing_ids(1000) == [*range(1000 - size, 1000)]
    for id in (1000 - size, -1, 10**12):
        with pytest.raises(InputError, match=f"^{id} is not a token id"):
            tokenizer.decode([0, id])
    with pytest.raises(InputError, match="not valid Unicode"):
        tokenizer.encode("\ud800")


# --- which file counts ---------------------------------------------------------------------------


def test_old_files_beside_tokenizer_json_are_read_if_they_are_of_the_same_tokenizer(tmp_path):
    folder = copied("german", tmp_path)
    shutil.copy(tokenizer_folder("published") / "tokenizer.json", folder)
    shutil.copy(tokenizer_folder("digits") / "vocab.json", folder)
    (folder / "vocab.json").write_bytes(b"damaged")
    merges = json.loads((folder / "tokenizer.json").read_bytes())["model"]["merges"]
    (folder / "merges.txt").write_text("\n".join(merges))
    with pytest.raises(CheckpointError, match=r"vocab\.json"):  # the faster way
        read_tokenizer(folder)
    (folder / "merges.txt").write_text("\n".join(merges[:-1]))
    expected = TOKENIZERS["published"]
    assert read_tokenizer(folder).encode(TEXTS[3]) == expected.encode(TEXTS[3])


def test_a_space_is_before_every_text_between_special_tokens():
    tokenizer = TOKENIZERS["prefixed"]
    a, space, b = (tokenizer.encode(text) for text in ("a", "  ", "b"))
    text = "a<|endoftext|>b<|endoftext|><|endoftext|>  <|endoftext|>"
    assert tokenizer.encode(text, special=True) == [*a, 0, *b, 0, 0, *space, 0]
    assert tokenizer.decode(a) == " a"
    assert tokenizer.encode("") == []
    assert tokenizer.decode(tokenizer.encode_bytes(b"a")) == "a"


def test_a_tokenizer_json_may_be_in_any_order(tmp_path):
    folder = copied("digits", tmp_path)
    raw = json.loads((folder / "tokenizer.json").read_bytes())
    raw = {"model": raw.pop("model")} | raw
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    for text, ids in zip(TEXTS, REFERENCE["digits"]["ids"], strict=True):
        assert read_tokenizer(folder).encode(text) == ids


def test_a_tokenizer_json_is_read_as_a_whole_where_the_class_is_not_gpt2s(tmp_path):
    folder = change(copied("published", tmp_path), "tokenizer_config.json")
    change(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    tokenizer = read_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("a")) == " a"


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("model", {"dropout": 0.5}),  # random splits
        ("pre_tokenizer", {"use_regex": False}),
        ("normalizer", {"type": "NFC"}),
        ("decoder", {"type": "Fuse"}),
    ],
)
def test_a_tokenizer_of_gpt2s_kind_has_no_other_part(tmp_path, part, changes):
    folder = copied("published", tmp_path)
    raw = json.loads((folder / "tokenizer.json").read_bytes())
    change(folder, "tokenizer.json", **{part: (raw[part] or {}) | changes})
    tokenizer, expected = read_tokenizer(folder), TOKENIZERS["published"]
    assert isinstance(tokenizer, ByteBPE) == ("dropout" in changes)
    assert tokenizer.encode(TEXTS[3]) == tokenizer.encode(TEXTS[3])
    if "dropout" in changes:
        assert tokenizer.encode(TEXTS[3]) == expected.encode(TEXTS[3])


def test_added_tokens_are_special_if_they_are_named(tmp_path):
    folder = copied("uer", tmp_path)
    size = len(REFERENCE["uer"]["words"]) + 5
    change(folder, "added_tokens.json", **{"<a>": size, "<b>": size + 1})
    change(folder, "special_tokens_map.json", bos_token="<a>")
    tokenizer = read_tokenizer(folder)
    assert tokenizer.special["<a>"] == tokenizer.special_ids.bos == size
    assert "<b>" not in tokenizer.special
    assert size not in tokenizer.encode("<a>")
    assert tokenizer.encode("<b>") == [size + 1]


@pytest.mark.parametrize(
    ("config", "begins"),
    [({}, True), ({"add_bos_token": True}, True), ({"bos_token": "</s>"}, False)],
)
def test_a_template_puts_the_start_token_before_texts(tmp_path, config, begins):
    folder = change(copied("fallback", tmp_path), "tokenizer_config.json", **config)
    assert read_tokenizer(folder).special_ids.begins_texts is begins
    template = json.loads((folder / "tokenizer.json").read_bytes())["post_processor"]
    several = {"type": "Sequence", "processors": [template]}
    change(folder, "tokenizer.json", post_processor=several)
    assert read_tokenizer(folder).special_ids.begins_texts is begins


@pytest.mark.parametrize("flag", [True, False])
def test_a_template_with_an_end_token_is_that_of_another_kind_of_model(tmp_path, flag):
    folder = change(copied("goldfish", tmp_path), "tokenizer_config.json", add_bos_token=flag)
    assert read_tokenizer(folder).special_ids.begins_texts is flag


# --- faults --------------------------------------------------------------------------------------


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ResourceError, match=r"rinna/spiece.model needs .*: pip install tokenizers$"
    ):
        read_tokenizer(tokenizer_folder("rinna"))
    assert all(read_tokenizer(tokenizer_folder(family)) for family in GPT2S)
    for family in (*FROM_SCRATCH, "doubled_files", "strips", "words_json"):
        with pytest.raises(ResourceError, match=rf"{family}/.* needs .*: pip install tokenizers$"):
            read_tokenizer(tokenizer_folder(family))


PANIC = {"type": "Precompiled", "precompiled_charsmap": "YWJj"}
TEMPLATE = {"type": "TemplateProcessing"}
SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
HOSTILE = {
    "no object": ("goldfish", "tokenizer.json", b"[1]"),
    "no JSON": ("goldfish", "tokenizer.json", b"\xff{"),
    "deep JSON": ("goldfish", "tokenizer.json", b'{"a":' + b"[" * 100_000),
    "no model": ("goldfish", "tokenizer.json", b"{}"),
    "a panic": ("goldfish", "tokenizer.json", {"normalizer": PANIC}),
    "an unknown kind": ("goldfish", "tokenizer.json", {"decoder": {"type": "Own"}}),
    "a template of numbers": ("goldfish", "tokenizer.json", {"post_processor": TEMPLATE}),
    "a model of another kind": ("digits", "tokenizer.json", {"model": {"type": "WordPiece"}}),
    "a bad expression": ("digits", "tokenizer.json", {"pre_tokenizer": SPLIT}),
    "settings that are a list": ("uer", "tokenizer_config.json", b"[]"),
    "special tokens that are damaged": ("uer", "special_tokens_map.json", b"{"),
    "a vocabulary of no UTF-8": ("uer", "vocab.txt", b"[UNK]\n\xff"),
    "a vocabulary without the unknown token": ("uer", "vocab.txt", b"a\nb"),
    "an empty vocabulary": ("uer", "vocab.txt", b""),
    "a vocabulary that is no object": ("prefixed", "vocab.json", b"[1]"),
    "a flag that is a text": ("uer", "tokenizer_config.json", {"do_lower_case": "yes"}),
    "an empty model": ("rinna", "spiece.model", b""),
    "no protobuf": ("rinna", "spiece.model", b"<html>"),
    "a model that is cut off": ("rinna", "spiece.model", b"\x0a\xff\xff\xff\xff\x0fab"),
    "a number that never ends": ("rinna", "spiece.model", b"\x0a" + b"\xff" * 30),
    "a piece that is a number": ("rinna", "spiece.model", b"\x08\x01"),
    "a long piece": ("gpt_sw3", "spiece.model", b"\x0a\xd4\x0f\x0a\xd1\x0f" + b"a" * 2001),
    "added tokens that are no ids": ("uer", "added_tokens.json", {"<a>": 300, "<b>": "c"}),
}  # fmt: skip


def test_two_tokens_of_one_id_are_refused(tmp_path):
    folder = copied("fallback", tmp_path)
    model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
    change(folder, "tokenizer.json", model=model | {"vocab": model["vocab"] | {"w": 3}})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: two tokens have the same id"):
        read_tokenizer(folder)


@pytest.mark.parametrize("fault", HOSTILE)
def test_damaged_files_are_refused_in_one_line_that_names_the_folder(tmp_path, fault, capfd):
    family, name, content = HOSTILE[fault]
    folder = copied(family, tmp_path)
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        change(folder, name, **content)
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(folder)
    assert str(folder) in str(caught.value)
    assert str(caught.value).endswith(": get it again")
    assert "\n" not in str(caught.value)
    assert "CheckpointError" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_padding_takes_no_memory(tmp_path):
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    folder = change(copied("goldfish", tmp_path), "tokenizer.json", padding=padding)
    assert read_tokenizer(folder).encode("the") == TOKENIZERS["goldfish"].encode("the")


# --- spans ---------------------------------------------------------------------------------------


@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=20)))
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_spans_are_where_tokens_are_in_the_text(name, special, text):
    tokenizer = TOKENIZERS[name]
    ids, spans = tokenizer.encode_with_spans(text, special=special)
    assert ids == tokenizer.encode(text, special=special)
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    if name in GPT2S:  # every character is in a token
        covered = {place for start, end in spans for place in range(start, end)}
        assert covered == set(range(len(text)))
        for id, (start, end) in zip(ids, spans, strict=True):
            piece = tokenizer.token_bytes(id)
            assert piece.removeprefix(b" ") in text[start:end].encode()


# --- many added tokens ---------------------------------------------------------------------------

NESTED = ["a" * size for size in range(3, 400)]
WORDS = [f"word{number:04x}" for number in range(10_000)]


@pytest.mark.parametrize(
    ("names", "flags", "unit", "adds_space"),
    [
        (WORDS, {}, "word0fff and ", False),
        (WORDS, {}, "word0fff and ", True),
        (WORDS, {}, "word", True),
        (WORDS, {"lstrip": True, "rstrip": True}, " \n word0fff ", False),
        (NESTED, {}, "aaaaab", False),
        (NESTED, {}, "aaaaab", True),
        ([f"{name}!" for name in NESTED], {}, "a", True),
        (["a.*b", "(a+)+$", "[x", "\\y", "a|b", "^z", "(?=x)"], {}, "a|b(a+)+$ aaaa", False),
        (WORDS, {"special": True}, "word0fff and ", False),
    ],
)
def test_many_added_tokens_take_linear_time(tmp_path, names, flags, unit, adds_space):
    folder = copied("german", tmp_path)
    listed = {str(320 + n): {"content": name} | flags for n, name in enumerate(names)}
    settings = {"added_tokens_decoder": listed, "add_prefix_space": adds_space}
    change(folder, "tokenizer_config.json", **settings)
    begun = time.perf_counter()
    tokenizer = read_tokenizer(folder)
    text = unit * (100_000 // len(unit))
    for special in (False, True):
        ids = tokenizer.encode(text, special=special)
        assert "".join(tokenizer.decode(ids).split()) == "".join(text.split())
    assert time.perf_counter() - begun < 5
    decoder = tokenizer.stream()
    assert "".join(map(decoder.push, ids[:100]))


def test_an_added_token_of_no_text_is_refused_by_its_file(tmp_path):
    folder = copied("german", tmp_path)
    change(folder, "tokenizer_config.json", added_tokens_decoder={"320": {"content": ""}})
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: .*has no text.*get it again"
    ):
        read_tokenizer(folder)


# --- added tokens and the ids of the vocabulary --------------------------------------------------


@pytest.mark.parametrize("name", ["\u00e9", "\u00b2", "\u0120the", "\u00a3"])
def test_an_added_token_may_have_the_name_of_a_token_of_the_vocabulary(tmp_path, name):
    """The library gives it the id of that token, which stands for other bytes."""
    folder = copied("german", tmp_path)
    vocab = json.loads((folder / "vocab.json").read_bytes())
    change(
        folder, "tokenizer_config.json", added_tokens_decoder={str(vocab[name]): {"content": name}}
    )
    tokenizer = read_tokenizer(folder)
    assert not isinstance(tokenizer, ByteBPE)
    assert tokenizer.encode(f"a{name}b")[1:-1] == [vocab[name]]


def test_added_tokens_with_a_gap_keep_their_ids_or_are_refused(tmp_path):
    folder = copied("german", tmp_path)
    listed = {"325": {"content": "<x>"}, "322": {"content": "<y>"}}
    change(folder, "tokenizer_config.json", added_tokens_decoder=listed)
    assert read_tokenizer(folder).encode("<x><y>") == [325, 322]
    listed["325"]["lstrip"] = True
    change(folder, "tokenizer_config.json", added_tokens_decoder=listed)
    with pytest.raises(CheckpointError, match="has the id 322, where transformers gives it 320"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ({"content": " ", "lstrip": True}, "takes white space around it"),
        ({"content": "x" * 1001}, "has more than 1000 characters"),
    ],
)
def test_added_tokens_that_could_take_long_are_refused(tmp_path, token, says):
    folder = copied("german", tmp_path)
    change(folder, "tokenizer_config.json", added_tokens_decoder={"320": token})
    with pytest.raises(CheckpointError, match=says):
        read_tokenizer(folder)


def test_a_token_within_a_special_one_is_found_as_the_library_finds_it(tmp_path):
    folder = copied("german", tmp_path)
    listed = {
        "320": {"content": "<|COVID-19|>", "special": True, "normalized": False},
        "321": {"content": "COVID-19", "normalized": False},
    }
    change(folder, "tokenizer_config.json", added_tokens_decoder=listed)
    assert not isinstance(read_tokenizer(folder), ByteBPE)
