"""What the KV cache is for: the same generation measured with it and without it.

Everything that a user waits for is inside the measured time: tokenization, the model, sampling and
text. The modes take turns, so that a slow moment of the machine hits both.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

from gpt_cli import checkpoint
from gpt_cli.engine import Engine
from gpt_cli.errors import ContextError, MismatchError
from gpt_cli.generate import Options
from gpt_cli.machine import peak_memory
from gpt_cli.sample import TEXT
from gpt_cli.sampling import check

_WARM_UP = 20  # tokens, before anything is measured: NumPy's products settle at the 16th
_EDGE = 10  # tokens at either end of the text, the medians of which tell how the time grows


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Raises:
        InputError: a number is below 1.
    """

    prompt_tokens: int = 32
    max_tokens: int = 128  # how many new tokens each row gets
    batch: int = 1  # rows side by side
    repetitions: int = 3  # of each mode
    caches: Sequence[bool] = (True, False)  # the modes: with the cache, without it

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "max_tokens", "batch", "repetitions"):
            check(getattr(self, name) >= 1, f"{name.replace('_', '-')} must be 1 or more")


@dataclass(frozen=True)
class Spread:
    """One figure over the repetitions."""

    median: float
    min: float
    max: float


@dataclass(frozen=True)
class Mode:
    """The figures of one mode: seconds (`_s`), and tokens of all rows a second (`_tok_s`).

    What is said of a token is said of a step, which makes a token of each row. None stands where
    there is but one new token.
    """

    tokenize_s: Spread  # all prompts
    first_token_s: Spread  # from the texts to the first token, tokenization included
    prefill_tok_s: Spread  # prompt tokens, in the time of the first step
    decode_tok_s: Spread | None  # new tokens after the first
    model_s: Spread | None  # mean of a token after the first: in the forward pass
    other_s: Spread | None  # and outside of it: sampling and text
    total_s: Spread  # from the texts to the last token
    token_s: list[float]  # what each new token took, the first from the texts on: medians
    growth: float | None  # how many times as long as `early` tokens the `late` ones took


@dataclass(frozen=True)
class Benchmark:
    """What was measured, and what of. Positions in the text are counted from 1."""

    model: str
    parameters: int
    weights_bytes: int
    dtype: str  # of the weights
    ops: str  # what computes
    threads: int
    prompt_tokens: int  # of each row
    max_tokens: int
    batch: int
    repetitions: int
    load_s: float
    peak_bytes: int | None  # of the process, from its start on; None where nobody tells
    positions: list[int]  # of the new tokens
    early: tuple[int, int] | None  # the positions, from and to, that `growth` compares
    late: tuple[int, int] | None
    cache_on: Mode | None
    cache_off: Mode | None
    ratio: dict[str, float] | None  # how many times as fast with the cache, figure by figure
    ids: list[list[int]]  # the new tokens of each row, the same in all runs

    @property
    def modes(self) -> dict[str, Mode]:
        """The modes that were measured, by their names."""
        both = {"cache on": self.cache_on, "cache off": self.cache_off}
        return {name: mode for name, mode in both.items() if mode is not None}


@dataclass(frozen=True)
class _Run:
    """One generation: what came of it, and when."""

    name: str
    ids: list[list[int]]  # of each row
    tokenize_s: float
    prefill_s: float  # the first step
    token_s: list[float]  # what each token took, the first with the tokenization
    model_s: list[float]  # the part of it in the forward pass


def measure(
    engine: Engine, plan: Plan, starting: Callable[[str], None] = lambda what: None
) -> Benchmark:
    """Generate greedily, some times in each mode, and return what it took.

    Args:
        engine: the model.
        plan: how much of what.
        starting: is told what comes next, outside of the measured time.

    Raises:
        InputError: prompt and new tokens do not fit the context.
        MismatchError: two runs chose different tokens.
        ResourceError: there is not enough memory for all rows at a time.
        CheckpointError: the weights are damaged.
    """
    length, n_positions = plan.prompt_tokens + plan.max_tokens, engine.model.config.n_positions
    if length > n_positions:
        raise ContextError(
            f"{plan.prompt_tokens} prompt tokens and {plan.max_tokens} new ones are {length}, more "
            f"than the model's context of {n_positions}; lower --prompt-tokens or --max-tokens"
        )
    texts = prompts(engine, plan.prompt_tokens, plan.batch)
    starting("warming up")
    for cache in plan.caches:
        _run(engine, texts, min(_WARM_UP, plan.max_tokens), cache, "the warm-up")
    runs: list[_Run] = []
    for repetition in range(1, plan.repetitions + 1):
        for cache in plan.caches:
            name = f"cache {'on' if cache else 'off'}, repetition {repetition}"
            starting(f"{name} of {plan.repetitions}")
            runs.append(_run(engine, texts, plan.max_tokens, cache, name))
            _check_alike(runs[0], runs[-1])
    prompt_tokens = len(engine.encode(texts[0]))
    modes = {
        cache: _mode(runs[place :: len(plan.caches)], plan.batch, prompt_tokens)
        for place, cache in enumerate(plan.caches)
    }
    return _benchmark(engine, plan, prompt_tokens, runs[0].ids, modes)


