"""From texts to ids and requests that a model can compute; InputError for all others."""

from collections.abc import Mapping
from typing import Any

from gpt_cli.errors import ContextError, InputError
from gpt_cli.generation import matcher
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.row import Request, fit
from gpt_cli.options.request import Options


def text_ids(loaded: LoadedModel, text: str, *, special: bool = False) -> list[int]:
    """Return the ids of a text; names such as `<|endoftext|>` are text unless `special`."""
    return loaded.config.check_ids(loaded.tokenizer.encode(text, special=special))


def prompt_ids(loaded: LoadedModel, prompt: str, *, special: bool = False) -> list[int]:
    """Return the ids of a prompt, or the start token if it is empty."""
    ids = text_ids(loaded, prompt, special=special)
    return ids or [loaded.config.start_token("the prompt is empty")]


def fitting_ids(loaded: LoadedModel, prompt: str, *, special: bool) -> list[int]:
    """Return the ids of a prompt that fits the context."""
    ids, n_positions = prompt_ids(loaded, prompt, special=special), loaded.config.n_positions
    if len(ids) > n_positions:
        raise ContextError(
            f"the prompt has {len(ids)} tokens, and the model's context is {n_positions}; "
            "shorten it"
        )
    return ids


def request_of(loaded: LoadedModel, prompt: str, options: Options, index: int) -> Request:
    """Return the request to continue a prompt; see `Request`."""
    ids = prompt_ids(loaded, prompt, special=options.special)
    loaded.config.check_ids([id for id, _ in options.logit_bias])
    matcher.check(loaded.tokenizer, loaded.config, options.constraint)
    return Request(fit(ids, loaded.config.n_positions, options), options, index)


def row_request(
    loaded: LoadedModel, row: str | Mapping[str, Any], defaults: Options, index: int
) -> Request:
    """Return the request of a row: a prompt, or a mapping with a "prompt" and options."""
    fields = dict(row) if isinstance(row, Mapping) else {"prompt": row}
    prompt = fields.pop("prompt", None)
    options = defaults.with_row(fields)
    if not isinstance(prompt, str):
        raise InputError('a row needs a string "prompt"')
    # A row that has a seed equals a run of this row alone.
    return request_of(loaded, prompt, options, index if fields.get("seed") is None else 0)
