"""Weights as training tools leave them: the model is the one that transformers would have saved."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

import gpt_cli
from gpt_cli.errors import CheckpointError, InputError
from support.checkpoints import (
    CONFIG,
    END_ID,
    MERGES,
    VOCAB,
    Stored,
    make_weights,
    safetensors_bytes,
    store,
    stored_tensors,
    write_checkpoint,
)
from support.torch_files import View, opcodes, pickled, views_of, zip_bytes

IDS = [[5, 80, 7, 200, 9, 31, 5, 5]]
FILE = "model.safetensors"
LINEAR = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def logits(folder: Path) -> np.ndarray:
    return gpt_cli.load(folder, device="cpu").logits(IDS)


def saved(folder: Path, config: dict) -> np.ndarray:
    """Return the logits of the model as transformers saves it."""
    return logits(write_checkpoint(folder / "saved", config))


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transformer", "head"),
    [
        ("_orig_mod.transformer.", "_orig_mod."),
        ("module.transformer.", "module."),
        ("model.transformer.", "model."),
        ("gpt.", "gpt."),
        ("module._orig_mod.", "module._orig_mod."),
        ("pretrained_model.transformer.", "pretrained_model."),
    ],
)
def test_a_prefix_that_all_names_share_is_left_out_with_a_note(tmp_path, caplog, transformer, head):
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    tensors = {
        (head if name == "lm_head.weight" else transformer) + name: tensor
        for name, tensor in stored_tensors(CONFIG, head="own").items()
    }
    tensors["v_head.summary.weight"] = Stored("F32", (1,), bytes(4))
    (folder / FILE).write_bytes(safetensors_bytes(tensors))
    expected = logits(write_checkpoint(tmp_path / "saved", CONFIG, head="own"))
    caplog.clear()
    assert np.array_equal(logits(folder), expected)
    notes = [record.getMessage() for record in caplog.records]
    assert notes[0] == f"{folder}: the names of the weights are read without {head!r}"
    assert "ignoring tensors beside the transformer, such as 'v_head.summary.weight'" in notes[1]


def test_a_missing_tensor_is_named_with_the_nearest_names(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG)
    tensors = stored_tensors(CONFIG)
    tensors["token.wte"] = tensors.pop("wte.weight")
    (folder / FILE).write_bytes(safetensors_bytes(tensors))
    with pytest.raises(
        CheckpointError, match=r"wte\.weight is missing \(the nearest names in .*wpe"
    ):
        logits(folder)


# --- other layouts and types ---------------------------------------------------------------------


def nanogpt(tensors: dict[str, Stored], **settings) -> bytes:
    """Return a checkpoint as nanoGPT writes it: Linear weights, settings, state of an optimizer."""
    views, storages = views_of(tensors)
    prefixed = {
        f"_orig_mod.{'' if name == 'lm_head.weight' else 'transformer.'}{name}": view
        for name, view in views.items()
    }
    first = next(iter(views.values()))
    step = View(first.storage, 0, (), ())
    optimizer = {"state": {0: {"step": step, "exp_avg": first}}, "param_groups": [{"params": [0]}]}
    args = {"n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 80, "dropout": None}
    args |= {"vocab_size": len(VOCAB)} | settings
    checkpoint = {"model": prefixed, "optimizer": optimizer, "model_args": args, "iter_num": 7}
    return zip_bytes(pickled(checkpoint), storages)


def shared_pickle(entries: dict, entry: str, name: str, depth: int) -> bytes:
    """Return a pickle with {entry: {name: x}}, where x is (y, y), y is (z, z), and so on."""
    tower = b"K\x01q\x01" + b"h\x01\x86q\x01" * depth  # 2**depth numbers, were they written out
    return b"\x80\x02}(" + b"".join(
        (
            *map(opcodes, (part for item in entries.items() for part in item)),
            opcodes(entry),
            b"}",
            opcodes(name),
            tower,
            b"s",
            b"u.",
        )
    )


def turned(name: str, array: np.ndarray) -> Stored:
    return store(array.T if name.endswith(LINEAR) else array)


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_is_read_with_its_settings(tmp_path, caplog, bias):
    weights = make_weights(CONFIG)
    if not bias:
        weights |= {name: 0 * weights[name] for name in weights if name.endswith(".bias")}
    config = CONFIG | {"activation_function": "gelu"}
    expected = write_checkpoint(tmp_path / "saved", config)
    arrays = {name: store(array) for name, array in weights.items()}
    (expected / FILE).write_bytes(safetensors_bytes(arrays))
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    for name in (FILE, "config.json"):
        (folder / name).unlink()
    tensors = {
        name: turned(name, array)
        for name, array in weights.items()
        if bias or not name.endswith(".bias")
    }
    tensors["lm_head.weight"] = tensors["wte.weight"]
    (folder / "ckpt.pt").write_bytes(nanogpt(tensors, bias=bias))
    assert np.array_equal(logits(folder), logits(expected))
    notes = " ".join(record.getMessage() for record in caplog.records)
    assert ("the weights have no biases, so all are 0" in notes) == (not bias)
    assert gpt_cli.load(folder).generate(["the"], max_tokens=3)[0].ids


def test_nested_settings_are_ignored_however_deep(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG)
    for name in (FILE, "config.json"):
        (folder / name).unlink()
    views, storages = views_of(stored_tensors(CONFIG))
    pickle = shared_pickle({"model": views}, "model_args", "n_layer", depth=60)
    (folder / "ckpt.pt").write_bytes(zip_bytes(pickle, storages))
    with pytest.raises(CheckpointError, match=r"ckpt\.pt has no"):
        logits(folder)


def test_a_training_checkpoint_without_settings_needs_config_json(tmp_path):
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    (folder / FILE).unlink()
    views, storages = views_of(stored_tensors(CONFIG))
    (folder / "ckpt.pt").write_bytes(zip_bytes(pickled({"state_dict": views}), storages))
    assert np.array_equal(logits(folder), saved(tmp_path, CONFIG))
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"ckpt\.pt has no vocab_size: add the config\.json"):
        logits(folder)


def test_float64_is_rounded_with_a_note(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    tensors = {
        name: Stored("F64", array.shape, array.astype("<f8").tobytes())
        for name, array in make_weights(CONFIG).items()
    }
    (folder / FILE).write_bytes(safetensors_bytes(tensors))
    assert np.array_equal(logits(folder), saved(tmp_path, CONFIG))
    assert "the weights are in float64, and are rounded to float32" in caplog.text


def openai(folder: Path) -> Path:
    """Write a folder with OpenAI's names of files."""
    write_checkpoint(folder, CONFIG)
    (folder / "vocab.json").rename(folder / "encoder.json")
    (folder / "merges.txt").rename(folder / "vocab.bpe")
    (folder / "config.json").unlink()
    sizes = {"n_vocab": len(VOCAB), "n_ctx": 80, "n_embd": 32, "n_head": 4, "n_layer": 3}
    (folder / "hparams.json").write_text(json.dumps(sizes))
    return folder


