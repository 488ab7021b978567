"""`gpt-cli rank`: which of several continuations is the likeliest."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import read_prompt
from gpt_cli.cli.layout import quoted
from gpt_cli.cli.streams import on_terminal, write
from gpt_cli.declare import PATH, option
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import read_text
from gpt_cli.records import json_line

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.rank import Choice


def rank(
    prompt: str | None = flags.argument("[PROMPT]", "Text before the choices"),
    *,
    choices: list[str] | None = option(
        (), "Continuations, separated by commas; repeatable.", metavar="A,B,C"
    ),
    choices_file: Path | None = option(
        None, "Continuations, one per line.", kind=PATH, metavar="FILE"
    ),
    by: Annotated[
        Literal["total", "token", "byte"],
        typer.Option(
            help="Rank by the total log-likelihood, which favours short choices, or by its mean "
            "per token or byte."
        ),
    ] = "total",
    exact: bool = option(False, "Use the choices as given: remove and add no spaces."),
    file: Path | None = flags.PROMPT_FILE,
    loading: flags.Loading,
    as_json: flags.Json = False,
) -> None:
    """Rank continuations of PROMPT by probability.

    The output is a table, or JSON in a pipe.

    Spaces around a choice are removed. One is added before it unless PROMPT ends with a space.

    Examples:
        gpt-cli rank -m tiny 'The fox was very' --choices happy,sad,stone
    """
    if choices_file == Path("-") and (prompt if file is None else file) in (None, Path("-")):
        raise InputError("PROMPT and --choices-file cannot both be read from the pipe")
    listed = _choices(choices, choices_file)
    text = read_prompt(prompt, file)
    space = "" if exact or not text or text[-1].isspace() else " "
    given: dict[str, str] = {}  # what the model sees -> what was given
    for choice in listed if exact else [choice.strip() for choice in listed]:
        if not choice:
            raise InputError("a choice is empty: remove it")
        if space + choice in given:
            raise InputError(f"duplicate choice {choice!r:.40}: remove it")
        given[space + choice] = choice
    engine = loading.load()
    ranked = engine.rank(text, list(given), by=by)
    if as_json or not on_terminal(sys.stdout):
        _write_json(engine, ranked, given)
    else:
        _write_table(ranked)


def _write_json(engine: "Engine", ranked: "list[Choice]", given: dict[str, str]) -> None:
    for place, choice in enumerate(ranked, 1):
        record = {
            "rank": place,
            "choice": given[choice.text],
            "text": choice.text,
            "probability": choice.probability,
            "logprob": choice.logprob,
            "tokens": len(choice.ids),
            "bytes": choice.bytes,
            "model": engine.name,
        }
        write(json_line(record))


def _write_table(ranked: "list[Choice]") -> None:
    write(f"{'probability':>11}  {'log-lik.':>9}  tokens  choice\n")
    for choice in ranked:
        numbers = f"{choice.probability:11.2%}  {choice.logprob:9.3f}  {len(choice.ids):6}"
        write(f"{numbers}  {quoted(choice.text.encode())}\n")


def _choices(given: list[str] | None, file: Path | None) -> list[str]:
    if (given is None) == (file is None):
        raise InputError("give either --choices A,B,C or --choices-file FILE")
    if file is not None:
        lines = [line.removesuffix("\r") for line in read_text(file).split("\n")]
        return [line for line in lines if line]
    return [choice for each in given or [] for choice in each.split(",")]
