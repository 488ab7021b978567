"""Which tokens begin and end texts: what tokenizer_config.json and its neighbours say."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpt_cli.system.files import read_json

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


@dataclass(frozen=True)
class TokenizerSettings:
    """The files beside a vocabulary, parsed."""

    raw: dict[str, Any]  # tokenizer_config.json
    kind: str  # the class of the tokenizer in transformers
    tokens: dict[str, str]  # by their roles, such as bos_token
    added: dict[str, int]  # added_tokens.json: tokens beside the vocabulary, and their ids
    declared_bos: Any  # bos_token_id of config.json, which may be wrong

    @classmethod
    def from_folder(cls, folder: Path) -> "TokenizerSettings":
        """Read the files that exist."""

        def read(name: str) -> dict[str, Any]:
            path = folder / name
            return read_json(path) if path.is_file() else {}

        raw = read("tokenizer_config.json")
        tokens = read("special_tokens_map.json")
        added = read("added_tokens.json")
        config = read("config.json")
        kind = raw.get("tokenizer_class") or config.get("tokenizer_class") or "GPT2Tokenizer"
        values = raw if "added_tokens_decoder" in raw else raw | tokens  # as in transformers
        contents = {
            role: value.get("content") if isinstance(value, dict) else value
            for role, value in values.items()
            if role.endswith("_token")  # add_bos_token is no text
        }
        named = {role: text for role, text in contents.items() if isinstance(text, str)}
        declared = config.get("bos_token_id", 50256)
        return cls(raw, str(kind).removesuffix("Fast"), named, added, declared)

    @property
    def adds_space(self) -> bool:
        """Return whether GPT-2's own kind puts a space before every text."""
        return self.kind == "GPT2Tokenizer" and bool(self.raw.get("add_prefix_space"))

    @property
    def special(self) -> set[str]:
        """Return the names of the special tokens."""
        return {*self.tokens.values(), _STARTS.get(self.kind, "")} - {""}

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

        With a tokenizer.json, transformers ignores `add_bos_token` and applies its template.
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