def test_the_files_of_openai_are_a_tokenizer_and_settings(tmp_path):
    engine = gpt_cli.load(openai(tmp_path / "124M"))
    assert engine.tokenizer.special == {"<|endoftext|>": END_ID}
    assert engine.encode("the") == gpt_cli.load(write_checkpoint(tmp_path, CONFIG)).encode("the")
    assert np.array_equal(engine.logits(IDS), saved(tmp_path, CONFIG))
    assert len(MERGES) > 0


def test_weights_of_tensorflow_are_refused_with_what_to_do(tmp_path):
    folder = openai(tmp_path)
    (folder / FILE).rename(folder / "model.ckpt.data-00000-of-00001")
    (folder / "model.ckpt.index").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only in a TensorFlow checkpoint.*from the Hub"):
        logits(folder)


# --- a vocabulary that is larger than the model --------------------------------------------------


def test_a_few_tokens_beyond_the_model_are_an_error_of_the_texts_that_need_them(tmp_path, caplog):
    missing = END_ID - 1  # the last merge
    folder = write_checkpoint(tmp_path, CONFIG | {"vocab_size": missing})
    engine = gpt_cli.load(folder)
    assert f"the vocabulary has {END_ID} tokens, and the model has {missing}" in caplog.text
    good, bad = engine.score_many(["the and", f"the and{engine.decode([missing])}"])
    assert len(good.ids) > 1
    assert isinstance(bad, InputError)
    assert f"the model has no token {missing}" in str(bad)
    assert engine.model.config.eos_token_id == ()


def test_many_tokens_beyond_the_model_are_those_of_another_model(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG | {"vocab_size": len(VOCAB) - 20})
    with pytest.raises(CheckpointError, match="get the tokenizer and the weights of the same"):
        gpt_cli.load(folder)


@pytest.fixture(autouse=True)
def _notes(caplog):
    caplog.set_level(logging.WARNING)


def test_data_that_needs_a_missing_token_is_compressed_by_its_bytes(tmp_path, library):
    missing = END_ID - 1
    config = CONFIG | {"vocab_size": missing, "bos_token_id": 0}
    engine = gpt_cli.load(write_checkpoint(tmp_path, config), bos_token=0)
    data = f"the and{engine.decode([missing])} the".encode()
    assert engine.decompress(engine.compress(data)) == data
