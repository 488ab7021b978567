"""Tokenizers of vocab.txt and of SentencePiece's files, as transformers builds them."""

import json
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.contents import BYTE_BPE, OPENAI_BPE
from gpt_cli.folder.pipeline import SPACE
from gpt_cli.folder.special_tokens import TokenizerSettings
from gpt_cli.system.files import read_small

# Classes with a Unigram that transformers builds by other rules than those of its file.
UNIGRAMS = ("T5Tokenizer", "XLMRobertaTokenizer")
# Types of pieces.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNIGRAM = 1
_LONGEST_PIECE = 1000  # bytes, far above any model's
_BERT_TOKENS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
# What GPT-SW3 removes from texts, and what it reads as a space.
_REMOVED = r"[\x00-\x08\x0b-\x1f\x7f-\x{9f}\x{a0}\x{ad}\x{200b}]"
_BLANK = r"[\x{2002}\x{2003}\x{2005}\x{2008}-\x{200a}\x{202f}\x{3000}\x{fffc}]"


def build(path: Path, settings: TokenizerSettings, description: dict[str, Any] | None) -> Tokenizer:
    """Return the tokenizer of a parsed tokenizer.json, or of a vocabulary in another file."""
    if description is not None:
        tokenizer = Tokenizer.from_str(json.dumps(description))
    elif path.name in (BYTE_BPE[0], OPENAI_BPE[0]):
        merges = BYTE_BPE[1] if path.name == BYTE_BPE[0] else OPENAI_BPE[1]
        tokenizer = _byte_level(path, path.with_name(merges), settings)
    elif path.name == "vocab.txt":
        tokenizer = _wordpiece(read_small(path), settings)
    else:
        tokenizer = _sentencepiece(read_small(path), settings)
    vocab = tokenizer.get_vocab()
    added = settings.all_added(description, vocab)
    tokenizer.add_tokens(
        [
            AddedToken(
                token.content,
                special=token.special,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                single_word=token.single_word,
                normalized=token.normalized,
            )
            for token in added
        ]
    )
    for token in added:
        id = tokenizer.token_to_id(token.content)
        if id != token.id:  # the library counts on from the vocabulary
            numbers = f"has the id {token.id}, where transformers gives it {id}"
            raise CheckpointError(
                f"{path}: the added token {token.content!r:.40} {numbers}: save the tokenizer "
                "again with transformers"
            )
    return tokenizer


def _byte_level(vocab: Path, merges: Path, settings: TokenizerSettings) -> Tokenizer:
    """Return GPT-2's own kind of tokenizer, from a vocabulary and its merges."""
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.adds_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wordpiece(data: bytes, settings: TokenizerSettings) -> Tokenizer:
    """Return BERT's tokenizer."""
    raw = settings.raw
    tokens = data.decode().removesuffix("\n").split("\n")
    vocab = {token.rstrip(): id for id, token in enumerate(tokens)}
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


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of a protobuf message: a whole number, or bytes."""
    file = BytesIO(data)
    while file.tell() < len(data):
        number, wire = divmod(_varint(file), 8)
        if wire == 0:
            yield number, _varint(file)
            continue
        size = _varint(file) if wire == 2 else {1: 8, 5: 4}[wire]
        value = file.read(size)
        if len(value) < size:
            raise ValueError("it is cut off")
        yield number, value


def _varint(file: BytesIO) -> int:
    """Return a whole number, 7 bits a byte; the highest bit says that another byte follows."""
    value = 0
    for shift in range(0, 63, 7):
        byte = file.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise ValueError("a number is too long")


def _piece(data: bytes) -> _Piece:
    fields = dict(_fields(data))
    if len(fields[1]) > _LONGEST_PIECE:
        raise ValueError("a piece is too long")
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return _Piece(fields[1].decode(), score, fields.get(3, _NORMAL))


def _sentencepiece(data: bytes, settings: TokenizerSettings) -> Tokenizer:
    """Return the tokenizer of T5 or XLM-R, or another by the rules of its file.

    The file is a ModelProto of sentencepiece_model.proto: the pieces, and the fields of TrainerSpec
    and NormalizerSpec by their numbers.
    """
    pieces = [_piece(value) for number, value in _fields(data) if number == 1]
    parts = dict(_fields(data))
    trainer = dict(_fields(parts.get(2, b"")))
    rules = dict(_fields(parts.get(3, b"")))
    scores = [(piece.text, piece.score) for piece in pieces]
    if settings.kind == "T5Tokenizer":
        tokenizer = _of_words(models.Unigram(scores, unk_id=2), rules)
    elif settings.kind == "XLMRobertaTokenizer":
        first = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
        vocab = [*first, *scores[3:], ("<mask>", 0.0)]
        tokenizer = _of_words(models.Unigram(vocab, unk_id=3), rules)
        tokenizer.add_special_tokens(["<pad>", "<mask>"])
    else:
        tokenizer = _of_rules(_model(pieces, trainer), rules, settings)
    for text, _, kind in pieces:
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            special = kind != _USER_DEFINED
            tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
    return tokenizer


def _of_words(model: models.Unigram, rules: dict[int, Any]) -> Tokenizer:
    """Return the tokenizer of T5 or XLM-R, which splits a text into words."""
    tokenizer = Tokenizer(model)
    if charsmap := rules.get(2):
        tokenizer.normalizer = normalizers.Precompiled(charsmap)
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.Metaspace(SPACE)
    return tokenizer


def _model(pieces: list[_Piece], trainer: dict[int, Any]) -> models.Model:
    """Return a Unigram, or a BPE whose merges make the pieces with the best scores first."""
    fallback = bool(trainer.get(35))
    if trainer.get(3, _UNIGRAM) == _UNIGRAM:
        scores = [(piece.text, piece.score) for piece in pieces]
        return models.Unigram(scores, trainer.get(40, 0), fallback)
    normal = {
        piece.text: (-piece.score, id) for id, piece in enumerate(pieces) if piece.kind == _NORMAL
    }
    ranked = sorted(
        (rank, text[:cut], text[cut:])
        for text, rank in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    )
    return models.BPE(
        {piece.text: id for id, piece in enumerate(pieces)},
        [(left, right) for _, left, right in ranked],
        unk_token=trainer.get(45, b"<unk>").decode(),
        fuse_unk=True,
        byte_fallback=fallback,
    )


def _of_rules(model: models.Model, rules: dict[int, Any], settings: TokenizerSettings) -> Tokenizer:
    """Return a tokenizer by the rules of its file, as SentencePiece applies them."""
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace
    steps: list[Any] = []
    if settings.kind == "GPTSw3Tokenizer":
        steps += [replace(Regex(_REMOVED), ""), replace(Regex(_BLANK), " "), normalizers.NFC()]
    if charsmap := rules.get(2):
        steps.append(normalizers.Precompiled(charsmap))
    if rules.get(4, 1):  # remove_extra_whitespaces
        steps += [replace(Regex(r"\A +| +\z"), ""), replace(Regex(" {2,}"), " ")]
    if rules.get(5, 1):  # escape_whitespaces
        steps.append(replace(" ", SPACE))
    ends: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if rules.get(3, 1):  # add_dummy_prefix
        steps.append(replace(Regex(r"\A" + SPACE), 2 * SPACE))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, split=False)
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer
