"""`gpt-cli generate`: continue a prompt."""

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpt_cli import jobs, records
from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import read_prompt, unescape
from gpt_cli.cli.layout import counted
from gpt_cli.cli.progress import LONG, StatusLine
from gpt_cli.cli.streams import note, on_terminal, remark, write
from gpt_cli.errors import InputError
from gpt_cli.options.declare import between, option
from gpt_cli.options.request import Options

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.generation.generate import Completion, Run

SEPARATOR = "\n---\n"  # between samples
_MOST = 10_000  # samples, which are all computed side by side
_SAMPLES = option(
    1,
    f"Number of texts, up to {_MOST:,}; several are printed together at the end, separated by ---.",
    between(1, _MOST),
)


def generate(
    prompt: str | None = flags.argument("[PROMPT]", "Text to continue"),
    *,
    file: Path | None = flags.PROMPT_FILE,
    escape: bool = option(False, r"Read \n, \r, \t and \\ in PROMPT and --stop as escapes."),
    options: Options,
    samples: int = _SAMPLES,
    echo: bool = option(False, "Print the prompt before the text."),
    stream: bool = option(
        True, "Print text as it is generated, or all at the end.", flag="--stream/--no-stream"
    ),
    as_json: flags.Json = False,
    logprobs: int | None = flags.LOGPROBS,
    stats: bool = option(False, "Show times and rates on standard error."),
    loading: flags.Generating,
) -> None:
    """Continue PROMPT and stream the text to standard output.

    Examples:
        gpt-cli generate -m tiny 'Once upon a time'
        echo 'Once upon a time' | gpt-cli generate -m tiny --seed 1 --echo
        gpt-cli generate -m tiny --samples 3 --json 'Every day, the fox'
    """
    if logprobs is not None and not as_json:
        raise InputError("--logprobs is part of the JSON: add --json")
    text = read_prompt(prompt, file)
    if escape:
        text = unescape(text)
        options = replace(options, stop=[unescape(stop) for stop in options.stop])
    if options.choices:
        options = replace(options, choices=[*jobs.spaced(text, options.choices)])
    engine = loading.load()
    run = engine.run([text] * samples, replace(options, top_logprobs=logprobs or 0))
    prefix, streams = text if echo else "", stream and samples == 1 and not as_json
    complete = _finish(run, prefix if streams else None, quiet=loading.quiet)
    if as_json:
        _write_json(engine, text, run, logprobs=logprobs is not None)
    else:
        _write_texts([] if streams else [prefix + result.text for result in run.completions])
    if not loading.quiet:
        remark(*_remarks(text, run, options, reported=as_json or stats))
    if stats:
        note(*(_statistics(engine, completion) for completion in run.completions))
    if not complete:
        raise typer.Exit(130)


def _finish(run: "Run", prefix: str | None, *, quiet: bool) -> bool:
    """Run to the end, writing the text after `prefix` if there is one; False if interrupted.

    A terminal shows the progress of several texts.
    """
    shown = len(run.completions) > 1 and not quiet
    try:
        with StatusLine(shown=shown, delay=LONG) as status:
            if prefix:
                write(prefix)
            for count, step in enumerate(run, 1):
                if prefix is not None:
                    write(step.text)
                status.show(f"{count:,} tokens of {len(run.completions):,} texts")
    except KeyboardInterrupt:
        return False
    return True


def _write_json(engine: "Engine", prompt: str, run: "Run", *, logprobs: bool) -> None:
    for index, completion in enumerate(run.completions):
        record = records.of_completion(engine, completion, logprobs=logprobs)
        write(records.json_line({"index": index, "prompt": prompt} | record))


def _write_texts(texts: list[str]) -> None:
    """Write texts that were not streamed; on a terminal, end the line."""
    if texts:
        write(SEPARATOR.join(texts))
    if on_terminal(sys.stdout):
        write("\n")


def _remarks(prompt: str, run: "Run", options: Options, *, reported: bool) -> list[str]:
    """Return notes about a result that a user may not expect, and its seed if it was drawn.

    With `reported`, the finish reason and the seed are part of the output.
    """
    reasons = {completion.finish_reason for completion in run.completions}
    notes = []
    if prompt.endswith(" "):
        notes.append("the prompt ends with a space: leave it out, as GPT-2's words begin with one")
    if "context" in reasons:
        notes.append("the context is full; --overflow shift continues past it")
    to_file = stat.S_ISREG(os.fstat(1).st_mode)
    if "length" in reasons and options.constraint:
        notes.append(
            f"cut at --max-tokens {options.max_tokens}, so it may not match the constraint"
        )
    elif "length" in reasons and to_file and not reported:
        notes.append(f"the text was cut at --max-tokens {options.max_tokens}")
    if "stuck" in reasons:
        notes.append("no token can follow: the constraint has no end there, or is too complex")
    drawn = options.seed is None and options.temperature > 0
    if drawn and (on_terminal(sys.stdout) or to_file) and not reported:
        notes.append(f"--seed {run.completions[0].seed} gives this text again")
    return notes


def _statistics(engine: "Engine", completion: "Completion") -> str:
    times, ops = records.timing(engine, completion), engine.model.ops
    first, rate = times["ttft_s"], times["decode_tok_s"]
    drafted = counted(completion.drafted, "drafted token")
    return ", ".join(
        [
            f"{engine.name} in {ops.dtype}: loaded in {times['load_s']:.2f} s",
            counted(completion.prompt_tokens, "prompt token"),
            "no token yet" if first is None else f"first token after {first:.3f} s",
            counted(len(completion.ids), "token") + (f" at {rate:.1f} a second" if rate else ""),
            *([f"{completion.accepted} of {drafted} accepted"] if completion.drafted else []),
            f"finish reason {completion.finish_reason}",
            f"seed {completion.seed}",
        ]
    )
