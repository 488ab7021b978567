"""The flags of commands: groups that several commands take, and flags that are used alone.

`gpt_cli.cli.parameters` turns them into typer's parameters.
"""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import escape, glob
from typing import TYPE_CHECKING, Any, Literal, Self

import typer

import gpt_cli
from gpt_cli import jobs
from gpt_cli.errors import InputError
from gpt_cli.folder.dtypes import NAMES
from gpt_cli.jobs.formats import Format
from gpt_cli.jobs.layout import KeepFields
from gpt_cli.options import declare
from gpt_cli.options.declare import Declared, Kind, Range, option
from gpt_cli.options.request import Options
from gpt_cli.system.startup import prepare

if TYPE_CHECKING:
    from gpt_cli.jobs.rows import Source


def argument(metavar: str, help: str) -> Any:
    """Return the declaration of an argument that falls back to a pipe."""
    return typer.Argument(None, metavar=metavar, help=f"{help}; read from a pipe if not given.")


def text_argument(metavar: str, help: str) -> Any:
    """Return the declaration of an argument of one or more words: see `gpt_cli.cli.inputs`."""
    return argument(metavar, f"{help}: words, or - (the pipe) and words after it")


def dash_as_none(name: str | None) -> str | None:
    """Return the name of an output, or None for "-", which is standard output."""
    return None if name == "-" else name


def _only(names: list[str]) -> str:
    """Return the only name; ValueError for several, of which typer would keep the last."""
    (name,) = names
    return name


_ONE_NAME = Kind("a single file", list[str], _only)
_DELIMITERS = Range(lambda text: len(text) == 1 and text not in '"\r\n', "one character, or tab")
_DELIMITER = Kind("a string", str, str, lambda text: "\t" if text in ("tab", r"\t") else text)
_MESSAGE = "gpt-cli: %(message)s"

# The model of a command without a job. It is kept until the process ends: freeing it takes 14 ms.
_model: "gpt_cli.Engine | None" = None


def _set_verbose(verbose: bool) -> bool:
    """Show messages of level INFO; see also `gpt_cli.cli.output.verbose`."""
    if verbose:
        logging.basicConfig(format=_MESSAGE)
    elif logging.lastResort:  # of warnings
        logging.lastResort.setFormatter(logging.Formatter(_MESSAGE))
    logging.getLogger("gpt_cli").setLevel(logging.INFO if verbose else logging.NOTSET)
    return verbose


def _set_quiet(quiet: bool) -> bool:
    """Show no notes about the files of models and about texts."""
    for room in ("folder", "gpt2", "texts"):
        level = logging.ERROR if quiet else logging.NOTSET
        logging.getLogger(f"gpt_cli.{room}").setLevel(level)
    return quiet


def complete_model(incomplete: str) -> list[str]:
    """Return known names, cached models, and folders with this prefix."""
    from gpt_cli.folder.contents import CONFIG
    from gpt_cli.hub.local import BUNDLED, SHORT_NAMES, list_models

    names = [*BUNDLED, *SHORT_NAMES]
    names += [model.name for model in list_models()]
    configs = glob(f"{escape(incomplete)}*/{CONFIG}")  # noqa: PTH207 (leaves ./ as it is)
    names += [file.removesuffix(f"/{CONFIG}") for file in sorted(configs)]
    # bash inserts names unquoted, so names that need quotes are left out.
    return [name for name in dict.fromkeys(names) if shlex.quote(name) == name]


def _check_only_model(context: typer.Context, name: str | None) -> str | None:
    """Return the argument; raise InputError if --model, which is parsed before it, differs."""
    source = context.get_parameter_source("model")
    models = context.params.get("model") or []
    if source and source.name == "COMMANDLINE" and name is not None and {*models} != {name}:
        flags = " ".join(f"--model {model}" for model in models)
        raise InputError(f"{flags} and the argument {name} differ: leave one of them out")
    return name


def _only_model(names: str | list[str]) -> str:
    """Return the only name; ValueError for several, of which typer would keep the last."""
    (name,) = {names} if isinstance(names, str) else {*names}
    return name


_MODEL = "gpt2"
_MODELS = "tiny (bundled), gpt2 and its relatives, OWNER/NAME on the Hub, or a folder."
_MODEL_FLAG: Any = {
    "aliases": ("-m",),
    "envvar": "GPT_CLI_MODEL",
    "autocompletion": complete_model,
}
_ONE_MODEL = Kind("one model (only serve has several)", list[str], _only_model, metavar="MODEL")


