#!/usr/bin/env python3
"""Measure speculative decoding against plain decoding of the same model, in turns in one process.

    speculation.py [--rounds 5] [--dtype float32] NAME=FOLDER ... > results/speculation.md

With every checkpoint, decode after short and long prompts, with the default options and greedily;
then drafts from n-grams alone, for a table, code and a story. A rate is tokens per second after the
first, and a ratio the median of the rounds' ratios. Acceptance is the share of right drafts among
those that follow only right ones. Both ways must generate the same ids and log-probabilities.
"""

import argparse
import inspect
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from run import machine

import gpt_cli
from gpt_cli.checks import bench
from gpt_cli.engine import Engine
from gpt_cli.generation import sampling
from gpt_cli.generation.generate import Completion
from gpt_cli.generation.row import Step
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator

TABLE = "".join(f"{n},item {n},{n * 7 % 10}.50,in stock\n" for n in range(1, 25))
CODE = inspect.getsource(sampling)[3000:4200]
LONG, SHORT = 896, 32  # tokens of a prompt


@dataclass(frozen=True)
class Work:
    """What to generate."""

    name: str
    prompts: Sequence[str]  # one for every round, and one to warm up
    new: int
    options: dict[str, Any]


class Speculating:
    """Runs of one engine with and without a speculator."""

    def __init__(self, engine: Engine, speculator: Speculator):
        plain = LoadedModel(engine.model, engine.tokenizer)
        self.plain = Engine(plain, engine.name, 0)
        self.drafting = Engine(replace(plain, speculator=speculator), engine.name, 0)

    def measure(self, work: Work) -> str:
        """Return the row of a table."""
        plain, drafting, passes = [], [], []
        for seed, prompt in enumerate(
            work.prompts
        ):  # the first warms up, and builds the draft model
            options = Options(max_tokens=work.new, seed=seed, ignore_eos=True, **work.options)
            (one, _), (other, steps) = (
                run(engine, prompt, options) for engine in (self.plain, self.drafting)
            )
            if (one.ids, one.logprobs) != (other.ids, other.logprobs):
                sys.exit(f"{work.name}, seed {seed}: the results differ")
            if seed:
                plain.append(rate(one))
                drafting.append(rate(other))
                passes += list(verified(steps))
        drafted, accepted = map(sum, zip(*passes, strict=True)) if passes else (0, 0)
        wrong = sum(right < count for count, right in passes)
        share = f"{accepted / (accepted + wrong):.3f}" if drafted else "-"
        ratio = statistics.median(b / a for a, b in zip(plain, drafting, strict=True))
        figures = [f"{statistics.median(rates):.1f}" for rates in (plain, drafting)]
        cells = work.name, *figures, f"{ratio:.2f}", share, f"{accepted} of {drafted}"
        return f"| {' | '.join(cells)} |"


def run(engine: Engine, prompt: str, options: Options) -> tuple[Completion, list[Step]]:
    """Return a completion with its steps."""
    running = engine.run([prompt], options)
    return next(iter(running.completions)), list(running)


def rate(completion: Completion) -> float:
    """Return the tokens per second after the first."""
    return (len(completion.ids) - 1) / (completion.seconds[-1] - completion.seconds[0])


def verified(steps: Sequence[Step]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of drafts and of right ones, of all passes that verified any."""
    starts = [index for index, step in enumerate(steps) if step.model_seconds]
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        if steps[start].drafted:
            yield steps[start].drafted, sum(step.accepted for step in steps[start:end])


def main() -> None:
    """Print a table for every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    a = parser.parse_args()
    for name, value in machine().items():
        print(f"- {name}: {value}")
    for model in a.models:
        name, _, folder = model.partition("=")
        engine = gpt_cli.load(folder, dtype=a.dtype)
        short, long = (bench.prompts(engine, tokens, a.rounds + 1) for tokens in (SHORT, LONG))
        columns = "plain", "speculating", "ratio", "acceptance", "accepted"
        print(f"\n| {' | '.join((f'{name}, {engine.model.ops.dtype}', *columns))} |")
        print("|-|-|-|-|-|-|", flush=True)
        runs = Speculating(engine, Speculator(engine.model))
        for kind, options in (("default options", {}), ("greedy", {"temperature": 0.0})):
            for before, prompts, new in ((SHORT, short, 200), (LONG, long, 100)):
                work = Work(f"{kind}, after {before}", prompts, new, options)
                print(runs.measure(work), flush=True)
        speculator = Speculator(engine.model)
        speculator.may_have_draft_model = False
        runs = Speculating(engine, speculator)
        for kind, prompt in (("a table", TABLE), ("code", CODE), ("a story", long[0][:1200])):
            prompts = [prompt] * (a.rounds + 1)
            work = Work(f"n-grams alone, {kind}", prompts, 200, {"temperature": 0.0})
            print(runs.measure(work), flush=True)


if __name__ == "__main__":
    main()
