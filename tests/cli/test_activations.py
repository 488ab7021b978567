"""`gpt-cli activations`: the values at hook points, in files of arrays and in tables."""

import json
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from safetensors import safe_open
from safetensors.numpy import load_file

import gpt_cli
from gpt_cli.jobs import parts
from gpt_cli.scoring import activations as module
from support import in_process
from support.in_process import records_here, refusal, run_here

TEXTS = ["Once upon a time", "", "The fox", "  ran  and ran ", "x " * 600, "  ", "The end"]
GOOD = [0, 2, 3, 5, 6]
GLOB, HOOKS = "*.hook_resid_post", [f"blocks.{layer}.hook_resid_post" for layer in range(3)]
ERRORS = {1: "the text is empty", 4: "the model's context is"}


@pytest.fixture(scope="module")
def engine(case_folder):
    return gpt_cli.load(str(case_folder("saved")), threads=1)


@pytest.fixture(autouse=True)
def inputs(case_folder, tmp_path, monkeypatch):
    """Be in a new folder with rows, and use a very small model."""
    monkeypatch.setenv("GPT_CLI_MODEL", str(case_folder("saved")))
    monkeypatch.chdir(tmp_path)
    rows = [{"text": text, "label": number} for number, text in enumerate(TEXTS)]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*flags, hook=GLOB, code=6, file="in.jsonl"):
    command = ["activations", file, "--hook", hook, "--threads", "1", "-q", *flags]
    out, errors = run_here(*command, code=code)
    assert out == b""
    return errors


def read(name):
    """Return the arrays of a file, or of all parts of a folder."""
    if Path(name).is_dir():
        tables = [load_file(file) for file in sorted(Path(name).glob("*.safetensors"))]
        names = dict.fromkeys(name for table in tables for name in table)
        return {n: np.concatenate([table[n] for table in tables if n in table]) for n in names}
    if name.endswith(".npz"):
        with np.load(name) as arrays:
            return {n: arrays[n] for n in arrays if n != "metadata"}
    return load_file(name)


def expected(engine, pool=None, hooks=(GLOB,), **options):
    """Return the rows and the values that `Engine.activations` has for the rows without errors."""
    good = [number for number in GOOD if pool != "word" or TEXTS[number].strip()]
    values = list(engine.activations([TEXTS[n] for n in good], hooks, pool=pool, **options))
    if pool in ("last", "mean"):
        values = [{name: value[None] for name, value in row.items()} for row in values]
    rows = np.repeat(good, [len(row[HOOKS[0]]) for row in values])
    return rows, {name: np.concatenate([row[name] for row in values]) for name in values[0]}


