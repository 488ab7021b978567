"""The flags of commands: groups that several commands take, and flags that are used alone.

A command has one parameter for a group, whose annotation is a dataclass of options. A parameter
whose default is an `option` is a single flag. `command` turns both into typer's parameters.
"""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer

from gpt_cli.cli import completion
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import Format, exists, is_address, read_text, without_line_end
from gpt_cli.options.declare import (
    AT_LEAST_0,
    AT_LEAST_1,
    NUMBER,
    PATH,
    TEXT,
    THREADS,
    WHOLE,
    Declared,
    NamedOptionError,
    Option,
    choice,
    declarations,
    option,
)
from gpt_cli.options.request import Options
from gpt_cli.system.machine import MOST_THREADS
from gpt_cli.system.startup import prepare

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.jobs import Cluster, Template

VERBOSE = "gpt_cli.verbose"  # in the context's `meta`: errors are shown with their traceback


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameters of a command that are a group or an `option` by flags."""
    groups: dict[str, type[Declared]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        group, field = parameter.annotation, parameter.default
        if isinstance(group, type) and issubclass(group, Declared):
            groups[name] = group
            parameters += [_flag(f.name, f) for f, declared in declarations(group) if declared.help]
        else:
            parameters.append(_flag(name, field) if isinstance(field, Field) else parameter)

    @functools.wraps(function)
    def run(**values: Any) -> None:
        flag_names = dict(_flag_names(parameters))  # before a command sets GPT_CLI_THREADS
        try:
            filled = {}
            for name, group in groups.items():
                members = {n: values.pop(n) for n in group.__dataclass_fields__ if n in values}
                # A flag that was not set has the default of its declaration.
                filled[name] = group(**{n: v for n, v in members.items() if v is not None})
                filled[name].validate()
            for parameter in parameters:
                declared, name = _declaration(parameter), parameter.name
                if declared and values.get(name) is not None:
                    values[name] = declared.convert(name, values[name])
            function(**values, **filled)
        except NamedOptionError as error:
            option, complaint = error.args
            error.args = flag_names.get(option, option), complaint
            raise

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _flag(name: str, field: Field[Any]) -> inspect.Parameter:
    """Return an option as the parameter of a function that typer reads."""
    declared: Option = field.metadata["option"]
    flag = declared.flag or f"--{name.replace('_', '-')}"
    more = dict(declared.typer) | ({"callback": _read_content} if declared.from_file else {})
    info = typer.Option(flag, *declared.aliases, help=declared.help, **more)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if field.default == () else field.default,  # (): a repeatable flag
        annotation=Annotated[declared.kind.flag_type, info, declared],
    )


def _declaration(parameter: inspect.Parameter) -> Option | None:
    """Return the declaration of a parameter that `_flag` has returned."""
    *_, last = getattr(parameter.annotation, "__metadata__", (None,))
    return last if isinstance(last, Option) else None


def _flag_names(parameters: Iterable[inspect.Parameter]) -> Iterator[tuple[str, str]]:
    """Yield pairs of an option and its flag; the option may have the name of the flag, too."""
    for parameter in parameters:
        declared = _declaration(parameter)
        if declared or parameter.kind is parameter.KEYWORD_ONLY:
            written = (declared and declared.flag) or f"--{parameter.name.replace('_', '-')}"
            flag = written.partition("/")[0]  # of --cache/--no-cache
            variable = declared.typer.get("envvar", "") if declared else ""
            shown = f"{flag} (or {variable})" if variable in os.environ else flag
            yield parameter.name, shown
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


def _flag_of(group: type[Declared], name: str) -> Any:
    """Return the annotation of one flag of a group, for a command that takes no others."""
    return _flag(name, group.__dataclass_fields__[name]).annotation


def argument(metavar: str, help: str) -> Any:
    """Return the default of a parameter that is an argument, with a pipe as its fallback."""
    return typer.Argument(None, metavar=metavar, help=f"{help}; read from a pipe if not given.")


def _set_verbose(context: typer.Context, verbose: bool) -> bool:
    if verbose:
        context.meta[VERBOSE] = True
        logging.basicConfig(format="gpt-cli: %(message)s")
        logging.getLogger("gpt_cli").setLevel(logging.INFO)
    return verbose


@dataclass(kw_only=True, eq=False, repr=False)
class Model(Declared):
    """The model of a command that needs only its files."""

    model: str = option(
        "gpt2",
        "tiny (bundled), gpt2 and its relatives, OWNER/NAME on the Hub, or a folder.",
        aliases=("-m",),
        envvar="GPT_CLI_MODEL",
        autocompletion=completion.models,
    )
    revision: str | None = option(None, "Branch, tag or commit on the Hub.", kind=TEXT)
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
    def lookup(self) -> dict[str, Any]:
        """Return keywords of the functions of `gpt_cli.hub` that find a model."""
        return {"revision": self.revision, "offline": self.offline}


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
        THREADS,
        kind=WHOLE,
        envvar="GPT_CLI_THREADS",
    )

    @property
    def options(self) -> dict[str, Any]:
        """Return keywords of `gpt_cli.load`."""
        return self.lookup | {"device": self.device, "dtype": self.dtype, "quiet": self.quiet}

    def load(self) -> "Engine":
        """Load the model; NumPy must not have been imported before."""
        prepare(self.threads)
        import gpt_cli

        return gpt_cli.load(self.model, **self.options)


@dataclass(kw_only=True, eq=False, repr=False)
class Generating(Loading):
    """The model of a command that generates text."""

    speculate: bool = option(
        True,
        "Where it pays, draft tokens and verify several in one pass: the same text, sooner.",
        flag="--speculate/--no-speculate",
    )

    @property
    def options(self) -> dict[str, Any]:
        """Return keywords of `gpt_cli.load`."""
        return super().options | {"speculate": self.speculate}


@dataclass(kw_only=True, eq=False, repr=False)
class RowFiles(Declared):
    """The input format and the output of a command with a record for each row."""

    output: str | None = option(
        None,
        "Write to a new file (JSON Lines, or Parquet if the name ends with .parquet), or to "
        "several files: FOLDER/, FOLDER/*.jsonl or FOLDER/*.parquet; local or a URL such as s3://...",
        kind=TEXT,
        aliases=("-o",),
        metavar="OUT",
        callback=lambda name: None if name == "-" else name,
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
        kind=choice(Format),
    )

    @property
    def used(self) -> bool:
        """Return whether any of the flags is set, so that the input must be rows."""
        return self.output is not None or self.format is not None or self.resume


@dataclass(kw_only=True, eq=False, repr=False)
class Filled(Declared):
    """A template: a text with fields of the rows of a command."""

    source: str | None = option(
        None,
        "A text, or a file with one, into which each row is put: {line}, or {NAME} of a field of "
        "JSON Lines or Parquet; {{ is a brace.",
        kind=TEXT,
        flag="--template",
        metavar="FILE|TEXT",
    )

    @property
    def template(self) -> "Template | None":
        """Return the template, if any; raise InputError if the file or the text is not valid."""
        if self.source is None:
            return None
        from gpt_cli.jobs import Template

        if not is_address(self.source) and exists(self.source):
            text = read_text(self.source).replace("\r\n", "\n")  # as the lines of an input
            return Template(without_line_end(text))
        if "{" not in self.source:
            raise InputError(
                f"--template {self.source:.80}: there is no such file, and a text needs "
                "{line} or {NAME} for a field"
            )
        return Template(self.source)


@dataclass(kw_only=True, eq=False, repr=False)
class Where(Declared):
    """Where rows are computed."""

    engine: str = option(
        "local",
        "Compute on this machine, or on a Ray cluster.",
        kind=choice(Literal["local", "ray"]),
    )
    address: str | None = option(
        None,
        "The Ray cluster, or auto for that of this machine; default: RAY_ADDRESS, or a new one.",
        kind=TEXT,
        metavar="HOST:PORT",
    )
    workers: int | None = option(
        None,
        "Processes that hold the model; default: as many as fit, with up to 4 threads each.",
        AT_LEAST_1,
        kind=WHOLE,
    )
    gpus_per_worker: float | None = option(
        None,
        "GPUs per worker, such as 1 or 0.5; 0 uses CPUs.",
        AT_LEAST_0,
        kind=NUMBER,
        metavar="G",
    )

    def prepare(self, threads: int | None) -> None:
        """Prepare this process unless Ray computes; raise InputError for flags that need Ray."""
        if self.engine == "ray":
            return
        for name in ("address", "workers", "gpus_per_worker"):
            if getattr(self, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} applies only to --engine ray")
        prepare(threads)

    def cluster(self, threads: int | None) -> "Cluster | None":
        """Return the cluster to compute on; None is this process."""
        if self.engine == "local":
            return None
        from gpt_cli.jobs import Cluster

        return Cluster(self.address, self.workers, self.gpus_per_worker or 0, threads)


PROMPT_FILE = option(
    None,
    "Read the prompt from FILE (- is standard input), and append PROMPT.",
    kind=PATH,
    aliases=("-f",),
    metavar="FILE",
)
ROWS_FILE = option(
    None, "Same as the argument.", kind=TEXT, flag="--file", aliases=("-f",), metavar="FILE"
)
LOGPROBS = option(
    None,
    "Add the log-probability of each token and of the N likeliest tokens to the JSON.",
    AT_LEAST_0,
    kind=WHOLE,
    metavar="N",
)
ModelName = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Same as --model.", autocompletion=completion.models),
]
Json = _flag("as_json", option(False, "Print JSON, one object per line.", flag="--json")).annotation
Special = _flag_of(Options, "special")
MaxTokens = _flag_of(Options, "max_tokens")
Quiet = _flag_of(Model, "quiet")
Verbose = _flag_of(Model, "verbose")
Revision = _flag_of(Model, "revision")
Threads = _flag_of(Loading, "threads")
