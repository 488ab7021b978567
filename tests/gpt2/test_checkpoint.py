import json
import math
import operator
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gpt_cli
from gpt_cli.errors import CheckpointError
from gpt_cli.folder import config
from gpt_cli.folder.config import GPT2Config, expected_shapes
from gpt_cli.folder.dtypes import NAMES_OF_CODES
from gpt_cli.folder.tensors import Tensor, unchanged
from gpt_cli.folder.weight_files import read_tensors
from gpt_cli.gpt2 import assembly, checkpoint
from gpt_cli.gpt2.memory import cache_bytes, count_parameters, weights_bytes
from gpt_cli.gpt2.weights import Weights
from gpt_cli.ops.numpy_ops import NumPyOps
from support.checkpoints import (
    CONFIG,
    Stored,
    make_weights,
    safetensors_bytes,
    store,
    stored_tensors,
    write_checkpoint,
)
from support.torch_files import pickled, views_of, write_torch, zip_bytes

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
UNTIED = CONFIG | {"tie_word_embeddings": False}
CHANGED = "changed while it was read"


def load(folder: Path):
    return checkpoint.load(folder, NumPyOps())


def refusal(folder: Path) -> str:
    """Return the message with which loading fails, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def narrowed(array, dtype):
    """Return an array with the bits that a narrower type keeps."""
    if dtype == "F16":
        return array.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return array


def store_tensors(folder: Path, tensors: dict[str, Stored]) -> None:
    (folder / FILE).write_bytes(safetensors_bytes(tensors))


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint(tmp_path, CONFIG)


@pytest.fixture
def sharded(tmp_path) -> Path:
    return write_checkpoint(tmp_path, CONFIG, shards=3, layout="saved")


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("layout", ["hub", "saved"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_read_exactly_into_aligned_float32(tmp_path, dtype, layout, shards):
    write_checkpoint(tmp_path, UNTIED, dtype=dtype, layout=layout, shards=shards)
    weights = make_weights(UNTIED)
    tensors = checkpoint.find_tensors(tmp_path)
    assert tensors.keys() == weights.keys()
    for name, tensor in tensors.items():
        array = tensor[:]
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0
        assert np.array_equal(array, narrowed(weights[name], dtype)), name


def test_the_data_of_the_hub_layout_has_odd_offsets(folder):
    assert all(tensor.offset % 2 for tensor in checkpoint.find_tensors(folder).values())


def test_the_parts_of_the_model_have_the_tensors_of_their_names(tmp_path):
    model, weights = load(write_checkpoint(tmp_path, UNTIED)), make_weights(UNTIED)
    for layer, b in enumerate(model.h):
        for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
            part = operator.attrgetter(name)(b)
            assert np.array_equal(part.weight, weights[f"h.{layer}.{name}.weight"])
            assert np.array_equal(part.bias, weights[f"h.{layer}.{name}.bias"])
    assert np.array_equal(model.wte, weights["wte.weight"].T)
    assert np.array_equal(model.wpe, weights["wpe.weight"])
    assert np.array_equal(model.ln_f.bias, weights["ln_f.bias"])
    assert np.array_equal(model.lm_head.weight, weights["lm_head.weight"].T)


def test_loading_parses_the_configuration_and_the_header_once(case_folder, monkeypatch):
    parsed = Counter()

    def counting(read):
        return lambda path: parsed.update([path.name]) or read(path)

    monkeypatch.setattr(config, "read_json", counting(config.read_json))
    monkeypatch.setattr(checkpoint, "read_tensors", counting(checkpoint.read_tensors))
    gpt_cli.load(str(case_folder("saved")))
    assert parsed.pop("generation_config.json", 1) == 1
    assert parsed == {"config.json": 1, "model.safetensors": 1}


def test_bfloat16_keeps_infinities_and_the_sign_of_zero(tmp_path):
    special = np.array([np.inf, -np.inf, -0.0, 2.0**-130], np.float32)
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"x": store(special, "BF16")}, odd=True))
    ((_, tensor),) = read_tensors(path)
    assert tensor[:].tobytes() == special.tobytes()


@pytest.mark.parametrize("name", ["h.0.attn.masked_bias", "transformer.h.0.attn.bias"])
def test_stored_masks_are_ignored(folder, name):
    tensors = stored_tensors(CONFIG, layout="saved")
    tensors[name] = store(np.array(-1e4, np.float32))
    store_tensors(folder, tensors)
    assert load(folder)


def test_a_single_file_comes_before_an_index(sharded):
    store_tensors(sharded, stored_tensors(CONFIG, seed=5))
    expected = make_weights(CONFIG, seed=5)["wte.weight"]
    assert np.array_equal(load(sharded).wte, expected.T)


@pytest.mark.parametrize(
    ("layers", "heads", "width", "parameters"),
    [
        (6, 12, 768, 81_912_576),
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
)
def test_the_published_models_have_their_known_numbers_of_parameters(
    layers, heads, width, parameters
):
    config = GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
    assert count_parameters(config) == parameters


@pytest.mark.parametrize(
    ("dtype", "matrix_bytes", "itemsize"),
    [("float32", 4, 4), ("float16", 2, 2), ("bfloat16", 2, 4), ("int8", 1 + 2 / 64, 2)],
)
def test_the_bytes_of_a_model_are_those_of_its_numbers(dtype, matrix_bytes, itemsize):
    weights, config = make_weights(UNTIED), GPT2Config.from_dict(UNTIED)
    matrices = sum(w.size for name, w in weights.items() if w.ndim == 2 and name != "wpe.weight")
    others = sum(weight.size for weight in weights.values()) - matrices
    assert weights_bytes(config, dtype) == matrix_bytes * matrices + 4 * others
    assert cache_bytes(config, 80, itemsize) == itemsize * 2 * 3 * 80 * 32  # layers, width


@pytest.mark.parametrize(
    ("dtype", "other", "stored"),
    [
        ("F32", "F32", "float32"),
        ("F16", "F16", "float16"),
        ("BF16", "BF16", "bfloat16"),
        ("F16", "BF16", "float32"),
    ],
)
def test_the_type_of_a_checkpoint_is_that_of_all_its_matrices(folder, dtype, other, stored):
    tensors = stored_tensors(CONFIG, dtype=dtype)
    tensors["wte.weight"] = stored_tensors(CONFIG, dtype=other)["wte.weight"]
    for name in ("wpe.weight", "ln_f.bias"):  # no matrices
        tensors[name] = stored_tensors(CONFIG)[name]
    store_tensors(folder, tensors)
    assert checkpoint.open_checkpoint(folder).stored_dtype == stored


@pytest.mark.parametrize("row", [None, 0, 1023, 1024, 2499])
def test_a_tied_head_is_dropped_if_it_equals_wte_in_all_rows(row):
    wte, head = np.ones((2, 2500, 2), np.float32)
    head[[] if row is None else row, 1] = 2
    tensors = {"wte.weight": wte, "lm_head.weight": head, "wpe.weight": wte}
    for tied in (True, False):
        config = GPT2Config(tie_word_embeddings=tied)
        kept = assembly.without_tied_head(tensors, config)
        left = {"lm_head.weight"} if tied and row is None else set()
        assert kept.keys() == tensors.keys() - left
    assert kept["wte.weight"] is wte


def test_a_million_layers_are_counted_without_a_list():
    tracemalloc.start()
    count = count_parameters(GPT2Config(n_layer=2**20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
    assert count == 39_385_344 + 2**20 * 7_087_872


# --- tensors that do not fit ---------------------------------------------------------------------


def without(name):
    return lambda tensors: tensors.pop(name)


def with_tensor(name, shape, dtype="F32", size=4):
    data = bytes(size * int(np.prod(shape)))
    return lambda tensors: tensors.update({name: Stored(dtype, shape, data)})


def turned(shape_of_one):
    """Turn all matrices of layers, as PyTorch's Linear has them, but one has another shape."""

    def turn(tensors):
        for name, stored in tensors.items():
            if re.fullmatch(r"h\.\d\.(attn|mlp)\.c_\w+\.weight", name):
                tensors[name] = replace(stored, shape=stored.shape[::-1])
        with_tensor("h.1.mlp.c_fc.weight", shape_of_one)(tensors)

    return turn


