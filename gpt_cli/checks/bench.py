"""Measure the same generation with and without the KV cache, or speculation.

The time includes all that a user waits for: tokenization, the model, sampling and decoding. The
modes alternate, so that a slow moment of the machine affects both.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import get_args

from gpt_cli.checks.plan import ModeName, Plan
from gpt_cli.engine import Engine
from gpt_cli.errors import ContextError, InputError, MismatchError, counted
from gpt_cli.generation.generate import Completion
from gpt_cli.generation.row import Step
from gpt_cli.gpt2.digests import sample_ids
from gpt_cli.gpt2.memory import count_parameters, weights_bytes
from gpt_cli.options.request import Options
from gpt_cli.system.machine import peak_memory
from gpt_cli.texts.speculator import Speculator

_WARM_UP = 20  # tokens before the first measurement: NumPy's products settle at the 16th
_EDGE = 10  # tokens at either end of the text; their median times show how the time grows


@dataclass(frozen=True)
class Spread:
    """A figure over the repetitions."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The figures of one mode: seconds (`_s`), and tokens of all rows per second (`_tok_s`).

    In the time of a token, every row gets one; tokens of the same pass share its time evenly. A
    figure is None if it needs more new tokens than there are.
    """

    tokenize_s: Spread  # all prompts
    first_token_s: Spread  # from the texts to the first token, including tokenization
    prefill_tok_s: Spread  # prompt tokens in the first step
    decode_tok_s: Spread | None = None  # new tokens after the first
    model_s: Spread | None = None  # mean per token after the first: drafts and forward pass
    other_s: Spread | None = None  # mean per token after the first: sampling and decoding
    total_s: Spread  # from the texts to the last token
    token_s: list[float]  # median times of the new tokens; the first includes tokenization
    growth: float | None = None  # time of the `late` tokens / time of the `early` tokens


@dataclass(frozen=True)
class Benchmark:
    """The measured figures, and what was measured. Positions in the text count from 1."""

    model: str
    adapter: str | None
    parameters: int
    weights_bytes: int
    dtype: str  # of the weights
    ops: str  # the implementation
    threads: int
    prompt_tokens: int  # per row
    max_tokens: int
    batch: int
    repetitions: int
    load_s: float
    peak_bytes: int | None  # of the process since its start; None if unknown
    positions: list[int]  # of the new tokens
    early: tuple[int, int] | None  # first and last position of the tokens that `growth` compares
    late: tuple[int, int] | None
    cache_on: Mode | None
    cache_off: Mode | None
    speculation: Mode | None
    drafted: int | None  # tokens of a text, as a median; None without speculation
    accepted: int | None  # drafted tokens that are in the text
    ratio: dict[str, float] | None  # speed with speculation or the cache / without, by figure
    ids_equal: bool | None  # in both modes; None if only one was measured
    ids: list[list[int]]  # the new tokens, by row

    @property
    def modes(self) -> dict[str, Mode]:
        """The measured modes by name."""
        modes = {name: getattr(self, name.replace(" ", "_")) for name in get_args(ModeName)}
        return {name: mode for name, mode in modes.items() if mode is not None}


@dataclass(frozen=True)
class _Run:
    """The results of one generation."""

    name: str
    completions: Sequence[Completion]
    token_s: list[float]  # times of the tokens; the first includes tokenization
    figures: dict[str, float]  # by the fields of `Mode` that are spreads; those with a value


def measure(
    engine: Engine, plan: Plan, starting: Callable[[str], None] = lambda step: None
) -> Benchmark:
    """Generate greedily in the modes of the plan in turn, and return the times.

    `starting` is called with the name of the next step.

    Raises:
        InputError: prompt and new tokens do not fit the context, or speculation is not possible.
        MismatchError: two runs chose different tokens.
    """
    length = plan.prompt_tokens + plan.max_tokens
    n_positions = engine.model.config.n_positions
    if length > n_positions:
        raise ContextError(
            f"{counted(plan.prompt_tokens, 'prompt token')} and "
            f"{counted(plan.max_tokens, 'new token')} are {counted(length, 'token')}, more than "
            f"the model's context of {n_positions:,}: use fewer"
        )
    ops = engine.model.ops
    if "speculation" in plan.modes and not ops.batch_invariant:
        raise InputError(
            f"speculation needs the compiled library or a GPU, and here {ops.name} computes: leave "
            "it out, or see `gpt-cli doctor`"
        )
    texts = prompts(engine, plan.prompt_tokens, plan.batch)
    engines = {mode: _engine(engine, mode) for mode in plan.modes}
    starting("warming up")
    for mode, mode_engine in engines.items():
        # With speculation, a whole text: it builds the draft model if that is worth it.
        tokens = plan.max_tokens if mode == "speculation" else _WARM_UP
        _run(mode_engine, texts, min(tokens, plan.max_tokens), mode, "the warm-up")
    runs: dict[ModeName, list[_Run]] = {mode: [] for mode in plan.modes}
    for repetition in range(1, plan.repetitions + 1):
        for mode, mode_engine in engines.items():
            name = f"{mode}, repetition {repetition}"
            starting(f"{name} of {plan.repetitions}")
            run = _run(mode_engine, texts, plan.max_tokens, mode, name)
            runs[mode].append(run)
            _check_alike(runs[plan.modes[0]][0], run)
    return _summary(engine, plan, runs, len(engine.encode(texts[0])))


def _summary(
    engine: Engine, plan: Plan, runs: dict[ModeName, list[_Run]], prompt_tokens: int
) -> Benchmark:
    ops = engine.model.ops
    config = engine.model.config
    modes = {mode: _mode(mode_runs) for mode, mode_runs in runs.items()}
    first = prompt_tokens + 1
    last = prompt_tokens + plan.max_tokens
    width = _edge(plan.max_tokens)
    speculative = runs.get("speculation", [])
    return Benchmark(
        model=engine.name,
        adapter=engine.adapter,
        parameters=count_parameters(config),
        weights_bytes=weights_bytes(config, ops.dtype),
        dtype=ops.dtype,
        ops=ops.name,
        threads=ops.threads,
        prompt_tokens=prompt_tokens,
        max_tokens=plan.max_tokens,
        batch=plan.batch,
        repetitions=plan.repetitions,
        load_s=engine.load_seconds,
        peak_bytes=peak_memory(),
        positions=list(range(first, last + 1)),
        early=(first + 1, first + width) if width else None,
        late=(last - width + 1, last) if width else None,
        cache_on=modes.get("cache on"),
        cache_off=modes.get("cache off"),
        speculation=modes.get("speculation"),
        drafted=_per_text(speculative, "drafted"),
        accepted=_per_text(speculative, "accepted"),
        ratio=_ratio(*modes.values()) if len(modes) == 2 else None,
        ids_equal=True if len(modes) == 2 else None,  # else `_check_alike` has raised MismatchError
        ids=[text.ids for text in runs[plan.modes[0]][0].completions],
    )


def _per_text(runs: Sequence[_Run], count: str) -> int | None:
    """Return a count of completions per text, the median of runs; None if there are no runs."""
    if not runs:
        return None
    totals = [sum(getattr(text, count) for text in run.completions) for run in runs]
    return round(statistics.median(totals) / len(runs[0].completions))


def prompts(engine: Engine, tokens: int, batch: int) -> list[str]:
    """Return `batch` texts of `tokens` tokens, from different positions of a sample.

    They repeat if there are more texts than positions. If no position gives this number of tokens,
    because cut text may tokenize differently, all texts have the next smaller number.
    """
    sample = engine.decode(sample_ids(engine.tokenizer, engine.model.config))
    period = len(engine.encode(sample))
    ids = engine.encode(sample * (tokens // period + 2))
    texts: dict[int, dict[str, None]] = {}  # number of tokens -> distinct texts
    for start in range(period):
        text = engine.decode(ids[start : start + tokens])
        texts.setdefault(len(engine.encode(text)), {})[text] = None
        if len(texts.get(tokens, ())) == batch:
            break
    longest = max(length for length in texts if length <= tokens)
    return list(islice(cycle(texts[longest]), batch))


def _engine(engine: Engine, mode: ModeName) -> Engine:
    """Return an engine with the same model, which speculates only in the mode of that name."""
    speculator = Speculator(engine.model) if mode == "speculation" else None
    loaded = replace(engine.loaded, speculator=speculator)
    return Engine(loaded, engine.name, engine.load_seconds)


def _run(engine: Engine, texts: Sequence[str], max_tokens: int, mode: ModeName, name: str) -> _Run:
    begin = time.perf_counter()
    prompt_tokens = sum(len(engine.encode(text)) for text in texts)
    tokenize_s = time.perf_counter() - begin
    options = Options(
        max_tokens=max_tokens,
        temperature=0,
        seed=0,
        ignore_eos=True,
        use_cache=mode != "cache off",
    )
    rows: list[list[tuple[Step, float]]] = [[] for _ in texts]  # steps with their arrival times
    start = time.perf_counter()
    run = engine.run(texts, options)
    for step in run:
        rows[step.row].append((step, time.perf_counter()))
    first, _ = rows[0][0]
    arrivals = [_arrivals(start, steps) for steps in rows]
    # The times when every row has its token.
    complete = [start]
    complete += [max(times) for times in zip(*arrivals, strict=True)]
    token_s = [after - before for before, after in pairwise(complete)]
    figures = {
        "tokenize_s": tokenize_s,
        "first_token_s": token_s[0],
        "prefill_tok_s": prompt_tokens / first.seconds,
        "total_s": sum(token_s),
    }
    later = max_tokens - 1  # tokens after the first
    if later:
        decode_s = sum(token_s[1:])
        # The row that ends last was in every pass.
        model_s = max(sum(step.model_seconds for step, _ in steps[1:]) for steps in rows)
        figures["decode_tok_s"] = len(texts) * later / decode_s
        figures["model_s"] = model_s / later
        figures["other_s"] = (decode_s - model_s) / later
    return _Run(name, run.completions, token_s, figures)


def _arrivals(start: float, steps: Sequence[tuple[Step, float]]) -> list[float]:
    """Return the arrival times of a row's tokens; those of a pass share its time evenly."""
    arrivals: list[float] = []
    passes = [index for index, (step, _) in enumerate(steps) if step.model_seconds]
    for first, stop in pairwise([*passes, len(steps)]):
        count = stop - first
        _, end = steps[stop - 1]
        arrivals += [start + (end - start) * n / count for n in range(1, count + 1)]
        start = end
    return arrivals


