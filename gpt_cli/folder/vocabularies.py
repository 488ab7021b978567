"""Tokenizers of vocab.txt and of SentencePiece's files, as transformers builds them."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gpt_cli.folder.special_tokens import TokenizerSettings
from gpt_cli.system.files import read_json, read_small

_SPACE = "\u2581"  # as SentencePiece writes a space
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of pieces
_UNIGRAM = 1
_LONGEST_PIECE, _MOST_EXTRA = 1000, 10_000  # far above those of any model
_BERT_TOKENS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
# White space at the end of a line of vocab.txt for Rust; for Python, other characters are, too.
_WHITE = "\t\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# What GPT-SW3 removes from texts, and what it reads as a space.
_REMOVED = r"[\x00-\x08\x0b-\x1f\x7f-\x{9f}\x{a0}\x{ad}\x{200b}]"
_BLANK = r"[\x{2002}\x{2003}\x{2005}\x{2008}-\x{200a}\x{202f}\x{3000}\x{fffc}]"


def build(
    folder: Path, name: str, settings: TokenizerSettings, added: Mapping[str, int]
) -> Tokenizer:
    """Return the tokenizer of a vocabulary, with the tokens of added_tokens.json."""
    path = folder / name
    if name == "vocab.json":
        tokenizer = _byte_level(read_json(path), read_small(folder / "merges.txt").decode())
    elif name == "vocab.txt":
        tokenizer = _wordpiece(read_small(path).decode(), settings)
    else:
        tokenizer = _sentencepiece(_File.parsed(read_small(path)), settings)
    for text in sorted(added, key=lambda text: added[text]):
        special = text in settings.special
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=not special)])
    return tokenizer


def _byte_level(vocab: dict[str, int], merges: str) -> Tokenizer:
    """Return GPT-2's own kind with a space before every text."""
    lines = [line.strip() for line in merges.split("\n") if not line.startswith("#version")]
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines if line)]
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wordpiece(lines: str, settings: TokenizerSettings) -> Tokenizer:
    """Return BERT's tokenizer."""
    raw = settings.raw
    vocab = {
        line.rstrip(_WHITE): id for id, line in enumerate(lines.removesuffix("\n").split("\n"))
    }
    unknown = settings.tokens.get("unk_token", "[UNK]")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=raw.get("tokenize_chinese_chars", True),
        strip_accents=raw.get("strip_accents"),
        lowercase=raw.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([token for token in _BERT_TOKENS if token in vocab])
    return tokenizer


class _File(NamedTuple):
    """A file of SentencePiece."""

    pieces: list[tuple[str, float, int]]  # text, score and type of each id
    trainer: dict[int, Any]  # fields of TrainerSpec by their numbers
    normalizer: dict[int, Any]  # fields of NormalizerSpec

    @classmethod
    def parsed(cls, data: bytes) -> "_File":
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
        return cls(pieces, *(dict(_fields(spec)) for spec in specs.values()))


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


def _sentencepiece(file: _File, settings: TokenizerSettings) -> Tokenizer:
    """Return the tokenizer of T5 or XLM-R, or another by the rules of its file."""
    vocab = [(text, score) for text, score, _ in file.pieces]
    model, tokens = None, list[str]()
    if settings.kind == "T5Tokenizer":
        extra = range(min(int(settings.raw.get("extra_ids", 100)), _MOST_EXTRA) - 1, -1, -1)
        model = models.Unigram([*vocab, *((f"<extra_id_{n}>", 0.0) for n in extra)], unk_id=2)
    elif settings.kind == "XLMRobertaTokenizer":
        roles = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
        tokens = [settings.tokens.get(f"{role}_token", text) for role, text in roles.items()]
        *first, last = [(token, 0.0) for token in tokens]
        model = models.Unigram([*first, *vocab[3:], last], unk_id=3)
    if model is None:
        tokenizer = _of_rules(file, settings)
    else:
        tokenizer = Tokenizer(model)
        if charsmap := file.normalizer.get(2):
            tokenizer.normalizer = normalizers.Precompiled(charsmap)
        split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(_SPACE)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
        tokenizer.decoder = decoders.Metaspace(_SPACE)
    for text, _, kind in file.pieces:
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and tokenizer.token_to_id(text) is not None:
            special = kind != _USER_DEFINED
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
    tokenizer.add_special_tokens(tokens)
    return tokenizer


def _of_rules(file: _File, settings: TokenizerSettings) -> Tokenizer:
    """Return a tokenizer by the rules of its file, as SentencePiece applies them."""
    trainer, rules, pieces = file.trainer, file.normalizer, file.pieces
    fallback = bool(trainer.get(35))
    if trainer.get(3, _UNIGRAM) == _UNIGRAM:
        scores = [(text, score) for text, score, _ in pieces]
        tokenizer = Tokenizer(models.Unigram(scores, trainer.get(40, 0), fallback))
    else:
        ids = {text: id for id, (text, _, _) in enumerate(pieces)}
        unknown = trainer.get(45, b"<unk>").decode()
        options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": fallback}
        tokenizer = Tokenizer(models.BPE(ids, _merges(pieces), **options))
    replace = normalizers.Replace
    steps: list[Any] = []
    if settings.kind == "GPTSw3Tokenizer":
        steps += [replace(Regex(_REMOVED), ""), replace(Regex(_BLANK), " "), normalizers.NFC()]
    if charsmap := rules.get(2):
        steps.append(normalizers.Precompiled(charsmap))
    if rules.get(4, 1):  # remove_extra_whitespaces
        steps += [replace(Regex(r"\A +| +\z"), ""), replace(Regex(" {2,}"), " ")]
    if rules.get(5, 1):  # escape_whitespaces
        steps.append(replace(" ", _SPACE))
    ends: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.get(3, 1):  # add_dummy_prefix
        steps.append(replace(Regex(r"\A" + _SPACE), 2 * _SPACE))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, split=False)
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


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