WRONG_TENSORS = {
    "turned, a vector": (turned((32,)), "h.1.mlp.c_fc.weight has the shape [32], but"),
    "turned, three axes": (turned((8, 4, 1)), "h.1.mlp.c_fc.weight has the shape [8, 4, 1], but"),
    "missing": (without("h.1.mlp.c_fc.bias"), "h.1.mlp.c_fc.bias is missing"),
    "missing embedding": (without("wpe.weight"), "wpe.weight is missing"),
    "a layer too many": (with_tensor("h.3.ln_1.weight", (32,)), "h.3.ln_1.weight"),
    "unknown": (with_tensor("h.0.attn.rotary.inv_freq", (4,)), "h.0.attn.rotary.inv_freq"),
    "too few positions": (with_tensor("wpe.weight", (63, 32)), "wpe.weight has the shape [63, 32]"),
    "transposed": (
        with_tensor("h.2.mlp.c_fc.weight", (128, 32)),
        "h.2.mlp.c_fc.weight has the shape [128, 32], but config.json requires [32, 128]",
    ),
    "other rank": (with_tensor("ln_f.bias", (32, 1)), "ln_f.bias has the shape [32, 1]"),
    "empty": (with_tensor("ln_f.bias", (0,)), "ln_f.bias has the shape [0]"),
    "integers": (with_tensor("ln_f.bias", (32,), "I64", 8), "ln_f.bias is I64"),
    "eight bits": (with_tensor("ln_f.bias", (32,), "F8_E4M3", 1), "ln_f.bias is F8_E4M3"),
    "both names": (with_tensor("transformer.ln_f.bias", (32,)), "duplicate tensor ln_f.bias"),
    "a head of another size": (with_tensor("lm_head.weight", (7, 32)), "lm_head.weight has the"),
}


