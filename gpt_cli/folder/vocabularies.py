"""Other files of vocabularies, described as a tokenizer.json: as transformers builds them."""

import base64
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpt_cli.folder.special_tokens import TokenizerSettings
from gpt_cli.system.files import read_json, read_small

_SPACE = "\u2581"  # as SentencePiece writes a space
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # types of pieces
_UNIGRAM = 1
_LONGEST_PIECE, _MOST_EXTRA = 1000, 10_000  # far above those of any model
_BERT_TOKENS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
# The white space that Rust removes at the end of a line of vocab.txt; Python removes more.
_WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_METASPACE = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}
# What GPT-SW3 removes from texts, and what it reads as a space.
_REMOVED = r"[\x00-\x08\x0b-\x1f\x7f-\x{9f}\x{a0}\x{ad}\x{200b}]"
_BLANK = r"[\x{2002}\x{2003}\x{2005}\x{2008}-\x{200a}\x{202f}\x{3000}\x{fffc}]"


def describe(
    folder: Path, name: str, settings: TokenizerSettings, added: Mapping[str, int]
) -> dict[str, Any]:
    """Return the tokenizer.json of a vocabulary, with the tokens of added_tokens.json."""
    path = folder / name
    if name == "vocab.json":
        description = _byte_level(read_json(path), read_small(folder / "merges.txt").decode())
    elif name == "vocab.txt":
        description = _wordpiece(read_small(path).decode(), settings)
    else:
        description = _sentencepiece(_Pieces.parsed(read_small(path)), settings)
    tokens = {token["content"]: token for token in description.get("added_tokens", [])}
    for content, id in added.items():
        tokens[content] = _added(id, content, special=content in settings.special)
    return {"version": "1.0", **description, "added_tokens": [*tokens.values()]}


def _added(id: int, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    return {"id": id, "content": content, "special": special, **flags}


def _sequence(kind: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", kind: parts}


def _replace(pattern: str, content: str, *, regex: bool = True) -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"Regex" if regex else "String": pattern},
        "content": content,
    }


def _byte_level(vocab: dict[str, int], merges: str) -> dict[str, Any]:
    """Describe GPT-2's own kind with a space before every text."""
    lines = [line for line in merges.splitlines() if line and not line.startswith("#version")]
    split = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": lines}
    return {"pre_tokenizer": split, "decoder": split, "model": model}


