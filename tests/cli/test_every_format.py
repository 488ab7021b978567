"""Every command that reads rows, over every format: the same rows give the same records.

And a job over any of them is continued where it was killed: no row is lost, and none comes twice.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import gpt_cli
from gpt_cli.cli.progress import Progress
from gpt_cli.jobs import parts
from support import in_process
from support.checkpoints import CONFIG, write_checkpoint
from support.classifiers import write_classifier
from support.in_process import run_here

TEXTS = [
    "Once upon a time, there",
    'the "cat" sat',
    "a dog\tran, and sat",
    "One 🦊 ran",
    "[the ring]",
    " {he} said:",
    "the, man\\n",
]
MANY = len(TEXTS)


def zstandard_bytes(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


FORMATS = {"lines": ".txt", "jsonl": ".jsonl", "csv": ".csv", "tsv": ".tsv", "parquet": ".parquet"}
ENDINGS = ["", ".gz", ".zst"]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstandard_bytes}
PACKED = [(form, ending) for form in FORMATS for ending in ENDINGS if form != "parquet"]
STORED = [*PACKED, ("parquet", "")]


@pytest.fixture(scope="module")
def models(case_folder, tmp_path_factory):
    """Return small models: by default, another one, and one for `classify`."""
    classifier = write_classifier(tmp_path_factory.mktemp("classifier"), "padded")
    other = write_checkpoint(tmp_path_factory.mktemp("other") / "model", CONFIG, seed=1)
    return {"classify": classifier, "default": case_folder("saved"), "other": other}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Be in a new folder, where zstandard and pyarrow are installed."""
    for package in ("zstandard", "pyarrow.parquet"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table_bytes(texts, field, delimiter):
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, delimiter=delimiter, lineterminator="\r\n")
    writer.writerows([["id", field], *([n, text] for n, text in enumerate(texts))])
    return stream.getvalue().encode()


def parquet_bytes(texts, field):
    import pyarrow
    from pyarrow.parquet import write_table

    stream = io.BytesIO()
    write_table(pyarrow.table({field: texts}), stream, row_group_size=2)
    return stream.getvalue()


def stored(form, ending, texts=TEXTS, field="text"):
    """Return the bytes of a file with a row for each text."""
    if form == "lines":
        data = "\n".join(texts).encode()
    elif form == "jsonl":
        data = b"\n\n".join(json.dumps({field: text, "id": 1}).encode() for text in texts)
    elif form == "parquet":
        data = parquet_bytes(texts, field)
    else:
        data = table_bytes(texts, field, "," if form == "csv" else "\t")
    return COMPRESS[ending](data)


def texts_of(form, data):
    """Return the texts of the rows in a file that is not compressed."""
    text = data.decode()
    if form == "lines":
        return text.splitlines()
    if form == "jsonl":
        return [json.loads(line)["text"] for line in text.splitlines() if line]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter="," if form == "csv" else "\t")
    return [row["text"] for row in rows]


# --- the commands --------------------------------------------------------------------------------

# By where a row is, when it was computed, and whether its format has ids.
VARIES = ("file", "line", "line_number", "timing", "id")


def known(line):
    """Return the record in a line, without what varies."""
    record = json.loads(line)
    return {name: value for name, value in record.items() if name not in VARIES}


def printed(*command, input=b""):
    """Return the records that a command prints."""
    return [known(line) for line in run_here(*command, input=input)[0].splitlines()]


def written(*command, input=b""):
    """Return the records that a command writes to a file."""
    Path("out.jsonl").unlink(missing_ok=True)
    assert run_here(*command, "-o", "out.jsonl", input=input) == (b"", "")
    return [known(line) for line in Path("out.jsonl").read_bytes().splitlines()]


def arrays(*command, input=b""):
    """Return the values of each row in the arrays that a command writes."""
    Path("out.npz").unlink(missing_ok=True)
    assert run_here(*command, "-o", "out.npz", input=input) == (b"", "")
    with np.load("out.npz") as file:
        # Without the manifest.
        values = {name: file[name] for name in file if name not in VARIES and file[name].ndim}
    return [{name: array[row].tolist() for name, array in values.items()} for row in range(MANY)]


# Of each command that has a record for each row: its flags, and how to take its records.
BY_ROW = {
    "batch": (["batch", "-n", "2", "-s", "1", "--ignore-eos", "-q"], printed),
    "score -o": (["score", "-q"], written),
    "score --lines": (["score", "--lines", "--json", "-q"], printed),
    "rank": (["rank", "--choices", "ran,sat", "--json", "-q"], printed),
    "classify": (["classify", "--json", "-q"], printed),
    "activations": (["activations", "--hook", "*.hook_resid_post", "--pool", "mean", "-q"], arrays),
}


def command_of(name, models):
    """Return a function that runs a command with its model, and the field that has the text."""
    words, take = BY_ROW[name]
    model = models.get(words[0], models["default"])
    return partial(take, *words, "-m", model), "prompt" if words[0] in ("batch", "rank") else "text"


