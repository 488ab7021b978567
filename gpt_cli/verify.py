"""Whether a model computes on this machine what it should: its files, what is known, what must be.

Three kinds of checks. The files have the hashes that are known of them. Greedily, the model writes
what others have published that it writes. And whatever the model is, some ways to compute the same
must agree: with the cache and without, beside other texts and alone, by each implementation. Where
the compiled library computes, they must agree to the last bit, on any number of threads and at each
level of the processor; a digest of the logits lets two machines be compared.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from gpt_cli import checkpoint, gpu
from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError, ResourceError
from gpt_cli.files import git_hash, sha256
from gpt_cli.generate import Completion
from gpt_cli.hub.local import SHORT_NAMES
from gpt_cli.ops import Ops, get_ops
from gpt_cli.ops.numpy_ops import Int8NumPyOps, NumPyOps
from gpt_cli.sample import TEXT
from gpt_cli.tokenizer import Tokenizer

# The most that natural logarithms of probabilities may differ, at a token and in the mean: far
# above what is measured (4e-5 and 1e-5 in float32), far below what a wrong kernel gives.
LIMITS = {"float32": (1e-3, 1e-4), "float16": (0.3, 0.05), "int8": (3.0, 0.5)}

PROMPTS = ("Once upon a time", "The", TEXT[:300], "In the beginning there was")
_NEW_TOKENS = 12
_DIGEST_TOKENS = 64
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Check:
    """What was checked, and what came of it."""

    name: str
    passed: bool | None  # None: it could not be checked, and `detail` says why
    detail: str
    largest: float | None = None  # difference of log-probabilities, where they were compared
    mean: float | None = None
    digest: str | None = None  # SHA-256 of logits


@cache
def known() -> dict[str, Any]:
    """What is known of models, by their names on the Hub, and of the bundled one."""
    facts: dict[str, Any] = json.loads(files("gpt_cli").joinpath("known.json").read_bytes())
    return facts


def verify(name: str, folder: Path) -> Iterator[Check]:
    """Check a model, one thing after the other.

    Args:
        name: as the user calls it.
        folder: where it is.

    Raises:
        GPTCLIError: it cannot be loaded.
    """
    facts = _facts(name, folder)
    yield _check_files(folder, facts.get("sha256", {}))
    tokenizer = Tokenizer.from_folder(folder)
    config, tensors = checkpoint.read(folder)
    dtype = "int8" if checkpoint.stored_dtype(tensors) == "int8" else "float32"

    def load(ops: Ops) -> Engine:
        return Engine(checkpoint.assemble(config, ops, tensors), tokenizer, name, 0.0)

    ops = get_ops("cpu", dtype)
    engine = load(ops)
    yield _check_continuations(engine, facts.get("continuations", []))
    together = _continue(engine)
    yield _check_same("cache on = off", together, _continue(engine, use_cache=False), ops)
    alone = [_continue(engine, [prompt])[0] for prompt in PROMPTS]
    yield _check_same("batch = single", together, alone, ops)
    yield _check_bits("bits", engine, facts)
    if ops.name == "numpy":
        expected = _logprobs(engine)
        yield Check("native = numpy", None, "NumPy computes here: see `gpt-cli doctor`")
    else:
        expected = _logprobs(load(Int8NumPyOps() if dtype == "int8" else NumPyOps()))
        yield _compare(f"{ops.name} = numpy", _logprobs(engine), expected, dtype)
    del engine
    others = [("cpu", "int8"), ("cuda", "float32"), ("cuda", "float16")]
    for device, other in others if dtype == "float32" else []:
        problem = gpu.problem() if device == "cuda" else None
        try:
            if problem:
                raise ResourceError(problem)
            engine = load(get_ops(device, other))
            found = _logprobs(engine)
        except GPTCLIError as error:
            yield Check(f"{device} in {other} = float32", None, str(error))
            continue
        yield _compare(f"{device} in {other} = float32", found, expected, other)
        if device == "cpu":
            yield _check_bits(f"bits in {other}", engine, facts)


def _facts(name: str, folder: Path) -> dict[str, Any]:
    """What is known of a model, found by its name or, in a plain folder, by its weights."""
    weights = folder / "model.safetensors"
    by_name = known().get(SHORT_NAMES.get(name, name))
    if by_name is not None or not weights.is_file():
        return by_name or {}
    digest = sha256(weights)
    same = (facts for facts in known().values() if facts["sha256"][weights.name] == digest)
    return next(same, {})


def _check_files(folder: Path, expected: dict[str, str]) -> Check:
    """Compare files with the hashes that are known, or that the Hub's cache names them by."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    missing = sorted(expected.keys() - {path.name for path in paths})
    if missing:
        return Check("files", False, f"{', '.join(missing)} should be there, and is not")
    wrong, checked = [], 0
    for path in paths:
        # The cache names a file by its hash.
        blob = path.resolve().name if path.is_symlink() else ""
        wanted = expected.get(path.name) or (blob if _HASH.fullmatch(blob) else None)
        if wanted is None:
            continue
        checked += 1
        if (git_hash(path) if len(wanted) == 40 else sha256(path)) != wanted:
            wrong.append(path.name)
    if wrong:
        return Check("files", False, f"{', '.join(wrong)} differ from what was published")
    if not checked:
        return Check("files", None, "no hash is known of a model in a plain folder")
    return Check("files", True, f"{checked} files have the hashes that are known of them")


