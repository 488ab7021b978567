"""The flags of commands: groups that several commands take, and flags that are used alone.

A command has one parameter for a group, whose annotation is a dataclass of options. A parameter
whose default is an `option` is a single flag. `command` turns both into typer's parameters. The
functions at the end read the inputs that arguments and flags name.
"""

import functools
import inspect
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from glob import escape, glob
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import typer

import gpt_cli
from gpt_cli import jobs
from gpt_cli.cli.output import on_terminal
from gpt_cli.errors import InputError, import_extra
from gpt_cli.jobs.storage import Format, exists, is_address, read_text, without_line_end
from gpt_cli.options import declare
from gpt_cli.options.declare import Declared, NamedOptionError, Option, OptionError, option
from gpt_cli.options.request import Options
from gpt_cli.system.atomic import check_file
from gpt_cli.system.machine import MOST_THREADS
from gpt_cli.system.startup import prepare


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameters of a command that are a group or an `option` with flags."""
    groups: dict[str, type[Declared]] = {}
    options: dict[str, Option] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        annotation, default = parameter.annotation, parameter.default
        if isinstance(annotation, type) and issubclass(annotation, Declared):
            groups[name] = annotation
            members = annotation.declarations()
        elif isinstance(default, Field):
            members = (declare.declaration(name, annotation, default),)
        else:
            parameters.append(parameter)
            continue
        for declared in members:
            if declared.help:
                options[declared.name] = declared
                parameters.append(_parameter(declared))

    @functools.wraps(function)
    def run(**values: Any) -> None:
        flags = dict(_shown_flags(options))  # before a command sets GPT_CLI_THREADS
        try:
            filled = {}
            for name, group in groups.items():
                members = {n: values.pop(n) for n in group.__dataclass_fields__ if n in values}
                # A flag that was not set has the default of its declaration.
                filled[name] = group(**{n: v for n, v in members.items() if v is not None})
                filled[name].validate()
            for name, value in values.items():
                if name in options and value is not None:
                    values[name] = options[name].convert(value)
            function(**values, **filled)
        except NamedOptionError as error:
            name, complaint = error.args
            error.args = flags.get(name, name), complaint
            raise

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _flag(declared: Option) -> str:
    return declared.flag or f"--{declared.name.replace('_', '-')}"


def _parameter(declared: Option) -> inspect.Parameter:
    """Return an option as the parameter of a function that typer reads."""
    more = dict(declared.typer) | ({"callback": _read_content} if declared.from_file else {})
    info = typer.Option(_flag(declared), *declared.aliases, help=declared.help, **more)
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if declared.default == () else declared.default,  # (): a repeatable flag
        annotation=Annotated[declared.kind.flag_type, info],
    )


def _shown_flags(options: Mapping[str, Option]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a name in an error and the flag; the name may be that of the flag, too."""
    for name, declared in options.items():
        flag = _flag(declared).partition("/")[0]  # of --cache/--no-cache
        variable = declared.typer.get("envvar", "")
        shown = f"{flag} (or {variable})" if variable in os.environ else flag
        yield name, shown
        yield flag.removeprefix("--").replace("-", "_"), shown


def _read_content(
    context: typer.Context, parameter: typer.CallbackParam, value: str | None
) -> str | None:
    """Return the text of a file without its last line end, or a text that begins with a brace."""
    if context.resilient_parsing:  # a shell completes with TAB
        return value
    if value == "":  # such as of a variable that is not set
        raise InputError(f"{parameter.opts[0]} is empty: name a file")
    if value is None or value.lstrip().startswith("{"):
        return value
    return without_line_end(read_text(value))


def argument(metavar: str, help: str) -> Any:
    """Return the declaration of an argument that falls back to a pipe."""
    return typer.Argument(None, metavar=metavar, help=f"{help}; read from a pipe if not given.")


def check_picture(option: str, file: Path, endings: Sequence[str]) -> None:
    """Raise an error before costly work if a picture cannot be written to the file."""
    check_file(option, file, endings)
    import_extra(f"{option} needs matplotlib", "matplotlib", "matplotlib.figure")


def dash_as_none(name: str | Path | None) -> str | Path | None:
    """Return the name of an output, or None for "-", which is standard output."""
    return None if str(name) == "-" else name