@dataclass(kw_only=True, eq=False, repr=False)
class Model(Declared):
    """The model of a command that needs only its files."""

    model: str = option(_MODEL, _MODELS, kind=_ONE_MODEL, **_MODEL_FLAG)
    revision: str | None = option(None, "Branch, tag or commit on the Hub; main if not set.")
    offline: bool = option(False, "Do not contact the Hub; use local files only.")
    quiet: bool = option(
        False, "Show no notes and no progress.", aliases=("-q",), callback=_set_quiet
    )
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
        """Return keywords of `gpt_cli.load`, or of `gpt_cli.hub.resolve_all`."""
        others = ("model", "models", "verbose", "threads")
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclass(kw_only=True, eq=False, repr=False)
class Adapted(Model):
    """The model of a command that reads its weights."""

    adapter: str | None = option(
        None,
        "Merge a LoRA adapter into the weights: a folder of PEFT, or OWNER/NAME on the Hub.",
        metavar="ADAPTER",
    )


@dataclass(kw_only=True, eq=False, repr=False)
class Loading(Adapted):
    """The model of a command that computes with it."""

    device: str = option(
        "auto",
        "cpu, cuda for an NVIDIA GPU, or auto: a GPU if one can be used. Both give the same bits, "
        "unless NumPy computes.",
        autocompletion=lambda: ["auto", "cpu", "cuda"],
    )
    dtype: str = option(
        "auto",
        "Weights in float32, bfloat16, float16 or int8, rounded if they are stored otherwise; "
        "auto: as stored.",
        autocompletion=lambda: ["auto", *NAMES],
    )
    threads: int | None = option(
        None,
        "Number of threads; one per core if not set.",
        declare.THREADS,
        envvar="GPT_CLI_THREADS",
    )

    bos_token: str | None = option(
        None,
        "Start token of a model that has none or a wrong one, such as [CLS].",
        metavar="TEXT|ID",
    )
    edits: Sequence[str] = option(
        (),
        "Change a value of the forward pass, such as 'hook_embed@0=0'; repeatable.",
        flag="--edit",
        metavar="EDIT",
    )

    def load(self) -> "gpt_cli.Engine":
        """Load the model; NumPy must not have been imported before."""
        prepare(self.threads)
        global _model
        _model = gpt_cli.load(self.model, **self.options)
        return _model


@dataclass(kw_only=True, eq=False, repr=False)
class LoadingByName(Loading):
    """The models of a command whose arguments are models: these options have no flags."""

    model: str = option("")
    revision: str | None = option(None)
    adapter: str | None = option(None)
    dtype: str = option("auto")
    bos_token: str | None = option(None)
    edits: Sequence[str] = option(())

    def load_named(self, name: str) -> "gpt_cli.Engine":
        """Load a model by its name, or NAME@DTYPE."""
        prepare(self.threads)
        from gpt_cli.loading import load_all

        (engine,) = load_all([name], **self.options).values()
        return engine


@dataclass(kw_only=True, eq=False, repr=False)
class Generating(Loading):
    """The model of a command that generates text."""

    speculate: bool = option(
        True,
        "Where it pays, draft tokens and verify several in one pass: the same text, sooner.",
        flag="--speculate/--no-speculate",
    )


@dataclass(kw_only=True, eq=False, repr=False)
class Serving(Generating):
    """The models of a server."""

    model: str = option("")
    models: Sequence[str] = option(
        (_MODEL,),
        f"{_MODELS} Repeatable: requests choose a model by its name. NAME@DTYPE, such as "
        "gpt2@int8, has a dtype of its own.",
        flag="--model",
        metavar="MODEL",
        **_MODEL_FLAG,
    )

    def load_all(self) -> "dict[str, gpt_cli.Engine]":
        """Load the models, by their names; NumPy must not have been imported before."""
        prepare(self.threads)
        from gpt_cli.loading import load_all

        return load_all(self.models, **self.options)


@dataclass(kw_only=True, eq=False, repr=False)
class RowFormat(Declared):
    """The format of files of rows."""

    format: Format | None = option(
        None,
        "Input format: lines, jsonl, csv, tsv, parquet, text (each file is one row), or auto: what "
        "the name of each file says, or else its first bytes; auto if not set.",
        metavar="FORMAT",
    )
    delimiter: str | None = option(
        None,
        "The character between the cells of CSV and TSV, such as ';', or tab.",
        _DELIMITERS,
        kind=_DELIMITER,
        metavar="CHARACTER",
    )

    def source(
        self, files: Sequence[str], fields: tuple[str, ...], *, whole_files: bool = False
    ) -> "Source":
        """Return the rows of files in this format, for a command without a job.

        The fields are those that are read, the text first. With `whole_files`, a file of lines is
        one row.
        """
        from gpt_cli.jobs.layout import Layout
        from gpt_cli.jobs.rows import Source
        from gpt_cli.jobs.task import ROWS_TOGETHER

        layout = Layout(fields, whole_files=whole_files)
        return Source(files, self.format or "auto", layout, ROWS_TOGETHER, self.delimiter)


