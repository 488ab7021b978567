"""Examine this machine for gpt-cli. Each finding is ok, a note or a problem, with a cure."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

import gpt_cli
from gpt_cli import gpu, hub, machine
from gpt_cli.errors import GPTCLIError
from gpt_cli.hub.local import cache_folder, list_models
from gpt_cli.machine import MOST_THREADS, format_size, native_library

_COLOURS = {
    "256": "256 colours",
    "truecolor": "all colours",
}  # otherwise `show` draws with characters
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
    yield Finding("gpt-cli", "ok", f"{gpt_cli.__version__} with Python {python}")
    yield _numpy()
    yield _library()
    yield _threads()
    yield _memory()
    yield _gpu()
    yield _bundled_model()
    yield _cache()
    yield _terminal()
    yield _hub()


def _numpy() -> Finding:
    blas: Any = np.show_config(mode="dicts")
    library = blas["Build Dependencies"]["blas"]["name"]
    return Finding("numpy", "ok", f"{np.__version__} with {library}")


def _library() -> Finding:
    """Report the level of the compiled library, or why it is not used."""
    if native_library() is None:
        slow = "not compiled when gpt-cli was installed: NumPy computes, slower, and no int8"
        return Finding("library", "note", slow, "install a C compiler, then reinstall gpt2-cli")
    from gpt_cli.ops.bindings import choose_level, levels

    try:
        available = levels()
    except ImportError as error:
        cure = "reinstall gpt2-cli"
        return Finding("library", "problem", f"cannot be loaded: {error}", cure)
    if not available:
        found = "this processor has no fused multiply-add: NumPy computes, slower, and no int8"
        return Finding("library", "note", found)
    try:
        level = choose_level()
    except GPTCLIError as error:
        return Finding("library", "problem", str(error), "unset GPT_CLI_LEVEL")
    lower = [other for other in available if other != level]
    also = f" (also here: {', '.join(lower)})" if lower else ""
    chosen = os.environ.get("GPT_CLI_OPS")
    if chosen not in (None, "", "native", "numpy"):
        return Finding(
            "library",
            "problem",
            f"GPT_CLI_OPS={chosen:.40} must be native or numpy",
            "unset GPT_CLI_OPS",
        )
    if chosen == "numpy":
        found = f"compiled, for {level}{also}, but GPT_CLI_OPS=numpy is set"
        return Finding("library", "note", found, "unset GPT_CLI_OPS")
    return Finding("library", "ok", f"computes at the level {level}{also}")


def _threads() -> Finding:
    cores, taken = machine.cores(), machine.threads()
    given = os.environ.get("GPT_CLI_THREADS", "")
    if given and not (given.isdecimal() and 1 <= int(given) <= MOST_THREADS):
        found = f"GPT_CLI_THREADS={given:.40} must be a number from 1 to {MOST_THREADS}"
        return Finding("threads", "problem", found, "unset GPT_CLI_THREADS")
    found = f"{taken} threads; this process may use {cores} of {os.cpu_count()} processors"
    if taken > cores:
        cure = f"give --threads {cores}, or unset GPT_CLI_THREADS"
        return Finding("threads", "note", found, cure)
    return Finding("threads", "ok", found)


def _memory() -> Finding:
    free = machine.free_memory()
    if free is None:
        return Finding("memory", "note", "the free memory is unknown")
    found = f"{format_size(free)} free"
    if free < _LITTLE:
        cure = "raise the limit of the container or of ulimit -v, or use distilgpt2 or int8"
        return Finding("memory", "note", found, cure)
    return Finding("memory", "ok", found)


def _gpu() -> Finding:
    problem = gpu.problem()
    packages = [name for name in ("cupy", "cupy-cuda12x", "cupy-cuda13x") if _installed(name)]
    if len(packages) > 1:
        cure = f"pip uninstall {' '.join(packages[:-1])}"
        return Finding("gpu", "problem", f"{' and '.join(packages)} are both installed", cure)
    if problem is None:
        return Finding("gpu", "ok", f"CuPy {version(packages[0])} can use the GPU")
    missing = gpu.install_hint() if gpu.load_driver() else None
    return Finding("gpu", "note", f"not used: {problem}", missing)


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def _bundled_model() -> Finding:
    try:
        folder = hub.find("tiny")
    except GPTCLIError as error:
        return Finding("tiny", "problem", str(error), "reinstall gpt2-cli")
    return Finding("tiny", "ok", f"{folder}")


def _cache() -> Finding:
    folder = cache_folder()
    models = [model for model in list_models() if model.origin == "cached"]
    size = format_size(sum(model.size for model in models))
    beside = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    free = format_size(shutil.disk_usage(beside).free)
    found = f"{folder}: {len(models)} models, {size}; {free} of disk free"
    if not os.access(beside, os.W_OK):
        return Finding("cache", "problem", f"{found}; not writable", "set HF_HOME to another place")
    return Finding("cache", "ok", found)


def _terminal() -> Finding:
    if sys.stdout is None or not sys.stdout.isatty():
        return Finding("terminal", "ok", "standard output is none: plain text, no escape codes")
    columns, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding
    colours = _COLOURS.get(Console(file=sys.stdout).color_system or "", "fewer than 256 colours")
    found = f"{os.environ.get('TERM', 'unknown')}, {columns} columns, {colours}, {encoding}"
    if encoding.lower().replace("-", "") != "utf8":
        return Finding("terminal", "note", found, "set a locale with UTF-8, such as LANG=C.UTF-8")
    return Finding("terminal", "ok", found)


def _hub() -> Finding:
    problem = hub.problem()
    if problem is not None:
        cure = "check the network, the proxy and HF_ENDPOINT; local models work without"
        if hub.switched_off():
            cure = "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE to fetch models"
        return Finding("hub", "note", problem, cure)
    return Finding("hub", "ok", f"{os.getenv('HF_ENDPOINT', 'https://huggingface.co')} answers")