def _set_verbose(verbose: bool) -> bool:
    """Show messages of level INFO; see also `gpt_cli.cli.output.verbose`."""
    if verbose:
        logging.basicConfig(format="gpt-cli: %(message)s")
    logging.getLogger("gpt_cli").setLevel(logging.INFO if verbose else logging.NOTSET)
    return verbose


def _complete_model(incomplete: str) -> list[str]:
    """Return known names, cached models, and folders with this prefix."""
    from gpt_cli.folder.contents import CONFIG
    from gpt_cli.hub.local import BUNDLED, SHORT_NAMES, list_models

    names = dict.fromkeys([*BUNDLED, *SHORT_NAMES, *(model.name for model in list_models())])
    configs = glob(f"{escape(incomplete)}*/{CONFIG}")  # noqa: PTH207 (leaves ./ as it is)
    folders = [file.removesuffix(f"/{CONFIG}") for file in sorted(configs)]
    # bash inserts names unquoted, so names that need quotes are left out.
    return [name for name in [*names, *folders] if shlex.quote(name) == name]


@dataclass(kw_only=True, eq=False, repr=False)
class Model(Declared):
    """The model of a command that needs only its files."""

    model: str = option(
        "gpt2",
        "tiny (bundled), gpt2 and its relatives, OWNER/NAME on the Hub, or a folder.",
        aliases=("-m",),
        envvar="GPT_CLI_MODEL",
        autocompletion=_complete_model,
    )
    revision: str | None = option(None, "Branch, tag or commit on the Hub.")
    offline: bool = option(False, "Do not contact the Hub; use local files only.")
    quiet: bool = option(False, "Show no notes and no progress.", aliases=("-q",))
    verbose: bool = option(
        False,
        "Explain choices, such as the CPU instead of a GPU, and show tracebacks.",
        aliases=("-v",),
        callback=_set_verbose,
    )

    def named(self, name: str | None) -> Self:
        """Return these options with the name of an argument, if there is one."""
        return self if name is None else replace(self, model=name)

    @property
    def options(self) -> dict[str, Any]:
        """Return keywords of `gpt_cli.load`, or of `gpt_cli.hub.resolve`."""
        others = ("model", "verbose", "threads")
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclass(kw_only=True, eq=False, repr=False)
class Loading(Model):
    """The model of a command that computes with it."""

    device: str = option(
        "auto",
        "cpu, cuda for an NVIDIA GPU, or auto: a GPU if one can be used.",
        autocompletion=lambda: ["auto", "cpu", "cuda"],
    )
    dtype: str = option(
        "auto",
        "Weights in float32, float16 (GPU) or int8 (CPU); auto: as stored, or float32 on a GPU.",
        autocompletion=lambda: ["auto", "float32", "bfloat16", "float16", "int8"],
    )
    threads: int | None = option(
        None,
        f"Number of threads, up to {MOST_THREADS}; one per core if not set.",
        declare.THREADS,
        envvar="GPT_CLI_THREADS",
    )

    bos_token: str | None = option(
        None,
        "Start token of a model that has none or a wrong one, such as [CLS].",
        metavar="TEXT|ID",
    )

    def load(self) -> "gpt_cli.Engine":
        """Load the model; NumPy must not have been imported before."""
        prepare(self.threads)
        return gpt_cli.load(self.model, **self.options)


@dataclass(kw_only=True, eq=False, repr=False)
class Generating(Loading):
    """The model of a command that generates text."""

    speculate: bool = option(
        True,
        "Where it pays, draft tokens and verify several in one pass: the same text, sooner.",
        flag="--speculate/--no-speculate",
    )


@dataclass(kw_only=True, eq=False, repr=False)
class RowFiles(Declared):
    """The input format and the output of a command with a record per row."""

    output: str | None = option(
        None,
        "Write to a new file (JSON Lines, or Parquet if the name ends with .parquet), or to "
        "several files: FOLDER/, FOLDER/*.jsonl or FOLDER/*.parquet; local or a URL such as s3://...",
        aliases=("-o",),
        metavar="OUT",
        callback=dash_as_none,
    )
    resume: bool = option(
        False,
        "Continue an interrupted run: keep the rows in OUT and add the missing ones. Repeat all "
        "flags; a random seed is reused.",
    )
    format: Format | None = option(
        None,
        "Input format; auto (the default): Parquet by the ending of the name, JSON Lines if the "
        "first row begins with {, else plain lines.",
    )

    @property
    def used(self) -> bool:
        """Return whether any of the flags is set, so that the input must be rows."""
        return self.output is not None or self.format is not None or self.resume