@dataclass(kw_only=True, eq=False, repr=False)
class RowFiles(RowFormat):
    """The input format and the output of a command with a record per row."""

    output: str | None = option(
        None,
        "Write to a new file (JSON Lines, or what .csv, .tsv or .parquet at the end of the name "
        "says), or to several files: FOLDER/, FOLDER/*.jsonl or FOLDER/*.parquet; local or a URL "
        "such as s3://...",
        aliases=("-o",),
        metavar="OUT",
        callback=dash_as_none,
    )
    resume: bool = option(
        False,
        "Continue an interrupted run: keep the rows in OUT and add the missing ones. Repeat all "
        "flags.",
        needs="--output",
    )
    keep_fields: KeepFields | None = option(
        None,
        "The fields of a row that its record has besides its text: none, its id, or all; all if "
        "not set.",
    )

    @property
    def used(self) -> bool:
        """Return whether any of the flags is set, so that the input must be rows."""
        return self.output is not None or self.format is not None


@dataclass(kw_only=True, eq=False, repr=False)
class Placement(Declared):
    """The machine or the cluster that computes rows."""

    engine: Literal["local", "ray"] = option(
        "local", "Compute on this machine, or on a Ray cluster."
    )
    address: str | None = option(
        None,
        "The Ray cluster, or auto for that of this machine; RAY_ADDRESS, or else a new one, if not "
        "set.",
        metavar="HOST:PORT",
        needs="--engine ray",
    )
    workers: int | None = option(
        None,
        "Processes that hold the model; as many as fit, with up to 4 threads each, if not set.",
        declare.AT_LEAST_1,
        needs="--engine ray",
    )
    gpus_per_worker: float | None = option(
        None,
        "GPUs per worker, such as 1 or 0.5; 0 uses CPUs; 0 if not set.",
        declare.AT_LEAST_0,
        metavar="G",
        needs="--engine ray",
    )

    def cluster(self, threads: int | None) -> "jobs.Cluster | None":
        """Return the cluster to compute on, or prepare this process and return None."""
        if self.engine == "ray":
            return jobs.Cluster(self.address, self.workers, self.gpus_per_worker or 0, threads)
        prepare(threads)
        return None


TEMPLATE = option(
    None,
    "A text, or a file with one, into which each row is put: {line}, or {NAME} of a field or a "
    "column; {{ is a brace.",
    metavar="FILE|TEXT",
)
ONE_FILE: Any = partial(option, None, kind=_ONE_NAME, aliases=("-f",), metavar="FILE")
PROMPT_FILE = ONE_FILE("Read the prompt from FILE (- is standard input), and append PROMPT.")
ROWS_FILES = option(
    None, "Same as the argument; repeatable.", flag="--file", aliases=("-f",), metavar="FILE"
)
BOS = option(False, "Score the first token of a text, too, after the start token.")
EOS = option(False, "Score the end token after a text, too.")
CHOICES_FILE = option(
    None,
    "Read the choices from FILE, one per line (- is standard input).",
    metavar="FILE",
    excludes=("--choices",),
)
LOGPROBS: Any = partial(
    option,
    None,
    "Add the log-probability of each token and of the N likeliest tokens to the JSON.",
    declare.AT_LEAST_0,
    metavar="N",
)
MODEL_NAME = typer.Argument(
    None,
    metavar="[MODEL]",
    help="Same as --model.",
    autocompletion=complete_model,
    callback=_check_only_model,
)
FORCE: Any = option(False, "Overwrite an existing FILE.")
JSON = option(False, "Print JSON, one object per line.", flag="--json")
QUIET: Any = Model.__dataclass_fields__["quiet"]
REVISION: Any = Model.__dataclass_fields__["revision"]
SPECIAL: Any = Options.__dataclass_fields__["special"]
DEVICE: Any = Loading.__dataclass_fields__["device"]
THREAD_COUNT: Any = Loading.__dataclass_fields__["threads"]
VERBOSE: Any = Model.__dataclass_fields__["verbose"]
