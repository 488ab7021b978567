"""Fuzz one target with atheris: `python tests/fuzz/fuzzer.py TARGET [LIBFUZZER'S ARGUMENTS]`."""

import random
import re
import shlex
import sys

import atheris

with atheris.instrument_imports(include=["gpt_cli"]):
    from targets import TARGETS

# Strings, numbers and names of JSON, and anything else between white space and punctuation.
WORD = re.compile(rb'"(?:[^"\\]|\\.)*"|[^\s\[\]{}:,"\0]+')
WORDS = b"""
    null true false 0 1 -1 -0 0.5 1e400 NaN -Infinity 64 1048577 4294967295 18446744073709551616 []
    {} [[]] [0,4] {"F32":null} ["F32",[1],[0,4]] "" "a" "he" "h" "\\ud800" "\\u0000" "\\u00e9"
""".split()
NESTED = [b"[" * 990 + b"]" * 990, b'{"a":' * 985 + b"1" + b"}" * 985, b"9" * 4301]


def mutate_json(data: bytes, max_size: int, seed: int) -> bytes:
    """Change words, so that the data often stays JSON, or bytes like libFuzzer."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        return atheris.Mutate(data, max_size)
    for _ in range(rng.choice((1, 1, 2, 3))):
        words = list(WORD.finditer(data))
        if not words:
            return atheris.Mutate(data, max_size)
        word = rng.choice(words)
        other = rng.choice(words)[0] if rng.random() < 0.5 else rng.choice(WORDS)
        if rng.random() < 0.01:
            other = rng.choice(NESTED)
        data = data[: word.start()] + other + data[word.end() :]
    return data[:max_size]


def mutate_safetensors(data: bytes, max_size: int, seed: int) -> bytes:
    """Change the header, and correct its length and that of the data."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return atheris.Mutate(data, max_size)
    length = int.from_bytes(data[:8], "little")
    header = mutate_json(data[8 : 8 + length], max_size // 2, seed)
    sizes = [int(digits) for digits in re.findall(rb"\b\d{1,3}\b", header)]
    body = data[8 + length :]
    size = rng.choice([*sizes, len(body)])
    data = len(header).to_bytes(8, "little") + header + body[:size].ljust(size, b"?")
    return data[:max_size]


MUTATORS = {
    "safetensors": mutate_safetensors,
    "shards": mutate_json,
    "config": mutate_json,
    "tokenizer": mutate_json,
    "rows": mutate_json,
    "constraints": mutate_json,
}


def main(target: str, *arguments: str) -> None:
    again = shlex.join([sys.executable, __file__, target])  # for -merge, which runs it in a shell
    atheris.Setup([again, *arguments], TARGETS[target], custom_mutator=MUTATORS.get(target))
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
