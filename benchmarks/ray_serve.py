#!/usr/bin/env python3
"""Compare the server of `gpt_cli.ray` with one replica and `gpt-cli serve`, in turns.

    ray_serve.py [--rounds 5] [--tokens 64] [--requests 2] [--stream] FOLDER > results/ray_serve.md

Both are there all the time on this machine, each with all of its cores. 32 clients ask for a text
at a time, `--requests` times. The texts must be equal. A ratio is the median of the rounds' ratios;
the first round warms up. Ray's processes run with the usual priority; by default, Ray gives its
workers a low one, which costs them much beside other programs.
"""

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from client import Server, ask, command
from ray import serve
from run import machine, spread, versions

import gpt_cli.ray

CLIENTS = 32
PORT = 8321
CPUS = os.cpu_count() or 1
PROMPT = "Once upon a time, there was a curious fox who lived in a small village by the sea. Day"


async def texts(port: int, tokens: int, requests: int, stream: bool) -> list[str]:
    """Return the texts of all clients."""

    async def client(number: int) -> list[str]:
        answers = []
        for request in range(requests):
            fields: dict[str, Any] = {"prompt": f"{PROMPT} {number}", "seed": request}
            fields |= {"max_tokens": tokens, "ignore_eos": True, "stream": stream}
            answer = await ask(port, fields)
            if answer.status != 200:
                sys.exit(f"status {answer.status}: {answer.body.decode(errors='replace')}")
            events = [event for _, event in answer.events()] if stream else [answer.json]
            answers.append("".join(event["choices"][0]["text"] for event in events))
        return answers

    answers = await asyncio.gather(*map(client, range(CLIENTS)))
    return [text for of_client in answers for text in of_client]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    wanted = options.tokens, options.requests, options.stream
    ray.init(
        num_cpus=CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"worker_niceness": 0},
    )
    serve.start(http_options={"port": PORT})
    serve.run(gpt_cli.ray.server(model=options.folder, num_cpus=CPUS))
    rates: dict[str, list[float]] = {"alone": [], "ray": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(command(options.folder), Path(folder) / "errors") as alone,
    ):
        for number in range(options.rounds + 1):
            results = []
            turns = [("alone", alone.port), ("ray", PORT)]
            for name, port in turns if number % 2 else reversed(turns):
                start = time.perf_counter()
                results.append(asyncio.run(texts(port, *wanted)))
                seconds = time.perf_counter() - start
                if number:
                    rates[name].append(CLIENTS * options.requests * options.tokens / seconds)
            if results[0] != results[1]:
                sys.exit("the texts differ")
    serve.shutdown()
    ray.shutdown()
    kind = "streamed" if options.stream else "whole"
    print(f"{machine()}, {versions(sys.executable, ['gpt2-cli', 'ray', 'numpy'])}\n")
    print("| model | answers | tokens a second alone | by Ray Serve | ratio |\n|-|-|-|-|-|")
    print(rates, file=sys.stderr)
    ratios = [ours / other for ours, other in zip(rates["ray"], rates["alone"], strict=True)]
    cells = spread(rates["alone"]), spread(rates["ray"]), spread(ratios)
    print(f"| {Path(options.folder).name} | {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
