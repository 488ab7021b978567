import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.special_tokens import SpecialIds
from gpt_cli.folder.tokenizer import with_special_tokens
from support.checkpoints import CONFIG, END_ID

INT8 = {"quant_method": "gpt-cli", "bits": 8, "block_size": 64}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def settled(folder, eos=None):
    """The configuration with the end token of a tokenizer, and of the files of the folder."""
    tokenizer = SimpleNamespace(special_ids=SpecialIds(eos=eos), size=0)
    return with_special_tokens(GPT2Config.from_folder(folder), tokenizer, folder)


FIELDS = {
    "vocab_size": 99, "n_positions": 33, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 20,
    "activation_function": "silu", "layer_norm_epsilon": 1e-3, "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": (50256,),
    "dtype": "float32",
}  # fmt: skip


def test_missing_fields_have_the_values_of_gpt2():
    config = GPT2Config.from_dict({})
    assert asdict(config) == GPT2
    assert (config.head_size, config.inner_size) == (64, 3072)
    assert type(config.head_size) is int


def test_every_field_is_read(folder):
    assert FIELDS.keys() == GPT2.keys() - {"dtype"}
    (folder / "config.json").write_text(json.dumps(FIELDS))
    config = GPT2Config.from_folder(folder)
    assert asdict(config) == FIELDS | {"eos_token_id": (2,), "dtype": "float32"}
    assert (config.inner_size, config.head_size) == (20, 4)


def test_the_sizes_have_other_names_and_some_fields_are_ignored():
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
    config = GPT2Config.from_dict(dict(zip(names, (2, 3, 12, 33), strict=True)))
    assert (config.n_layer, config.n_head, config.n_embd, config.n_positions) == (2, 3, 12, 33)
    raw = {"n_ctx": 3, "resid_pdrop": 0.5, "architectures": ["GPT2LMHeadModel"], "n_inner": None}
    assert GPT2Config.from_dict(raw) == GPT2Config()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        *((name, name) for name in ("gelu_new", "gelu", "relu", "silu", "tanh")),
        *(("gelu_fast", "gelu_new"), ("gelu_pytorch_tanh", "gelu_new"), ("swish", "silu")),
    ],
)
def test_every_activation_is_known_also_by_its_other_names(name, function):
    assert GPT2Config.from_dict({"activation_function": name}).activation_function == function


@pytest.mark.parametrize(("value", "ids"), [(3, (3,)), ([3, 5], (3, 5)), (None, ()), ([], ())])
def test_there_may_be_any_number_of_end_tokens_and_no_start_token(value, ids):
    config = GPT2Config.from_dict({"eos_token_id": value, "bos_token_id": None})
    assert (config.eos_token_id, config.bos_token_id) == (ids, None)


@pytest.mark.parametrize("size", [1, 2**20])
def test_the_smallest_and_the_largest_sizes_are_valid(size):
    raw = dict.fromkeys(["vocab_size", "n_embd", "n_layer", "n_head", "n_inner"], size)
    raw |= {"n_positions": max(2, size), "bos_token_id": size - 1, "eos_token_id": [0, 2**20]}
    config = GPT2Config.from_dict(raw)
    assert (config.n_layer, config.n_positions) == (size, max(2, size))
    assert (config.head_size, config.inner_size) == (1, size)


@pytest.mark.parametrize(("quantization", "dtype"), [(INT8, "int8"), (None, "float32")])
def test_the_type_of_the_matrices_is_that_of_the_quantization(quantization, dtype):
    assert GPT2Config.from_dict({"quantization_config": quantization}).dtype == dtype


COPIED = {"eos_token_id": 7, "_from_model_config": True}  # from an earlier config.json