@pytest.mark.parametrize("fault", WRONG_TENSORS)
def test_a_wrong_tensor_is_named(folder, fault):
    change, complaint = WRONG_TENSORS[fault]
    tensors = stored_tensors(CONFIG)
    change(tensors)
    store_tensors(folder, tensors)
    assert complaint in refusal(folder)


def test_an_untied_head_must_be_there(tmp_path):
    write_checkpoint(tmp_path, UNTIED, head="omitted")
    assert "lm_head.weight is missing" in refusal(tmp_path)


def test_a_damaged_shard_or_one_with_the_tensors_of_another_is_named(sharded):
    (sharded / SHARDS[2]).write_bytes((sharded / SHARDS[1]).read_bytes())
    assert f"{SHARDS[2]}: duplicate tensor" in refusal(sharded)
    (sharded / SHARDS[2]).write_bytes((sharded / SHARDS[1]).read_bytes()[:-1])
    assert f"{sharded / SHARDS[2]} is not safetensors" in refusal(sharded)


# --- damaged files -------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["cut", "replaced", "deleted"])
def test_a_file_that_changes_while_it_is_read_is_refused(folder, change):
    tensors = checkpoint.find_tensors(folder)
    path = folder / FILE
    data = path.read_bytes()
    path.unlink()
    if change != "deleted":
        path.write_bytes(data[:3000] if change == "cut" else data)
        os.utime(path, (1, 1))
    with pytest.raises(CheckpointError, match=CHANGED):
        for tensor in tensors.values():
            tensor[:]


@pytest.mark.parametrize("name", [FILE, "config.json", "vocab.json", "merges.txt"])
def test_a_model_that_changes_while_it_is_read_is_refused(folder, name):
    with unchanged(folder):
        (folder / "other.txt").write_text("no file of the model")
    with pytest.raises(CheckpointError, match=CHANGED), unchanged(folder):
        (folder / name).rename(folder / "aside")


def test_a_folder_that_is_replaced_while_it_is_read_is_refused(folder, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    one, other = (shutil.copytree(folder, models / name) for name in ("one", "other"))
    os.utime(other / "config.json", (1, 1))
    with pytest.raises(CheckpointError, match=CHANGED), unchanged(one):
        one.rename(models / "aside")
        other.rename(one)


# --- shards --------------------------------------------------------------------------------------


def test_a_missing_shard_is_named(sharded):
    (sharded / SHARDS[1]).unlink()
    assert f"{SHARDS[1]} is missing" in refusal(sharded)
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"x": "x" * 300 + ".safetensors"}}))
    assert "xxx is missing" in refusal(sharded)


def test_shards_that_are_not_all_in_the_index_lack_tensors(sharded):
    files = json.loads((sharded / INDEX).read_bytes())["weight_map"].items()
    index = {"weight_map": {name: file for name, file in files if file != SHARDS[0]}}
    (sharded / INDEX).write_text(json.dumps(index))
    assert "is missing" in refusal(sharded)


@pytest.mark.parametrize(
    "path", ["../{}", "/etc/{}", "sub/../{}", "..", ".", "/", "", "pytorch_model.bin", "a\0b"]
)
def test_an_index_that_names_anything_but_files_beside_it_is_refused(sharded, path):
    (sharded.parent / SHARDS[0]).write_bytes((sharded / SHARDS[0]).read_bytes())
    index, path = json.loads((sharded / INDEX).read_bytes()), path.format(SHARDS[0])
    index["weight_map"]["transformer.wte.weight"] = path
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"{sharded / INDEX} names {path!r:.80}, not a" in refusal(sharded)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff", b"[]", b"null", b"{}", b"[" * 200_000),
        *(b'{"weight_map": %s}' % of for of in (b"{}", b"null", b'["a.safetensors"]')),
        *(b'{"weight_map": %s}' % of for of in (b'{"a": ["b"]}', b'{"a": "b", "c": 1}')),
    ],
    ids=lambda content: content[:40],
)
def test_a_damaged_index_is_refused_by_its_name(sharded, content):
    (sharded / INDEX).write_bytes(content)
    assert refusal(sharded).startswith(str(sharded / INDEX))


