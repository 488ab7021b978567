"""`gpt-cli generate` and `batch`: continue a prompt, or many."""

import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING

import typer

import gpt_cli
from gpt_cli import jobs, records, serve
from gpt_cli.cli import flags, inputs
from gpt_cli.cli.jobs import run as run_job
from gpt_cli.cli.output import note, on_terminal, remark, write, write_json
from gpt_cli.cli.progress import LONG, StatusLine
from gpt_cli.cli.wrap import text_writer
from gpt_cli.errors import InputError, RowsError, counted
from gpt_cli.options.declare import OptionError, option
from gpt_cli.options.request import SAMPLES, Options

if TYPE_CHECKING:
    from gpt_cli.generation.generate import Run

_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}
_SAMPLES = option(
    1,
    "Number of texts, or the best of --beams; several are printed together at the end, separated "
    "by ---.",
    SAMPLES,  # all are computed side by side
)


def generate(
    words: list[str] | None = flags.text_argument("[PROMPT]...", "Text to continue"),
    *,
    file: str | None = flags.PROMPT_FILE,
    escape: bool = option(
        False, r"Read \n, \r, \t and \\ in PROMPT, --stop and --bad-words as escapes."
    ),
    options: Options,
    choices_file: str | None = flags.CHOICES_FILE,
    samples: int = _SAMPLES,
    echo: bool = option(False, "Print the prompt before the text."),
    stream: bool = option(
        True, "Print text as it is generated, or all at the end.", flag="--stream/--no-stream"
    ),
    as_json: bool = flags.JSON,
    logprobs: int | None = flags.LOGPROBS(needs="--json"),
    stats: bool = option(False, "Show times and rates on standard error."),
    loading: flags.Generating,
) -> None:
    """Continue PROMPT and stream the text to standard output.

    Examples:
        gpt-cli generate -m tiny 'Once upon a time'
        echo 'Once upon a time' | gpt-cli generate -m tiny --seed 1 --echo
        gpt-cli generate -m tiny --beams 5 --samples 3 --json 'Every day, the fox'
    """
    if options.beams is not None and samples > options.beams:
        raise InputError(f"--samples must be at most --beams, which is {options.beams}")
    first_word = words[0] if words else "-"
    options = inputs.with_choices(options, choices_file, [file or first_word])
    text = inputs.read_prompt(words, file, quiet=loading.quiet)
    if escape:
        text = _unescape(text)
        options = _with_escapes(options)
    if options.choices:
        options = replace(options, choices=list(jobs.spaced(text, options.choices)))
    engine = loading.load()
    prompts = [text] * (1 if options.beams else samples)
    run = engine.run(prompts, replace(options, top_logprobs=logprobs or 0))
    prefix = text if echo else ""
    streams = stream and samples == 1 and not as_json
    complete = _finish(run, options, prefix if streams else None, quiet=loading.quiet)
    completions = _first(run, samples)
    if as_json:
        _write_records(engine, text, completions, logprobs=logprobs is not None)
    elif not streams:
        text_writer()("\n---\n".join(prefix + completion.text for completion in completions))
    if not as_json and on_terminal(sys.stdout):
        write("\n")
    if not loading.quiet:
        remark(*_remarks(text, completions, options, reported=as_json or stats))
        if complete and len(completions) < samples:
            remark(f"only {counted(len(completions), 'text')} can be generated")
    if stats:
        note(*_statistics(engine, completions))
    if not complete:
        raise typer.Exit(130)
    _check_ends(completions)


def _check_ends(completions: Sequence["gpt_cli.Completion"]) -> None:
    """Raise RowsError if some texts cannot go on, although their constraint demands it."""
    stuck = sum(completion.finish_reason == "stuck" for completion in completions)
    if stuck:
        which = "the text"
        if len(completions) > 1:
            which = f"{stuck} of {len(completions)} texts"
        raise RowsError(f"no token can follow {which}: {records.STUCK}")


def _first(run: "Run", samples: int) -> list["gpt_cli.Completion"]:
    """Return the first completions; a beam search has several for a prompt."""
    completions = []
    for best in run.completions:
        completions += [best, *best.others]
    return completions[:samples]


def _unescape(text: str) -> str:
    return re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], text)


def _with_escapes(options: Options) -> Options:
    stop = list(map(_unescape, options.stop))
    return replace(options, stop=stop, bad_words=list(map(_unescape, options.bad_words)))


def _finish(run: "Run", options: Options, prefix: str | None, *, quiet: bool) -> bool:
    """Generate to the end, and write the text after `prefix` unless it is None.

    Return False if it was interrupted.
    """
    tokens = 0
    what = counted(len(run.completions), "text")
    if options.beams:
        what = f"{counted(options.beams, 'beam')}, shown at the end"
    shown = (len(run.completions) > 1 or options.beams is not None) and not quiet
    try:
        with StatusLine(shown=shown, delay=LONG) as status:
            write_text = text_writer()
            if prefix:
                write_text(prefix)
            for steps in run.passes:
                for step in map(run.add, steps):
                    if prefix is not None and not step.hypothesis:
                        write_text(step.text)
                tokens += len(steps) or 1  # each beam has one more
                status.show(f"{counted(tokens, 'token')} of {what}")
    except KeyboardInterrupt:
        return False
    return True


def _write_records(
    engine: "gpt_cli.Engine",
    prompt: str,
    completions: Sequence["gpt_cli.Completion"],
    *,
    logprobs: bool,
) -> None:
    for index, completion in enumerate(completions):
        record = records.of_completion(engine, completion, logprobs=logprobs)
        write_json({"index": index, "prompt": prompt} | record)


