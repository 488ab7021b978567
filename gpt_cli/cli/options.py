"""Options that several commands share, and what must be set before NumPy is imported."""

import os
from typing import Annotated

import typer

VERBOSE = "gpt_cli.verbose"  # in the context's `meta`: errors are shown with their traceback

# What the BLAS libraries that NumPy may be built with read when they are loaded.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def _set_verbose(context: typer.Context, verbose: bool) -> bool:
    if verbose:
        context.meta[VERBOSE] = True
    return verbose


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="GPT_CLI_MODEL",
        help="tiny (bundled), gpt2 and its relatives, owner/name on the Hub, or a folder.",
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of the model on the Hub.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what is on this machine.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_set_verbose, help="Show the traceback of an error."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, an object a line.")]


def limit_threads(threads: int | None) -> None:
    """Let matrix products use this many threads; must be called before NumPy is imported."""
    if threads is not None:
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
