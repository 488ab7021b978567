"""Checkpoints in int8: `gpt-cli quantize` writes them, and every command reads them."""

import functools
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import gpt_cli
from gpt_cli.errors import CheckpointError
from gpt_cli.folder.config import is_matrix, is_transposed
from gpt_cli.gpt2 import assembly, checkpoint
from gpt_cli.gpt2.model import forward
from gpt_cli.ops import get_ops
from gpt_cli.ops.int8 import quantize
from gpt_cli.system.library import native_library
from support.checkpoints import (
    CASES,
    CONFIG,
    Stored,
    make_weights,
    safetensors_bytes,
    store,
    stored_tensors,
    write_checkpoint,
)
from support.in_process import records_here, refusal, run_here
from support.processes import COMMAND, posix

FILE = "model.safetensors"
INT8 = {"quant_method": "gpt-cli", "bits": 8, "block_size": 64}  # in config.json
WIDE = CONFIG | {"n_embd": 96, "n_layer": 2}  # several groups in every row and column
IDS = [[*range(0, 280, 7)], [*range(3, 283, 7)]]
STORED = ["hub", "saved", "shards", "f16", "bf16", "untied", "tied_but_stored"]
STORED += ["tied_but_different", "padded_vocabulary", "wide"]


@pytest.fixture(params=["numpy", "native"])
def computed_by(request, monkeypatch) -> str:
    if request.param == "native":
        request.getfixturevalue("library")
    monkeypatch.setenv("GPT_CLI_OPS", request.param)
    return request.param


@pytest.fixture(scope="module")
def original(case_folder, tmp_path_factory):
    """Return a function that returns the folder of one of `STORED`, not in int8."""
    wide = write_checkpoint(tmp_path_factory.mktemp("wide"), WIDE)
    return lambda case: wide if case == "wide" else case_folder(case)


@pytest.fixture(scope="module")
def in_int8(original, tmp_path_factory):
    """Return a function that returns the folder of one of `STORED`, quantized once."""

    @functools.cache
    def make(case: str) -> Path:
        folder = tmp_path_factory.mktemp("int8") / case
        printed = run_here("quantize", original(case), "--output", folder)
        assert printed == (f"{folder}\n".encode(), "")
        return folder

    return make


@pytest.fixture
def source(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "source", CONFIG)


def load(folder: Path, dtype: str = "auto"):
    """Load a model, by NumPy's reference for int8 where there is no library."""
    with pytest.MonkeyPatch.context() as patch:
        if native_library() is None:
            patch.setenv("GPT_CLI_OPS", "numpy")
        return gpt_cli.load(str(folder), dtype=dtype)


def store_tensors(folder: Path, changes: dict[str, Stored]) -> None:
    """Write the weights of a folder again, with changed tensors."""
    (folder / FILE).write_bytes(safetensors_bytes(stored_tensors(CONFIG) | changes))


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- what a folder in int8 computes --------------------------------------------------------------


@pytest.mark.parametrize("case", STORED)
def test_the_logits_are_those_of_the_original_that_is_rounded_when_loaded(
    original, in_int8, computed_by, case
):
    engine, other = load(in_int8(case), "int8"), load(original(case), "int8")
    assert engine.model.ops.name == other.model.ops.name == computed_by
    assert np.array_equal(engine.logits(IDS), other.logits(IDS))


@pytest.mark.parametrize("case", STORED)
def test_in_float32_it_is_a_model_of_the_rounded_weights(original, in_int8, computed_by, case):
    opened = checkpoint.open_checkpoint(original(case))
    tensors = dict(opened.tensors)
    for name, tensor in tensors.items():
        if is_matrix(name, tensor.shape):
            tensors[name] = quantize(tensor[:], transposed=is_transposed(name))[:]
    model = assembly.assemble(opened.config, get_ops("cpu", "float32"), tensors)
    expected = forward(model, np.array(IDS))
    engine = load(in_int8(case), "float32")
    assert engine.model.ops.dtype == "float32"
    assert abs(engine.logits(IDS) - expected).max() <= 1e-5 * expected.std()
    exact = load(original(case), "float32").logits(IDS)
    assert abs(expected - exact).max() > 1e-3 * exact.std()