@pytest.mark.parametrize("name", BY_ROW)
def test_a_command_has_the_same_records_of_the_same_rows(name, models, memory):
    run, field = command_of(name, models)
    records = []
    for form, ending in STORED:
        data, file = stored(form, ending, field=field), f"in{FORMATS[form]}{ending}"
        Path(file).write_bytes(data)
        records.append(run(file))
        if form != "parquet":
            records.append(run("--format", form, input=data))
    # Files of all formats, with a row or two each.
    files = []
    for place, (form, ending) in enumerate(STORED[1::2]):
        texts = TEXTS[place : place + 1] if place < 5 else TEXTS[5:]
        files.append(f"parts/{place}{FORMATS[form]}{ending}")
        Path("parts").mkdir(exist_ok=True)
        Path(files[-1]).write_bytes(stored(form, ending, texts, field))
        memory.pipe(f"/bucket/{files[-1]}", Path(files[-1]).read_bytes())
    records.append(run(*files))
    if name != "score --lines":
        records += [run("--format", "auto", name) for name in ("parts", "memory://bucket/parts")]
    first = records[0]
    if name == "activations":
        assert [row["row"] for row in first] == [*range(MANY)]
    else:
        assert [(row["index"], row[field]) for row in first] == [*enumerate(TEXTS)]
        assert not any("error" in row for row in first)
    for others in records[1:]:
        assert others == first


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "parquet"])
def test_a_filter_passes_the_same_rows(form, models):
    scores = gpt_cli.load(str(models["default"])).score_many(TEXTS)
    limit = sorted(score.perplexity for score in scores)[MANY // 2] * 1.001
    expected = [text for text, score in zip(TEXTS, scores, strict=True) if score.perplexity < limit]
    command = ["score", "--max-perplexity", limit, "-q", "-m", models["default"]]
    for ending in ENDINGS:
        data, file = stored(form, ending), f"in{FORMATS[form]}{ending}"
        Path(file).write_bytes(data)
        for arguments in ([file], ["--format", form]):
            out, _ = run_here(*command, *arguments, input=data)
            assert texts_of(form, out) == expected


def test_sums_of_a_table_are_the_same(models):
    """Of `score` and `compare` over a whole file; a file of lines is one text for them."""
    sums, differences = [], []
    for form, ending in STORED:
        if form == "lines":
            continue
        file = f"in{FORMATS[form]}{ending}"
        Path(file).write_bytes(stored(form, ending))
        sums += printed("score", "--json", "-q", "-m", models["default"], file)
        differences += printed("compare", models["default"], models["other"], "--json", file)
    data = stored("jsonl", "")
    sums += printed("score", "--json", "-q", "-m", models["default"], input=data)
    scores = gpt_cli.load(str(models["default"])).score_many(TEXTS)
    assert sums[0]["total_logprob"] == pytest.approx(sum(score.total_logprob for score in scores))
    assert sums[0]["rows"] == MANY
    assert all(record == sums[0] for record in sums)
    for record in differences:
        for token in record["worst"]:
            token.pop("file")
    assert len({token["text"] for token in differences[0]["worst"]}) > 1
    assert all(record == differences[0] for record in differences)


# --- a job that was killed -----------------------------------------------------------------------


def interrupt_at(number):
    """Return a function that is interrupted at a call."""
    calls = itertools.count(1)

    def advance(*arguments):
        if next(calls) == number:
            raise KeyboardInterrupt

    return advance


def tear(output):
    """Take from an output what the last write of a killed process may lack."""
    *_, last = sorted(Path(output.partition("*")[0]).glob("part*")) or [Path(output)]
    if "*" in output:
        last.unlink()
    else:
        last.write_bytes(last.read_bytes()[:-9])


def contents(output):
    """Return the bytes of a file, or of the parts in a folder."""
    files = sorted(Path(output.partition("*")[0]).glob("part*")) or [Path(output)]
    return {file.name: file.read_bytes() for file in files}


# Where a job appends, writes parts, or has only parts until its last row.
OUTPUTS = ["{}.jsonl", "{}/*.jsonl", "{}/*.parquet", "{}.csv", "{}.parquet"]


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_job_over_any_format_loses_and_repeats_no_row(output, models, monkeypatch, here):
    monkeypatch.setattr(parts, "BYTES", 1)  # a part for every row
    command = ["score", "-q", "-m", models["default"], "-o"]
    for place, form in enumerate(FORMATS, OUTPUTS.index(output)):
        folder = here / form
        folder.mkdir()
        monkeypatch.chdir(folder)
        ending = "" if form == "parquet" else [*COMPRESS][place % len(COMPRESS)]
        file = f"in{FORMATS[form]}{ending}"
        texts = TEXTS if form == "lines" else [*TEXTS[:2], "the\n\nman", *TEXTS[2:]]
        Path(file).write_bytes(stored(form, ending, texts))
        whole, new = output.format("whole"), output.format("new")
        run_here(*command, whole, file)
        with monkeypatch.context() as patch:
            patch.setattr(Progress, "advance", interrupt_at(2 + place % 4))
            assert in_process.finished(*command, new, file).returncode == 130
        if output in OUTPUTS[:3]:
            tear(new)
        run_here(*command, new, file, "--resume")
        assert [*contents(new).values()] == [*contents(whole).values()]
        assert not list(folder.glob("*.parts"))
