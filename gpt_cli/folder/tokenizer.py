"""Which tokenizer a model's folder describes, and its special tokens."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt_cli.errors import MALFORMED, CheckpointError, import_extra
from gpt_cli.folder.base_tokenizer import Tokenizer, check_bytes
from gpt_cli.folder.byte_bpe import ByteBPE, byte_ranks, can_match, check_merges
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.contents import BYTE_BPE, OPENAI_BPE, VOCABULARIES, vocabulary
from gpt_cli.folder.special_tokens import AddedToken, TokenizerSettings
from gpt_cli.options.declare import OptionError
from gpt_cli.system.files import read_json, read_small

__all__ = ["Tokenizer", "check_bytes", "read_tokenizer", "with_special_tokens"]

_log = logging.getLogger(__name__)

# Options of a BPE that GPT-2's does not have.
_UNUSUAL = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
_PUNCTUATION = re.compile(rb'[\s"\[\],{}\\]+')  # of JSON, between the merges of a list
_MOST_MISSING = 0.01  # of a vocabulary: the share of the tokens that the model may not have
_LARGEST_ID = 2**24
_TAIL = 500  # bytes of tokenizer.json that have its last merge


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model's folder; raise CheckpointError if there is none.

    ResourceError if it is not of GPT-2's own kind, and the package tokenizers is missing.
    """
    settings = TokenizerSettings.from_folder(folder)
    present = {name for files in VOCABULARIES for name in files if (folder / name).is_file()}
    files = vocabulary(present)
    if files is None:
        names = ", or ".join(" and ".join(files) for files in VOCABULARIES)
        cure = f"add the model's {names}"
        if (folder / "tokenizer.model").is_file():
            saved = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            cure = f"tokenizer.model is not read, but transformers writes a tokenizer.json: {saved}"
        raise CheckpointError(f"{folder} has no tokenizer: {cure}")
    source = " and ".join([str(folder / files[0]), *files[1:]])
    try:
        description = _description(folder, settings, present) if files == VOCABULARIES[0] else None
        tokenizer: Tokenizer | None = None
        if files in (BYTE_BPE, OPENAI_BPE) or (description and _is_gpt2s(description)):
            parts = [folder / name for name in (files if len(files) == 2 else BYTE_BPE)]
            tokenizer = _byte_bpe(parts, settings, description, source)
        if tokenizer is None:
            if description is not None:
                description = settings.applied(read_json(folder / files[0]))
            tokenizer = _pipeline(folder / files[0], settings, description, source)
        special = tokenizer.special.values()
        tokenizer.special_ids = settings.special_ids(tokenizer.token_id, special, description)
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{source}: damaged ({error!r:.120}): get it again") from None
    return tokenizer


def _description(folder: Path, settings: TokenizerSettings, present: set[str]) -> dict[str, Any]:
    """Return a tokenizer.json, without its vocabulary if vocab.json and merges.txt have the same.

    They are faster to parse. Other files may be of another tokenizer: its last merge shows it.
    """
    path = folder / "tokenizer.json"
    if present.issuperset(BYTE_BPE):
        data = read_small(path)
        merges = read_small(folder / "merges.txt")
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
    model = description["model"]
    split = description.get("pre_tokenizer") or {}
    return (
        model.get("type", "BPE") == "BPE"
        and not any(model.get(part) for part in _UNUSUAL)
        and not description.get("normalizer")
        and split.get("type") == "ByteLevel"
        and split.get("use_regex", True)
        and (description.get("decoder") or split)["type"] == "ByteLevel"
    )


def _byte_bpe(
    files: Sequence[Path],
    settings: TokenizerSettings,
    description: dict[str, Any] | None,
    source: str,
) -> ByteBPE | None:
    """Return a tokenizer of GPT-2's own kind; None if tiktoken cannot hold it.

    `files` are the vocabulary and the merges, if a description does not have them.
    """
    adds_space = settings.adds_space
    if description:
        adds_space = bool(description["pre_tokenizer"].get("add_prefix_space"))
    if description and "vocab" in description["model"]:
        model = description["model"]
        vocab = model["vocab"]
        merged = [  # as "left right" or ["left", "right"]
            merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
            for merge in model["merges"]
        ]
    else:
        # A line is `left right`, and the files' alphabet has no white space.
        merged = read_small(files[1]).decode().replace(" ", "").split()
        if merged and merged[0].startswith("#version"):
            del merged[0]
        vocab = read_json(files[0])
    ranks = byte_ranks(vocab, merged, source)
    if ranks is None:
        _check_ids(vocab)
        return None
    added = settings.all_added(description, vocab)
    in_bpe = set(ranks.values())
    listed = {token.content for token in added}
    others = [name for name, id in vocab.items() if id not in in_bpe and name not in listed]
    check_merges(vocab, others, source)
    added += [AddedToken(name, vocab[name], special=True, normalized=False) for name in others]
    if any(not token.content for token in added):
        raise CheckpointError(f"{source}: a token is empty: get it again")
    if not can_match(added, ranks, adds_space=adds_space):
        return None
    return ByteBPE(ranks, added, source, adds_space=adds_space)


