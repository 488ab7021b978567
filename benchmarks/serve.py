#!/usr/bin/env python3
"""Measure `gpt-cli serve`: a real process, whose clients share the cores with it.

    serve.py [--rounds 5] [--peer NAME=PYTHON] FOLDER [PART ...] > results/serve.md

By default it runs all parts:
    batch     8 clients at once against `Engine.batch` of the same rows in this process, in turns
    decode    1 client that streams against `Engine.stream`, in turns, with and without speculation
    latency   the time to the first token, idle and beside 7 others; the longest gap between the
              tokens of 7 while a long prompt arrives
    clients   1, 8 and 32 clients, greedy, beside the peers `llama.cpp` (llama_cpp.server) and
              `transformers` (transformers serve), in fresh processes for every round
    overload  half and twice the requests that it can take, at random times

Prompts have 32 tokens, and no two begin alike. A text has 64 new tokens and does not end early. A
ratio is the median of the rounds' ratios; the first round of the first two parts warms up. The
texts of server and engine must be equal. PYTHON has the peer with its server: the extras `server`
of llama-cpp-python, with gguf and safetensors, and `serving` of transformers.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

from client import Answer, Pieces, Server, ask, command
from run import convert, machine, spread, versions

import gpt_cli
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.gpt2.digests import TEXT
from gpt_cli.options.request import Options
from gpt_cli.texts.speculator import Speculator

PROMPT, LONG, NEW, DECODED = 32, 900, 64, 128  # tokens
OURS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "the defaults of `generate`": OURS,
    "OpenAI's defaults": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
}
THREADS = os.cpu_count() or 1
OWN = ["gpt2-cli", "numpy", "uvicorn", "starlette"]
PACKAGES = {
    "llama.cpp": ["llama-cpp-python"],
    "transformers": ["torch", "transformers"],
}
CLIENTS = {1: 4, 8: 2, 32: 1}  # numbers of clients, with the requests of one client
PROBES = 5  # of the latency, in a round
SECONDS = 60.0  # of a load


@dataclass
class Setting:
    """The model, the prompts and the servers of a run."""

    engine: Engine
    folder: str
    rounds: int
    peers: dict[str, str]
    scratch: Path

    def prompts(self, tokens: int = PROMPT, seed: int = 0) -> Iterator[str]:
        """Yield texts of a number of tokens that begin with different words."""
        choose = random.Random(seed)  # noqa: S311
        words = sorted(set(TEXT.split()))
        period = len(self.engine.encode(TEXT))
        ids = self.engine.encode(TEXT * (tokens // period + 2))
        seen = set()
        while True:
            start = choose.randrange(period)
            first = " ".join(choose.choices(words, k=2))
            text = first + self.engine.decode(ids[start : start + tokens])
            text = self.engine.decode(self.engine.encode(text)[:tokens])
            if len(self.engine.encode(text)) == tokens and text not in seen:
                seen.add(text)
                yield text

    @contextmanager
    def server(self, *flags: str) -> Iterator[Server]:
        """Run gpt-cli's server."""
        with Server(command(self.folder, *flags), self.scratch / "errors") as server:
            yield server


def table(*columns: str) -> None:
    """Print the head of a table."""
    print(f"\n| {' | '.join(columns)} |\n|{'-|' * len(columns)}", flush=True)


def row(*cells: str) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def ratios(ours: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the rounds' ratios, with their range."""
    return spread([a / b for a, b in zip(ours, others, strict=True)])


def checked(answer: Answer) -> Answer:
    """Return an answer, which must not be an error."""
    if answer.status != 200:
        sys.exit(f"status {answer.status}: {answer.body.decode(errors='replace')}")
    return answer


def text(answer: Answer) -> str:
    """Return the text of an answer, streamed or not."""
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json["choices"][0]["text"])
    return "".join(event["choices"][0]["text"] for _, event in answer.events())


def arrivals(answer: Answer) -> list[float]:
    """Return the times of the events that have text."""
    return [seconds for seconds, event in answer.events() if event["choices"][0]["text"]]


async def at_once(port: int, rows: Sequence[dict[str, Any]]) -> tuple[float, list[Answer]]:
    """Return the seconds of requests that come at once, and their answers."""
    start = time.perf_counter()
    answers = await asyncio.gather(*(ask(port, fields) for fields in rows))
    return time.perf_counter() - start, [checked(answer) for answer in answers]