@pytest.mark.parametrize(
    ("generation", "eos", "ids"),
    [
        ({"eos_token_id": [7, 8]}, 5, (7, 8)),
        ({"eos_token_id": [7, CONFIG["vocab_size"]]}, None, (7,)),
        ({"eos_token_id": None}, 5, (5,)),
        ({"eos_token_id": None}, None, (END_ID,)),
        ({}, 5, (5,)),
        ({}, CONFIG["vocab_size"], (END_ID,)),
        ({}, None, (END_ID,)),
        (COPIED, 5, (5,)),
        (COPIED, None, (7,)),
    ],
)
def test_the_end_token_of_generation_config_comes_first(folder, generation, eos, ids):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert settled(folder, eos).eos_token_id == ids


@pytest.mark.parametrize("value", ["end", [1, -2], True])
def test_an_invalid_end_token_of_generation_config_is_refused_by_its_file(folder, value):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be"):
        settled(folder)


NO_SIZES = [0, None, 2.5, "2", True, [768], 2**20 + 1]
INVALID = {
    "vocab_size": NO_SIZES, "n_positions": [*NO_SIZES, 1], "n_embd": NO_SIZES, "n_layer": NO_SIZES,
    "n_head": [*NO_SIZES, -1], "n_inner": [0], "activation_function": ["mish", None, ["gelu"]],
    "layer_norm_epsilon": [0, -1e-5, 1, math.nan, "1e-5", True], "scale_attn_weights": [1],
    "scale_attn_by_inverse_layer_idx": [None], "tie_word_embeddings": ["no"],
    "bos_token_id": [-1, 1.5, 2**20 + 1], "eos_token_id": ["end", [1, -2], True],
    "model_type": ["gpt_neo", None], "add_cross_attention": [True],
    "quantization_config": [INT8 | {"bits": 4}, {"quant_method": "gptq", "bits": 8}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in INVALID.items() for value in values]
)
def test_an_invalid_field_is_refused_in_one_line_that_names_it(folder, name, value):
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | {name: value}))
    with pytest.raises(CheckpointError, match=name) as caught:
        GPT2Config.from_folder(folder)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_is_shown_as_json_and_a_long_one_not_in_full():
    with pytest.raises(CheckpointError, match="n_layer must be a whole number, not true:"):
        GPT2Config.from_dict({"n_layer": True})
    with pytest.raises(CheckpointError) as caught:
        GPT2Config.from_dict({"activation_function": "x" * 10_000})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["model_type", "n_layer", "activation_function", "eos_token_id"])
def test_a_value_that_is_too_deep_to_be_shown_is_refused(name):
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(CheckpointError, match=r"recursion|Stack overflow"):
        GPT2Config.from_dict({name: {"value": value}})


def test_the_heads_must_divide_the_width():
    with pytest.raises(CheckpointError, match="n_head 5 does not divide n_embd 32"):
        GPT2Config.from_dict(CONFIG | {"n_head": 5})


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 200_000, b"[1]", b"null"],
    ids=["empty", "cut off", "not UTF-8", "too deep", "a list", "null"],
)
def test_a_file_without_a_json_object_is_refused_by_its_name(folder, name, content):
    complaint = "is not a JSON obj" if content in (b"[1]", b"null") else "cannot be read as JSON"
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        settled(folder)
    assert str(folder / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_not_a_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        GPT2Config.from_folder(tmp_path)


# --- token ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("id", [-1, 10, 2**70])
def test_an_id_that_the_model_does_not_have_is_refused(id):
    config = GPT2Config(vocab_size=10)
    assert config.check_ids((0, 9)) == [0, 9]
    with pytest.raises(InputError, match=f"no token {id}; its ids are from 0 to 9"):
        config.check_ids([0, id])


@pytest.mark.parametrize("bos", [None, 10, 11])
def test_a_model_without_a_start_token_says_why_one_is_needed(bos):
    assert GPT2Config(vocab_size=10, bos_token_id=9).start_token("because") == 9
    with pytest.raises(InputError, match=r"^bos_token must be given: because, and "):
        GPT2Config(vocab_size=10, bos_token_id=bos).start_token("because")