def _check_continuations(engine: Engine, continuations: Sequence[dict[str, Any]]) -> Check:
    """Compare what the model writes greedily with what is known."""
    name = "known texts"
    if not continuations:
        return Check(name, None, "nothing is known of what this model writes")
    for fact in continuations:
        (found,) = engine.generate([fact["prompt"]], max_tokens=fact["tokens"], temperature=0)
        if found.text != fact["text"]:
            return Check(name, False, f"{fact['prompt']!r:.40} goes on with {found.text!r:.60}")
    tokens = sum(fact["tokens"] for fact in continuations)
    return Check(
        name, True, f"{len(continuations)} texts, {tokens} tokens in all, are as published"
    )


def _continue(
    engine: Engine, prompts: Sequence[str] = PROMPTS, *, use_cache: bool = True
) -> list[Completion]:
    return engine.generate(
        prompts,
        max_tokens=_NEW_TOKENS,
        temperature=0,
        ignore_eos=True,
        use_cache=use_cache,
        overflow="truncate",
    )


def _check_same(
    name: str, found: Sequence[Completion], expected: Sequence[Completion], ops: Ops
) -> Check:
    """Compare the tokens of several texts, and how likely they were."""
    if [one.ids for one in found] != [other.ids for other in expected]:
        return Check(name, False, "the tokens are not the same")
    pairs = [[logprob for one in each for logprob in one.logprobs] for each in (found, expected)]
    check = _compare(name, np.array(pairs[0]), np.array(pairs[1]), ops.dtype)
    if ops.name != "native":
        return check
    detail = "the same bits" if check.largest == 0 else f"not the same bits: {check.detail}"
    return replace(check, passed=check.largest == 0, detail=detail)


def _check_bits(name: str, engine: Engine, facts: dict[str, Any]) -> Check:
    """Compare logits, bit by bit, between threads and levels, and with what is known of them."""
    ops = engine.model.ops
    if ops.name != "native":
        return Check(name, None, "only the compiled library has the same bits everywhere")
    from gpt_cli.ops import bindings  # which need the library

    ids = engine.encode(TEXT)[: min(_DIGEST_TOKENS, engine.model.config.n_positions)]
    threads = ops.threads
    levels, counts = bindings.levels(), (1, max(2, threads))
    digests = {}
    try:
        for level, count in itertools.product(levels, counts):
            bindings.use_level(level)
            ops.threads = count
            logits = engine.logits([ids]).astype("<f4", copy=False)
            digests[level, count] = hashlib.sha256(logits.tobytes()).hexdigest()
    finally:
        bindings.choose_level()
        ops.threads = threads
    digest = digests[levels[0], 1]
    known = facts.get("digests", {}).get(ops.dtype, digest)
    ways = f"with {counts[0]} and {counts[1]} threads, at {', '.join(levels)}"
    if set(digests.values()) != {digest}:
        return Check(name, False, f"they differ {ways}: {digests}", digest=digest)
    if digest != known:
        return Check(name, False, f"{digest}, but {known} is known", digest=digest)
    return Check(name, True, f"{digest} {ways}", digest=digest)


def _logprobs(engine: Engine) -> np.ndarray[Any, Any]:
    """How likely each token of a text is."""
    return np.array(engine.score(TEXT).token_logprobs[1:], float)


def _compare(
    name: str, found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], dtype: str
) -> Check:
    """Compare logarithms of probabilities, within the limits of a type."""
    differences = np.abs(found - expected)
    largest, mean = float(differences.max()), float(differences.mean())
    most, most_in_the_mean = LIMITS[dtype]
    passed = largest <= most and mean <= most_in_the_mean
    detail = (
        f"log-probabilities differ by {largest:.1e} at most, {mean:.1e} in the mean "
        f"({most:.0e} and {most_in_the_mean:.0e} are allowed)"
    )
    return Check(name, passed, detail, largest, mean)
