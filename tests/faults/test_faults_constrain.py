"""Faults of constraints: what is not valid, too large or endless, their files, and signals."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from support.in_process import run_here
from support.processes import posix
from support.server_process import COMPLETIONS, serving
from support.signals import (
    LONG,
    SIGNALS,
    SLOWLY,
    TINY,
    each_signal,
    interrupt,
    limit_addresses,
    linux,
)
from support.world import fault_row

pytest.importorskip("llguidance")
pytestmark = posix

SLOW = pytest.mark.slow
MOST_SECONDS = 20 if sys.platform == "linux" else 60
# No limit of llguidance ends this one: the states of ten terminals are multiplied.
ENDLESS = "start: A\nA: " + " & ".join(
    f"/(.{{{count}}})*/" for count in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
)


def generate(*arguments):
    return ("generate", *TINY, "-n", 3, "-s", 1, *arguments, "Once")


def deep(count, inner="{}"):
    return '{"items":' * count + inner + "}" * count


def chain(count):
    """Return a grammar in which each rule needs the next one."""
    rules = "".join(f'r{n}: "x" r{n + 1}\n' for n in range(count))
    return f'start: r0\n{rules}r{count}: "y"'


def references(count, depth):
    """Return a schema in which each definition needs the next one, nested to a depth."""
    definitions = {
        f"d{n}": json.loads(deep(depth, json.dumps({"$ref": f"#/$defs/d{n + 1}"})))
        for n in range(count)
    }
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {}}})


def properties(count):
    """Return a schema of many properties with ten values each, of 150 bytes."""
    values = {f"field_{n}": {"enum": [f"v{n}_{i}" for i in range(10)]} for n in range(count)}
    return json.dumps({"type": "object", "properties": values})


# --- what is not valid ---------------------------------------------------------------------------


EMPTY = "standard output is empty"


def row(number, name, flag, content, says, do="--"):
    return fault_row(number, name, 2, flag, content, says, do, intact=EMPTY)


REGEX, SCHEMA, GRAMMAR = "--regex", "--json-schema", "--grammar"
BIG = "too big"
# fmt: off
NOT_VALID = [
    row(82, "a regex with an open group", REGEX, "(a", "at character 1: unclosed group"),
    row(82, "look-ahead", REGEX, "(?=a)b", "look-around"),
    row(82, "look-behind", REGEX, "(?<!a)b", "look-around"),
    row(82, "a backreference", REGEX, r"(a)\1", "at character 4: backreferences"),
    row(82, "a word boundary", REGEX, r"\ba", "not supported"),
    row(82, "a regex that matches nothing", REGEX, r"[^\s\S]", "must match some text"),
    row(82, "a schema that is not JSON", SCHEMA, '{"type":', "must be JSON", "line 1 column"),
    row(82, "a schema that is a list", SCHEMA, "[1]", "must be a JSON object", "such as {}"),
    row(82, "a schema that is true", SCHEMA, "true", "must be a JSON object", "such as {}"),
    row(82, "a type that is a number", SCHEMA, '{"type": 3}', "type must be a string"),
    row(82, "a type that is none", SCHEMA, '{"items": {"type": "x"}}', "at #/items"),
    row(82, "a number that is not finite", SCHEMA, '{"minimum": NaN}', "must be JSON"),
    row(82, "half of a surrogate in a schema", SCHEMA, r'{"const": "\ud800"}', "must be JSON"),
    row(82, "a keyword that is not known", SCHEMA, '{"not": {}}', 'Unimplemented keys: ["not"]'),
    row(82, "a schema that nothing fits", SCHEMA, '{"enum": []}', "Unsatisfiable"),
    row(82, "a reference to http", SCHEMA, '{"$ref": "http://127.0.0.1:9/x"}',
        "it refers to http://127.0.0.1:9/x", "only references within it"),
    row(82, "a reference to a file", SCHEMA, '{"$ref": "file:///etc/passwd"}',
        "it refers to file:///etc/passwd", "only references within it"),
    row(82, "a reference to a name", SCHEMA, '{"$ref": "other.json"}', "other.json",
        "only references within it"),
    row(82, "a schema of schemas at http", SCHEMA, '{"$schema": "http://127.0.0.1:9/x"}',
        "it refers to http://127.0.0.1:9/x", "only references within it"),
    row(82, "a reference in a grammar", GRAMMAR, 'start: %json {"$ref": "http://127.0.0.1:9/x"}',
        "http://127.0.0.1:9/x", "does not fetch"),
    row(82, "a reference to itself", SCHEMA, '{"$ref": "#"}', "must match some text"),
    row(82, "JSON without an end", SCHEMA, '{"x-guidance": {"item_separator": "n*n"}}',
        "must have ',' with white space", "as item_separator"),
    row(82, "white space without an end", SCHEMA, '{"x-guidance": {"whitespace_pattern": "n*n"}}',
        "must have white space", "as whitespace_pattern"),
    row(82, "a grammar without start", GRAMMAR, 'a: "x"', "no start rule found"),
    row(82, "a grammar in the form of llama.cpp", GRAMMAR, 'root ::= "a"', "line 1, column 7",
        "without ::="),
    row(82, "a rule that is itself", GRAMMAR, "start: a\na: a", "must match some text"),
    row(82, "a terminal that is itself", GRAMMAR, "start: A\nA: B\nB: A", "circular reference"),
    row(82, "an import of a file", GRAMMAR, "%import /etc/passwd\nstart: A", "line 1, column 9"),
    row(82, "a special token that is none", GRAMMAR, "start: <|nope|>", "unknown special token"),
]
TOO_LARGE = [
    row(83, "a regex of 2,000,001 characters", REGEX, "a" * 2_000_001, "at most 2,000,000",
        "characters"),
    row(83, "a million dots", REGEX, "." * 1_000_000, BIG),
    row(83, "100,000 parentheses", REGEX, "(" * 100_000 + "a" + ")" * 100_000,
        "at character 251", "nested parentheses"),
    row(83, "100,000 open parentheses", REGEX, "(" * 100_000, "unclosed group"),
    row(83, "100,000 brackets in a grammar", GRAMMAR, "start: " + "(" * 100_000, "and brackets"),
    row(83, "100 brackets in a grammar", GRAMMAR, "start: " + "(" * 100, "too deeply nested"),
    row(83, "a chain of 100,000 rules", GRAMMAR, lambda: chain(100_000), "at most 5,000 rules"),
    row(83, "a chain of 3,000 rules with brackets", GRAMMAR,
        "start: r0\n" + "".join(f'r{n}: (("x" r{n + 1}))\n' for n in range(3000)),
        "at most 5,000 rules and brackets"),
    row(83, "a rule of 100,000 parts", GRAMMAR, "start: " + '"a" /b/ ' * 50_000, BIG),
    row(83, "a rule of 100,000 ways", GRAMMAR, "start: " + '"a"|"b"|' * 50_000 + "/c/", BIG),
    row(83, "a schema of 1 MB", SCHEMA, lambda: properties(6500), BIG),
    row(83, "a schema of 3 MB", SCHEMA, lambda: properties(20_000), "at most 2,000,000",
        "characters"),
    row(83, "a schema 200 deep", SCHEMA, deep(200), "recursion limit"),
    row(83, "a schema 100,000 deep", SCHEMA, deep(100_000), "nested too deeply"),
    row(83, "an error in a schema 120 deep", SCHEMA, deep(120, '{"type": 3}'), "type must be"),
    row(83, "a chain of 4,000 references", SCHEMA, lambda: references(4000, 1), "fewer references"),
    row(83, "a chain of hidden references", SCHEMA,
        lambda: references(20_000, 1).replace("$", r"\u0024"), "fewer references"),
    row(83, "a chain of 1,000 references, each 20 deep", SCHEMA, lambda: references(1000, 20),
        "fewer references"),
    row(83, "a grammar without an end of compiling", GRAMMAR, ENDLESS, "takes more than 10 seconds",
        "make it simpler"),
]
# fmt: on


def argument(flag, content, world):
    """Return a flag's argument: the constraint itself, or a new file of it."""
    if flag == REGEX or (content.startswith("{") and flag == SCHEMA and len(content) < 100_000):
        return content
    path = world.place / "constraint"
    path.write_text(content, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("flag", "content", "says", "do"), NOT_VALID)