async def measure_batch(setting: Setting) -> None:
    """Print the rates of 8 clients, relative to a batch of the same rows."""
    print("\n## 8 clients at once, tokens a second")
    table("", "`Engine.batch`", "server", "ratio", "streaming, prompts known", "ratio")
    prompts = setting.prompts()
    with setting.server() as server:
        for name, sampling in SAMPLINGS.items():
            options = Options(max_tokens=NEW, ignore_eos=True, **sampling)
            rates: list[list[float]] = []
            used: list[float] = []  # share of a core by this process, the client
            for number in range(setting.rounds + 1):
                rows = [
                    {"prompt": prompt, "seed": 8 * number + client}
                    for client, prompt in enumerate(islice(prompts, 8))
                ]
                start = time.perf_counter()
                completions = list(setting.engine.batch(rows, options))
                seconds = [time.perf_counter() - start]
                texts = [c.text for c in completions if not isinstance(c, InputError)]
                for stream in (False, True):
                    fields = {"max_tokens": NEW, "ignore_eos": True, "stream": stream, **sampling}
                    cpu = time.process_time()
                    took, answers = await at_once(
                        server.port, [fields | row_fields for row_fields in rows]
                    )
                    used.append((time.process_time() - cpu) / took)
                    seconds.append(took)
                    if [text(answer) for answer in answers] != texts:
                        sys.exit(f"8 clients, round {number}: the texts differ")
                rates.append([8 * NEW / run_seconds for run_seconds in seconds])
            ours, plain, streaming = map(list, zip(*rates[1:], strict=True))
            cells = spread(plain), ratios(plain, ours), spread(streaming), ratios(streaming, ours)
            row(name, spread(ours), *cells)
    print(f"\nThe clients took {max(used):.1%} of a core, at most.")


async def measure_decode(setting: Setting) -> None:
    """Print the rate of one client that streams, relative to `Engine.stream`."""
    print(f"\n## 1 client, {DECODED} new tokens: tokens a second after the first")
    table("", "`Engine.stream`", "server", "ratio")
    engine = setting.engine
    for flag, speculator in (
        ("--no-speculate", None),
        ("--speculate", Speculator(engine.model)),
    ):
        alone = Engine(replace(engine.loaded, speculator=speculator), engine.name, 0)
        prompts = setting.prompts()
        with setting.server(flag) as server:
            for name, sampling in SAMPLINGS.items():
                rates = []
                for seed, prompt in enumerate(islice(prompts, setting.rounds + 1)):
                    options = {"max_tokens": DECODED, "ignore_eos": True, "seed": seed, **sampling}
                    pieces = [
                        (time.perf_counter(), piece) for piece in alone.stream(prompt, **options)
                    ]
                    answer = checked(
                        await ask(server.port, {"prompt": prompt, "stream": True, **options})
                    )
                    if text(answer) != "".join(piece for _, piece in pieces):
                        sys.exit(f"1 client, round {seed}: the texts differ")
                    times = [seconds for seconds, _ in pieces], arrivals(answer)
                    rates.append([(DECODED - 1) / (arrived[-1] - arrived[0]) for arrived in times])
                ours, served = map(list, zip(*rates[1:], strict=True))
                row(f"`{flag}`, {name}", spread(ours), spread(served), ratios(served, ours))


async def first_token(port: int, prompt: str) -> float:
    """Return the time to the first token of a text."""
    fields = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True, **OURS}
    answer = checked(await ask(port, fields))
    return answer.pieces[0][0] - answer.sent