# --- files of PyTorch, and heads beside the transformer -------------------------------------------


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_files_of_pytorch_have_the_same_tensors(tmp_path, older, shards):
    tensors = stored_tensors(UNTIED, layout="saved")
    write_torch(write_checkpoint(tmp_path, UNTIED), tensors, older=older, shards=shards)
    weights = make_weights(UNTIED)
    read = checkpoint.find_tensors(tmp_path)
    assert read.keys() == weights.keys()
    assert all(np.array_equal(tensor[:], weights[name]) for name, tensor in read.items())


def test_a_head_at_the_place_of_wte_is_tied_without_a_look(tmp_path, monkeypatch):
    tensors = stored_tensors(CONFIG, head="wte")
    tensors["lm_head.weight"] = tensors["wte.weight"]
    write_torch(write_checkpoint(tmp_path, CONFIG), tensors)
    opened = checkpoint.open_checkpoint(tmp_path)
    monkeypatch.setattr(Tensor, "__getitem__", None)
    assert "lm_head.weight" not in assembly.without_tied_head(opened.tensors, opened.config_json)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_turned_matrices_are_copied(tmp_path, dtype, native):
    name, weights = "h.1.attn.c_proj.weight", make_weights(CONFIG)
    views, storages = views_of(stored_tensors(CONFIG, dtype=dtype))
    view = views[name]
    storages[view.storage.key] = store(weights[name].T, dtype).data
    views[name] = view._replace(strides=view.strides[::-1])
    (write_checkpoint(tmp_path, CONFIG) / FILE).unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(zip_bytes(pickled(views), storages))
    stored, is_transposed = assembly._as_stored(name, checkpoint.find_tensors(tmp_path)[name])
    assert (stored.strides, is_transposed) == (None, True)
    for ops in (NumPyOps(), native(NAMES_OF_CODES[dtype])):
        array = Weights(checkpoint.load(tmp_path, ops))[name]
        assert np.array_equal(array, narrowed(weights[name], dtype))


@pytest.mark.parametrize("name", ["score.weight", "v_head.summary.bias", "optimizer.state.0"])
def test_tensors_beside_the_transformer_are_ignored_with_one_note(folder, name, caplog):
    tensors = stored_tensors(CONFIG, layout="saved") | {name: Stored("I64", (2,), bytes(16))}
    store_tensors(folder, tensors)
    load(folder)
    assert caplog.messages == [
        f"{folder}: ignoring tensors beside the transformer, such as {name!r}"
    ]
    store_tensors(folder, tensors | {f"transformer.{name}": tensors[name]})
    assert f"tensors that GPT-2 does not have, such as transformer.{name}" in refusal(folder)


# --- config.json and the weights together --------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "llama"}, "model_type is"),
        ({"n_layer": 4}, "h.3.attn.c_attn.weight is missing"),
        (
            {"n_layer": 2},
            "config.json has n_layer 2, and the weights have 3 layers: get the weights",
        ),
        ({"n_embd": 64}, "wte.weight has the shape [290, 32], but config.json requires [290, 64]"),
        ({"vocab_size": 300}, "wte.weight has the shape"),
        ({"n_inner": 100}, "h.0.mlp.c_fc.weight has the shape"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(folder, changes, complaint):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    assert complaint in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "layer", "scale"),
    [
        ({}, 2, 8**-0.5),
        ({"scale_attn_weights": False}, 2, 1),
        ({"scale_attn_by_inverse_layer_idx": True}, 0, 8**-0.5),
        ({"scale_attn_by_inverse_layer_idx": True}, 2, 8**-0.5 / 3),
        ({"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}, 1, 1 / 2),
    ],
)
def test_the_scale_of_the_scores_follows_the_config(make_model, changes, layer, scale):
    assert make_model(**changes).h[layer].attn.scale == pytest.approx(scale, rel=1e-15)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_loading_takes_little_more_memory_than_the_weights(folder):
    sizes = CONFIG | {"n_embd": 256, "n_layer": 16, "n_positions": 1024}
    config = GPT2Config.from_dict(sizes)
    shapes = dict(expected_shapes(config)).items()
    zeros = {name: Stored("F32", shape, bytes(4 * math.prod(shape))) for name, shape in shapes}
    store_tensors(folder, zeros)
    (folder / "config.json").write_text(json.dumps(sizes))
    weights = weights_bytes(config, "float32")
    code = """if True:
        import re, sys
        import numpy.random  # which sampling needs
        from pathlib import Path
        from gpt_cli import loading

        def peak():
            return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

        before = peak()
        loading.load(sys.argv[1]).generate(["a"], max_tokens=5)
        print(1024 * (peak() - before))
    """
    command = [sys.executable, "-c", code, str(folder)]
    grown = int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert weights < grown < 1.25 * weights
