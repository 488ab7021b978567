"""Special and added tokens, as tokenizer_config.json and its neighbours list them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpt_cli.errors import MALFORMED, CheckpointError
from gpt_cli.system.files import read_json

LONGEST_NAME = 1000  # characters of an added token

# Roles that are lists of names, the older one first.
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# The start token of a class of tokenizers in transformers, where the files name none.
_STARTS = {
    "GPT2Tokenizer": "<|endoftext|>",
    "AlbertTokenizer": "[CLS]",
    "XLMRobertaTokenizer": "<s>",
    "GPTSw3Tokenizer": "<s>",
    "LlamaTokenizer": "<s>",
}


class SpecialIds(NamedTuple):
    """The special tokens of a tokenizer, as ids."""

    bos: int | None = None  # begins a text; None if there is none
    eos: int | None = None  # ends a text; None if the files beside the vocabulary name none
    begins_texts: bool = False  # whether transformers puts its start token before every text

    @property
    def start(self) -> list[int]:
        """Return the start token if transformers puts it before every text, else []."""
        return [self.bos] if self.begins_texts and self.bos is not None else []


class AddedToken(NamedTuple):
    """A token that is searched for in a text before the rest is split, as transformers does it.

    Attributes:
        content: its name, which is its text.
        id: its id.
        special: whether the name is text unless special tokens are requested.
        lstrip: whether it includes white space to the left.
        rstrip: whether it includes white space to the right.
        single_word: whether it is none within a word.
        normalized: whether it is searched for in the normalized text, after those that are not.
    """

    content: str
    id: int
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True

    @classmethod
    def parse(cls, raw: Mapping[str, Any], id: int) -> "AddedToken":
        """Read one as the files write it; raise ValueError or TypeError if it is not valid."""
        content = raw["content"]
        if not isinstance(content, str) or not isinstance(id, int) or id < 0:
            raise TypeError(f"an added token is not a name and an id: {content!r:.40}, {id!r:.20}")
        if not content:
            raise ValueError("an added token has no text")
        if len(content) > LONGEST_NAME:
            raise ValueError(f"an added token has more than {LONGEST_NAME} characters")
        strips = raw.get("lstrip") or raw.get("rstrip")
        if strips and content.isspace():  # finding it would take quadratic time
            raise ValueError("an added token of white space takes white space around it")
        special = bool(raw.get("special"))
        return cls(
            content,
            id,
            special=special,
            lstrip=bool(raw.get("lstrip")),
            rstrip=bool(raw.get("rstrip")),
            single_word=bool(raw.get("single_word")),
            normalized=bool(raw.get("normalized", not special)),
        )


@dataclass(frozen=True)
class TokenizerSettings:
    """The files beside a vocabulary, parsed."""

    raw: dict[str, Any]  # tokenizer_config.json
    kind: str  # the class of the tokenizer in transformers
    tokens: dict[str, str]  # by their roles, such as bos_token
    special: frozenset[str]  # the names of all special tokens
    added: tuple[AddedToken, ...]  # those that the files beside the vocabulary list
    declared_bos: Any  # bos_token_id of config.json, which may be wrong

    @classmethod
    def from_folder(cls, folder: Path) -> "TokenizerSettings":
        """Read the files that exist."""

        def read(name: str) -> dict[str, Any]:
            path = folder / name
            return read_json(path) if path.is_file() else {}

        raw = read("tokenizer_config.json")
        config = read("config.json")
        kind = raw.get("tokenizer_class") or config.get("tokenizer_class") or "GPT2Tokenizer"
        kind = str(kind).removesuffix("Fast")
        # As in transformers, which then ignores the other two files.
        listed = raw.get("added_tokens_decoder")
        others = {} if listed is not None else read("special_tokens_map.json")
        roles = raw | others if others else raw
        contents = {
            role: _name(value)
            for role, value in roles.items()
            if role.endswith("_token")  # add_bos_token is no text
        }
        named = {role: text for role, text in contents.items() if isinstance(text, str)}
        path = folder / ("tokenizer_config.json" if roles is raw else "special_tokens_map.json")
        try:
            names = {*named.values(), *_listed_names(roles), _STARTS.get(kind, "")}
            special = frozenset(names - {""})
            if listed is None:
                path = folder / "added_tokens.json"
                added = _of_ids(read("added_tokens.json"), special)
            else:
                added = [AddedToken.parse(token, int(id)) for id, token in listed.items()]
        except MALFORMED as error:
            raise CheckpointError(f"{path}: damaged ({error!r:.120}): get it again") from None
        declared = config.get("bos_token_id", 50256)
        return cls(raw, kind, named, special, tuple(added), declared)

    @property
    def adds_space(self) -> bool:
        """Return whether GPT-2's own kind puts a space before every text."""
        return self.kind == "GPT2Tokenizer" and bool(self.raw.get("add_prefix_space"))

    def all_added(
        self, description: Mapping[str, Any] | None, vocab: Mapping[str, int]
    ) -> list[AddedToken]:
        """Return all added tokens, in the order of their ids.

        Args:
            description: a parsed tokenizer.json, whose list counts less than that of
                tokenizer_config.json, and more than added_tokens.json.
            vocab: the vocabulary: a special token may be one of its tokens, without being listed.
        """
        listed = [] if description is None else description.get("added_tokens") or []
        added = {token["id"]: AddedToken.parse(token, token["id"]) for token in listed}
        beside = {token.id: token for token in self.added}
        by_id = added | beside if "added_tokens_decoder" in self.raw else beside | added
        names = {token.content for token in by_id.values()}
        for name in self.special - names:
            if name in vocab:
                token = AddedToken(name, vocab[name], special=True, normalized=False)
                by_id.setdefault(token.id, token)
        tokens = [by_id[id] for id in sorted(by_id)]
        return [
            token._replace(special=True) if token.content in self.special else token
            for token in tokens
        ]

    def applied(self, description: dict[str, Any]) -> dict[str, Any]:
        """Return a tokenizer.json with `add_prefix_space` as in transformers, and no randomness."""
        split = description.get("pre_tokenizer") or {}
        if split.get("type") == "ByteLevel" and self.kind == "GPT2Tokenizer":
            split["add_prefix_space"] = self.adds_space
        description["model"].pop("dropout", None)
        return description

    def special_ids(
        self,
        token_id: Callable[[str], int | None],
        special: Collection[int],
        description: dict[str, Any] | None,
    ) -> SpecialIds:
        """Return the special tokens as ids; `description` is a parsed tokenizer.json, if any.

        With a tokenizer.json, its template decides what begins a text. `add_bos_token` counts only
        if the template also ends texts.
        """

        def id_of(name: str | None) -> int | None:
            return None if name is None else token_id(name)

        start = self.tokens.get("bos_token")
        declared = self.declared_bos if self.declared_bos in special else None
        starts = (id_of(start), declared, id_of(_STARTS.get(self.kind)))
        bos = next((id for id in starts if id is not None), None)
        begins = self.raw.get("add_bos_token") is True
        if description is not None:
            parts = _template(description.get("post_processor"))
            first = parts[0].get("SpecialToken") if parts else None
            alone = bool(parts) and "Sequence" in parts[-1]  # nothing after the text
            begins = first is not None and first["id"] == start and (begins or alone)
        return SpecialIds(bos, id_of(self.tokens.get("eos_token")), begins)


def _template(processor: Any) -> list[dict[str, Any]]:
    """Return what a post-processor puts around a text, which is a "Sequence", or []."""
    if not isinstance(processor, dict):
        return []
    if processor.get("type") == "TemplateProcessing":
        return [part for part in processor["single"] if isinstance(part, dict)]
    inner = processor.get("processors") or []
    return next(filter(None, map(_template, inner)), [])


def _of_ids(ids: Mapping[str, int], special: Collection[str]) -> list[AddedToken]:
    """Return the tokens of added_tokens.json, which has only their names and ids."""
    return [
        AddedToken.parse({"content": name, "special": name in special}, id)
        for name, id in ids.items()
    ]


def _listed_names(roles: Mapping[str, Any]) -> set[str]:
    """Return the names of special tokens without a role of their own."""
    names: set[str] = set()
    for role in _LISTS:
        values = roles.get(role) or []
        values = values.values() if isinstance(values, dict) else values
        names.update(name for name in map(_name, values) if isinstance(name, str))
    return names


def _name(value: Any) -> Any:
    """Return the name of a special token, which may be written with its flags."""
    return value.get("content") if isinstance(value, dict) else value