def same(array, other):
    """Rows are computed beside others: only the library gives them the same bits."""
    return array.shape == other.shape and np.allclose(array, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out", ["out", "out/", "out/*.safetensors", "out.safetensors", "out.npz"])
@pytest.mark.parametrize("bytes", [64 << 20, 1])
def test_all_tokens(out, bytes, engine, monkeypatch):
    monkeypatch.setattr(parts, "BYTES", bytes)
    run("-o", out, "--bos")
    arrays = read(out.partition("/")[0])
    rows, values = expected(engine, bos=True)
    assert {*arrays} == {"row", "line", "position", "token", *HOOKS}
    assert np.array_equal(arrays["row"], rows)
    assert np.array_equal(arrays["line"], rows + 1)
    ids = [engine.encode("<|endoftext|>" + TEXTS[n], special=True) for n in GOOD]
    assert arrays["token"].tolist() == [id for row in ids for id in row]
    assert arrays["position"].tolist() == [n for row in ids for n in range(len(row))]
    assert all(same(arrays[name], values[name]) for name in HOOKS)


@pytest.mark.parametrize("pool", ["last", "mean", "word"])
@pytest.mark.parametrize(
    ("out", "dtype"),
    [
        ("out", "float16"),
        ("out.npz", "float32"),
        ("out.parquet", "float32"),
        ("out.parquet", "float16"),
    ],
)
def test_pooled(out, pool, dtype, engine, monkeypatch):
    monkeypatch.setattr(parts, "BYTES", 2000)
    if out.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    run("-o", out, "--pool", pool, "--out-dtype", dtype)
    rows, values = expected(engine, pool)
    word = {name: values.pop(name) for name in ("word", "start", "end") if pool == "word"}
    if out.endswith(".parquet"):
        arrays = table_of(out, pool)
    else:
        arrays = read(out)
        assert {*arrays} == {"row", "line", *HOOKS, *word} - ({"word"} if out == "out" else set())
    assert np.array_equal(arrays["row"], rows)
    for name in {*word} & {*arrays}:
        assert np.array_equal(arrays[name], word[name])
    for name in HOOKS:
        assert arrays[name].dtype == dtype
        assert same(arrays[name], values[name].astype(dtype))


def table_of(out, pool):
    """Return the columns of a table; check those of the input and of errors."""
    from pyarrow.parquet import read_table

    table = read_table(out)
    size = table.schema.field(HOOKS[0]).type.list_size
    errors = {**ERRORS, **({5: "the text has no words"} if pool == "word" else {})}
    records = table.to_pylist()
    for record in records:
        assert record["label"] == record["index"] == record["line"] - 1
        if record["error"]:
            assert errors.pop(record["index"]) in record["error"]["message"]
            assert record[HOOKS[0]] is None
        else:
            assert record["text"] == TEXTS[record["index"]]
    assert not errors
    good = [record for record in records if not record["error"]]
    kind = np.float16 if "halffloat" in str(table.schema.field(HOOKS[0]).type) else np.float32
    arrays = {name: np.array([r[name] for r in good], kind).reshape(-1, size) for name in HOOKS}
    arrays |= {n: np.array([r[n] for r in good]) for n in ("word", "start", "end") if n in good[0]}
    return arrays | {"row": np.array([record["index"] for record in good])}


def test_errors_of_rows_are_in_the_metadata():
    errors = run("-o", "out", hook="hook_embed")
    assert errors == "gpt-cli: error: 2 of 7 rows failed: the output has their errors\n"
    (part,) = Path("out").glob("*.safetensors")
    with safe_open(part, "np") as file:
        records = json.loads(file.metadata()["errors"])
    assert [record["index"] for record in records] == [*ERRORS]
    assert all(ERRORS[record["index"]] in record["error"]["message"] for record in records)
    assert records[1]["error"]["code"] == "context_overflow"


def test_scores_are_as_wide_as_the_longest_text_of_the_file(engine, monkeypatch):
    monkeypatch.setattr(parts, "BYTES", 1)  # parts of several widths are joined
    run("-o", "out.npz", hook="blocks.1.attn.*n*")
    arrays = read("out.npz")
    for name in ("blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern"):
        (values,) = engine.activations([TEXTS[0]], [name])
        size = values[name].shape[1]
        first = arrays[name][arrays["row"] == 0]
        assert first.shape == (size, values[name].shape[0], np.bincount(arrays["row"]).max())
        assert same(first[..., :size].swapaxes(0, 1), values[name])
        assert np.isnan(first[..., size:]).all()


def test_a_table_keeps_all_columns_of_a_table():
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import read_table, write_table

    columns = {"text": ["a b", "c"], "word": [1, 2], "mark": [1.5, None], "many": [[1], [2, 3]]}
    write_table(pa.table(columns), "in.parquet")
    run("-o", "out.parquet", "--pool", "word", file="in.parquet", code=0)
    records = read_table("out.parquet").to_pylist()
    assert [(r["word"], r["row_word"], r["mark"], r["many"]) for r in records] == [
        ("a", 1, 1.5, [1]), ("b", 1, 1.5, [1]), ("c", 2, None, [2, 3])
    ]  # fmt: skip


def test_columns_of_several_types_become_json(monkeypatch):
    pytest.importorskip("pyarrow")
    from pyarrow.parquet import read_table

    rows = [{"text": "a", "x": 1}, {"text": "b", "x": "y"}, {"text": ""}, {"text": "c", "x": 2}]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("-o", "out.parquet", "--pool", "last")
    assert read_table("out.parquet")["x"].to_pylist() == ["1", '"y"', None, "2"]
    monkeypatch.setattr(parts, "BYTES", 1)
    run("-o", "parts.parquet", "--pool", "last")
    assert read_table("parts.parquet")["x"].to_pylist() == ["1", '"y"', None, "2"]


def test_a_template_and_lines(engine):
    Path("in.txt").write_text("Once\n{x\n")
    run(
        "-o",
        "out",
        "--template",
        "A {line}.",
        "--format",
        "lines",
        "--pool",
        "last",
        file="in.txt",
        code=0,
    )
    values = engine.activations(["A Once.", "A {x."], [GLOB], pool="last")
    assert same(read("out")[HOOKS[0]], np.stack([row[HOOKS[0]] for row in values]))


def test_rows_are_joined_by_their_lines_ids_and_files(monkeypatch):
    monkeypatch.setattr(parts, "BYTES", 1)  # parts with and without ids are joined
    Path("a.jsonl").write_text('\n{"text": "One"}\n{"text": "Two", "id": "b"}\n')
    Path("c.jsonl").write_text('{"text": "Three", "id": 7}\n{"text": ""}\n')
    run("c.jsonl", "-o", "out.npz", "--pool", "last", file="a.jsonl")
    arrays = read("out.npz")
    assert arrays["row"].tolist() == [0, 1, 2]
    assert arrays["line"].tolist() == [2, 3, 1]
    assert arrays["id"].tolist() == ["", "b", "7"]
    assert arrays["file"].tolist() == ["a.jsonl", "a.jsonl", "c.jsonl"]
    run(
        "-o",
        "out",
        "--pool",
        "last",
        "--template",
        "{line}.",
        "--format",
        "lines",
        file="a.jsonl",
        code=0,
    )
    assert read("out")["line"].tolist() == [2, 3]  # line 1 is empty


@pytest.mark.parametrize("template", ["A {x}!", "A {text}!"])
def test_words_of_a_template_begin_and_end_in_its_text(template):
    pytest.importorskip("pyarrow")
    from pyarrow.parquet import read_table

    Path("in.jsonl").write_text('{"text": "fox", "x": "fox"}\n')
    run("-o", "out.parquet", "--pool", "word", "--template", template, code=0)
    records = read_table("out.parquet").to_pylist()
    assert [record["text"] for record in records] == ["A fox!"] * 2
    assert [record["text"][record["start"] : record["end"]] for record in records] == ["A", "fox!"]
    assert [record["x"] for record in records] == ["fox"] * 2


def test_values_beyond_float16_are_errors_of_their_rows(monkeypatch):
    means = module._means
    monkeypatch.setattr(module, "_means", lambda array, ranges: 1e6 * means(array, ranges))
    errors = run("-o", "out", "--pool", "mean", "--out-dtype", "float16")
    assert "of 7 rows failed" in errors
    (part,) = Path("out").glob("*.safetensors")
    assert "too large for float16" in safe_open(part, "np").metadata()["errors"]


@pytest.mark.parametrize("out", ["out", "out.safetensors", "out.npz", "out.parquet"])
def test_an_interrupted_run_is_resumed(out, monkeypatch):
    pooled = ["--pool", "mean"]
    run("-o", f"whole{out.removeprefix('out')}", *pooled)
    rows = module.text_activations

    def interrupted(*arguments):
        for number, row in enumerate(rows(*arguments)):
            if number == 3:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr("gpt_cli.engine.text_activations", interrupted)
        assert "with --resume continues" in finished_interrupted("-o", out, *pooled)
    run("-o", out, *pooled, "--resume")
    assert "is complete" not in run("-o", out, *pooled, "--resume")
    if out == "out":
        assert len(list(Path("out").glob("part-*"))) == 2
        assert all(same(read("out")[name], array) for name, array in read("whole").items())
    elif not out.endswith(".parquet"):
        whole = read(f"whole{out.removeprefix('out')}")
        assert all(same(read(out)[name], array) for name, array in whole.items())
    other = refusal(
        "activations", "in.jsonl", "--hook", "hook_embed", "-o", out, *pooled, "--resume"
    )
    assert f'--hook of {out} was ["{GLOB}"], and is now ["hook_embed"]' in other


def finished_interrupted(*flags):
    command = ["activations", "in.jsonl", "--hook", GLOB, "--threads", "1", *flags]
    process = in_process.finished(*command)
    assert process.returncode == 130
    return process.stderr.decode()


def test_a_file_has_the_same_bytes_each_time():
    for out in ("a.safetensors", "b.safetensors"):
        run("-o", out)
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


def test_a_full_disk_loses_no_finished_part(monkeypatch):
    monkeypatch.setattr(parts, "BYTES", 1)
    real = LocalFileSystem.open

    def full(self, path, mode="rb", **options):
        stream = real(self, path, mode, **options)
        if mode == "wb" and "part-000000000002" in path:
            stream.write = lambda data: no_room() if data else 0
        return stream

    def no_room():
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "open", full)
        errors = run("-o", "out", code=5)
    assert errors == ("gpt-cli: error: cannot write out: full; resume the job when that is fixed\n")
    finished = sorted(file.name for file in Path("out").iterdir())
    assert finished == ["_job.json", *(f"part-{row:012}.safetensors" for row in (0, 1))]
    run("-o", "out", "--resume")
    run("-o", "whole.safetensors")
    whole = read("whole.safetensors")
    assert all(same(read("out")[name], array) for name, array in whole.items() if "row" in name)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--hook", "hook_embd", "-o", "o"], "did you mean hook_embed"),
        (["--hook", "hook_resid_post", "-o", "o"], "without its layer: give blocks.0.hook_resid_"),
        (
            ["--hook", "*pattern", "--pool", "last", "-o", "o"],
            "--pool must not be set for blocks.0.attn.hook_pattern, which has a number per key: "
            "leave it out",
        ),
        (["-o", "o"], "no hook point: give --hook NAME"),
        (["--json", "--hook", "*", "-o", "o"], "--json needs --hooks"),
        (["--hooks", "--hook", "hook_embd"], "did you mean hook_embed"),
        (["--hook", "*"], "no output: add --output"),
        (["--hook", "*", "-o", "in.jsonl"], "for arrays, name a FOLDER/ or a file that ends with"),
        (["--hook", "*", "-o", "o.parquet"], "--pool must be set for the table o.parquet: choose"),
        (["--hook", "*", "-o", "o/*.jsonl"], "FOLDER/*.safetensors or FOLDER/*.npz"),
        (["--hook", "*", "-o", "there"], "there has other files"),
        (["--hook", "*", "-o", "there.npz"], "there.npz exists: name another output"),
        (["--hook", "*", "-o", "there.npz", "--resume"], "has no records of this command"),
        (["--hook", "*", "--bos", "-m", "tiny", "-o", "a/b/c"], "there is no folder"),
    ],
)
def test_a_refusal_leaves_nothing(flags, says):
    Path("there").mkdir()
    for file in ("there/file", "there.npz"):
        Path(file).touch()
    before = {path.name for path in Path().rglob("*")}
    assert says in refusal("activations", "in.jsonl", *flags)
    assert {path.name for path in Path().rglob("*")} == before


@pytest.mark.parametrize("out", ["out.safetensors", "out.npz"])
@pytest.mark.parametrize("data", [b"", b"\x08", b"\xff" * 20, b"PK\x03\x04", b"[]", "cut"])
def test_a_damaged_file_is_refused(out, data):
    run("-o", out)
    whole = Path(out).read_bytes()
    Path(out).write_bytes(whole[:-9] if data == "cut" else data)
    command = ["activations", "in.jsonl", "--hook", GLOB, "-o", out, "--resume"]
    assert refusal(*command).endswith(" has no records of this command: name another output\n")


def test_hooks_are_listed_with_their_sizes(engine):
    config = engine.model.config
    listed = records_here("activations", "--hooks", "--json")
    assert listed[0] == {"name": "hook_embed", "shape": ["T", config.n_embd],
                         "bytes_per_token": 4 * config.n_embd}  # fmt: skip
    scores = next(hook for hook in listed if hook["name"].endswith("hook_attn_scores"))
    assert scores["shape"] == [config.n_head, "T", "T"]
    assert scores["bytes_per_token_and_key"] == 4 * config.n_head
    half = records_here("activations", "--hooks", "--json", "--out-dtype", "float16")
    assert half[0]["bytes_per_token"] == 2 * config.n_embd
    out, _ = run_here("activations", "--hooks")
    lines = out.decode().splitlines()
    assert [line.split()[0] for line in lines] == [hook["name"] for hook in listed]
    assert lines[7].split()[-1] == f"{4 * config.n_head}*T"
    assert lines[0].split()[-1] == str(4 * config.n_embd)
    matching = records_here("activations", "--hooks", "--json", "--hook", GLOB)
    assert [hook["name"] for hook in matching] == HOOKS


def test_the_list_of_hooks_has_a_header_on_a_terminal(monkeypatch):
    monkeypatch.setattr("gpt_cli.cli.commands.activations.on_terminal", lambda _: True)
    out, _ = run_here("activations", "--hooks", "--hook", GLOB)
    header, first, *_ = out.decode().splitlines()
    assert header.split() == ["name", "shape", "bytes", "per", "token"]
    assert header.index("shape") == first.index("(")