def test_int8_cannot_be_quantized_again(in_int8, tmp_path):
    assert "is in int8 already" in refusal("quantize", in_int8("hub"), "-o", tmp_path / "new")
    assert everything_below(tmp_path) == set()


# --- what is in the folder -----------------------------------------------------------------------


def stored_in(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """The types and the shapes in a file, by the name of each tensor."""
    with safe_open(folder / FILE, framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}


def test_the_file_has_the_matrices_in_int8_with_the_scales_of_their_groups(in_int8):
    expected = {"wpe.weight": ("F32", [80, 96])}
    expected |= {"wte.weight": ("I8", [290, 96]), "wte.weight_scale": ("F32", [290, 2])}
    attention = ("attn.c_attn", 96, 288, 2), ("attn.c_proj", 96, 96, 2)
    for h in ("h.0", "h.1"):
        for name, n_in, n_out, groups in (
            *attention, ("mlp.c_fc", 96, 384, 2), ("mlp.c_proj", 384, 96, 6)
        ):  # fmt: skip
            expected[f"{h}.{name}.weight"] = "I8", [n_in, n_out]
            expected[f"{h}.{name}.weight_scale"] = "F32", [groups, n_out]
            expected[f"{h}.{name}.bias"] = "F32", [n_out]
    for ln in ("h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"):
        expected |= {f"{ln}.{part}": ("F32", [96]) for part in ("weight", "bias")}
    assert stored_in(in_int8("wide")) == expected


@pytest.mark.parametrize("case", STORED[:-1])
def test_the_file_has_the_same_names_however_the_original_was_stored(in_int8, case):
    vocab_size, expected = CASES[case].config["vocab_size"], stored_in(in_int8("hub"))
    heads = ["lm_head.weight"] if case in ("untied", "tied_but_different") else []
    for name in ("wte.weight", *heads):
        expected |= {name: ("I8", [vocab_size, 32]), f"{name}_scale": ("F32", [vocab_size, 1])}
    assert stored_in(in_int8(case)) == expected


@pytest.mark.parametrize("case", ["hub", "bf16"])
def test_other_tensors_than_matrices_stay_exactly_as_they_are(original, in_int8, case):
    before, after = (checkpoint.find_tensors(folder(case)) for folder in (original, in_int8))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if not is_matrix(name, tensor.shape):
            assert np.array_equal(tensor[:], after[name][:]), name


def test_the_other_files_of_a_model_are_copied(source, tmp_path):
    (source / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    (source / "added_tokens.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"of no use")
    to = tmp_path / "deep" / "down"
    assert run_here("quantize", source, "-o", to) == (f"{to}\n".encode(), "")
    copied = ["vocab.json", "merges.txt", "generation_config.json", "added_tokens.json"]
    assert everything_below(to) == {*copied, "config.json", FILE}
    for name in copied:
        assert (to / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((to / "config.json").read_bytes()) == CONFIG | {"quantization_config": INT8}
    assert load(to).model.config.eos_token_id == (5, 6)


@posix
def test_links_as_in_the_cache_become_files_in_a_folder_that_was_empty(source, tmp_path):
    links, to = tmp_path / "links", tmp_path / "new"
    links.mkdir()
    to.mkdir()
    for file in source.iterdir():
        (links / file.name).symlink_to(file)
    run_here("quantize", links, "-o", to)
    assert not any(file.is_symlink() for file in to.iterdir())
    assert (to / "vocab.json").read_bytes() == (source / "vocab.json").read_bytes()
    assert len({path.stat().st_mode for path in to.iterdir()}) == 1  # the weights' too
    assert load(to).model.ops.dtype == "int8"


def test_info_shows_the_type_and_the_memory_that_it_takes(original, in_int8):
    folders = original("wide"), in_int8("wide")
    full, held = (records_here("info", folder, "--json")[0] for folder in folders)
    assert (full["dtype"], held["dtype"]) == ("float32", "int8")
    assert full["parameters"] == held["parameters"]
    assert full["weights_bytes"] / 4 < held["weights_bytes"] < full["weights_bytes"] / 3
    assert held["kv_cache_bytes"] == full["kv_cache_bytes"] / 2


# --- what cannot be written ----------------------------------------------------------------------


@pytest.fixture
def not_written(source, tmp_path):
    """Refuse to quantize `source`, which leaves no file; return the error."""

    def refused(code, to=tmp_path / "new"):
        before = everything_below(tmp_path)
        error = refusal("quantize", source, "-o", to, code=code)
        assert everything_below(tmp_path) == before
        return error

    return refused


@pytest.mark.parametrize("name", ["new", "new/precious"])
def test_an_existing_file_is_left_alone(tmp_path, not_written, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert f"{tmp_path / 'new'} exists and is not an empty folder" in not_written(2)
    assert (tmp_path / name).read_text() == "mine"


def test_a_name_that_is_no_model_is_exit_code_3(tmp_path):
    refusal("quantize", tmp_path / "nothing", "-o", tmp_path / "new", code=3)
    refusal("quantize", "no/model", "--offline", "-o", tmp_path / "new", code=3)
    assert everything_below(tmp_path) == set()


@pytest.mark.parametrize(
    "name", ["wte.weight", "h.2.mlp.c_proj.weight", "h.0.ln_1.bias", "wpe.weight"]
)
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF])
def test_weights_that_are_not_finite_are_not_written(source, not_written, name, bits):
    weight = make_weights(CONFIG)[name]
    weight.reshape(-1)[7:8].view(np.uint32)[:] = bits
    store_tensors(source, {name: store(weight)})
    assert f"the tensor {name} is not finite" in not_written(4)


def test_a_model_without_a_tokenizer_or_with_damaged_weights_is_not_written(source, not_written):
    (source / "merges.txt").rename(source / "aside")
    assert f"{source} has no merges.txt" in not_written(4)
    (source / "aside").rename(source / "merges.txt")
    (source / FILE).write_bytes((source / FILE).read_bytes()[:-1])
    assert "not safetensors" in not_written(4)


def test_a_folder_that_cannot_be_made_is_exit_code_5(tmp_path, not_written):
    (tmp_path / "file").write_text("no folder")
    to = tmp_path / "file" / "new"
    error = not_written(5, to)
    assert f"cannot write {to}: " in error
    assert "give another folder" in error


@posix
def test_a_full_disk_is_exit_code_5(tmp_path):
    import resource

    to = tmp_path / "new"
    finished = subprocess.run(
        [*COMMAND, "quantize", "tiny", "-o", str(to)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
        capture_output=True,
        timeout=60,
    )
    assert finished.returncode == 5, finished.stderr
    message = f"gpt-cli: error: cannot write {to}: File too large; give another folder\n"
    assert finished.stderr.decode() == message
    assert everything_below(tmp_path) == set()


# --- what cannot be read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quantization",
    [
        *(INT8 | change for change in ({"block_size": 32}, {"bits": 4}, {"more": 1})),
        *({"quant_method": "gptq", "bits": 4}, {}, "int8", [], False),
    ],
    ids=str,
)
def test_another_kind_of_quantization_is_refused(source, tmp_path, quantization):
    (source / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    for arguments in (["quantize", source, "-o", tmp_path / "new"], ["info", source]):
        error = refusal(*arguments, code=4)
        assert f"{source / 'config.json'}: quantization_config is " in error
    with pytest.raises(CheckpointError, match="quantization_config is "):
        load(source)


def int8_tensor(*shape: int) -> Stored:
    return Stored("I8", shape, bytes(int(np.prod(shape))))


def int8_matrix(name: str, shape: tuple[int, ...], groups: tuple[int, ...], dtype: str = "F32"):
    """Return a matrix in int8 with its scales, which are all 1."""
    scale = store(np.ones(groups, np.float32), dtype)
    return {name: int8_tensor(*shape), name + "_scale": scale}


FC, PROJ, WTE = "h.1.mlp.c_fc.weight", "h.1.mlp.c_proj.weight", "wte.weight"
ONES = store(np.ones((1, 128), np.float32))
UNSIGNED = Stored("U8", (32, 128), bytes(32 * 128))
WRONG_TENSORS = {
    "no scale": ({FC: int8_tensor(32, 128)}, f"{FC} is I8"),
    "not in int8": ({FC + "_scale": ONES}, FC + "_scale"),
    "no weight": ({"h.3_scale": store(np.ones(3, np.float32))}, "h.3_scale"),
    "an unsigned weight": ({FC: UNSIGNED, FC + "_scale": ONES}, FC),
    "too many groups": (
        int8_matrix(FC, (32, 128), (2, 128)),
        f"{FC}_scale is F32 [2, 128], but must be F32 [1, 128]",
    ),
    "too few groups": (
        int8_matrix(PROJ, (128, 32), (1, 32)),
        f"{PROJ}_scale is F32 [1, 32], but must be F32 [2, 32]",
    ),
    "transposed scales": (
        int8_matrix(WTE, (290, 32), (5, 32)),
        "wte.weight_scale is F32 [5, 32], but must be F32 [290, 1]",
    ),
    "half scales": (
        int8_matrix(FC, (32, 128), (1, 128), "F16"),
        f"{FC}_scale is F16 [1, 128], but must be F32 [1, 128]",
    ),
    "a weight of another size": (
        int8_matrix(FC, (32, 127), (1, 127)),
        f"{FC} has the shape [32, 127], but config.json requires [32, 128]",
    ),
    "a single number": (int8_matrix(FC, (), ()), FC),
    "a row": (int8_matrix(WTE, (290,), (5,)), WTE),
}


@pytest.mark.parametrize("fault", WRONG_TENSORS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_wrong_tensor_is_named(source, fault, dtype):
    changes, complaint = WRONG_TENSORS[fault]
    (source / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": INT8}))
    store_tensors(source, changes)
    with pytest.raises(CheckpointError, match=re.escape(complaint)) as caught:
        load(source, dtype)
    assert str(caught.value).startswith(f"{source}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_scale_that_is_not_finite_is_noticed(source, computed_by, dtype, bits):
    scale = np.ones((1, 128), np.float32)
    scale.view(np.uint32)[0, 5] = bits
    store_tensors(source, {FC: int8_tensor(32, 128), FC + "_scale": store(scale)})
    with pytest.raises(CheckpointError, match="its weights are damaged"):
        load(source, dtype).logits(IDS)


# --- what int8 needs -----------------------------------------------------------------------------


@pytest.fixture
def without_library(monkeypatch):
    """Let commands run as if gpt-cli had been installed without its library."""
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    monkeypatch.setattr("gpt_cli.ops.select.native_library", lambda: None)


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize("env", [{}, {"GPT_CLI_OPS": "native"}])
def test_without_the_library_the_error_says_how_to_get_it(in_int8, env):
    for model in (["-m", "tiny", "--dtype", "int8"], ["-m", in_int8("saved")]):
        what = "GPT_CLI_OPS=native" if env else "--dtype int8"
        assert refusal("generate", *model, "text", **env) == (
            f"gpt-cli: error: {what} needs the compiled library, and gpt-cli was installed without "
            "it: install a C compiler, then reinstall gpt2-cli (`gpt-cli doctor` says more)\n"
        )


@pytest.mark.usefixtures("without_library")
def test_without_the_library_int8_can_be_written_and_computed_otherwise(source, tmp_path):
    to = tmp_path / "new"
    run_here("quantize", source, "-o", to)
    arguments = ["generate", "-m", to, "--seed", "1", "-n", "3", "text"]
    out, errors = run_here(*arguments, "--dtype", "float32")
    assert (bool(out), errors) == (True, "")
    assert " in int8: loaded" in run_here(*arguments, "--stats", GPT_CLI_OPS="numpy")[1]