@dataclass(kw_only=True, eq=False, repr=False)
class Where(Declared):
    """Where rows are computed."""

    engine: Literal["local", "ray"] = option(
        "local", "Compute on this machine, or on a Ray cluster."
    )
    address: str | None = option(
        None,
        "The Ray cluster, or auto for that of this machine; default: RAY_ADDRESS, or a new one.",
        metavar="HOST:PORT",
    )
    workers: int | None = option(
        None,
        "Processes that hold the model; default: as many as fit, with up to 4 threads each.",
        declare.AT_LEAST_1,
    )
    gpus_per_worker: float | None = option(
        None,
        "GPUs per worker, such as 1 or 0.5; 0 uses CPUs.",
        declare.AT_LEAST_0,
        metavar="G",
    )

    def validate(self) -> None:
        """Raise OptionError for flags that need Ray."""
        for name in ("address", "workers", "gpus_per_worker"):
            if self.engine == "local" and getattr(self, name) is not None:
                raise OptionError(name, "applies only to --engine ray")

    def cluster(self, threads: int | None) -> "jobs.Cluster | None":
        """Return the cluster to compute on, or prepare this process and return None."""
        if self.engine == "ray":
            return jobs.Cluster(self.address, self.workers, self.gpus_per_worker or 0, threads)
        prepare(threads)
        return None


TEMPLATE = option(
    None,
    "A text, or a file with one, into which each row is put: {line}, or {NAME} of a field of "
    "JSON Lines or Parquet; {{ is a brace.",
    metavar="FILE|TEXT",
)
PROMPT_FILE = option(
    None,
    "Read the prompt from FILE (- is standard input), and append PROMPT.",
    aliases=("-f",),
    metavar="FILE",
)
ROWS_FILE = option(None, "Same as the argument.", flag="--file", aliases=("-f",), metavar="FILE")
LOGPROBS = option(
    None,
    "Add the log-probability of each token and of the N likeliest tokens to the JSON.",
    declare.AT_LEAST_0,
    metavar="N",
)
MODEL_NAME = typer.Argument(
    None, metavar="[MODEL]", help="Same as --model.", autocompletion=_complete_model
)
JSON = option(False, "Print JSON, one object per line.", flag="--json")
QUIET: Any = Model.__dataclass_fields__["quiet"]
REVISION: Any = Model.__dataclass_fields__["revision"]
SPECIAL: Any = Options.__dataclass_fields__["special"]
THREAD_COUNT: Any = Loading.__dataclass_fields__["threads"]
VERBOSE: Any = Model.__dataclass_fields__["verbose"]


# --- the inputs that arguments and flags name ---------------------------------------------------


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of `file` ("-" is standard input) followed by `prompt`.

    Without both, the prompt is read from a pipe. One line end is dropped from the end of a file or
    a pipe, where editors and `echo` put it.
    """
    if file is None and prompt is not None:
        return prompt
    text = read_text(or_pipe(file, "no prompt: give a PROMPT, --file FILE"))
    return text + prompt if prompt is not None else without_line_end(text)


def input_file(argument: str | None, option: str | None, rows: str) -> str:
    """Return an argument or --file, else "-" for a pipe; both, or none, is an InputError."""
    refuse_both(argument, option)
    return or_pipe(argument if option is None else option, f"no {rows}: give a FILE")


def refuse_both(argument: object, option: object) -> None:
    """Raise InputError if there is an argument and the option file."""
    if argument is not None and option is not None:
        raise InputError("--file and an argument are both given: leave one of them out")


def or_pipe(file: Path | str | None, missing: str) -> str:
    """Return the name of a file, or "-" for a pipe; raise InputError if there is neither."""
    if file is None and (sys.stdin is None or on_terminal(sys.stdin)):
        raise InputError(f"{missing}, or a pipe on standard input")
    return str(file or "-")


def read_template(source: str | None) -> "jobs.Template | None":
    """Return the template in a file or a text; raise InputError if it is not valid."""
    if source is None:
        return None
    if not is_address(source) and exists(source):
        text = read_text(source).replace("\r\n", "\n")  # as the lines of an input
        return jobs.Template(without_line_end(text))
    if "{" not in source:
        raise InputError(
            f"--template {source:.80}: there is no such file, and a text needs "
            "{line} or {NAME} for a field"
        )
    return jobs.Template(source)
