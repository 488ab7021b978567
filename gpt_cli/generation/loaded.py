"""LoadedModel: what everything that computes texts is passed."""

from dataclasses import dataclass
from functools import cached_property

from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.prefix_cache import PrefixCache
from gpt_cli.generation.speculator import Speculator
from gpt_cli.gpt2.model import GPT2


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its tokenizer, and what makes texts faster."""

    model: GPT2
    tokenizer: Tokenizer
    speculator: Speculator | None = None  # without one, nothing is drafted
    kept_bytes: float = 0  # of prefixes that are kept; at least the last one is

    @property
    def config(self) -> GPT2Config:
        """Return the configuration of the model."""
        return self.model.config

    @cached_property
    def prefixes(self) -> PrefixCache:
        """The beginnings of earlier texts."""
        return PrefixCache(self.model, self.kept_bytes)

    def release(self) -> None:
        """Give back the memory of all but the weights."""
        self.prefixes.release()
        if self.speculator:
            self.speculator.release()