def _check_ids(vocab: Mapping[str, Any]) -> None:
    """Raise ValueError for an id that the library would skip, or whose size would fill the memory.

    It has a table of all ids up to the largest one.
    """
    if not all(type(id) is int and 0 <= id <= _LARGEST_ID for id in vocab.values()):
        raise ValueError(f"an id is not a whole number from 0 to {_LARGEST_ID}")


def _pipeline(
    path: Path, settings: TokenizerSettings, description: dict[str, Any] | None, source: str
) -> Tokenizer:
    import_extra(f"{source} needs the package tokenizers", "tokenizers", "tokenizers")
    from gpt_cli.folder import pipeline, vocabularies  # the library takes 25 ms

    if description is not None and isinstance(description["model"]["vocab"], dict):
        _check_ids(description["model"]["vocab"])
    build = partial(vocabularies.build, path, settings, description)
    joins_bytes = path.suffix == ".model" and settings.kind not in vocabularies.UNIGRAMS
    return pipeline.Pipeline(build, source, joins_bytes=joins_bytes)


def with_special_tokens(
    config: GPT2Config, tokenizer: Tokenizer, folder: Path, bos_token: str | int | None = None
) -> GPT2Config:
    """Return a configuration with the start and end tokens that texts have.

    The start token is `bos_token`, a name or an id; by default the tokenizer's, or config.json's.

    Raise OptionError if `bos_token` is not a token of the model; CheckpointError if the tokenizer
    has many more tokens than the model, added ones apart, or generation_config.json is not valid.
    """
    size = config.vocab_size
    if tokenizer.size > size:
        sizes = f"the vocabulary has {tokenizer.size:,} tokens, and the model has {size:,}"
        if tokenizer.size - size > _MOST_MISSING * tokenizer.size:
            raise CheckpointError(
                f"{tokenizer.source}: {sizes} (vocab_size): get the tokenizer and the weights of "
                "the same model"
            )
        _log.warning("%s: %s: texts that need the others are errors", tokenizer.source, sizes)
    if bos_token is not None:
        start: int | None = _id_of(str(bos_token), tokenizer, size)
    else:
        starts = (tokenizer.special_ids.bos, config.bos_token_id)
        start = next((id for id in starts if id is not None and id < size), None)
    ends = tuple(id for id in _end_tokens(config, tokenizer, folder) if id < size)
    return replace(config, bos_token_id=start, eos_token_id=ends)


def _end_tokens(config: GPT2Config, tokenizer: Tokenizer, folder: Path) -> tuple[int, ...]:
    """Return the end tokens of generation_config.json, the tokenizer or config.json.

    The first of these that names one counts. But what generation_config.json only copies from
    config.json comes after the tokenizer.
    """
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    ends = config.eos_token_id
    declared = generation.get("eos_token_id")
    if declared is not None:
        try:
            ends = GPT2Config.parse_json({"eos_token_id": declared})["eos_token_id"]
        except OptionError as error:
            raise CheckpointError(f"{path}: {error}: correct the file or get it again") from None
        if not generation.get("_from_model_config"):
            return ends
    eos = tokenizer.special_ids.eos
    return ends if eos is None or eos >= config.vocab_size else (eos,)


def _id_of(name: str, tokenizer: Tokenizer, size: int) -> int:
    id = int(name) if name.isdecimal() and len(name) < 10 else tokenizer.token_id(name)
    if id is None or id >= size:
        cure = "give a special token such as [CLS] or <s>, or an id"
        raise OptionError("bos_token", f"{name!r:.40} is not a token of this model: {cure}")
    return id
