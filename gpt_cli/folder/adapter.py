"""LoraConfig: the fields of an adapter's `adapter_config.json`, as PEFT saves it."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from gpt_cli.errors import CheckpointError
from gpt_cli.options.declare import (
    NUMBER,
    WHOLE,
    Declared,
    Kind,
    OptionError,
    Range,
    between,
    option,
)
from gpt_cli.system.files import read_json

T = TypeVar("T")

# Fields that change nothing after the training. Any other field that is set is refused. The file of
# weights shows what the targets were; the last two are of features that are off.
_OF_TRAINING = (
    "fan_in_fan_out",
    "peft_version",
    "task_type",
    "revision",
    "auto_mapping",
    "inference_mode",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "eva_config",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
)
# The supported values of fields that are always set. Other initializers change the model, too.
_ALLOWED: dict[str, Collection[object]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
MERGE = "merge it into its model with PEFT (merge_and_unload), and load that"

_RANKS = between(1, 2**20)
_ALPHAS = between(-(2**20), 2**20)
# With these limits, matching takes seconds, whoever wrote the patterns and the names.
_MOST = 500
_NAMES = Range(lambda names: len(names) <= _MOST, f"up to {_MOST} names")
_COSTLY = r"\)[*+]|\[\[|--|\|\||([*+(].*){3}"
_PATTERN = re.compile(rf"(?!.*({_COSTLY}))[\w.^$|\\()\[\]*+-]{{1,100}}", re.ASCII)


def _patterns(number: Kind, range: Range) -> Any:
    """Return an option with numbers by patterns of the ends of modules' names, as in PEFT."""

    def convert(values: Any) -> dict[re.Pattern[str], Any]:
        numbers = {key: number.convert(value) for key, value in dict(values).items()}
        if len(numbers) > _MOST or not all(map(range.contains, numbers.values())):
            raise ValueError
        with suppress(re.error):
            if all(map(_PATTERN.fullmatch, numbers)):
                return {re.compile(rf"(.*\.)?({key})$"): numbers[key] for key in numbers}
        raise ValueError

    limits = f"up to {_MOST} numbers {range.name}"
    kind = Kind(f"{limits} by the names of modules, or by simple patterns of them", str, convert)
    return option((), kind=kind)


@dataclass(frozen=True)
class LoraConfig(Declared):
    """The fields of `adapter_config.json` that affect the merged weights."""

    r: int = option(8, range=_RANKS)
    lora_alpha: float = option(8, range=_ALPHAS)
    use_rslora: bool = option(False)
    rank_pattern: Mapping[re.Pattern[str], int] = _patterns(WHOLE, _RANKS)
    alpha_pattern: Mapping[re.Pattern[str], float] = _patterns(NUMBER, _ALPHAS)
    modules_to_save: Sequence[str] = option((), range=_NAMES)
    base_model_name_or_path: str = option("")

    @classmethod
    def from_file(cls, path: Path) -> "LoraConfig":
        """Read a configuration; CheckpointError if a field is wrong or needs more than LoRA."""
        raw = read_json(path)
        names = [field.name for field in fields(cls)]
        known = {*names, *_OF_TRAINING, *_ALLOWED}
        refused = [name for name, values in _ALLOWED.items() if raw.get(name) not in values]
        refused += [name for name, value in raw.items() if value and name not in known]
        if refused:
            shown = f"{refused[0]:.40} is {raw.get(refused[0])!r:.40}"
            raise CheckpointError(f"{path}: {shown}, which is not supported: {MERGE}")
        try:
            return cls(**{name: raw[name] for name in names if raw.get(name) is not None})
        except OptionError as error:
            raise CheckpointError(f"{path}: {error}: correct the file or get it again") from None

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank of the change of a module's matrix, and the factor of the change."""
        rank = _first_match(self.rank_pattern, module, self.r)
        alpha = _first_match(self.alpha_pattern, module, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def saves(self, name: str) -> bool:
        """Return whether a tensor is in one of the modules to save."""
        return any(f".{module}." in f".{name}" for module in self.modules_to_save)


def _first_match(numbers: Mapping[re.Pattern[str], T], module: str, default: T) -> T:
    """Return the number of the first pattern that matches a module's name."""
    return next((numbers[pattern] for pattern in numbers if pattern.match(module)), default)
