"""Measure the same generation with and without the KV cache.

The time includes all that a user waits for: tokenization, the model, sampling and decoding. The
modes alternate, so that a slow moment of the machine affects both.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise

from gpt_cli import checkpoint
from gpt_cli.engine import Engine
from gpt_cli.errors import ContextError, InputError, MismatchError
from gpt_cli.machine import peak_memory
from gpt_cli.options import Options

TEXT = (  # also the input whose results `verify` compares
    "A librarian once copied a long book by hand. Before each new word she went back to the first "
    "page and read everything again, and so the work became slower and slower. Then a child gave "
    'her a notebook. "Write down what you learn from each page," said the child, "and you need not '
    'read it twice." From that day on, the last word took no longer than the first, and the book '
    "was finished before the winter came.\n"
)
_MOST = 1_000_000  # for each number of a plan
_WARM_UP = 20  # tokens before the first measurement: NumPy's products settle at the 16th
_EDGE = 10  # tokens at either end of the text, whose medians show how the time grows


@dataclass(frozen=True)
class Plan:
    """The plan of a measurement.

    Raises:
        InputError: a number is out of range.
    """

    prompt_tokens: int = 32
    max_tokens: int = 128  # new tokens per row
    batch: int = 1  # rows
    repetitions: int = 3  # of each mode
    caches: Sequence[bool] = (True, False)  # the modes: with and without the cache

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "max_tokens", "batch", "repetitions"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise InputError(f"--{name.replace('_', '-')} must be from 1 to {_MOST}")


@dataclass(frozen=True)
class Spread:
    """A figure over the repetitions."""

    median: float
    min: float
    max: float


@dataclass(frozen=True)
class Mode:
    """The figures of one mode: seconds (`_s`), and tokens of all rows per second (`_tok_s`).

    Times per token are times per step, which makes one token of each row. A figure is None if it
    needs more new tokens than there are.
    """

    tokenize_s: Spread  # all prompts
    first_token_s: Spread  # from the texts to the first token, including tokenization
    prefill_tok_s: Spread  # prompt tokens in the first step
    decode_tok_s: Spread | None  # new tokens after the first
    model_s: Spread | None  # mean per token after the first: the forward pass
    other_s: Spread | None  # mean per token after the first: sampling and decoding
    total_s: Spread  # from the texts to the last token
    token_s: list[float]  # median time of each new token; the first includes tokenization
    growth: float | None  # time of the `late` tokens / time of the `early` tokens


@dataclass(frozen=True)
class Benchmark:
    """The measured figures, and what was measured. Positions in the text count from 1."""

    model: str
    parameters: int
    weights_bytes: int
    dtype: str  # of the weights
    ops: str  # the implementation
    threads: int
    prompt_tokens: int  # of each row
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
    ratio: dict[str, float] | None  # speed with the cache / speed without, for each figure
    ids_equal: bool | None  # with and without the cache; None if only one mode was measured
    ids: list[list[int]]  # the new tokens of each row

    @property
    def modes(self) -> dict[str, Mode]:
        """The measured modes by name."""
        both = {"cache on": self.cache_on, "cache off": self.cache_off}
        return {name: mode for name, mode in both.items() if mode is not None}


@dataclass(frozen=True)
class _Run:
    """The results and times of one generation."""

    name: str
    ids: list[list[int]]  # of each row
    tokenize_s: float
    prefill_s: float  # the first step
    token_s: list[float]  # the time of each token; the first includes tokenization
    model_s: list[float]  # the part in the forward pass


def measure(
    engine: Engine, plan: Plan, starting: Callable[[str], None] = lambda what: None
) -> Benchmark:
    """Generate greedily in each mode, and return the times; `starting` takes the name of each part.

    Raises:
        InputError: prompt and new tokens do not fit the context.
        MismatchError: two runs chose different tokens.
        ResourceError: there is not enough memory for all rows.
        CheckpointError: the weights are damaged.
    """
    length, n_positions = plan.prompt_tokens + plan.max_tokens, engine.model.config.n_positions
    if length > n_positions:
        raise ContextError(
            f"--prompt-tokens {plan.prompt_tokens} and --max-tokens {plan.max_tokens} are {length} "
            f"tokens, more than the model's context of {n_positions}: lower one"
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
    prompt_tokens, kinds = len(engine.encode(texts[0])), len(plan.caches)
    modes = {
        cache: _mode(runs[place::kinds], plan.batch, prompt_tokens)
        for place, cache in enumerate(plan.caches)
    }
    ops, sizes = engine.model.ops, checkpoint.memory(engine.model.config, engine.model.ops.dtype)
    first, last = prompt_tokens + 1, prompt_tokens + plan.max_tokens
    width = _edge(plan.max_tokens)
    return Benchmark(
        model=engine.name,
        parameters=sizes["parameters"],
        weights_bytes=sizes["weights_bytes"],
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
        cache_on=modes.get(True),
        cache_off=modes.get(False),
        ratio=_ratio(modes[True], modes[False]) if kinds == 2 else None,
        ids_equal=True if kinds == 2 else None,  # else `_check_alike` has raised MismatchError
        ids=runs[0].ids,
    )


def prompts(engine: Engine, tokens: int, batch: int) -> list[str]:
    """Return `batch` texts of `tokens` tokens each, from different positions of `TEXT`.

    They repeat if there are more texts than positions. All have the same number of tokens, which
    is below `tokens` only if no position gives exactly that: cut text may tokenize differently.
    """
    period = len(engine.encode(TEXT))
    ids = engine.encode(TEXT * (tokens // period + 2))
    found: dict[int, dict[str, None]] = {}  # number of tokens -> distinct texts
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
        if step.row == len(texts) - 1:  # every row has its token
            arrived.append(time.perf_counter())
            model_s.append(step.model_seconds)
    ids = [completion.ids for completion in run.completions]
    return _Run(name, ids, tokenize_s, prefill_s, [b - a for a, b in pairwise(arrived)], model_s)


def _check_alike(first: _Run, run: _Run) -> None:
    """Raise MismatchError if two runs have different tokens."""
    for row, pair in enumerate(zip(first.ids, run.ids, strict=True), 1):
        for place, (one, other) in enumerate(zip(*pair, strict=True), 1):
            if one != other:
                raise MismatchError(
                    f"new token {place} of row {row} is {one} ({first.name}) and {other} "
                    f"({run.name}). Rounding can cause this if two tokens are almost equally "
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
    """Return the number of tokens at each end of the text, not counting the first token."""
    return min(_EDGE, (new_tokens - 1) // 2)


def _ratio(on: Mode, off: Mode) -> dict[str, float]:
    """Return the speed with the cache / the speed without, for each figure that depends on it."""
    found = {}
    for name, spread in vars(on).items():
        if isinstance(spread, Spread) and name != "tokenize_s":
            ratio = spread.median / getattr(off, name).median
            found[name] = ratio if name.endswith("_tok_s") else 1 / ratio
    return found
