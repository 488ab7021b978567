"""The choices of a prompt, as they follow it."""

from collections.abc import Sequence

from gpt_cli.errors import InputError


def spaced(prompt: str, choices: Sequence[str], *, exact: bool = False) -> dict[str, str]:
    """Return the written choices, by the texts that follow a prompt.

    Unless `exact`, spaces around a choice are removed, and one is put before it if the prompt does
    not end with white space. A choice that is empty, a duplicate or no string is an InputError.
    """
    is_list = isinstance(choices, list | tuple) and len(choices) > 0
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise InputError(
            'the "choices" of a row must be a list of one or more strings, such as ["yes", "no"]'
        )
    space = "" if exact or not prompt or prompt[-1].isspace() else " "
    written: dict[str, str] = {}
    for choice in choices:
        if not exact:
            choice = choice.strip()
        if not choice:
            raise InputError("a choice is empty: remove it")
        text = space + choice
        if text in written:
            raise InputError(f"duplicate choice {choice!r:.40}: remove it")
        written[text] = choice
    return written