def test_what_is_not_valid_is_told(flag, content, says, do, world, suffer_here):
    suffer_here(*generate(flag, argument(flag, content, world)), code=2, says=says, do=do)


@SLOW
@pytest.mark.parametrize(("flag", "content", "says", "do"), TOO_LARGE)
def test_what_is_too_large_is_told_in_time(flag, content, says, do, world, suffer):
    start = time.monotonic()
    text = argument(flag, content() if callable(content) else content, world)
    if len(text) < 100_000:
        suffer(*generate(flag, text), code=2, says=says, do=do)
    else:  # too long for an argument
        line = json.dumps({"prompt": "Once", "regex": text})
        finished = world.run("batch", *TINY, "-q", "-n", 3, stdin=line.encode())
        assert finished.returncode == 6
        message = json.loads(finished.stdout)["error"]["message"]
        assert says in message
        assert len(message) < 500
    assert time.monotonic() - start < MOST_SECONDS


@pytest.mark.fault(82, "half of a surrogate in a regex", 2, intact=EMPTY)
def test_half_of_a_surrogate_is_told(suffer):
    suffer(*generate(REGEX, b"a\xed\xa0\x80"), code=2, says="not valid Unicode", do="")


@pytest.mark.fault(82, "two constraints", 2, intact=EMPTY)
def test_two_constraints_are_told(suffer_here):
    flags = (REGEX, "a", "--choices", "a,b")
    suffer_here(*generate(*flags), code=2, says="must be the only", do="constraint")


