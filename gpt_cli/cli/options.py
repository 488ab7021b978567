"""Options that several commands share, and what must be set before NumPy is imported."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gpt_cli.cli import completion
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.machine import MOST_THREADS, addresses, blas_threads, cores, native_computes

if TYPE_CHECKING:
    from gpt_cli.generate import Options
    from gpt_cli.ray.job import Cluster

VERBOSE = "gpt_cli.verbose"  # in the context's `meta`: errors are shown with their traceback

# What we read, and the BLAS libraries that NumPy may be built with when they are loaded.
THREAD_VARIABLES = (
    "GPT_CLI_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

# Bytes of address space that NumPy and loading a small model take, as measured, with a margin.
_TO_START, _PER_THREAD = 480 << 20, 40 << 20
_MOST_THREADS = 64  # of the OpenBLAS in NumPy's wheels


def _set_verbose(context: typer.Context, verbose: bool) -> bool:
    if verbose:
        context.meta[VERBOSE] = True
        logging.basicConfig(format="gpt-cli: %(message)s")
        logging.getLogger("gpt_cli").setLevel(logging.INFO)
    return verbose


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="GPT_CLI_MODEL",
        help="tiny (bundled), gpt2 and its relatives, owner/name on the Hub, or a folder.",
        autocompletion=completion.models,
    ),
]
ModelName = Annotated[
    str, typer.Argument(help="As for generate --model.", autocompletion=completion.models)
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of the model on the Hub.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what is on this machine.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        callback=_set_verbose,
        help="Say why something else is used, and show the traceback of an error.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, an object a line.")]


# A job of many rows: the fields of gpt_cli.cli.jobs.Job.
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="OUT",
        path_type=str,
        callback=lambda name: None if name == "-" else name,
        help="Write to a new file: JSON Lines, or .parquet; or to files in a folder, as FOLDER/, "
        "FOLDER/*.jsonl or FOLDER/*.parquet; here or at an address.",
    ),
]
_FORMAT = typer.Option(
    "--format",
    help="What the rows are in; auto: parquet by the ending of the name, jsonl if it begins with "
    "{, else lines.",
)
RowsFormat = Annotated[Literal["auto", "lines", "jsonl", "parquet"], _FORMAT]
OtherFormat = Annotated[Literal["auto", "lines", "jsonl", "parquet"] | None, _FORMAT]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="If OUT is there, keep its rows and add those that are missing. Give the same flags "
        "again; the seed is known from OUT.",
    ),
]
EngineName = Annotated[
    Literal["local", "ray"],
    typer.Option("--engine", help="Compute on this machine, or on those of a Ray cluster."),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Of the cluster, or auto for the one that this machine is in; else Ray is started "
        "here for this job.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many hold the model; if not set, all that have room, with up to 4 threads.",
    ),
]
GPUsPerWorker = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="G", help="GPUs of each worker, as 1 or 0.5; else it computes on CPUs."
    ),
]

PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Read the prompt from FILE (-: a pipe); PROMPT comes after it.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda for an NVIDIA GPU, or auto: a GPU where one can be used.",
        autocompletion=completion.devices,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Weights in float32, float16 on a GPU, or int8 on a CPU; auto: as stored, or float32 "
        "on a GPU.",
        autocompletion=completion.dtypes,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_THREADS,
        envvar="GPT_CLI_THREADS",
        help="Threads to compute with; all cores if not set.",
    ),
]

# How to continue a prompt: the fields of gpt_cli.Options.
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="How many new tokens at most.")]
Temperature = Annotated[
    float, typer.Option(help="Higher is more surprising; 0: always the likeliest token.")
]
TopK = Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0: among all.")]
TopP = Annotated[
    float, typer.Option(help="Choose among the fewest that have this probability together; 1: all.")
]
MinP = Annotated[
    float,
    typer.Option(help="Drop what is less likely than this fraction of the likeliest; 0: none."),
]
RepeatPenalty = Annotated[
    float, typer.Option(help="Above 1, tokens that the text already has get less likely.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this string; may be given repeatedly.")
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", "-s", help="The same seed gives the same text; else one is drawn."),
]
Cache = Annotated[
    bool, typer.Option("--cache/--no-cache", help="Keep keys and values of earlier tokens.")
]
Overflow = Annotated[
    Literal["error", "truncate", "shift"],
    typer.Option(
        help="Where the text does not fit the context: refuse it, drop the prompt's "
        "beginning, or go on with the newest half."
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Never end with the end token.")]
Special = Annotated[
    bool, typer.Option("--special", help="Let <|endoftext|> in the text be the token.")
]
LogProbs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        min=0,
        help="Add to the JSON each token's log-probability, and those of the N likeliest.",
    ),
]


def generation_options(**given: Any) -> "Options":
    """Return the options that flags say; None is for what was not given."""
    from gpt_cli.generate import Options

    return Options(**{name: value for name, value in given.items() if value is not None})


def cluster(
    engine: str,
    *,
    address: str | None,
    workers: int | None,
    gpus: float | None,
    threads: int | None,
) -> "Cluster | None":
    """Return what flags say of a cluster; None if all is computed here.

    Raises:
        InputError: a flag for Ray was given without it.
        ResourceError: Ray is not installed.
    """
    if engine == "local":
        given = {"--address": address, "--workers": workers, "--gpus-per-worker": gpus}
        for name, value in given.items():
            if value is not None:
                raise InputError(f"{name} is of a Ray cluster: add --engine ray")
        return None
    try:
        from gpt_cli.ray.job import Cluster
    except ImportError as error:
        raise ResourceError(f"--engine ray: {error}: pip install 'ray[data]'") from None
    return Cluster(address, workers, gpus or 0, threads)


def prepare(threads: int | None) -> None:
    """Do what must be done before NumPy is imported: set threads, and see that it can be.

    By default as many compute as the process may use cores, which the libraries do not know in a
    container, unless one of their variables is set. Where the compiled library computes, NumPy's
    own products get one: starting more takes a fifth of NumPy's import.

    Raises:
        ResourceError: there are too few addresses, for lack of which OpenBLAS ends the process.
    """
    if threads is None and not any(name in os.environ for name in THREAD_VARIABLES):
        threads = cores()
    if threads is not None:
        numpy_computes = not native_computes() or os.environ.get("GPT_CLI_OPS") == "numpy"
        of_numpy = threads if numpy_computes else 1
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(of_numpy)))
        os.environ["GPT_CLI_THREADS"] = str(threads)
    left, needed = addresses(), _TO_START + min(blas_threads(), _MOST_THREADS) * _PER_THREAD
    if left is not None and left < needed:
        raise ResourceError(
            f"{needed >> 20} MiB of address space are needed to start, and a limit leaves "
            f"{left >> 20}: raise it (ulimit -v), or set fewer --threads"
        )