def _wordpiece(lines: str, settings: TokenizerSettings) -> dict[str, Any]:
    """Describe BERT's tokenizer."""
    raw, unknown = settings.raw, settings.tokens.get("unk_token", "[UNK]")
    vocab = {
        line.rstrip(_WHITE): id for id, line in enumerate(lines.removesuffix("\n").split("\n"))
    }
    special = (name for name in dict.fromkeys((*_BERT_TOKENS, *settings.special)) if name in vocab)
    return {
        "added_tokens": [_added(vocab[name], name) for name in special],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": raw.get("tokenize_chinese_chars", True),
            "strip_accents": raw.get("strip_accents"),
            "lowercase": raw.get("do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "vocab": vocab,
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    }


class _Pieces(NamedTuple):
    """A file of SentencePiece."""

    pieces: list[tuple[str, float, int]]  # text, score and type of each id
    trainer: dict[int, Any]  # fields of TrainerSpec by their numbers
    normalizer: dict[int, Any]  # fields of NormalizerSpec

    @classmethod
    def parsed(cls, data: bytes) -> "_Pieces":
        """Parse the ModelProto of sentencepiece_model.proto."""
        pieces: list[tuple[str, float, int]] = []
        specs = {2: b"", 3: b""}
        for number, value in _fields(data):
            if number == 1:
                fields = dict(_fields(value))
                if len(fields[1]) > _LONGEST_PIECE:
                    raise ValueError("a piece is too long")
                (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
                pieces.append((fields[1].decode(), score, fields.get(3, _NORMAL)))
            elif number in specs:
                specs[number] = value
        return cls(pieces, *(dict(_fields(value)) for value in specs.values()))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of a protobuf message: a whole number, or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            byte, at = data[at], at + 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number is too long")

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        if size > len(data) - at:
            raise ValueError("it is cut off")
        yield number, data[at : at + size]
        at += size


def _sentencepiece(file: _Pieces, settings: TokenizerSettings) -> dict[str, Any]:
    """Describe T5's and XLM-R's tokenizers as transformers builds them, others by their file."""
    pieces = file.pieces
    model: dict[str, Any] = {"type": "Unigram", "byte_fallback": False}
    vocab = [(text, score) for text, score, _ in pieces]
    tokens = settings.tokens
    if settings.kind == "T5Tokenizer":
        extra = range(min(int(settings.raw.get("extra_ids", 100)), _MOST_EXTRA) - 1, -1, -1)
        model |= {"unk_id": 2, "vocab": vocab + [(f"<extra_id_{n}>", 0.0) for n in extra]}
    elif settings.kind == "XLMRobertaTokenizer":
        roles = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
        *first, last = [(tokens.get(f"{role}_token", name), 0.0) for role, name in roles.items()]
        model |= {"unk_id": 3, "vocab": [*first, *vocab[3:], last]}
    else:
        return _by_its_file(file, settings)
    charsmap = file.normalizer.get(2)
    return {
        "added_tokens": _special_pieces(pieces, [text for text, _ in model["vocab"]]),
        "normalizer": _precompiled(charsmap) if charsmap else None,
        "pre_tokenizer": _sequence("pretokenizers", [{"type": "WhitespaceSplit"}, _METASPACE]),
        "decoder": _METASPACE,
        "model": model,
    }


def _precompiled(charsmap: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}


def _special_pieces(pieces: list[tuple[str, float, int]], names: list[str]) -> list[dict[str, Any]]:
    """Return the entries of control and user-defined pieces, with their ids in a vocabulary."""
    kinds = {text: kind for text, _, kind in pieces if kind in (_CONTROL, _USER_DEFINED)}
    return [
        _added(id, name, special=kinds[name] == _CONTROL)
        for id, name in enumerate(names)
        if name in kinds
    ]


def _by_its_file(file: _Pieces, settings: TokenizerSettings) -> dict[str, Any]:
    """Describe a tokenizer with the rules of its file."""
    trainer, rules, pieces = file.trainer, file.normalizer, file.pieces
    fallback, dummy = bool(trainer.get(35)), bool(rules.get(3, 1))
    if trainer.get(3, _UNIGRAM) == _UNIGRAM:
        vocab = [(text, score) for text, score, _ in pieces]
        model = {"type": "Unigram", "unk_id": trainer.get(40, 0), "vocab": vocab}
    else:
        model = {"type": "BPE", "vocab": {text: id for id, (text, _, _) in enumerate(pieces)}}
        model |= {"merges": _merges(pieces), "fuse_unk": True}
        model["unk_token"] = trainer.get(45, b"<unk>").decode()
    normalizers = []
    if settings.kind == "GPTSw3Tokenizer":
        normalizers += [_replace(_REMOVED, ""), _replace(_BLANK, " "), {"type": "NFC"}]
    if charsmap := rules.get(2):
        normalizers.append(_precompiled(charsmap))
    if rules.get(4, 1):  # remove_extra_whitespaces
        normalizers += [_replace(r"\A +| +\z", ""), _replace(" {2,}", " ")]
    if rules.get(5, 1):  # escape_whitespaces
        normalizers.append(_replace(" ", _SPACE, regex=False))
    decoders = [_replace(_SPACE, " ", regex=False), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if dummy:
        normalizers.append(_replace(r"\A" + _SPACE, 2 * _SPACE))
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "added_tokens": _special_pieces(pieces, [text for text, _, _ in pieces]),
        "normalizer": _sequence("normalizers", normalizers),
        "pre_tokenizer": _METASPACE | {"split": False} if dummy else None,
        "decoder": _sequence("decoders", decoders),
        "model": model | {"byte_fallback": fallback},
    }


def _merges(pieces: list[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return the merges of a BPE, the pieces with the best scores first."""
    normal = {
        text: (-score, id) for id, (text, score, kind) in enumerate(pieces) if kind == _NORMAL
    }
    ranked = [
        (rank, text[:cut], text[cut:])
        for text, rank in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    return [(left, right) for _, left, right in sorted(ranked)]