@asynccontextmanager
async def decoding(port: int, prompts: Iterator[str]) -> AsyncIterator[list[Pieces]]:
    """Let 7 streams decode; yield the pieces of their answers."""
    streams: list[Pieces] = [[] for _ in range(7)]
    fields = {"max_tokens": LONG, "ignore_eos": True, "stream": True, **OURS}
    tasks = [
        asyncio.create_task(
            ask(port, {"prompt": next(prompts), "seed": seed, **fields}, pieces=pieces)
        )
        for seed, pieces in enumerate(streams)
    ]
    try:
        while not all(streams):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        yield streams
        if ended := [task for task in tasks if task.done()]:
            sys.exit(f"a stream ended too early: {ended[0]}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.5)  # the server notices that they left


async def measure_latency(setting: Setting) -> None:
    """Print the time to the first token, and how a long prompt delays other texts."""
    print("\n## Latency, ms")
    prompts, long = setting.prompts(), setting.prompts(LONG)
    idle, beside, usual, longest, first_of_long = ([] for _ in range(5))
    with setting.server() as server:
        for _ in range(setting.rounds + 1):
            alone = [await first_token(server.port, next(prompts)) for _ in range(PROBES)]
            idle.append(1e3 * statistics.median(alone))
            async with decoding(server.port, prompts) as streams:
                busy = [await first_token(server.port, next(prompts)) for _ in range(PROBES)]
                beside.append(1e3 * statistics.median(busy))
            async with decoding(server.port, prompts) as streams:
                await asyncio.sleep(1)
                sent = time.perf_counter()
                first_of_long.append(1e3 * await first_token(server.port, next(long)))
                until = time.perf_counter()
                await asyncio.sleep(0.2)
                gaps = [(a, b) for pieces in streams for (a, _), (b, _) in pairwise(pieces)]
                usual.append(1e3 * statistics.median(b - a for a, b in gaps if b < sent))
                longest.append(1e3 * max(b - a for a, b in gaps if b > sent and a < until))
    table("", "median of the rounds")
    row(f"first token of a prompt of {PROMPT}, idle", spread(idle[1:]))
    row("the same beside 7 others that decode", spread(beside[1:]))
    row("ratio", ratios(beside[1:], idle[1:]))
    row(f"first token of a prompt of {LONG}, beside 7 others", spread(first_of_long[1:]))
    row("usual gap between the tokens of these", spread(usual[1:]))
    row(f"their longest gap while the prompt of {LONG} arrives", spread(longest[1:]))


@dataclass(frozen=True)
class Service:
    """A server to compare."""

    command: list[str]
    fields: dict[str, Any]  # of its requests
    variables: dict[str, str]  # of its environment


def services(setting: Setting) -> dict[str, Service]:
    """Return our server and those of the peers, which compute with as many threads."""
    folder, port = setting.folder, ["--port", "{port}", "--host", "127.0.0.1"]
    servers = {"gpt-cli": Service(command(folder), {"ignore_eos": True}, {})}
    if python := setting.peers.get("llama.cpp"):
        file = convert("llama.cpp", python, Path(folder), setting.scratch, "float32")
        threads = ["--n_threads", str(THREADS), "--n_threads_batch", str(THREADS)]
        flags = ["--model", str(file), "--n_ctx", "1024", "--logits_all", "false", *threads]
        servers["llama_cpp.server"] = Service(
            [python, "-m", "llama_cpp.server", *flags, *port], {}, {}
        )
    if python := setting.peers.get("transformers"):
        start = [python, "-m", "transformers.cli.transformers", "serve", folder, *port]
        start += ["--device", "cpu", "--dtype", "float32"]
        variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(THREADS)}
        servers["transformers serve"] = Service(start, {"model": folder}, variables)
        # Without these numbers, its cache takes most of the memory.
        batching = ["--continuous-batching", "--cb-num-blocks", "64", "--cb-block-size", "128"]
        batching += ["--cb-max-batch-tokens", "256"]
        servers["the same with `--continuous-batching`"] = Service(
            [*start, *batching], {"model": folder}, variables
        )
    return servers


async def tried(port: int, fields: dict[str, Any]) -> Answer | None:
    """Return the answer to a request, or None if the server ends the connection."""
    try:
        return await ask(port, fields)
    except (OSError, EOFError):
        return None


async def closed_loop(
    port: int, clients: int, prompts: Sequence[str], **fields: Any
) -> tuple[float, list[Answer | None]]:
    """Return the seconds of clients that ask for one text after the other, and the answers."""
    waiting = iter(prompts)

    async def client() -> list[Answer | None]:
        options = {"max_tokens": NEW, **fields}
        return [await tried(port, {"prompt": prompt, **options}) for prompt in waiting]

    start = time.perf_counter()
    answers = await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - start
    return seconds, [answer for of_client in answers for answer in of_client]


