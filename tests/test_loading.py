"""Loading with `dtype`: weights that are rounded are those of a checkpoint that is stored so."""

from pathlib import Path

import numpy as np
import pytest

import gpt_cli
from gpt_cli import loading
from gpt_cli.errors import CheckpointError
from gpt_cli.gpt2 import assembly, checkpoint, quantize
from gpt_cli.gpt2.digests import weights_digest
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.gpt2.weights import named_weights
from gpt_cli.options.declare import OptionError
from gpt_cli.texts.speculator import make_draft_model
from support.adapters import ADAPTERS
from support.checkpoints import (
    CONFIG,
    make_weights,
    safetensors_bytes,
    store,
    stored_tensors,
    write_checkpoint,
)
from support.rounding import nearest, store_nearest
from support.torch_files import pickled, views_of, write_torch, zip_bytes

SHORT = ["float16", "bfloat16"]
FILE = "model.safetensors"
IDS = [[5, 80, 7, 200, 9, 31, 5, 5]]
ODD = CONFIG | {"n_embd": 3 * 47, "n_head": 3, "n_inner": 131, "vocab_size": 291, "n_layer": 2}
CONFIGS = {
    "saved": CONFIG,
    "untied": CONFIG | {"tie_word_embeddings": False},
    "odd": ODD,
    "odd and untied": ODD | {"tie_word_embeddings": False},
}
NOTE = "the weights of {} are rounded to {}"
# Subnormal in one type or both, beside ties, and the largest that float16 rounds down.
SPECIAL = np.float32([1e-45, -1e-40, 2.9e-8, 3e-8, -6e-5, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8])

pytestmark = pytest.mark.usefixtures("library")


def load(folder: Path, dtype: str, **options):
    return gpt_cli.load(folder, device="cpu", dtype=dtype, **options)


