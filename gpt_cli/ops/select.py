"""The choice of an implementation of the operations, for a device and a type of weights."""

import importlib
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from gpt_cli.errors import InputError, ResourceError, did_you_mean
from gpt_cli.folder.dtypes import NAMES, SHORT, WEIGHT_TYPES
from gpt_cli.ops.contract import Ops
from gpt_cli.options.declare import THREADS, OptionError, OptionResourceError, check
from gpt_cli.system import gpu
from gpt_cli.system.library import native_library, source_tree_fault


@dataclass(frozen=True)
class _Implementation:
    """A module `NAME_ops` and what it can compute."""

    class_name: str
    device: str
    dtypes: tuple[str, ...]  # of the weights


_IMPLEMENTATIONS = {  # the fastest first
    "cupy": _Implementation("CuPyOps", "cuda", NAMES),
    "native": _Implementation("NativeOps", "cpu", NAMES),
    "numpy": _Implementation("NumPyOps", "cpu", ("float32", "int8")),
}
_SYNONYMS = {"gpu": "cuda", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_VARIABLE = "GPT_CLI_OPS"  # environment variable that names an implementation

_log = logging.getLogger(__name__)


def check_available(device: str, dtype: str) -> list[str]:
    """Return the names of the implementations that `get_ops` tries, without loading one.

    For "auto", return the implementations for float32: the type is not known yet.
    Raise InputError if there is none or GPT_CLI_OPS is invalid, and ResourceError if a GPU is
    needed and cannot be used.
    """
    why = "" if dtype == "auto" else f" for {dtype}"
    if dtype == "auto":
        dtype = "float32"
    _check_name("device", device, [kind.device for kind in _IMPLEMENTATIONS.values()])
    _check_name("dtype", dtype, NAMES)
    names = [
        name
        for name, kind in _IMPLEMENTATIONS.items()
        if dtype in kind.dtypes and device in ("auto", kind.device)
    ]
    if "cupy" in names and (problem := gpu.problem()):
        names.remove("cupy")
        if not names:
            raise OptionResourceError("device", f"cuda: {problem}")
    choice = os.environ.get(_VARIABLE)
    if choice:
        if choice not in names:
            raise InputError(f"{_VARIABLE} must be {' or '.join(names)}{why}, not {choice!r}")
        names = [choice]
    elif WEIGHT_TYPES[dtype].has_groups and "numpy" in names:  # slower than float32
        names.remove("numpy")
    if names == ["native"] and native_library() is None:
        needs = (
            "needs the compiled library, and gpt-cli was installed without it: "
            "install a C compiler, then reinstall gpt2-cli (`gpt-cli doctor` says more)"
        )
        if fault := source_tree_fault():
            needs = f"needs the compiled library, and {fault}"
        if choice:
            raise InputError(f"{_VARIABLE}={choice} {needs}")
        raise OptionError("dtype", f"{dtype} {needs}")
    return names


def get_ops(device: str, dtype: str, threads: int | None = None) -> Ops:
    """Return the operations for a device ("auto" prefers a GPU) and a type of weights.

    GPT_CLI_OPS names the implementation; by default it is the fastest that can be used. `threads`
    is the number of CPU threads; by default see `machine.threads`. It does not apply to NumPy.

    Raise the errors of `check_available`, and ResourceError if no implementation works.
    """
    if threads is not None:
        check("threads", threads, THREADS)
    names = check_available(device, dtype)
    if device == "auto" and (problem := gpu.problem()):
        _log.info("computing on the CPU: %s", problem)
    if names[-2:] == ["native", "numpy"]:
        _warn_of_source_tree()
    for name in names:
        try:
            module = importlib.import_module(f"gpt_cli.ops.{name}_ops")
            implementation = getattr(module, _IMPLEMENTATIONS[name].class_name)
            ops: Ops = implementation(dtype)
        except (ImportError, OSError) as error:  # OSError: CuPy cannot create its folder
            reason = " ".join(str(error).split())
            _log.info("%s cannot be used: %s", name, reason)
        else:
            if threads is not None and name == "native":
                ops.threads = threads
            return ops
    if name == "cupy":
        fault = gpu.fault()
        problem = f"{fault.text}: {fault.cure}" if fault else f"CuPy does not work: {reason}"
        raise OptionResourceError("device", f"{device}: {problem}")
    raise OptionResourceError("dtype", f"{dtype}: {name} does not work here: {reason}")


@cache
def _warn_of_source_tree() -> None:
    """Warn once if NumPy computes only because Python imports gpt_cli from a source tree."""
    if fault := source_tree_fault():
        _log.warning("NumPy computes, more slowly and with other last bits: %s", fault)


def ops_for(stored: str, device: str, threads: int | None = None, *, mixed: bool = False) -> Ops:
    """Return the operations of a device for weights that are stored in a type.

    16-bit weights are held as they are stored, and widened exactly when they are used. They are
    held in float32 if NumPy computes, or on a GPU if some weights are not in this type (`mixed`).
    """
    if stored not in SHORT:
        return get_ops(device, stored, threads)
    with suppress(InputError, ResourceError):
        if not mixed or check_available(device, stored)[0] != "cupy":
            return get_ops(device, stored, threads)
    return get_ops(device, "float32", threads)


def _check_name(option: str, name: str, names: Iterable[str]) -> None:
    """Raise OptionError for an unknown name."""
    known = list(dict.fromkeys(["auto", *names]))
    if name not in known:
        hint = did_you_mean(_SYNONYMS.get(name, name), known)
        raise OptionError(
            option, f"must be one of {', '.join(known)}, not {json.dumps(name)}{hint}"
        )