def _check_alike(first: _Run, run: _Run) -> None:
    """Raise MismatchError if two runs have different tokens."""
    texts = zip(first.completions, run.completions, strict=True)
    for row, (text, other) in enumerate(texts, 1):
        for token, (id, other_id) in enumerate(zip(text.ids, other.ids, strict=True), 1):
            if id != other_id:
                raise MismatchError(
                    f"new token {token} of row {row} is {id} ({first.name}) and {other_id} "
                    f"({run.name}). Rounding can cause this if two tokens are almost equally "
                    "likely: try another number of prompt tokens"
                )


def _mode(runs: Sequence[_Run]) -> Mode:
    times_of_runs = [run.token_s for run in runs]
    token_s = [statistics.median(times) for times in zip(*times_of_runs, strict=True)]
    growth = None
    width = _edge(len(token_s))
    if width:
        growth = statistics.median(token_s[-width:]) / statistics.median(token_s[1 : width + 1])
    spreads = {}
    for name in runs[0].figures:
        values = [run.figures[name] for run in runs]
        spreads[name] = Spread(statistics.median(values), min(values), max(values))
    return Mode(**spreads, token_s=token_s, growth=growth)


def _edge(new_tokens: int) -> int:
    """Return the number of tokens at either end of the text, without the first token."""
    return min(_EDGE, (new_tokens - 1) // 2)


def _ratio(mode: Mode, other: Mode) -> dict[str, float]:
    """Return the speed in a mode / the speed in the other, by the figures that depend on it."""
    ratios = {}
    for name, spread in vars(mode).items():
        if isinstance(spread, Spread) and name != "tokenize_s":
            ratio = spread.median / getattr(other, name).median
            ratios[name] = ratio if name.endswith("_tok_s") else 1 / ratio
    return ratios
