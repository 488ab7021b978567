"""LoadedModel: a model and its tokenizer, for everything that computes texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpt_cli.errors import ContextError, counted
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.prefix_cache import PrefixCache
from gpt_cli.generation.speculator import Speculator
from gpt_cli.gpt2.edits import Bound, Edit, bind
from gpt_cli.gpt2.model import GPT2
from gpt_cli.options.request import Options


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its tokenizer, and what makes texts faster; texts become ids that it has."""

    model: GPT2
    tokenizer: Tokenizer
    speculator: Speculator | None = None  # without one, nothing is drafted
    kept_bytes: float = 0  # of prefixes that are kept; at least the last one is
    edits: tuple[Edit, ...] = ()  # of all texts

    @property
    def config(self) -> GPT2Config:
        """Return the configuration of the model."""
        return self.model.config

    @cached_property
    def prefixes(self) -> PrefixCache:
        """The beginnings of earlier texts."""
        return PrefixCache(self.model, self.kept_bytes)

    @cached_property
    def missing_ids(self) -> list[int]:
        """The ids of the model that have no token. To find them takes milliseconds."""
        return self.tokenizer.missing_ids(self.config.vocab_size)

    @property
    def start(self) -> list[int]:
        """Return the start token if the tokenizer puts it before every text, else []."""
        start = self.config.bos_token_id
        return [start] if self.tokenizer.special_ids.begins_texts and start is not None else []

    def text_ids(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; names such as `<|endoftext|>` are text unless `special`."""
        return self.config.check_ids(self.tokenizer.encode(text, special=special))

    def prompt_ids(self, prompt: str, *, special: bool = False) -> list[int]:
        """Return the ids of a prompt after `start`, or the start token if both are empty."""
        ids = [*self.start, *self.text_ids(prompt, special=special)]
        return ids or [self.config.start_token("the prompt is empty")]

    def fitting_ids(self, prompt: str, *, special: bool) -> list[int]:
        """Return the ids of a prompt; raise ContextError if they do not fit the context."""
        ids = self.prompt_ids(prompt, special=special)
        self.check_fits(len(ids), "prompt")
        return ids

    def check_fits(self, tokens: int, what: str) -> None:
        """Raise ContextError if tokens do not fit the context."""
        if tokens > (n_positions := self.config.n_positions):
            raise ContextError(
                f"the {what} has {counted(tokens, 'token')}, and the model's context is "
                f"{n_positions:,}; shorten it"
            )

    def row_edits(self, texts: str | Sequence[str] | None) -> list[Edit]:
        """Return the edits in a field of a row; raise InputError if one is not valid."""
        valid = Options.parse_json({"edits": texts})["edits"] if texts else ()
        return [Edit.parse(text, self.config) for text in valid]

    def bound_edits(self, texts: str | Sequence[str] | None, length: int, most: int) -> list[Bound]:
        """Return the edits of a text, those of all texts and its own: see `edits.bind`.

        Raise ContextError if the text has edits and does not fit the context.
        """
        if edits := [*self.edits, *self.row_edits(texts)]:
            self.check_fits(length, "text with edits")
        return bind(edits, length, most)

    def release(self) -> None:
        """Give back the memory of all but the weights."""
        self.prefixes.release()
        if self.speculator:
            self.speculator.release()
