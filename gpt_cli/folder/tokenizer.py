"""Tokenizers: what the program needs of one, and which one a model's folder describes."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gpt_cli.errors import MALFORMED, CheckpointError, InputError, import_extra
from gpt_cli.folder.byte_bpe import ByteBPE
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.contents import VOCABULARIES, vocabulary
from gpt_cli.folder.special_tokens import SpecialIds, TokenizerSettings
from gpt_cli.options.declare import OptionError
from gpt_cli.system.files import read_json, read_small

_SINGLE, _BYTE_BPE = VOCABULARIES[:2]
# Options of a BPE that GPT-2's does not have.
_UNUSUAL = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
_PUNCTUATION = re.compile(rb'[\s"\[\],{}\\]+')  # of JSON, between the merges of a list
_TAIL = 500  # bytes of tokenizer.json that have its last merge


class Stream(Protocol):
    """Decodes ids one by one. The joined texts are what the ids add to the decoded prompt."""

    def push(self, id: int) -> str:
        """Add a token; return the text that it makes certain, or ""."""

    def flush(self) -> str:
        """End the stream; return the text that was held back, such as U+FFFD, or ""."""


class Tokenizer(Protocol):
    """Converts text to ids and back."""

    kind: str  # "GPT-2's own", or that of the library's model, such as "Unigram"
    special: dict[str, int]  # the names of special tokens, and their ids
    special_ids: SpecialIds
    has_bytes: bool  # whether tokens have bytes, which are what they add to a text
    has_all_bytes: bool  # whether any bytes have tokens

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`; names such as `<|endoftext|>` are text unless `special`.

        Raise InputError if the text has a lone surrogate, which is not a character.
        """

    def encode_bytes(self, data: bytes, *, special: bool = False) -> list[int]:
        """Return ids whose joined bytes are `data`, which may be any bytes."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; undecodable bytes become U+FFFD."""

    def pieces(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[bytes]:
        """Yield what each token adds to the text of a prompt and the tokens before it."""

    def stream(self, prompt: Sequence[int] = ()) -> Stream:
        """Return a decoder of the ids that follow a prompt."""

    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes of a token, perhaps a part of a character; None if it has none.

        Raise InputError if there is no such token.
        """

    def token_name(self, id: int) -> str:
        """Return a token as text, or as the vocabulary writes it if tokens have no bytes."""

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token or of a text that is one token, else None."""

    def missing_ids(self, vocab_size: int) -> list[int]:
        """Return the ids below `vocab_size` that have no token, such as padding rows of wte."""


def check_bytes(tokenizer: Tokenizer, purpose: str, *, every: bool = False) -> None:
    """Raise InputError if tokens have no bytes, or with `every`, if some bytes have no token."""
    if not (tokenizer.has_all_bytes if every else tokenizer.has_bytes):
        what = "tokens for all bytes" if every else "the bytes of each token"
        raise InputError(
            f"{purpose} needs {what}, which the tokenizer of this model does not have: use a model "
            "with a byte-level tokenizer, such as gpt2"
        )


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder; raise CheckpointError if there is none.

    ResourceError if it is not of GPT-2's own kind, and the package tokenizers is missing.
    """
    settings = TokenizerSettings.from_folder(folder)
    names = {name for files in VOCABULARIES for name in files if (folder / name).is_file()}
    files = vocabulary(names)
    if files is None:
        raise CheckpointError(
            f"{folder} has no tokenizer: add the model's vocab.json and merges.txt, or its "
            "tokenizer.json, vocab.txt or spiece.model"
        )
    source = str(folder / files[0])
    try:
        description = None
        if files == _SINGLE:
            description = _description(folder, names, settings)
            files = _SINGLE if "vocab" in description["model"] else _BYTE_BPE
        source = " and ".join([str(folder / files[0]), *files[1:]])
        tokenizer = _of_files(folder, files, settings, description, source)
        tokenizer.special_ids = settings.special_ids(tokenizer.token_id, description)
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{source}: damaged ({error!r:.120}): get it again") from None
    return tokenizer


def _description(folder: Path, names: set[str], settings: TokenizerSettings) -> dict[str, Any]:
    """Return a tokenizer.json, without its vocabulary if vocab.json and merges.txt have the same.

    They are faster to parse. Other files may be of another tokenizer: its last merge shows it.
    """
    path = folder / "tokenizer.json"
    if names.issuperset(_BYTE_BPE):
        data, merges = read_small(path), read_small(folder / "merges.txt")
        last = _PUNCTUATION.sub(b"", merges.rstrip().rpartition(b"\n")[2])
        if last and _PUNCTUATION.sub(b"", data[-_TAIL:]).endswith(last):
            head = data.partition(b'"vocab"')[0].rstrip().removesuffix(b",")
            with suppress(ValueError):
                rules = settings.applied(json.loads(head + b"}}"))
                if "pre_tokenizer" in rules and _is_gpt2s(rules):
                    return rules
    whole = settings.applied(read_json(path))
    if "vocab" not in whole["model"]:
        raise ValueError("it has no vocabulary")
    return whole


def _is_gpt2s(description: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json describes a tokenizer of GPT-2's own kind."""
    model, split = description["model"], description.get("pre_tokenizer") or {}
    return (
        model.get("type", "BPE") == "BPE"
        and not any(model.get(part) for part in _UNUSUAL)
        and not description.get("normalizer")
        and split.get("type") == "ByteLevel"
        and split.get("use_regex", True)
        and not split.get("add_prefix_space")
        and (description.get("decoder") or split)["type"] == "ByteLevel"
    )


def _of_files(
    folder: Path,
    files: tuple[str, ...],
    settings: TokenizerSettings,
    description: dict[str, Any] | None,
    source: str,
) -> Tokenizer:
    if description is None:
        added = folder / "added_tokens.json"
        more = read_json(added) if added.is_file() else {}
    else:
        more = {token["content"]: token["id"] for token in description.get("added_tokens") or []}
    if files == _SINGLE and description and _is_gpt2s(description):
        model = description["model"]
        merged = [  # as "left right" or ["left", "right"]
            "".join(merge.split(" ") if isinstance(merge, str) else merge)
            for merge in model["merges"]
        ]
        return ByteBPE(model["vocab"], merged, more, source)
    if files == _BYTE_BPE and not settings.adds_space:
        # A line is `left right`, and the files' alphabet has no white space.
        lines = read_small(folder / "merges.txt").decode()
        merged = lines.replace(" ", "").split()
        if merged and merged[0].startswith("#version"):
            del merged[0]
        return ByteBPE(read_json(folder / "vocab.json"), merged, more, source)

    import_extra(f"{source} needs the package tokenizers", "tokenizers", "tokenizers")
    from tokenizers import Tokenizer as Library

    from gpt_cli.folder import pipeline, vocabularies  # the library takes 25 ms

    def build() -> Library:
        if files == _SINGLE:
            return Library.from_str(json.dumps(description))
        return vocabularies.build(folder, files[0], settings, more)

    return pipeline.Pipeline(build, settings.special, source)


def with_special_tokens(
    config: GPT2Config, tokenizer: Tokenizer, folder: Path, bos_token: str | int | None = None
) -> GPT2Config:
    """Return a configuration with the special tokens of the tokenizer, which win over config.json.

    An end token in generation_config.json wins over the tokenizer's, unless it comes from
    config.json. Raise OptionError if `bos_token`, a name or an id, is not a token of the model.
    """
    ids, size, declared = tokenizer.special_ids, config.vocab_size, config.bos_token_id
    special = declared if declared in tokenizer.special.values() else None
    starts = [ids.bos, special, ids.usual_bos, declared]
    start = next((id for id in starts if id is not None and id < size), None)
    if bos_token is not None:
        start = _id_of(str(bos_token), tokenizer, size)
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    chosen = generation.get("eos_token_id") is not None and not generation.get("_from_model_config")
    ends = config.eos_token_id
    if ids.eos is not None and ids.eos < size and not chosen:
        ends = (ids.eos,)
    return replace(config, bos_token_id=start, eos_token_id=tuple(id for id in ends if id < size))


def _id_of(name: str, tokenizer: Tokenizer, size: int) -> int:
    id = int(name) if name.isdecimal() and len(name) < 10 else tokenizer.token_id(name)
    if id is None or id >= size:
        cure = "give a special token such as [CLS] or <s>, or an id"
        raise OptionError("bos_token", f"{name!r:.40} is not a token of this model: {cure}")
    return id
