"""Check that a model computes the right results on this machine.

The source, the files and greedy texts must be the published ones. Ways to compute the same result
must agree: with and without the cache, in a batch and alone, with each implementation; with the
compiled library and on a GPU to the last bit, for any threads and processor level. Digests of
logits compare machines.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gpt_cli.checks import computed
from gpt_cli.compression.archive import ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError, InputError, ResourceError, counted
from gpt_cli.folder.config import is_matrix
from gpt_cli.folder.dtypes import SHORT, WEIGHT_TYPES
from gpt_cli.generation.generate import Completion
from gpt_cli.gpt2 import assembly, checkpoint
from gpt_cli.gpt2.digests import TEXT, logits_digest
from gpt_cli.gpt2.source import MODEL, is_modified
from gpt_cli.gpt2.weights import named_weights
from gpt_cli.hub.local import SHORT_NAMES
from gpt_cli.ops import Array, Ops, bindings, get_ops
from gpt_cli.ops.numpy_ops import NumPyOps
from gpt_cli.system import gpu
from gpt_cli.system.files import file_hash
from gpt_cli.texts.loaded import LoadedModel

# Relative noise in the vectors of a model, by the dtype in which it is computed. Models amplify
# rounding by very different factors, but noise by the same factors: in 27 models, trained and
# random, rounding changed the log-probabilities at most 1.1 times as much as the noise.
_NOISE = {kind.name: kind.noise for kind in WEIGHT_TYPES.values() if kind.noise}
_TRIALS = 3  # of the noise
_MARGIN = 6  # limit / effect of the noise

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ONLY_NATIVE = "only the compiled library gives the same bits everywhere"


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None  # None: not checked, for the reason in `detail`
    detail: str
    largest: float | None = None  # difference of log-probabilities, if they were compared
    mean: float | None = None
    digest: str | None = None  # SHA-256 of logits


@cache
def known() -> dict[str, Any]:
    """Return the facts of known.json, by Hub id or bundled name."""
    return json.loads(files("gpt_cli.checks").joinpath("known.json").read_bytes())


def verify(name: str, folder: Path, adapter: Path | None = None) -> Iterator[Check]:
    """Yield the results of checking the model in `folder`, which the user calls `name`.

    With an adapter, which changes the texts, nothing is known about it. Raise GPTCLIError if it
    cannot be loaded.
    """
    facts = {} if adapter else _facts(name, folder)
    yield _check_source()
    yield _check_files(folder, facts.get("sha256", {}))
    load, stored = _loader(name, folder, adapter)
    dtype = stored if stored in _NOISE else "float32"
    others = [other for other in (stored, "int8") if other != dtype]
    reference = _reference(load(NumPyOps(dtype)), {dtype, *others} & _NOISE.keys())
    engine = load(get_ops("cpu", dtype))
    known = facts.get("digests", {})
    yield from _check_ways(engine, facts, reference.limits[dtype])
    bits = _check_bits("bits", engine, known)
    yield bits
    ops = engine.model.ops
    if ops.name == "numpy":
        yield Check("native = numpy", None, "only NumPy computes here: see `gpt-cli doctor`")
    else:
        yield _compare(
            f"{ops.name} = numpy",
            computed.logprobs(engine),
            reference.logprobs,
            reference.limits[dtype],
        )
    yield _check_hooks(engine, reference)
    round_trip = _check_round_trip(engine)
    results = {dtype: _results_for_gpu(engine)}
    del engine
    for other in others:
        try:
            engine = load(get_ops("cpu", other))
        except GPTCLIError as error:
            yield Check(f"bits in {other}", None, str(error))
            continue
        same = {other: bits.digest} if other in SHORT else known  # 16 bits are widened exactly
        yield from _check_dtype(other, engine, reference, same)
        results[other] = _results_for_gpu(engine)
        del engine
    yield round_trip
    for checked in [dtype, *others]:
        yield _check_cuda(checked, load, results.get(checked), reference)


@dataclass(frozen=True)
class _Reference:
    """The results of NumPy, and the limits (2,) of `_differences` from them."""

    logprobs: Array
    hooked: Array
    limits: dict[str, Array]  # of the log-probabilities, by dtype
    hook_limits: Array


def _reference(engine: Engine, dtypes: Iterable[str]) -> _Reference:
    """Return the results of an engine that NumPy computes, and limits for dtypes."""
    logprobs = computed.logprobs(engine)
    limits = {dtype: _limits(engine, logprobs, dtype) for dtype in dtypes}
    hooked = computed.hook_values(engine)
    hook_limits = _limits(engine, hooked, engine.model.ops.dtype, computed.hook_values)
    return _Reference(logprobs, hooked, limits, hook_limits)


def _loader(name: str, folder: Path, adapter: Path | None) -> tuple[Callable[[Ops], Engine], str]:
    """Return a function that loads a model in a dtype and on a device, and the stored dtype."""
    opened = checkpoint.open_checkpoint(folder, adapter)

    def load(ops: Ops) -> Engine:
        model = assembly.assemble(opened.config, ops, opened.tensors)
        return Engine(LoadedModel(model, opened.tokenizer), name, 0.0)

    # An adapter changes some matrices.
    return load, "float32" if adapter else opened.stored_dtype


def cure(failed: Sequence[str]) -> str:
    """Return what to do if these checks failed."""
    if "source" in failed:
        return f"undo the changes in {MODEL}, or reinstall gpt2-cli"
    if "files" in failed:
        return "get its files again, and report it if that does not help"
    return "this machine or this program computes wrong results; please report it"


def _facts(name: str, folder: Path) -> dict[str, Any]:
    """Return the facts of known.json about a model with this name or these weights."""
    weights = folder / "model.safetensors"
    full_name = SHORT_NAMES.get(name, name)
    if full_name in known() or not weights.is_file():
        return known().get(full_name, {})
    digest = file_hash(weights)
    return next((f for f in known().values() if f["sha256"][weights.name] == digest), {})


def _check_source() -> Check:
    """Check that model.py is the file of this release."""
    if is_modified():
        return Check("source", False, f"{MODEL} was modified")
    return Check("source", True, f"{MODEL.name} is the file of this release")


def _check_files(folder: Path, expected: dict[str, str]) -> Check:
    """Compare the files with their known hashes, or with the hashes that name the cache's blobs."""
    paths = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    missing = sorted(expected.keys() - paths.keys())
    if missing:
        return Check("files", False, f"missing: {', '.join(missing)}")
    blobs = {name: path.resolve().name for name, path in paths.items() if path.is_symlink()}
    hashes = {name: digest for name, digest in blobs.items() if _HASH.fullmatch(digest)} | expected
    wrong = []
    for name, expected_hash in sorted(hashes.items()):
        if file_hash(paths[name], len(expected_hash)) != expected_hash:
            wrong.append(name)
    if wrong:
        return Check("files", False, f"not as published: {', '.join(wrong)}")
    if not hashes:
        return Check("files", None, "no known hashes for a model in a plain folder")
    return Check("files", True, f"{counted(len(hashes), 'file')}, as published")


