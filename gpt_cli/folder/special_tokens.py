"""Which tokens begin and end texts: what tokenizer_config.json and its neighbours say."""

from collections.abc import Callable
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
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class SpecialIds(NamedTuple):
    """The special tokens of a tokenizer, as ids."""

    bos: int | None = None  # begins a text; None if the files name none that exists
    eos: int | None = None  # ends a text
    usual_bos: int | None = None  # of the class of the tokenizer, if the files name none
    begins_texts: bool = False  # whether transformers puts its start token before every text

    @property
    def start(self) -> list[int]:
        """Return the start token if transformers puts it before every text, else []."""
        start = self.usual_bos if self.bos is None else self.bos
        return [start] if self.begins_texts and start is not None else []


@dataclass(frozen=True)
class TokenizerSettings:
    """The files beside a vocabulary, parsed."""

    raw: dict[str, Any]  # tokenizer_config.json
    kind: str  # the class of the tokenizer in transformers
    tokens: dict[str, str]  # by their roles, such as bos_token

    @classmethod
    def from_folder(cls, folder: Path) -> "TokenizerSettings":
        """Read tokenizer_config.json, special_tokens_map.json and the class in config.json."""
        raw, tokens, config = (
            read_json(folder / name) if (folder / name).is_file() else {}
            for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json")
        )
        kind = raw.get("tokenizer_class") or config.get("tokenizer_class") or "GPT2Tokenizer"
        values = raw if "added_tokens_decoder" in raw else raw | tokens  # as in transformers
        contents = {
            role: value.get("content") if isinstance(value, dict) else value
            for role, value in values.items()
            if role in _ROLES
        }
        named = {role: text for role, text in contents.items() if isinstance(text, str)}
        return cls(raw, str(kind).removesuffix("Fast"), named)

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
        self, token_id: Callable[[str], int | None], description: dict[str, Any] | None
    ) -> SpecialIds:
        """Return the special tokens as ids; `description` is that of a tokenizer.json, if any.

        With a tokenizer.json, transformers ignores `add_bos_token` and applies its template.
        """
        names = [self.tokens.get("bos_token"), self.tokens.get("eos_token"), _STARTS.get(self.kind)]
        bos, eos, usual = (None if name is None else token_id(name) for name in names)
        begins = self.raw.get("add_bos_token") is True
        if description is not None:
            parts = _template(description.get("post_processor"))
            first = parts[0].get("SpecialToken") if parts else None
            alone = bool(parts) and "Sequence" in parts[-1]  # nothing after the text
            begins = first is not None and first["id"] == names[0] and (begins or alone)
        return SpecialIds(bos, eos, usual, begins)


def _template(processor: Any) -> list[dict[str, Any]]:
    """Return what a post-processor puts around a text, which is a "Sequence", or []."""
    if not isinstance(processor, dict):
        return []
    if processor.get("type") == "TemplateProcessing":
        return [part for part in processor["single"] if isinstance(part, dict)]
    inner = processor.get("processors") or []
    return next(filter(None, map(_template, inner)), [])
