"""Many mixed requests to one server: each answer must be that of its request alone, and the
server's memory, files and threads must stay flat.

    python tests/faults/serve_soak.py REQUESTS [--model tiny] [--save FILE]

An engine in this process computes the answers before, one text at a time, without speculation and
without a cache of beginnings. One in ten clients leaves at some moment, and one in twelve sends
something wrong. Linux only.
"""

import argparse
import asyncio
import functools
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from client import Connection, Server, ask, command, request

import gpt_cli
from gpt_cli.checks.bench import TEXT
from gpt_cli.generation.decode import top_logprobs
from gpt_cli.generation.generate import Completion, Run
from gpt_cli.generation.row import Request
from gpt_cli.options.request import Options
from gpt_cli.scoring.score import score
from gpt_cli.serve.choice import token_name
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text

CLIENTS = 24
FLAGS = ["--batch-size", "16", "--max-queue", "24"]  # so few that requests wait or are refused
PHASES = 10  # with a sample of the resources after each
GROWTH = 20e6  # bytes, most, from the first third to the last
THREADS = 48  # most: the web framework keeps a pool of up to 40
PATIENCE = 120.0  # seconds for an answer
PATH = "/v1/completions"

WORDS = TEXT.split()
ODD = ["", "Grüße, naïve 🦊", "\n\n", "0" * 30, "<|endoftext|>", "日本語"]
SAMPLINGS = [
    {},
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.1},
    {"top_k": 1},
    {"presence_penalty": 1, "frequency_penalty": 0.5},
    {"repeat_penalty": 1.3, "logit_bias": {"13": -100, "262": 2}},
    {"stop": ["."]},
    {"stop": ["the", "\n"], "temperature": 0.5},
    {"ignore_eos": True, "top_p": 0.5},
    {"use_beam_search": True, "best_of": 4},
    {"use_beam_search": True, "length_penalty": -1, "early_stopping": True, "no_repeat_ngram": 2},
]