def _check_ways(engine: Engine, facts: dict[str, Any], limits: Array) -> Iterator[Check]:
    """Check the texts of one implementation, computed in several ways."""
    yield _check_continuations(engine, facts.get("continuations", []))
    ops = engine.model.ops
    together = computed.texts(engine, computed.PROMPTS)
    recomputed = computed.texts(engine, computed.PROMPTS, use_cache=False)
    yield _check_same("cache on = off", together, recomputed, ops, limits)
    alone = [computed.texts(engine, [prompt])[0] for prompt in computed.PROMPTS]
    yield _check_same("batch = single", together, alone, ops, limits)


def _check_continuations(engine: Engine, continuations: Sequence[dict[str, Any]]) -> Check:
    """Compare greedy continuations with the known ones."""
    name = "known texts"
    if not continuations:
        return Check(name, None, "no known continuations of this model")
    for fact in continuations:
        (text,) = engine.generate([fact["prompt"]], max_tokens=fact["tokens"], temperature=0)
        if text.text != fact["text"]:
            prompt = _quoted(fact["prompt"], 40)
            return Check(name, False, f"{prompt} continues with {_quoted(text.text, 60)}")
    tokens = counted(sum(fact["tokens"] for fact in continuations), "token")
    return Check(name, True, f"{counted(len(continuations), 'text')} of {tokens}, as published")