# --- what takes long but has an end --------------------------------------------------------------

# fmt: off
HARD = {
    "a regex that explodes": (REGEX, "((a{1000}){1000}){1000}"),
    "a regex of all lengths": (REGEX, "(((a{0,100}){0,100}){0,100}){0,100}"),
    "a regex with a long memory": (REGEX, "(a|b)*a(a|b){30}"),
    "an endless rule": (GRAMMAR, 'start: a\na: "x" a'),
    "a text that must go on and has no end": (GRAMMAR, "start: A A\nA: /y*y/"),
    "an ambiguous rule": (GRAMMAR, 'start: s\ns: s s | "a" |'),
    "a very ambiguous rule": (GRAMMAR, "start: s s s\ns: s s s s | /[a-z]/ | /[a-z ]*/ |"),
    "1,000,000,000 parts": (GRAMMAR, 'start: b~1000\nb: c~1000\nc: "x"~1000'),
    "9,000 parts that may be there": (GRAMMAR, "start: " + '"a"? ' * 9000),
    "a chain of 4,900 rules": (GRAMMAR, chain(4900)),
    "a chain of 500 references": (SCHEMA, references(500, 1)),
    "a schema of 200 KB": (SCHEMA, properties(1200)),
    "a description of 1 MB": (SCHEMA, json.dumps({"type": "null", "description": "x" * 10**6})),
    "a pattern in a schema that explodes": (SCHEMA, '{"pattern": "((a{1000}){1000}){1000}"}'),
    "many items": (SCHEMA, '{"type": "array", "items": {}, "minItems": 100000}'),
}
# fmt: on


@SLOW
@pytest.mark.parametrize(
    ("flag", "content"),
    [fault_row(83, name, 0, *hard, intact="its reason") for name, hard in HARD.items()],
)
def test_what_is_hard_ends_in_time(flag, content, world):
    text = argument(flag, content, world)
    start = time.monotonic()
    finished = world.run(*generate(flag, text, "--json"))
    assert time.monotonic() - start < MOST_SECONDS
    reason = json.loads(finished.stdout)["finish_reason"]
    assert reason in (("complete", "eos", "length") if not finished.returncode else ("stuck",))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [SCHEMA, GRAMMAR])
@pytest.mark.parametrize(
    ("make", "says", "do"),
    [
        fault_row(84, name, 2, make, says, do, intact=EMPTY)
        for name, make, says, do in (
            ("a constraint that is nowhere", Path.exists, "No such file", "a text must"),
            ("a folder for a constraint", Path.mkdir, "cannot read", "constraint"),
            ("an empty constraint", Path.touch, "is empty", "a text is needed"),
            ("a constraint that is no UTF-8", partial(Path.write_bytes, data=b"{\xff}"),
             "is not UTF-8: byte 1", "convert it"),
        )
    ],
)  # fmt: skip
def test_a_bad_file_is_told(flag, make, says, do, world, suffer_here):
    path = world.place / "constraint"
    make(path)
    suffer_here(*generate(flag, path), code=2, says=says, do=do)


@linux
@pytest.mark.fault(84, "a constraint in a pipe", 0, intact="the text")
def test_a_constraint_may_come_through_a_pipe(world):
    reader, writer = os.pipe()
    os.write(writer, b'start: " cat"')
    os.close(writer)
    text = world.output(*generate(GRAMMAR, f"/dev/fd/{reader}"), pass_fds=[reader])
    os.close(reader)
    assert text == b" cat"
    schema = b'\xef\xbb\xbf{"const": "cat"}\r\n'
    assert world.output(*generate("-n", 9, SCHEMA, "/dev/stdin"), stdin=schema) == b'"cat"'


# --- rows, processes and the server --------------------------------------------------------------


