#!/usr/bin/env python3
"""Measure what constraints cost: their set-up, and their part of the time of a token.

    constrain.py [--dtype float32] [--rounds 5] [--llama PYTHON FILE] FOLDER > results/constrain.md

FOLDER has GPT-2's vocabulary. The set-up is that of a new process. Then every round continues
a prompt by TOKENS tokens with all constraints, and without one. The part of a constraint is the
time in `Matcher.push` and `Sampler.ban`, token by token. The constraint that allows every
token is compared with none, whose text it repeats. Last, ROWS texts side by side, and one with
drafts.

With --llama, llama.cpp follows the schema of a person, too, with the same weights in FILE; PYTHON
has llama-cpp-python.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from run import machine

import gpt_cli
from gpt_cli.engine import Engine
from gpt_cli.generation.matcher import Matcher
from gpt_cli.generation.row import Sampler
from gpt_cli.options.request import Options

PROMPT, TOKENS = "Once upon a time there was a boy. What we know of him:", 100
ROWS = 48
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
        },
    },
    "required": ["name", "age", "colours", "home"],
}
SUM = """
start: sum
sum: product (("+" | "-") product)*
product: factor (("*" | "/") factor)*
factor: NUMBER | "(" sum ")"
NUMBER: /[0-9]+(\\.[0-9]+)?/
"""
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "none": {},
    "every token": {"grammar": "start: ALL\nALL: ~/x{999}/"},
    "words": {"regex": "( [A-Za-z]+){60,90}"},
    "any text": {"regex": "(?s:.*)"},
    "a person": {"json_schema": PERSON},
    "any JSON": {"json_schema": {"type": "array", "items": {"type": "object"}, "minItems": 3}},
    "a sum": {"grammar": SUM},
}
SETUP = """
import sys, time
import gpt_cli
from gpt_cli.options.request import Options
engine = gpt_cli.load(sys.argv[1])
start = time.perf_counter()
engine.check_constraint(Options(regex="[0-9]{4}"))
print(time.perf_counter() - start)
"""

LLAMA = """
import json, sys, time
from llama_cpp import Llama, LlamaGrammar
file, prompt, tokens, rounds, schema = sys.argv[1:]
model = Llama(file, n_ctx=512, n_threads=2, verbose=False)
times = {"without": [], "a person": []}
for seed in range(int(rounds)):
    for name, seconds in times.items():
        grammar = {}
        if name == "a person":
            grammar["grammar"] = LlamaGrammar.from_json_schema(schema, verbose=False)
        before = None
        for _ in model(prompt, max_tokens=int(tokens), seed=seed, stream=True, **grammar):
            now = time.perf_counter()
            seconds += [now - before] if before else []
            before = now
print(json.dumps(times))
"""


class Part:
    """The seconds of a constraint since the last token."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for owner, name in ((Matcher, "push"), (Sampler, "ban")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        return call

    def take(self) -> float:
        """Return the seconds, and start again from 0."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def follow(engine: Engine, part: Part, seed: int, constraint: dict[str, Any]) -> Any:
    """Return the seconds of the tokens after the first, those of the constraint, and the text."""
    options = Options(max_tokens=TOKENS, seed=seed, ignore_eos=True, **constraint)
    run = engine.run([PROMPT], options)
    tokens, parts, before = [], [], time.perf_counter()
    for _ in run:
        now = time.perf_counter()
        tokens.append(now - before)
        parts.append(part.take())
        before = now
    return tokens[1:], parts[1:], run.completions[0]


def measure_tokens(engine: Engine, part: Part, rounds: int) -> None:
    """Print a table of the parts of constraints."""
    seconds: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    ratios = []
    names = [*CONSTRAINTS]
    for seed in range(rounds):
        texts, medians = {}, {}
        names.append(names.pop(0))  # none is always the first for another
        for name in names:
            tokens, constraint, texts[name] = follow(engine, part, seed, CONSTRAINTS[name])
            medians[name] = statistics.median(tokens)
            seconds[name] += tokens
            parts[name] += constraint
        if texts["every token"].ids != texts["none"].ids:
            sys.exit("the texts differ")
        ratios.append(medians["none"] / medians["every token"])
    print("\n| constraint | tokens | ms a token | of these the constraint | worst, ms | part |")
    print("|-|-|-|-|-|-|")
    for name in CONSTRAINTS:
        token, constraint = statistics.median(seconds[name]), statistics.median(parts[name])
        numbers = f"{1e3 * token:.2f} | {1e3 * constraint:.3f} | {1e3 * max(parts[name]):.2f}"
        print(f"| {name} | {len(parts[name])} | {numbers} | {constraint / token:.1%} |")
    print(f"\nrate with every token allowed / without: {statistics.median(ratios):.3f}")


def measure_drafts(engine: Engine, part: Part, rounds: int) -> None:
    """Print the rates with drafts / without."""
    engines = [Engine(replace(engine.loaded, speculator=None), engine.name, 0), engine]
    for name in ("none", "every token", "words", "a person"):
        ratios = []
        for seed in range(rounds):
            both = [follow(each, part, seed, CONSTRAINTS[name]) for each in engines]
            if both[0][2].ids != both[1][2].ids:
                sys.exit("the texts differ")
            ratios.append(sum(both[0][0]) / sum(both[1][0]))
        print(f"- {name}: with drafts / without {statistics.median(ratios):.2f}")


def measure_batch(engine: Engine, rounds: int) -> None:
    """Print the rates of texts side by side with a constraint / without."""
    for name in ("every token", "words"):
        ratios = []
        for seed in range(rounds):
            seconds = []
            for constraint in ({}, CONSTRAINTS[name]):
                before = time.perf_counter()
                options = {"max_tokens": 24, "seed": seed, "ignore_eos": True, **constraint}
                engine.generate([PROMPT] * ROWS, **options)
                seconds.append(time.perf_counter() - before)
            ratios.append(seconds[0] / seconds[1])
        print(f"- {ROWS} texts, {name}: rate / without {statistics.median(ratios):.3f}")


def measure_llama(python: str, file: str, rounds: int) -> None:
    """Print llama.cpp's time of a token, without and with the schema of a person."""
    command = [python, "-c", LLAMA, file, PROMPT, str(TOKENS), str(rounds), json.dumps(PERSON)]
    times = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    for name, seconds in times.items():
        print(f"- llama.cpp, {name}: {1e3 * statistics.median(seconds):.2f} ms a token")


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama", nargs=2, metavar=("PYTHON", "FILE"))
    arguments = parser.parse_args()
    for name, value in {**machine(), "weights": arguments.dtype}.items():
        print(f"- {name}: {value}")
    command = [sys.executable, "-c", SETUP, arguments.folder]
    root = Path(gpt_cli.__file__).parents[1]
    setups = [
        float(subprocess.run(command, check=True, capture_output=True, cwd=root).stdout)
        for _ in range(arguments.rounds)
    ]
    print(f"\nset-up in a new process: {statistics.median(setups):.3f} s (worst {max(setups):.3f})")
    engine, part = gpt_cli.load(arguments.folder, dtype=arguments.dtype), Part()
    plain = Engine(replace(engine.loaded, speculator=None), engine.name, 0)
    measure_tokens(plain, part, arguments.rounds)
    print()
    measure_batch(plain, arguments.rounds)
    measure_drafts(engine, part, arguments.rounds)
    if arguments.llama:
        python, file = arguments.llama
        measure_llama(python, file, arguments.rounds)


if __name__ == "__main__":
    main()
