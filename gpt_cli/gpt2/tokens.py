"""Checks of token ids: those that a model has, and the one that begins a text."""

from collections.abc import Sequence

from gpt_cli.errors import InputError
from gpt_cli.folder.config import GPT2Config


def check_ids(config: GPT2Config, ids: Sequence[int]) -> list[int]:
    """Return token ids; raise InputError if the model has no such token."""
    size = config.vocab_size
    if bad := [id for id in ids if not 0 <= id < size]:
        raise InputError(f"the model has no token {bad[0]}; its ids are from 0 to {size - 1}")
    return list(ids)


def start_token(config: GPT2Config, reason: str) -> int:
    """Return the start token, which is needed for a reason; raise InputError if there is none."""
    if config.bos_token_id is None or config.bos_token_id >= config.vocab_size:
        raise InputError(f"{reason}, and this model has no start token (bos_token_id)")
    return config.bos_token_id