def special_weights(config):
    """Return weights with numbers that are hard to round, in a tensor of each kind."""
    weights = make_weights(config)
    for name in ("wte.weight", "wpe.weight", "h.1.ln_2.bias", "h.0.mlp.c_fc.weight"):
        weights[name].flat[: len(SPECIAL)] = SPECIAL
    weights["h.0.mlp.c_fc.bias"][3] = 65519
    return weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that writes a checkpoint in float32, and as it is saved in another type."""

    def write(config: str, dtype: str):
        folder, weights = tmp_path_factory.mktemp("both"), special_weights(CONFIGS[config])
        kinds = {"float32": store, dtype: lambda array: store_nearest(array, dtype)}
        for name, kind in kinds.items():
            write_checkpoint(folder / name, CONFIGS[config])
            tensors = {key: kind(array) for key, array in weights.items()}
            (folder / name / FILE).write_bytes(safetensors_bytes(tensors))
        return folder / "float32", folder / dtype

    return write


def bits_of(engine):
    """Return everything that the model computes with: arrays, and the panels of matrices."""
    arrays = {
        name: getattr(weight, "panels", weight) for name, weight in named_weights(engine.model)
    }
    return {name: (array.dtype, array.tobytes()) for name, array in arrays.items()}


# --- what rounding gives --------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", SHORT)
def test_rounded_weights_have_the_bits_of_a_checkpoint_that_is_stored_so(folders, dtype, config):
    wide, short = folders(config, dtype)
    rounded, stored = load(wide, dtype), load(short, "auto")
    assert rounded.model.ops.dtype == stored.model.ops.dtype == dtype
    assert bits_of(rounded) == bits_of(stored)
    digests = [weights_digest(engine.model, engine.tokenizer) for engine in (rounded, stored)]
    assert digests[0] == digests[1]
    assert np.array_equal(rounded.logits(IDS), stored.logits(IDS))
    assert not np.array_equal(rounded.logits(IDS), load(wide, "float32").logits(IDS))


@pytest.mark.parametrize("dtype", SHORT)
def test_only_matrices_are_held_in_16_bits_but_all_values_are_rounded(folders, dtype):
    engine, weights = load(folders("untied", dtype)[0], dtype), special_weights(CONFIGS["untied"])
    types = {name: bits[0] for name, bits in bits_of(engine).items()}
    matrices = {name for name, array in weights.items() if array.ndim == 2} - {"wpe.weight"}
    assert {name for name, held in types.items() if held == np.uint16} == matrices
    assert {held for name, held in types.items() if name not in matrices} == {np.dtype("f4")}
    for name, array in weights.items():
        held, expected = engine.weights[name], nearest(array, dtype)
        assert np.array_equal(held.view(np.uint32), expected.view(np.uint32)), name


@pytest.mark.parametrize(("case", "dtype"), [("f16", "bfloat16"), ("bf16", "float16")])
def test_weights_in_16_bits_are_rounded_to_the_other_type(case_folder, case, dtype):
    wide, rounded = (load(case_folder(case), kind) for kind in ("float32", dtype))
    assert rounded.model.ops.dtype == dtype
    for name, array in wide.weights.items():
        assert np.array_equal(rounded.weights[name], nearest(array, dtype))


@pytest.mark.parametrize("dtype", SHORT)
def test_tensors_of_several_types_become_one(tmp_path, dtype):
    weights = make_weights(CONFIG)
    tensors = {
        name: store(array, ("F32", "F16", "BF16")[place % 3])
        for place, (name, array) in enumerate(weights.items())
    }
    (write_checkpoint(tmp_path, CONFIG) / FILE).write_bytes(safetensors_bytes(tensors))
    wide, rounded = (load(tmp_path, kind) for kind in ("float32", dtype))
    assert {b[0] for b in bits_of(rounded).values()} == {np.dtype("u2"), np.dtype("f4")}
    for name, array in wide.weights.items():
        assert np.array_equal(rounded.weights[name], nearest(array, dtype))


@pytest.mark.parametrize("dtype", SHORT)
def test_a_head_that_equals_wte_once_both_are_rounded_is_tied(tmp_path, dtype):
    weights = make_weights(CONFIG)
    wte = weights["wte.weight"]
    weights["lm_head.weight"] = nearest(wte, dtype)
    tensors = {name: store(array) for name, array in weights.items()}
    (write_checkpoint(tmp_path, CONFIG) / FILE).write_bytes(safetensors_bytes(tensors))
    assert "lm_head.weight" in load(tmp_path, "float32").weights
    assert "lm_head.weight" not in load(tmp_path, dtype).weights


def test_a_head_at_the_place_of_wte_is_tied_without_a_look(tmp_path, monkeypatch):
    tensors = stored_tensors(CONFIG, head="wte")
    tensors["lm_head.weight"] = tensors["wte.weight"]
    write_torch(write_checkpoint(tmp_path, CONFIG), tensors)
    opened = checkpoint.open_checkpoint(tmp_path)
    rounded = checkpoint.rounded(opened.tensors, "float16", "a model")
    monkeypatch.setattr("gpt_cli.folder.tensors.Tensor.__getitem__", None)
    assert "lm_head.weight" not in assembly.without_tied_head(rounded, opened.config_json)


@pytest.mark.parametrize("dtype", SHORT)
def test_turned_matrices_are_rounded(tmp_path, dtype):
    name, weights = "h.1.attn.c_proj.weight", make_weights(CONFIG)
    views, storages = views_of(stored_tensors(CONFIG))
    view = views[name]
    storages[view.storage.key] = store(weights[name].T).data
    views[name] = view._replace(strides=view.strides[::-1])
    (write_checkpoint(tmp_path, CONFIG) / FILE).unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(zip_bytes(pickled(views), storages))
    engine = load(tmp_path, dtype)
    assert np.array_equal(engine.weights[name], nearest(weights[name], dtype))


# --- adapters, draft models, other weights --------------------------------------------------------


@pytest.mark.parametrize("case", ["saved", "f16", "bf16"])
@pytest.mark.parametrize("dtype", SHORT)
def test_merged_weights_are_rounded_only_if_that_is_chosen(case_folder, tmp_path, case, dtype):
    adapter = str(ADAPTERS["plain"].write(tmp_path / "adapter"))
    wide, rounded, held = (
        load(case_folder(case), kind, adapter=adapter) for kind in ("float32", dtype, "auto")
    )
    for name, array in wide.weights.items():
        assert np.array_equal(rounded.weights[name], nearest(array, dtype))
        assert np.array_equal(held.weights[name], array)
    assert bits_of(rounded)["h.1.attn.c_attn.weight"][0] == np.uint16
    assert bits_of(held)["h.1.attn.c_attn.weight"][0] == np.float32


@pytest.mark.parametrize("dtype", SHORT)
def test_the_draft_model_is_that_of_the_stored_weights(folders, dtype):
    wide, short = folders("odd", dtype)
    drafts = [make_draft_model(load(*one).model) for one in ((wide, dtype), (short, "auto"))]
    ours, theirs = (dict(named_weights(draft)) for draft in drafts)
    for name in ("h.0.mlp.c_fc.weight", "lm_head.weight"):
        assert ours[name].format == "int8"
        assert np.array_equal(ours[name].panels, theirs[name].panels)


@pytest.mark.parametrize("dtype", SHORT)
def test_other_weights_of_a_rounded_model_are_not_rounded(case_folder, dtype):
    engine, name = load(case_folder("saved"), dtype), "h.0.attn.c_attn.weight"
    array = make_weights(CONFIG)[name]
    changed = engine.with_weights({name: array})
    assert np.array_equal(changed.weights[name], array)
    assert not np.array_equal(engine.weights[name], array)
    again = changed.with_weights({name: engine.weights[name]})
    assert np.array_equal(again.logits(IDS), engine.logits(IDS))


# --- the note, the memory, and what is refused ----------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dtype", "noted"),
    [
        ("saved", "bfloat16", True),
        ("saved", "float16", True),
        ("f16", "bfloat16", True),
        ("bf16", "float16", True),
        ("f16", "float16", False),
        ("bf16", "bfloat16", False),
        ("f16", "float32", False),
        ("saved", "int8", False),
        ("saved", "auto", False),
    ],
)
def test_one_note_says_that_weights_are_rounded(case_folder, caplog, case, dtype, noted):
    folder = case_folder(case)
    load(folder, dtype)
    assert caplog.messages == ([NOTE.format(folder, dtype)] if noted else [])


def test_the_memory_that_is_checked_is_that_of_the_rounded_weights(
    case_folder, tmp_path, monkeypatch
):
    adapter, checked = str(ADAPTERS["plain"].write(tmp_path / "adapter")), []
    monkeypatch.setattr(loading, "check_room", lambda what, needed, *_: checked.append(needed))
    for options in ({}, {"adapter": adapter}):
        for dtype in SHORT:
            engine = load(case_folder("saved"), dtype, **options)
            held = sum(len(data) for _, data in bits_of(engine).values())
            needed = weights_bytes(engine.model.config, dtype)
            assert checked.pop() == needed < 0.6 * weights_bytes(engine.model.config, "float32")
            assert needed < held < 1.5 * needed  # panels are padded, and a tied head counts twice
    assert checked == []


@pytest.mark.parametrize("dtype", SHORT)
def test_int8_weights_are_not_rounded_again(case_folder, tmp_path, dtype):
    folder = tmp_path / "int8"
    quantize.write(case_folder("saved"), folder)
    twice = "is stored in int8, and its weights would be rounded twice: choose auto or float32"
    with pytest.raises(OptionError, match=f"cannot be {dtype}: {folder} {twice}"):
        load(folder, dtype)


def test_weights_beyond_float16_are_an_error_that_suggests_bfloat16(tmp_path):
    weights = make_weights(CONFIG)
    weights["h.1.mlp.c_proj.weight"][3, 4] = 65520
    tensors = {name: store(array) for name, array in weights.items()}
    (write_checkpoint(tmp_path, CONFIG) / FILE).write_bytes(safetensors_bytes(tensors))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, "float16").logits(IDS)
    cure = "float16 holds numbers up to 65504, so choose dtype bfloat16; if dtype float32 does not"
    assert f"the model's results are not finite: {cure} help" in str(caught.value)
    assert np.isfinite(load(tmp_path, "bfloat16").logits(IDS)).all()


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", ["wte.weight", "wpe.weight", "h.0.ln_1.bias"])
def test_damaged_weights_stay_damaged(tmp_path, dtype, name):
    weights = make_weights(CONFIG)
    weights[name].view(np.uint32).flat[3] = 0x7F800001  # a NaN in the lowest bits only
    tensors = {key: store(array) for key, array in weights.items()}
    (write_checkpoint(tmp_path, CONFIG) / FILE).write_bytes(safetensors_bytes(tensors))
    with pytest.raises(CheckpointError, match="not finite"):
        load(tmp_path, dtype).logits([[0, 1, 2, 3]])


def test_without_the_library_rounding_is_refused(case_folder, monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    monkeypatch.setattr("gpt_cli.ops.select.native_library", lambda: None)
    with pytest.raises(OptionError, match="bfloat16 needs the compiled library"):
        load(case_folder("saved"), "bfloat16")
