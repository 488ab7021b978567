"""Examine this machine for gpt-cli. Each finding is ok, a note or a problem, with a cure."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

import gpt_cli
from gpt_cli import hub
from gpt_cli.errors import GPTCLIError, ResourceError, counted
from gpt_cli.hub.local import cache_folder, list_models
from gpt_cli.ops import get_ops
from gpt_cli.ops.bindings import choose_level, levels
from gpt_cli.system import gpu, machine
from gpt_cli.system.library import native_library, source_tree_fault
from gpt_cli.system.machine import MOST_THREADS, format_size

_COLOURS = {"256": "256 colours", "truecolor": "all colours"}  # with fewer, `show` uses characters
_LITTLE = 1 << 30  # bytes of memory: just enough for gpt2 and a prompt


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    status: Literal["ok", "note", "problem"]  # note: something is slow or missing
    found: str
    cure: str | None = None


def examine() -> Iterator[Finding]:
    """Yield the findings; only the last uses the network."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    folder = Path(gpt_cli.__file__).parent
    yield Finding("gpt-cli", "ok", f"{gpt_cli.__version__} in {folder} with Python {python}")
    blas: Any = np.show_config(mode="dicts")
    library = blas["Build Dependencies"]["blas"]["name"]
    yield Finding("numpy", "ok", f"{np.__version__} with {library}")
    for check in (_library, _threads, _memory, _gpu, _bundled_model, _cache, _terminal, _hub):
        yield check()


def _ok_or_note(name: str, text: str, cure: str | None) -> Finding:
    """Return a finding that is ok unless it has a cure."""
    return Finding(name, "note" if cure else "ok", text, cure)


def _library() -> Finding:
    """Report the level of the compiled library, or why it is not used."""
    slow = "NumPy computes, more slowly, without int8"
    path = native_library()
    if path is None and (fault := source_tree_fault()):
        reason, _, cure = fault.rpartition(": ")
        return Finding("library", "note", f"{reason}: {slow}", cure)
    if path is None:
        cure = "install a C compiler, then reinstall gpt2-cli"
        return Finding("library", "note", f"not compiled at installation: {slow}", cure)
    try:
        available = levels()
        level = choose_level() if available else None
    except ImportError as error:
        return Finding("library", "problem", f"cannot be loaded: {error}", "reinstall gpt2-cli")
    except GPTCLIError as error:
        return Finding("library", "problem", str(error), "unset GPT_CLI_LEVEL")
    if level is None:
        return Finding("library", "note", f"this processor lacks fused multiply-add: {slow}")
    lower = [other for other in available if other != level]
    also = f" (also here: {', '.join(lower)})" if lower else ""
    choice = os.environ.get("GPT_CLI_OPS") or "native"
    if choice == "native":
        text = f"computes at the level {level}{also}"
        if Path(gpt_cli.__file__).parent not in path.parents:
            text += f", from {path.parent}"  # as a source tree does
        return Finding("library", "ok", text)
    cure = "unset GPT_CLI_OPS"
    if choice in ("numpy", "cupy"):
        text = f"compiled, for {level}{also}, but GPT_CLI_OPS={choice} is set"
        return Finding("library", "note", text, cure)
    text = f"GPT_CLI_OPS={choice:.40} must be native, numpy or cupy"
    return Finding("library", "problem", text, cure)


def _threads() -> Finding:
    cores = machine.cores()
    threads = machine.threads()
    variable = os.environ.get("GPT_CLI_THREADS", "")
    if variable and not (variable.isdecimal() and 1 <= int(variable) <= MOST_THREADS):
        text = f"GPT_CLI_THREADS={variable:.40} must be a number from 1 to {MOST_THREADS}"
        return Finding("threads", "problem", text, "unset GPT_CLI_THREADS")
    cure = f"set threads to {cores}, or unset GPT_CLI_THREADS" if threads > cores else None
    usable = f"{cores} of {counted(os.cpu_count() or cores, 'processor')} can be used"
    text = f"{counted(threads, 'thread')}; {usable}"
    return _ok_or_note("threads", text, cure)


def _memory() -> Finding:
    free = machine.free_memory()
    if free is None:
        return Finding("memory", "note", "the free memory is unknown")
    cure = "raise the limit of the container or of ulimit -v, or use distilgpt2 or int8"
    return _ok_or_note("memory", f"{format_size(free)} free", cure if free < _LITTLE else None)


def _gpu() -> Finding:
    """Report what is missing for a GPU, or that it computes; that may compile the kernels."""
    if problem := gpu.problem():
        text, _, command = problem.partition(": ")
        return Finding("gpu", "note", f"not used: {text}", command or None)
    if fault := gpu.fault():
        return Finding("gpu", "problem", *fault)
    try:
        get_ops("cuda", "float32")
    except ResourceError as error:
        return Finding("gpu", "problem", str(error))
    packages = [f"{name} {version(name)}" for name in gpu.cupy_packages()]
    return Finding("gpu", "ok", f"{gpu.name()} with {' '.join(packages)}")


def _bundled_model() -> Finding:
    try:
        return Finding("tiny", "ok", str(hub.find("tiny")))
    except GPTCLIError as error:
        return Finding("tiny", "problem", str(error), "reinstall gpt2-cli")


def _cache() -> Finding:
    folder = cache_folder()
    models = [model for model in list_models() if model.origin == "cached"]
    size = format_size(sum(model.size for model in models))
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    free = format_size(shutil.disk_usage(existing).free)
    text = f"{folder} (models: {len(models)}, {size}); {free} of disk free"
    if not os.access(existing, os.W_OK):
        return Finding("cache", "problem", f"{text}; not writable", "set HF_HOME to another place")
    return Finding("cache", "ok", text)


def _terminal() -> Finding:
    if sys.stdout is None or not sys.stdout.isatty():
        return Finding("terminal", "ok", "output is not a terminal: plain text, no escape codes")
    columns = shutil.get_terminal_size().columns
    encoding = sys.stdout.encoding
    colours = _COLOURS.get(Console(file=sys.stdout).color_system or "", "fewer than 256 colours")
    text = f"{os.environ.get('TERM', 'unknown')}, {columns} columns, {colours}, {encoding}"
    is_utf8 = encoding.lower().replace("-", "") == "utf8"
    cure = "set a locale with UTF-8, such as LANG=C.UTF-8"
    return _ok_or_note("terminal", text, None if is_utf8 else cure)


def _hub() -> Finding:
    problem = hub.problem()
    if problem is None:
        return Finding("hub", "ok", f"{os.getenv('HF_ENDPOINT', 'https://huggingface.co')} answers")
    cure = "check the network, the proxy and HF_ENDPOINT; local models work offline"
    if hub.switched_off():
        cure = "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to fetch models"
    return Finding("hub", "note", problem, cure)