def prompts(engine: Engine, tokens: int, batch: int) -> list[str]:
    """Return `batch` texts of so many tokens each, which begin at different places of `TEXT`.

    Where more are wanted than there are places, they begin again. All have one length in any case,
    which is smaller only if no place gives the one that is wanted: cut text may have other tokens.
    """
    period = len(engine.encode(TEXT))
    ids = engine.encode(TEXT * (tokens // period + 2))
    found: dict[int, dict[str, None]] = {}  # texts, each once, by how many tokens they have
    for start in range(period):
        text = engine.decode(ids[start : start + tokens])
        found.setdefault(len(engine.encode(text)), {})[text] = None
        if len(found.get(tokens, ())) == batch:
            break
    longest = max(length for length in found if length <= tokens)
    return list(islice(cycle(found[longest]), batch))


def _run(engine: Engine, texts: Sequence[str], max_tokens: int, cache: bool, name: str) -> _Run:
    begin = time.perf_counter()
    for text in texts:
        engine.encode(text)
    tokenize_s = time.perf_counter() - begin

    options = Options(
        max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True, use_cache=cache
    )
    prefill_s, arrived, model_s = 0.0, [time.perf_counter()], []
    run = engine.run(texts, options)
    for step in run:
        prefill_s = prefill_s or step.seconds
        if step.row == len(texts) - 1:  # all rows have their token
            arrived.append(time.perf_counter())
            model_s.append(step.model_seconds)
    ids = [completion.ids for completion in run.completions]
    return _Run(name, ids, tokenize_s, prefill_s, [b - a for a, b in pairwise(arrived)], model_s)


def _check_alike(first: _Run, run: _Run) -> None:
    """Raise MismatchError where two runs have different tokens."""
    for row, pair in enumerate(zip(first.ids, run.ids, strict=True), 1):
        for place, (one, other) in enumerate(zip(*pair, strict=True), 1):
            if one != other:
                raise MismatchError(
                    f"new token {place} of row {row} differs: {one} ({first.name}), {other} "
                    f"({run.name}). Rounding can do that where two tokens are almost equally "
                    "likely: try another --prompt-tokens"
                )


def _mode(runs: Sequence[_Run], batch: int, prompt_tokens: int) -> Mode:
    token_s = [statistics.median(times) for times in zip(*(r.token_s for r in runs), strict=True)]
    decode = model = other = growth = None
    if after := len(token_s) - 1:  # tokens after the first
        decode_s = [sum(run.token_s[1:]) for run in runs]
        model_s = [sum(run.model_s[1:]) for run in runs]
        decode = _spread([batch * after / seconds for seconds in decode_s])
        model = _spread([seconds / after for seconds in model_s])
        other = _spread([(a - b) / after for a, b in zip(decode_s, model_s, strict=True)])
    if width := _edge(len(token_s)):
        growth = statistics.median(token_s[-width:]) / statistics.median(token_s[1 : width + 1])
    return Mode(
        tokenize_s=_spread([run.tokenize_s for run in runs]),
        first_token_s=_spread([run.token_s[0] for run in runs]),
        prefill_tok_s=_spread([batch * prompt_tokens / run.prefill_s for run in runs]),
        decode_tok_s=decode,
        model_s=model,
        other_s=other,
        total_s=_spread([sum(run.token_s) for run in runs]),
        token_s=token_s,
        growth=growth,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def _edge(new_tokens: int) -> int:
    """How many tokens stand for an end of the text: the first token, with the prompt, for none."""
    return min(_EDGE, (new_tokens - 1) // 2)


def _benchmark(
    engine: Engine, plan: Plan, prompt_tokens: int, ids: list[list[int]], modes: dict[bool, Mode]
) -> Benchmark:
    sizes = checkpoint.memory(engine.model.config, engine.model.ops.dtype)
    first, last = prompt_tokens + 1, prompt_tokens + plan.max_tokens
    width = _edge(plan.max_tokens)
    return Benchmark(
        model=engine.name,
        parameters=sizes["parameters"],
        weights_bytes=sizes["weights_bytes"],
        dtype=engine.model.ops.dtype,
        ops=engine.model.ops.name,
        threads=engine.model.ops.threads,
        prompt_tokens=prompt_tokens,
        max_tokens=plan.max_tokens,
        batch=plan.batch,
        repetitions=plan.repetitions,
        load_s=engine.load_seconds,
        peak_bytes=peak_memory(),
        positions=list(range(first, last + 1)),
        early=(first + 1, first + width) if width else None,
        late=(last - width + 1, last) if width else None,
        cache_on=modes.get(True),
        cache_off=modes.get(False),
        ratio=_ratio(modes[True], modes[False]) if len(modes) == 2 else None,
        ids=ids,
    )


def _ratio(on: Mode, off: Mode) -> dict[str, float]:
    found = {}
    for name, spread in vars(on).items():
        other = getattr(off, name)
        if isinstance(spread, Spread) and name != "tokenize_s":  # which is the same work
            more_is_better = name.endswith("_tok_s")
            better, worse = (spread, other) if more_is_better else (other, spread)
            found[name] = better.median / worse.median
    return found
