"""`gpt-cli rank` and `next`: the likeliest of several continuations, and of all tokens."""

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpt_cli import jobs
from gpt_cli.cli import flags, inputs
from gpt_cli.cli.jobs import AnswerLines, run
from gpt_cli.cli.output import bar, on_terminal, write, write_json
from gpt_cli.cli.table import Column, Table
from gpt_cli.display.labels import quoted, token_label
from gpt_cli.errors import InputError
from gpt_cli.options.declare import AT_LEAST_1, Declared, option, split_commas
from gpt_cli.options.request import CHOICES
from gpt_cli.records import Record, of_ranking, of_token

_By = Literal["total", "token", "byte"]


@dataclass(kw_only=True, eq=False, repr=False)
class Choices(Declared):
    """The choices of a command, and how to compare them."""

    choices: Sequence[str] | None = option(
        None,
        "Continuations, separated by commas; repeatable.",
        CHOICES,
        metavar="A,B,C",
        callback=split_commas,
    )
    choices_file: str | None = flags.CHOICES_FILE
    by: _By = option(
        "total",
        "Rank by the total log-likelihood, which favours short choices, or by its mean per token "
        "or byte.",
    )
    exact: bool = option(False, "Use the choices as given: remove and add no spaces.")
    calibrate: str | None = option(
        None,
        "Rank by how much likelier the prompt makes a choice than TEXT does ('' is the start "
        "token).",
        metavar="TEXT",
    )
    tokens: bool = option(False, "Add the log-probability of each token of the choices.")

    def read(self, others: Sequence[str]) -> tuple[str, ...]:
        """Return the choices, if any; raise InputError if others are read from the pipe, too."""
        choices = inputs.read_choices(self.choices, self.choices_file, others)
        if choices:
            jobs.spaced("", choices, exact=self.exact)  # raises for choices that no prompt can have
        return choices


def rank(
    words: list[str] | None = flags.text_argument(
        "[PROMPT|IN]...",
        "Rows, as for batch, if all arguments name files (or FOLDER/), or look like names; else "
        "the text before the choices",
    ),
    *,
    from_files: Sequence[str] | None = flags.ROWS_FILES,
    question: Choices,
    template: str | None = flags.TEMPLATE,
    special: bool = flags.SPECIAL,
    rows: flags.RowFiles,
    loading: flags.Loading,
    placement: flags.Placement,
    as_json: bool = flags.JSON,
) -> None:
    r"""Rank continuations of PROMPT, or of each row of IN, by probability.

    For one prompt, the output is a table, or JSON in a pipe. For rows, it is a line for each: the
    likeliest choice, its probability and the row, with tabs between them; with --json or --output,
    a record with all choices. In JSON Lines, a row has a "prompt" (or a "text"), and may have an
    "id" and "choices" of its own. With --template, it has the fields of the template instead of a
    prompt.

    Spaces around a choice are removed. One is added before it unless the prompt ends with a space.

    Examples:
        gpt-cli rank -m tiny 'The fox was very' --choices happy,sad,stone
        printf 'The fox was\nThe sun was\n' | gpt-cli rank -m tiny --choices red,up
    """
    choices = question.read(words or from_files or ["-"])
    filled = inputs.read_template(template)
    many = from_files is not None or filled or rows.used or placement.engine != "local"
    cure = "--choices takes commas, as in happy,sad; put quotes around a prompt"
    if many or inputs.are_files(words or ["-"], quiet=loading.quiet, cure=cure):
        missing = "no prompt: give a PROMPT, a FILE of rows"
        files = inputs.files_or_pipe(words, from_files, missing, quiet=loading.quiet)
        flag_names = "--output, --format, --template or --engine"
        inputs.check_files(words, f"with {flag_names}, the arguments are files")
        task = jobs.Ranking(
            choices,
            question.by,
            question.exact,
            filled,
            special,
            question.calibrate,
            question.tokens,
        )
        if question.tokens and not as_json and rows.output is None:
            raise InputError("--tokens of rows are in records: add --json, or --output OUT")
        sink = None if as_json else BestChoices(task.layout.texts)
        run(task, files, rows, loading, placement, sink)
        return
    if not choices:
        raise InputError("no choices: give --choices A,B,C or --choices-file FILE")
    prompt = inputs.read_prompt(words, None, quiet=loading.quiet)
    spaced = jobs.spaced(prompt, choices, exact=question.exact)
    engine = loading.load()
    ranked = engine.rank(
        prompt, list(spaced), by=question.by, calibrate=question.calibrate, special=special
    )
    records = of_ranking(engine, ranked, spaced, logprobs=question.tokens)
    if as_json or not on_terminal(sys.stdout):
        write_json(*records)
    else:
        _write_table(records)


class BestChoices(AnswerLines):
    """A line per row: the likeliest choice, its probability, and the fields of the row."""

    def answer(self, record: Record) -> tuple[str, str]:
        """Return the likeliest choice and its probability."""
        best = record["choices"][0]
        return best["choice"], f"{best['probability']:.4f}"


def _write_table(records: Sequence[Record]) -> None:
    table = Table(
        Column("probability", width=11, align=">", format=".2%"),
        Column("log-lik.", width=9, align=">", format=".3f"),
        Column("tokens", width=6, align=">"),
        Column("choice"),
    )
    for record in records:
        choice = quoted(record["text"].encode())
        if "neutral_logprob" in record:
            choice += f"  neutral {record['neutral_logprob']:.3f}"
        for token in record.get("logprobs", ()):
            choice += f"  {token_label(token)} {token['logprob']:.3f}"
        write(table.line(record["probability"], record["logprob"], record["tokens"], choice))


def next_tokens(
    words: list[str] | None = flags.text_argument("[PROMPT]...", "The text so far"),
    *,
    top: int = option(10, "Number of tokens.", AT_LEAST_1, aliases=("-k",)),
    file: str | None = flags.PROMPT_FILE,
    special: bool = flags.SPECIAL,
    loading: flags.Loading,
    as_json: bool = flags.JSON,
) -> None:
    """Show the likeliest next tokens after PROMPT.

    The output is a table with bars, or JSON in a pipe.

    Examples:
        gpt-cli next -m tiny 'Every day, the fox' -k 5
    """
    text = inputs.read_prompt(words, file, quiet=loading.quiet)
    engine = loading.load()
    tokens = []
    for rank, (id, logprob) in enumerate(engine.next_tokens(text, top, special=special), 1):
        token = of_token(engine, id, logprob)
        tokens.append({"rank": rank, **token, "probability": math.exp(logprob)})
    if as_json or not on_terminal(sys.stdout):
        write_json(*tokens)
        return
    labels = [token_label(token) for token in tokens]
    width = max(map(len, labels))
    room = max(1, shutil.get_terminal_size().columns - width - 13)
    table = Table(Column(width=8, align=">", format=".2%"), Column(width=width), Column())
    for token, label in zip(tokens, labels, strict=True):
        drawn = bar(token["probability"] / tokens[0]["probability"] * room)
        write(table.line(token["probability"], label, drawn))