def _remarks(
    prompt: str, completions: Sequence["gpt_cli.Completion"], options: Options, *, reported: bool
) -> list[str]:
    """Return notes on what a user may not expect; `reported`: the output has reason and seed."""
    reasons = {completion.finish_reason for completion in completions}
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
    drawn = options.seed is None and options.temperature > 0 and options.beams is None
    if drawn and (on_terminal(sys.stdout) or to_file) and not reported:
        notes.append(f"--seed {completions[0].seed} gives this text again")
    return notes


def _statistics(
    engine: "gpt_cli.Engine", completions: Sequence["gpt_cli.Completion"]
) -> Iterator[str]:
    """Yield a line for each text; several lines are numbered from 1."""
    for number, completion in enumerate(completions, 1):
        head = f"text {number}: " if len(completions) > 1 else ""
        yield head + _facts(engine, completion)


def _facts(engine: "gpt_cli.Engine", completion: "gpt_cli.Completion") -> str:
    times = records.timing(engine, completion)
    first = times["ttft_s"]
    rate = times["decode_tok_s"]
    merged = "" if engine.adapter is None else f" with {engine.adapter}"
    facts = [
        f"{engine.name}{merged} in {engine.model.ops.dtype}: loaded in {times['load_s']:.2f} s",
        counted(completion.prompt_tokens, "prompt token"),
        "no token yet" if first is None else f"first token after {first:.3f} s",
        counted(len(completion.ids), "token") + (f" at {rate:.1f} a second" if rate else ""),
    ]
    if completion.drafted:
        drafted = counted(completion.drafted, "drafted token")
        facts.append(f"{completion.accepted} of {drafted} accepted")
    facts.append(f"finish reason {completion.finish_reason}")
    if completion.score is not None:
        facts.append(f"score {completion.score:.4f}")
    facts.append(f"seed {completion.seed}")
    return ", ".join(facts)


def batch(
    files: list[str] | None = flags.argument(
        "[IN]...",
        "Prompts as plain lines, JSON Lines or tables (CSV, Parquet): files, folders, quoted "
        "patterns, or URLs of these",
    ),
    *,
    from_files: Sequence[str] | None = flags.ROWS_FILES,
    rows: flags.RowFiles,
    template: str | None = flags.TEMPLATE,
    batch_size: str = option(
        "auto",
        "Number of rows to compute at once, 1 or more; auto: 64, or fewer if memory is short.",
        metavar="N|auto",
    ),
    options: Options,
    choices_file: str | None = flags.CHOICES_FILE,
    samples: int = option(
        1, "Number of texts for each row, or the best of --beams; each has a record.", SAMPLES
    ),
    escape: bool = option(False, r"Read \n, \r, \t and \\ in --stop and --bad-words as escapes."),
    logprobs: int | None = flags.LOGPROBS(),
    loading: flags.Generating,
    placement: flags.Placement,
) -> None:
    r"""Continue each prompt of IN.

    Write one JSON record per row, or per sample, in the order of the input.

    In JSON Lines, a row is an object with a "prompt" (or a "text"), an optional "id", and options
    of its own, such as "max_tokens", "temperature", "seed", "stop" and "n", the number of samples.
    Its record keeps its other fields. Or all rows are requests as in OpenAI's batch files, with
    "custom_id" and "body": see `gpt-cli help batch`.

    Examples:
        printf 'Once\nThe fox\n' | gpt-cli batch -m tiny -n 20
        printf 'Once\nThe fox\n' | gpt-cli batch -m tiny -n 20 -o new.jsonl
    """
    options = inputs.with_choices(options, choices_file, files or from_files or ["-"])
    inputs.check_files(files, "to continue a text, use `gpt-cli generate`")
    files = inputs.files_or_pipe(files, from_files, "no prompts: give a FILE", quiet=loading.quiet)
    size = _batch_size(batch_size)
    if escape:
        options = _with_escapes(options)
    options = replace(options, top_logprobs=logprobs or 0)
    shown = inputs.read_template(template)
    task = jobs.Generation(options, size, logprobs is not None, shown, samples)
    flags_of_texts = {
        "template": template,
        "samples": samples > 1,
        "logprobs": logprobs is not None,
        "keep_fields": rows.keep_fields is not None,
    }
    requests = partial(_requests, options, size, flags_of_texts)
    run_job(task, files, rows, loading, placement, requests=requests)


def _requests(
    options: Options, batch_size: int | None, flags_of_texts: Mapping[str, object]
) -> jobs.Task:
    """Return the task for requests; raise OptionError for an option that they set themselves."""
    own = ("seed", "top_logprobs")  # the seed is that of the job
    used = [
        member.name
        for member in fields(options)
        if member.name not in own and getattr(options, member.name) != member.default
    ]
    used += [name for name, is_used in flags_of_texts.items() if is_used]
    if used:
        complaint = "cannot be used with requests: set it in their bodies, or leave it out"
        raise OptionError(used[0], complaint)
    return serve.Requests(options.seed, batch_size)


def _batch_size(value: str) -> int | None:
    if value == "auto":
        return None
    with suppress(ValueError):  # not decimal, or thousands of digits
        if value.isdecimal() and int(value):
            return int(value)
    raise InputError(f"--batch-size must be auto, or 1 or more, not {json.dumps(value):.40}")