@pytest.mark.fault(85, "rows with a bad constraint", 6, intact="all other rows")
def test_a_bad_constraint_is_an_error_of_its_row():
    rows = [
        {"regex": " cat"}, {"regex": "("}, {}, {"json_schema": {"type": 3}}, {"choices": []},
        {"grammar": chain(9000)}, {"choices": ["cat"]}, {"regex": "a", "choices": ["a"]},
    ]  # fmt: skip
    lines = "\n".join(json.dumps({"prompt": "Once"} | row) for row in rows)
    flags = ("-q", "-n", 3, "-s", 1, "--format", "jsonl")
    out, errors = run_here("batch", *TINY, *flags, input=lines.encode(), code=6)
    assert errors.count("\n") == 1
    records = [json.loads(line) for line in out.splitlines()]
    bad = {index for index, record in enumerate(records) if "error" in record}
    assert {1, 3, 5, 7} <= bad <= {1, 3, 4, 5, 7}
    assert records[0]["text"] == records[6]["text"] == " cat"


@SLOW
@pytest.mark.fault(85, "two processes with one constraint", 0, intact="their texts")
def test_two_processes_do_not_disturb_one_another(world):
    (world.place / "constraint").write_text(properties(500), encoding="ascii")
    command = generate(SCHEMA, "constraint")
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: world.output(*command), range(2))
    assert one == other
    assert one.startswith(b"{")


@SLOW
@pytest.mark.fault(85, "a request without an end of compiling", "HTTP 400", intact="the server")
def test_an_endless_constraint_is_refused_by_the_server(world, record_property):
    short = {"prompt": "Once", "max_tokens": 4, "seed": 1}
    # A Rust thread cannot be ended, but the server can.
    with serving(start=world.start) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.ask, COMPLETIONS, short | {"guided_grammar": ENDLESS})
        time.sleep(1)
        assert server.ask("/health").status == 200
        assert server.complete(**short)["choices"]
        error = answer.result().error(400)
        assert error["param"] == "guided_grammar"
        assert "takes more than 10 seconds" in error["message"]
        record_property("message", error["message"])


# --- resources and signals -----------------------------------------------------------------------


@pytest.fixture
def without_llguidance(world):
    """Return the environment of a process that cannot import llguidance."""
    hidden = world.root / "hidden"
    hidden.mkdir()
    (hidden / "llguidance.py").write_text("raise ImportError('not installed')\n")
    paths = [str(hidden), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.mark.fault(86, "llguidance is not installed", 5, intact="texts without a constraint")
def test_a_missing_package_is_told(world, without_llguidance, suffer):
    options = {"env": without_llguidance, "says": "llguidance", "do": "pip install llguidance"}
    suffer(*generate(REGEX, "a"), code=5, **options)
    assert world.output(*generate(), env=without_llguidance)


@pytest.mark.fault(86, "a server without llguidance", "HTTP 501", intact="other requests")
def test_a_server_without_the_package_tells_it(world, without_llguidance, record_property):
    with serving(start=world.start, env=without_llguidance) as server:
        request = {"prompt": "Once", "guided_regex": "a"}
        error = server.ask(COMPLETIONS, request).error(501)
        assert "pip install llguidance" in error["message"]
        record_property("message", error["message"])
        assert server.complete(prompt="Once")["choices"]


@linux
@SLOW
@pytest.mark.fault(86, "a limit of 800 MiB of address space", 0, intact="the text")
@pytest.mark.parametrize("name", ["a regex that explodes", "a schema of 200 KB", "an endless rule"])
def test_constraints_need_little_memory(name, world):
    flag, content = HARD[name]
    command = generate(flag, argument(flag, content, world), "--threads", 1)
    assert world.output(*command, preexec_fn=limit_addresses(800))


@SLOW
@each_signal(86, "while a constraint is compiled", "nothing is said")
def test_a_signal_ends_compiling(number, world, survive):
    (world.place / "constraint").write_text(ENDLESS, encoding="ascii")
    for wait in (0.5, 1, 2):
        with world.start(*generate(GRAMMAR, "constraint")) as process:
            time.sleep(wait)
            process.send_signal(number)
            start = time.monotonic()
            out, errors = process.communicate(timeout=60)
        assert time.monotonic() - start < 5
        assert process.returncode in (SIGNALS[number], -number)
        assert (out, errors) == (b"", b"")
    survive(3)


@SLOW
@each_signal(
    86, "in the middle of a constrained text", "standard output is a beginning of the whole"
)
def test_a_signal_leaves_the_constrained_text_so_far(number, world, survive):
    command = (*LONG, *SLOWLY, "--stats", REGEX, r"(?s:.*)")
    code, out, errors = interrupt(world, number, *command, size=10)
    assert code == SIGNALS[number]
    assert len(out) >= 10
    assert b"finish reason interrupted" in errors
    survive(1)