def _quoted(text: str, most: int) -> str:
    """Return up to `most` characters of a text in quotes; an ellipsis shows that it is cut."""
    return repr(text if len(text) <= most else f"{text[: most - 1]}…")


def _check_same(
    name: str, texts: Sequence[Completion], others: Sequence[Completion], ops: Ops, limits: Array
) -> Check:
    """Compare the tokens and the log-probabilities of several texts."""
    if [text.ids for text in texts] != [other.ids for other in others]:
        return Check(name, False, "the tokens differ")
    ours = np.concatenate([text.logprobs for text in texts])
    theirs = np.concatenate([text.logprobs for text in others])
    check = _compare(name, ours, theirs, limits)
    if not ops.batch_invariant:
        return check
    detail = "the same bits" if check.largest == 0 else f"different bits: {check.detail}"
    return replace(check, passed=check.largest == 0, detail=detail)


def _check_bits(name: str, engine: Engine, known: Mapping[str, str | None]) -> Check:
    """Compare the bits of logits for all threads and levels, and with the known digest."""
    ops = engine.model.ops
    if ops.name != "native":
        return Check(name, None, _ONLY_NATIVE)
    levels = bindings.levels()
    counts = (1, max(2, ops.threads))
    digests = {}
    for level, count in itertools.product(levels, counts):
        with _computing(ops, level, count):
            digests[level, count] = logits_digest(engine.model, engine.tokenizer)
    digest = digests[levels[0], 1]
    right = known.get(ops.dtype, digest)
    ways = f"with {counts[0]} and {counts[1]} threads, at {', '.join(levels)}"
    if set(digests.values()) != {digest}:
        return Check(name, False, f"digests differ {ways}: {digests}", digest=digest)
    detail = f"{digest} {ways}" if digest == right else f"{digest}, expected {right}"
    return Check(name, digest == right, detail, digest=digest)


def _check_dtype(
    dtype: str, engine: Engine, reference: _Reference, known: Mapping[str, str | None]
) -> Iterator[Check]:
    """Check another dtype than the first on the CPU."""
    if dtype in reference.limits:  # other types are widened exactly
        limits = reference.limits[dtype]
        yield _compare(
            f"cpu in {dtype} = float32", computed.logprobs(engine), reference.logprobs, limits
        )
    yield _check_bits(f"bits in {dtype}", engine, known)


def _results_for_gpu(engine: Engine) -> dict[str, Any] | None:
    """Return the results of a CPU; None if no GPU can have the same bits."""
    return None if gpu.problem() or not engine.model.ops.batch_invariant else computed.exact(engine)


def _check_cuda(
    dtype: str, load: Callable[[Ops], Engine], of_cpu: dict[str, Any] | None, reference: _Reference
) -> Check:
    """Compare a GPU with the CPU, bit for bit, or else with NumPy within limits."""
    name = f"cuda in {dtype} = cpu"
    try:
        if problem := gpu.problem():
            raise ResourceError(problem)
        engine = load(get_ops("cuda", dtype))
    except GPTCLIError as error:
        return Check(name, None, str(error))
    if of_cpu is None:
        limits = reference.limits[dtype if dtype in reference.limits else "float32"]
        return _compare(name, computed.logprobs(engine), reference.logprobs, limits)
    results = computed.exact(engine)
    digest = results["logits"]
    different = [what for what, value in results.items() if value != of_cpu.get(what)]
    if different:
        return Check(name, False, f"other bits: {', '.join(different)}", digest=digest)
    others = [what for what in results if what != "logits"]
    return Check(name, True, f"{digest}, and the same {', '.join(others)}", digest=digest)