async def measure_clients(setting: Setting) -> None:
    """Print the rates of several numbers of clients, beside the peers."""
    print("\n## Clients that ask for one text after the other, greedy")
    servers = services(setting)
    rates: dict[tuple[str, int], list[float]] = {}
    failed: Counter[tuple[str, int]] = Counter()
    prompts = setting.prompts()
    for _ in range(setting.rounds):
        texts = {
            clients: list(islice(prompts, clients * count)) for clients, count in CLIENTS.items()
        }
        warm = next(prompts)
        for name, service in servers.items():
            with Server(service.command, setting.scratch / "errors", **service.variables) as server:
                fields = {"temperature": 0, **service.fields}
                await closed_loop(server.port, 1, [warm], **fields)
                for clients, part in texts.items():
                    seconds, answers = await closed_loop(server.port, clients, part, **fields)
                    whole = [
                        answer
                        for answer in answers
                        if answer
                        and answer.status == 200
                        and answer.json["usage"]["completion_tokens"] == NEW
                    ]
                    failed[name, clients] += len(answers) - len(whole)
                    rates.setdefault((name, clients), []).append(len(whole) / seconds)
    table("clients", "server", "requests a second", "tokens a second", "gpt-cli / this", "failed")
    for clients in CLIENTS:
        for name in servers:
            mine, these = rates["gpt-cli", clients], rates[name, clients]
            tokens = spread([NEW * rate for rate in these])
            cells = spread(these), tokens, ratios(mine, these), str(failed[name, clients])
            row(str(clients), name, *cells)


async def open_loop(port: int, rate: float, prompts: Iterator[str]) -> list[Answer | None]:
    """Return the answers to requests that come at random times, also while others wait."""
    choose = random.Random(1)  # noqa: S311
    gaps = [choose.expovariate(rate) for _ in range(int(rate * SECONDS))]
    options = {"max_tokens": NEW, "ignore_eos": True, **OURS}
    bodies = [options | {"prompt": prompt} for prompt in islice(prompts, len(gaps))]
    tasks = []
    start = time.perf_counter()
    for after, body in zip(accumulate(gaps), bodies, strict=True):
        await asyncio.sleep(start + after - time.perf_counter())
        tasks.append(asyncio.create_task(tried(port, body)))
    return await asyncio.gather(*tasks)


async def measure_overload(setting: Setting) -> None:
    """Print the fate of requests at half and at twice the rate that the server can take."""
    prompts = setting.prompts()
    lines = []
    with setting.server() as server:
        await closed_loop(server.port, 32, list(islice(prompts, 32)), ignore_eos=True, **OURS)
        texts = list(islice(prompts, 128))
        seconds, _ = await closed_loop(server.port, 32, texts, ignore_eos=True, **OURS)
        most = len(texts) / seconds
        for load in (0.5, 2.0):
            cpu, begin = time.process_time(), time.perf_counter()
            answers = await open_loop(server.port, load * most, prompts)
            used = (time.process_time() - cpu) / (time.perf_counter() - begin)
            seconds_of: dict[int, list[float]] = {200: [], 429: []}
            for answer in answers:
                if answer and answer.status in seconds_of:
                    seconds_of[answer.status].append(answer.seconds)
            answered, refused = seconds_of[200], seconds_of[429]
            cuts = statistics.quantiles(answered, n=100, method="inclusive")
            others = len(answers) - len(answered) - len(refused)
            lines.append(
                [f"{load:g} of it", len(answers), len(answered), len(refused), others]
                + [f"{latency:.2f}" for latency in (cuts[49], cuts[98], max(answered))]
                + [f"{1e3 * max(refused):.0f}" if refused else "", f"{used:.1%}"]
            )
    print(f"\n## {SECONDS:g} s of requests at random times")
    print(f"\nWith 32 clients, the server takes {most:.2f} requests a second.")
    table(
        *("load", "requests", "answered", "429", "other", "latency of the answered, s: median"),
        *("99 of 100", "worst", "a 429, ms: worst", "clients' share of a core"),
    )
    for line in lines:
        row(*map(str, line))


PARTS: dict[str, Callable[[Setting], Coroutine[Any, Any, None]]] = {
    "batch": measure_batch,
    "decode": measure_decode,
    "latency": measure_latency,
    "clients": measure_clients,
    "overload": measure_overload,
}


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    a = parser.parse_args()
    if unknown := set(a.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    peers = dict(peer.partition("=")[::2] for peer in a.peer)
    if unknown := peers.keys() - PACKAGES.keys():
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    facts = machine() | {"threads": THREADS} | versions(sys.executable, OWN)
    for peer, python in peers.items():
        facts |= versions(python, PACKAGES[peer])
    for name, value in facts.items():
        print(f"- {name}: {value}")
    engine = gpt_cli.load(a.folder)
    print(f"- weights: {engine.model.ops.dtype}")
    loaded = replace(engine.loaded, speculator=Speculator(engine.model))
    engine = Engine(loaded, engine.name, 0)
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(engine, a.folder, a.rounds, peers, Path(scratch))
        for part in a.parts or PARTS:
            asyncio.run(PARTS[part](setting))


if __name__ == "__main__":
    main()