# Each with the status of its answer.
BAD = [
    (400, request(PATH, b"{")),
    (400, request(PATH, b"[]")),
    (400, request(PATH, b"\xff\xfe")),
    (400, request(PATH, b"[" * 100_000)),
    (400, request(PATH, b'{"prompt": 3}')),
    (400, request(PATH, b'{"prompt": ["a", [1]], "max_tokens": -2}')),
    (400, request(PATH, b'{"prompt": [1, 1000000000]}')),
    (400, request(PATH, b'{"prompt": "\\ud800"}')),
    (400, request(PATH, b'{"prompt": "a", "temperature": NaN}')),
    (400, request(PATH, b'{"prompt": "a", "temperature": "hot"}')),
    (400, request(PATH, b'{"prompt": "a", "n": 1000000}')),
    (400, request(PATH, b'{"prompt": "a", "functions": []}')),
    (400, request(PATH, json.dumps({"prompt": "word " * 5000}).encode())),
    (404, request(PATH, b'{"prompt": "a", "model": "gpt-4"}')),
    (404, request("/v1/nothing", b"{}")),
    (404, request("/v1/models/nothing")),
    (405, request(PATH)),
    (403, request(PATH, b'{"prompt": "a"}', Host="example.com")),
    (403, request(PATH, b'{"prompt": "a"}', Origin="http://example.com")),
    (413, request(PATH, b"0" * 4_000_001)[:200]),
    (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
]
OTHERS = [
    request("/v1/models"),
    request("/health"),
    request("/metrics"),
    request("/tokenizer_info"),
    request("/"),
    request("/tokenize", b'{"prompt": "Once upon a time<|endoftext|>"}'),
    request("/detokenize", b'{"tokens": [40, 41, 42]}'),
]


@dataclass(frozen=True)
class Case:
    """A request, and what its answer must have."""

    fields: dict
    choices: list  # each with its text, finish reason and log-probabilities
    usage: tuple  # tokens of prompts, and new ones


class Reference:
    """The answers of an engine that computes each text alone."""

    def __init__(self, name):
        self.engine = gpt_cli.load(name, speculate=False)

    @property
    def loaded(self):
        """Return the model without the beginnings of earlier texts."""
        return LoadedModel(self.engine.model, self.engine.tokenizer)

    def case(self, number):
        """Return a random request with its answer."""
        choose = random.Random(number)
        fields = {"seed": number, "max_tokens": choose.choice([1, 2, 5, 10, 20, 40])}
        fields |= choose.choice(SAMPLINGS)
        fields["prompt"] = self.prompt(choose)
        if choose.random() < 0.2:
            fields["prompt"] = [self.prompt(choose) for _ in range(choose.randint(1, 3))]
            if len({type(prompt) for prompt in fields["prompt"]}) > 1:
                fields["prompt"] = [text for text in fields["prompt"] if isinstance(text, str)]
        if choose.random() < 0.2:
            fields["n"] = choose.randint(1, 3)
        elif choose.random() < 0.05:
            fields["best_of"] = 2
        if choose.random() < 0.4:
            fields["logprobs"] = choose.choice([0, 1, 5])
        if choose.random() < 0.3:
            fields["echo"] = True
            if choose.random() < 0.5:
                fields["max_tokens"] = 0
                fields.pop("best_of", None)
        return Case(fields, *self.answer(fields))

    def prompt(self, choose):
        """Return a text, or ids; some begin alike."""
        if choose.random() < 0.1:
            return choose.choice(ODD)
        words = choose.choices(WORDS, k=choose.choice([1, 3, 10, 30]))
        if choose.random() < 0.3:
            template = random.Random(choose.randrange(5))
            words = template.choices(WORDS, k=template.randint(50, 150)) + words
        text = " ".join(words)
        return self.engine.encode(text) if choose.random() < 0.2 else text

    def answer(self, fields):
        """Return the choices that a request must have, and the numbers of tokens."""
        prompts = fields["prompt"]
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        n = fields.get("n", 1)
        candidates = fields.get("best_of", n)
        choices, read, generated = [], 0, 0
        for number, prompt in enumerate(prompts):
            ids = self.engine.encode(prompt) if isinstance(prompt, str) else prompt
            text = prompt if isinstance(prompt, str) else self.engine.decode(prompt)
            ids = ids or [self.engine.model.config.start_token("the prompt is empty")]
            indices = range(number * candidates, (number + 1) * candidates)
            if is_search := fields.get("use_beam_search", False):
                best = self.complete(fields | {"beams": candidates}, ids, 0)
                completions = [best, *best.others][:n] if fields["max_tokens"] else [best] * n
            else:
                completions = [self.complete(fields, ids, index) for index in indices]
            read += len(ids)
            generated += sum(len(completion.ids) for completion in completions)
            if "best_of" in fields and not is_search:
                completions.sort(key=lambda done: -sum(done.logprobs) / len(done.logprobs))
            choices += [
                self.choice(fields, text, ids, completion) for completion in completions[:n]
            ]
        return choices, (read, generated)

    def complete(self, fields, ids, index):
        """Return a text, computed alone."""
        names = {"prompt", "n", "best_of", "logprobs", "echo", "max_tokens", "use_beam_search"}
        sampling = {name: value for name, value in fields.items() if name not in names}
        options = Options(
            **({} if "beams" in fields else {"temperature": 1, "top_k": 0, "top_p": 1}) | sampling,
            max_tokens=max(1, fields["max_tokens"]),
            top_logprobs=fields.get("logprobs", 0),
        )
        if not fields["max_tokens"]:
            return Completion(len(ids), options.seed, finish_reason="length")
        run = Run(self.loaded, [Request(Text(ids), options, index)])
        list(run)
        return run.completions[0]

    def choice(self, fields, text, ids, done):
        """Return the text, finish reason and log-probabilities of a choice."""
        echo = fields.get("echo", False)
        reason = "stop" if done.finish_reason in ("stop", "eos") else "length"
        entries = None
        if "logprobs" in fields:
            entries = self.scored(ids, fields["logprobs"]) if echo else []
            entries += zip(done.ids, done.logprobs, done.top_logprobs, strict=True)
            entries = [self.entry(*entry) for entry in entries]
        return text * echo + done.text, reason, entries

    def scored(self, ids, count):
        """Return the tokens of a prompt with their log-probabilities."""
        (measured,) = score(self.loaded, [ids])
        top = [[] for _ in ids]
        if count and len(ids) > 1:
            top[1:] = top_logprobs(
                self.engine.model.ops, self.engine.logits([ids])[0, :-1], [count] * (len(ids) - 1)
            )
        return list(zip(ids, measured.token_logprobs, top, strict=True))

    def entry(self, id, logprob, top):
        """Return a token as OpenAI writes it; the likeliest ones include itself."""
        name = functools.partial(token_name, self.engine.tokenizer)
        if logprob is None:
            return name(id), None, None
        return name(id), logprob, {name(id): p for id, p in [*top, (id, logprob)]}


def answered(answer):
    """Return the choices of an answer and its usage, streamed or not."""
    if "event-stream" not in answer.headers["content-type"]:
        objects = [answer.json]
    else:
        if not answer.body.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError("a stream has no end")
        objects = [event for _, event in answer.events()]
    choices, usage = {}, None
    for chunk in objects:
        if "error" in chunk:
            raise RuntimeError(f"in a stream: {chunk}")
        usage = chunk.get("usage", usage)
        for choice in chunk["choices"]:
            text, _, entries = choices.get(choice["index"], ("", None, None))
            if logprobs := choice["logprobs"]:
                columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
                entries = (entries or []) + list(zip(*columns, strict=True))
            text += choice["text"]
            choices[choice["index"]] = text, choice["finish_reason"], entries
    tokens = usage and (usage["prompt_tokens"], usage["completion_tokens"])
    return [choices[index] for index in sorted(choices)], tokens


class Soak:
    """Clients of one server."""

    def __init__(self, port, cases):
        self.port, self.cases = port, cases
        self.done = Counter()

    async def run(self, numbers):
        """Send requests, some at a time, and wait for all answers."""
        numbers = iter(numbers)

        async def client():
            kept = []
            for number in numbers:
                async with asyncio.timeout(PATIENCE):
                    await self.request(random.Random(number), kept)
            for connection in kept:
                connection.close()

        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(client())

    async def request(self, choose, kept):
        """Send a request of any kind; `kept` is a list of at most one open connection."""
        kind = choose.random()
        if kind < 0.1:
            await self.leave(choose)
        elif kind < 0.18:
            await self.send_bad(choose)
        elif kind < 0.23:
            self.expect(200, await self.exchange(choose.choice(OTHERS), kept))
            self.done["other paths"] += 1
        else:
            await self.complete(choose, kept)

    async def exchange(self, data, kept):
        """Return an answer, from an open connection if there is one."""
        connection = kept.pop() if kept else await Connection.open(self.port)
        answer = await connection.exchange(data)
        kept.append(connection)
        return answer

    async def complete(self, choose, kept):
        """Compare an answer with that of the engine."""
        case = choose.choice(self.cases)
        fields = dict(case.fields)
        if "best_of" not in fields and choose.random() < 0.5:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        data = request(PATH, json.dumps(fields).encode())
        while (answer := await self.exchange(data, kept)).status == 429:
            if int(answer.headers["retry-after"]) < 1:
                raise RuntimeError(f"Retry-After: {answer.headers['retry-after']}")
            self.done["refused for now (429)"] += 1
            await asyncio.sleep(choose.uniform(0.1, 0.5))
        self.expect(200, answer)
        actual, expected = answered(answer), (case.choices, case.usage)
        if actual != expected:
            raise RuntimeError(f"{fields}: {actual} and not {expected}")
        self.done["streams" if "stream" in fields else "whole answers"] += 1

    async def send_bad(self, choose):
        """Send something wrong; the answer must say so."""
        status, data = choose.choice(BAD)
        connection = await Connection.open(self.port)
        answer = await connection.exchange(data)
        connection.close()
        self.expect(status, answer)
        if b"\x16" not in data and not answer.json["error"]["message"]:
            raise RuntimeError(f"{data[:200]}: {answer.body}")
        self.done["wrong requests"] += 1

    async def leave(self, choose):
        """Leave at some moment."""
        fields = dict(choose.choice(self.cases).fields)
        moment = choose.choice(["while sending", "while waiting", "in a stream"])
        if moment == "in a stream":
            fields |= {"stream": True, "max_tokens": 100}
            fields.pop("best_of", None)
        data = request(PATH, json.dumps(fields).encode())
        if moment == "while sending":
            data = data[: choose.randrange(1, len(data))]
        connection = await Connection.open(self.port)
        connection.send(data)
        if moment == "in a stream":
            _, headers = await connection.head()
            pieces = choose.randint(1, 20)
            async for _ in connection.body(headers):
                if not (pieces := pieces - 1):
                    break
        else:
            await asyncio.sleep(choose.choice([0, 0.001, 0.01, 0.1]))
        connection.close(reset=choose.random() < 0.5)
        self.done[f"left {moment}"] += 1

    def expect(self, status, answer):
        """Raise an error if an answer has another status."""
        if answer.status != status:
            raise RuntimeError(f"status {answer.status} and not {status}: {answer.body}")

    async def idle(self):
        """Wait until nothing is computed any more."""
        for _ in range(50):
            await asyncio.sleep(0.1)
            text = (await ask(self.port, path="/metrics")).body.decode()
            if re.findall(r"^gpt_cli_texts_\w+{.*} (.*)", text, re.MULTILINE) == ["0.0", "0.0"]:
                break
        else:
            raise RuntimeError("texts that nobody wants are still computed")
        await asyncio.sleep(0.5)  # the last connections are closed


@dataclass(frozen=True)
class Sample:
    """The resources of a process at a moment."""

    memory: int  # resident, in bytes
    files: int
    threads: int

    @classmethod
    def take(cls, pid):
        process = Path("/proc", str(pid))
        pages = int((process / "statm").read_text().split()[1])
        files, threads = (len(list((process / name).iterdir())) for name in ("fd", "task"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), files, threads)


async def soak(server, cases, requests):
    """Send requests; return a sample after the warm-up and after each phase, and what was done."""
    clients = Soak(server.port, cases)
    samples = []
    size = requests // PHASES
    for phase in range(PHASES + 1):  # the first warms up
        await clients.run(range(phase * size, (phase + 1) * size))
        await clients.idle()
        samples.append(Sample.take(server.process.pid))
        print(f"{(phase + 1) * size} requests: {samples[-1]}", file=sys.stderr)
        if not phase:
            clients.done.clear()
    return samples, clients.done


def report(model, samples, done, minutes):
    """Return the table, and whether everything is flat."""
    third = (len(samples) - 1) // 3
    parts = samples[1 : 1 + third], samples[-third:]
    memory, later = (statistics.median(sample.memory for sample in part) for part in parts)
    files, later_files = (max(sample.files for sample in part) for part in parts)
    threads = [max(sample.threads for sample in part) for part in parts]
    flat = later - memory <= GROWTH and later_files <= files and max(threads) <= THREADS
    rows = "".join(f"| {count:,} | {name} |\n" for name, count in sorted(done.items()))
    return (
        f"""\
# A soak of a server

Written by `make soak-serve` with gpt-cli {gpt_cli.__version__} and Python \
{platform.python_version()}: {done.total():,} requests, {CLIENTS} at
a time, to `gpt-cli serve -m {model} {" ".join(FLAGS)}`, in {minutes:.0f} minutes.
Each answer has the text, the log-probabilities and the counts that the engine gives for the request
alone. Nothing is left running, standard error is empty, and the exit code is 0.

| requests | |
|-|-|
{rows}
| when idle | first third | last third |
|-|-|-|
| memory, median | {memory / 1e6:.1f} MB | {later / 1e6:.1f} MB |
| open files, most | {files} | {later_files} |
| threads, most | {threads[0]} | {threads[1]} |

{"Flat" if flat else "NOT flat"}: it may take {GROWTH / 1e6:.0f} MB and no file more, and \
{THREADS} threads.
A warm-up of {1 / PHASES:.0%} as many requests came before.
""",
        flat,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", type=int)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--save", type=Path, help="write the table here, too")
    arguments = parser.parse_args()
    reference = Reference(arguments.model)
    cases = [reference.case(number) for number in range(arguments.requests // PHASES)]
    del reference
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        errors = Path(scratch, "errors")
        with Server(command(arguments.model, *FLAGS), errors) as server:
            try:
                samples, done = asyncio.run(soak(server, cases, arguments.requests))
            except BaseException:
                print(errors.read_text(), file=sys.stderr)
                raise
            code = server.stop()
        _, *unexpected = errors.read_text().splitlines()  # after the line that it listens
        if unexpected or code:
            raise RuntimeError(f"exit code {code}: {unexpected}")
    table, flat = report(arguments.model, samples, done, (time.monotonic() - start) / 60)
    print(table, end="")
    if arguments.save:
        arguments.save.write_text(table)
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