def _check_hooks(engine: Engine, reference: _Reference) -> Check:
    """Compare values at hook points of texts side by side with NumPy's, and with those alone."""
    values = computed.hook_values(engine, together=True)
    if engine.model.ops.batch_invariant and not np.array_equal(
        values, computed.hook_values(engine)
    ):
        return Check("hooks", False, "different bits alone and in a batch")
    what = "values, in standard deviations,"
    return _compare("hooks", values, reference.hooked, reference.hook_limits, what)


def _check_round_trip(engine: Engine) -> Check:
    """Compress the sample text at the highest level, and decompress it at all with one thread."""
    name = "compress, decompress"
    ops = engine.model.ops
    if ops.name != "native":
        return Check(name, None, _ONLY_NATIVE)
    data = TEXT.encode()
    levels = bindings.levels()
    try:
        codec = Codec(engine.model, engine.tokenizer)
    except InputError as error:  # such as without a start token
        return Check(name, None, str(error))
    with _computing(ops, levels[0], max(2, ops.threads)):
        packed = b"".join(codec.compress(BytesIO(data), computed.SEGMENT))
    for level in levels:
        with _computing(ops, level, 1):
            try:
                passed = b"".join(codec.decompress(ArchiveReader(BytesIO(packed)))) == data
            except InputError:
                passed = False
        if not passed:
            return Check(name, False, f"what {levels[0]} writes, {level} cannot read")
    detail = f"{len(data)} bytes as {len(packed)}, and back at {', '.join(levels)}"
    return Check(name, True, detail)


@contextmanager
def _computing(ops: Ops, level: str, threads: int) -> Iterator[None]:
    """Compute at a level of the compiled library, with a number of threads."""
    before = ops.threads
    try:
        bindings.use_level(level)
        ops.threads = threads
        yield
    finally:
        bindings.choose_level()
        ops.threads = before


def _limits(
    engine: Engine,
    expected: Array,
    dtype: str,
    compute: Callable[[Engine], Array] = computed.logprobs,
) -> Array:
    """Return the limits (2,) of `_differences` in a dtype: a multiple of the effect of noise."""
    model = engine.model
    random = np.random.default_rng(0)
    effects = []
    for _ in range(_TRIALS):
        weights = dict(named_weights(model))
        for name, weight in weights.items():
            if isinstance(weight, np.ndarray) and not is_matrix(name, weight.shape):
                noise = _NOISE[dtype] * random.standard_normal(weight.shape, np.float32)
                weights[name] = weight + weight * noise
        noisy = replace(engine.loaded, model=assembly.build(model.config, model.ops, weights))
        results = compute(Engine(noisy, engine.name, 0.0))
        effects.append(_differences(results, expected))
    return _MARGIN * np.max(effects, axis=0)


def _differences(results: Array, others: Array) -> Array:
    """Return the largest and the mean difference (2,)."""
    differences = np.abs(results - others)
    return np.array([differences.max(), differences.mean()])


def _compare(
    name: str, results: Array, expected: Array, limits: Array, what: str = "log-probabilities"
) -> Check:
    """Compare results within limits (2,)."""
    largest, mean = _differences(results, expected).tolist()
    most, most_mean = limits.tolist()
    detail = (
        f"{what} differ by at most {largest:.1e}, mean {mean:.1e} "
        f"(limits: {most:.0e}, {most_mean:.0e})"
    )
    return Check(name, largest <= most and mean <= most_mean, detail, largest, mean)
