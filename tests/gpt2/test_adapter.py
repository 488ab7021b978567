"""LoRA adapters: merged as PEFT merges them, and refused if they are anything else."""

import json
import math
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import gpt_cli
from gpt_cli import loading
from gpt_cli.errors import CheckpointError
from gpt_cli.folder.tensors import unchanged
from gpt_cli.gpt2 import assembly, checkpoint, quantize
from gpt_cli.gpt2.digests import weights_digest
from gpt_cli.gpt2.model import forward
from gpt_cli.options.declare import OptionError
from support.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS, C_ATTN, FIELDS, PREFIX
from support.checkpoints import Stored, safetensors_bytes, write_tokenizer
from support.in_process import records_here, run_here
from support.torch_files import pickled, torch_bytes, views_of, zip_bytes

A, B = (f"{PREFIX}{C_ATTN.format(1)}.lora_{letter}.weight" for letter in "AB")


def merge(source: Path, folder: Path):
    opened = checkpoint.open_checkpoint(source, folder)
    return opened.config_json, opened.tensors


def refusal(source: Path, folder: Path) -> str:
    """Return the message with which merging fails, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        merge(source, folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.fixture
def folder(tmp_path) -> Path:
    return ADAPTERS["plain"].write(tmp_path / "adapter")


@pytest.fixture
def model(case_folder) -> Path:
    return case_folder("saved")


def write_tensors(folder: Path, tensors: dict[str, Stored]) -> None:
    (folder / ADAPTER_WEIGHTS).write_bytes(safetensors_bytes(tensors))


def configure(folder: Path, **fields: object) -> None:
    (folder / ADAPTER_CONFIG).write_text(json.dumps(FIELDS | fields))


# --- what is merged -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ADAPTERS)
def test_logits_are_those_of_peft(case, case_folder, ops, golden, tmp_path):
    lora, reference = ADAPTERS[case], golden("adapters.npz")
    config, tensors = merge(case_folder(lora.base), lora.write(tmp_path))
    logits = forward(assembly.assemble(config, ops, tensors), reference["rows"])[:, -1]
    np.testing.assert_allclose(logits, reference[case], rtol=0, atol=1e-5)


def test_the_reference_results_differ(golden):
    results = {case: golden("adapters.npz")[case] for case in ADAPTERS}
    results |= {base: golden("models.npz")[f"{base}/logits"][:, -1] for base in ("saved", "untied")}
    assert np.array_equal(results.pop("not_transposed"), results["plain"])
    resized = [results.pop(name) for name in ("resized_wte", "resized_head")]
    for result in resized:  # the same arrays, but for the new tokens
        np.testing.assert_allclose(result[:, :290], results["saved_both"], rtol=0, atol=1e-5)
    for one, other in combinations(results.values(), 2):
        assert np.abs(one[:, :290] - other[:, :290]).max() > 0.01


def test_a_vocabulary_that_grew_is_the_models(model, tmp_path, caplog):
    folder = ADAPTERS["resized"].write(tmp_path / "adapter")
    assert "lm_head.weight" in checkpoint.open_checkpoint(model, folder).tensors
    engine = gpt_cli.load(model, adapter=str(folder))
    assert "lm_head.weight" not in engine.weights  # it is tied, as before
    assert engine.model.config.vocab_size == 293
    int8 = tmp_path / "int8"
    quantize.write(model, int8, folder)
    assert gpt_cli.load(int8).model.config.vocab_size == 293
    assert not any("tokenizer" in message for message in caplog.messages)


def test_the_tokenizer_beside_an_adapter_is_used(model, tmp_path, caplog):
    folder = ADAPTERS["resized"].write(tmp_path / "adapter")
    write_tokenizer(folder)
    added = {"<new>": 290, "<sep>": 291, "<end>": 292}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    engine = gpt_cli.load(model, adapter=str(folder))
    assert f"the tokenizer is the one beside the adapter: {folder}" in caplog.messages
    assert engine.encode("<sep>") == [291]
    quantize.write(model, tmp_path / "int8", folder)
    assert gpt_cli.load(tmp_path / "int8").encode("<end><new>") == [292, 290]
    assert run_here("tokenize", "-m", folder, "<sep>")[0] == b"291\n"
    (about,) = records_here("info", model, "--adapter", folder, "-q", "--json")
    assert about["vocab_size"] == 293
    (folder / "added_tokens.json").write_text(json.dumps(added | {"<more>": 293}))
    with pytest.raises(CheckpointError, match="its wte has 293 rows, and its tokenizer 294 tokens"):
        gpt_cli.load(model, adapter=str(folder))


@pytest.mark.parametrize("new_tokens", [5, -5])
def test_a_head_alone_must_have_the_rows_of_the_model(model, tmp_path, new_tokens):
    adapter = replace(ADAPTERS["resized"], saved=("lm_head.weight",), new_tokens=new_tokens)
    message = refusal(model, adapter.write(tmp_path / "adapter"))
    assert f"lm_head.weight has the shape [{290 + new_tokens}, 32], not [290, 32]" in message


def test_a_trained_embedding_of_another_size_needs_its_head(model, tmp_path):
    adapter = replace(ADAPTERS["resized_wte"], saved=("transformer.wte.weight",), same={})
    message = refusal(model, adapter.write(tmp_path / "adapter"))
    assert "the tensor lm_head.weight is missing" in message


@pytest.mark.parametrize("shape", [(2, 16), (0, 32), (32,)])
def test_a_head_of_a_classifier_that_does_not_fit_is_none(model, folder, shape):
    head = {f"{PREFIX}score.weight": zeros(*shape)}
    write_tensors(folder, ADAPTERS["plain"].tensors() | head)
    assert checkpoint.open_checkpoint(model, folder).classifier_head is None


def test_an_embedding_smaller_than_the_models_is_refused(model, tmp_path):
    folder = replace(ADAPTERS["resized"], new_tokens=-2).write(tmp_path / "adapter")
    message = refusal(model, folder)
    assert "its wte has 288 rows, and the model 290 tokens: merge it into its model" in message


def test_the_head_of_a_classifier_is_noted(model, folder, caplog):
    expected = merge(model, folder)[1]
    head = {f"{PREFIX}score.weight": zeros(2, 32)}
    write_tensors(folder, ADAPTERS["plain"].tensors() | head)
    configure(folder, modules_to_save=["classifier", "score"], task_type="SEQ_CLS")
    assert merge(model, folder)[1].keys() == expected.keys()
    used = "classify uses its score.weight, and nothing else does"
    assert f"{folder} is a classifier: {used}" in caplog.messages


def test_files_of_pytorch_and_names_of_the_bare_model_give_the_same(model, folder):
    expected = {name: rows[:] for name, rows in merge(model, folder)[1].items()}
    tensors = ADAPTERS["plain"].tensors()
    bare = {name.replace("transformer.", ""): tensor for name, tensor in tensors.items()}
    (folder / ADAPTER_WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(torch_bytes(bare))
    merged = merge(model, folder)[1]
    assert merged.keys() == expected.keys()
    assert all(np.array_equal(rows[:], expected[name]) for name, rows in merged.items())


@pytest.mark.parametrize(
    "fields",
    [
        *({"init_lora_weights": name} for name in (False, "gaussian", "orthogonal", "eva")),
        {"layers_to_transform": [1], "exclude_modules": ["wte"], "eva_config": {"rho": 2.0}},
        {"alpha_pattern": None, "rank_pattern": None, "bias": None, "revision": "main"},
    ],
    ids=str,
)
def test_fields_of_the_training_change_nothing(fields, model, folder):
    before = merge(model, folder)[1]["h.1.attn.c_attn.weight"][:]
    configure(folder, **fields)
    assert np.array_equal(merge(model, folder)[1]["h.1.attn.c_attn.weight"][:], before)


def test_ranges_of_rows_have_the_same_bits(model, folder, library):
    matrix = merge(model, folder)[1]["h.1.attn.c_attn.weight"]
    parts = [matrix[start : start + 5] for start in range(0, 32, 5)]
    assert np.array_equal(np.concatenate(parts), matrix[:])


@pytest.mark.parametrize("base", ["bf16", "f16"])
def test_changed_matrices_of_16_bit_models_are_in_float32(base, case_folder, folder, library):
    name, ids = str(case_folder(base)), [[5, 6, 7, 8]]
    stored, wide, plain = (
        gpt_cli.load(name, device="cpu", **options)
        for options in ({"adapter": str(folder)}, {"adapter": str(folder), "dtype": "float32"}, {})
    )
    assert stored.model.ops.dtype in ("bfloat16", "float16")
    assert np.array_equal(stored.logits(ids), wide.logits(ids))
    assert not np.array_equal(stored.logits(ids), plain.logits(ids))
    assert stored.with_weights({}).adapter == stored.adapter == str(folder)


def test_int8_weights_are_those_of_the_merged_model(model, folder, tmp_path, library):
    int8 = tmp_path / "int8"
    quantize.write(model, int8, folder)
    loaded = gpt_cli.load(str(int8))
    merged = gpt_cli.load(str(model), adapter=str(folder), dtype="int8")
    ours, theirs = (weights_digest(engine.model, engine.tokenizer) for engine in (loaded, merged))
    assert ours == theirs
    with pytest.raises(OptionError, match="cannot change int8 weights: quantize the model with"):
        gpt_cli.load(str(int8), adapter=str(folder))


def test_gpt_cli_ops_may_name_a_gpu(model, folder, monkeypatch):
    expected = merge(model, folder)[1]["h.1.attn.c_attn.weight"][:]
    monkeypatch.setenv("GPT_CLI_OPS", "cupy")
    merged = merge(model, folder)[1]["h.1.attn.c_attn.weight"][:]
    np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("base", "warned"),
    [(None, False), ("", False), ("acme/gpt", True), ("/x/{}", False), ("somebody/{}", False)],
)
def test_a_model_of_another_name_is_noted(base, warned, model, folder, caplog):
    configure(folder, base_model_name_or_path=base and base.format(model.name))
    merge(model, folder)
    assert bool(caplog.messages) == warned
    if warned:
        assert caplog.messages == [
            f"the adapter {folder} was trained for {base!r}, not for {model}"
        ]


@pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin"])
def test_an_adapter_that_changes_while_it_is_read_is_refused(name, model, folder):
    with pytest.raises(CheckpointError, match=f"{folder} changed"), unchanged(model, folder):
        (folder / name).write_bytes(b"changed")


def test_a_model_or_an_adapter_that_changes_while_it_is_loaded_is_refused(
    model, folder, monkeypatch
):
    placing = assembly.placing

    def change(*arguments):
        (folder / ADAPTER_CONFIG).write_text("{}")
        return placing(*arguments)

    monkeypatch.setattr(assembly, "placing", change)
    with pytest.raises(CheckpointError, match=f"{folder} changed"):
        gpt_cli.load(str(model), adapter=str(folder))


def test_the_memory_for_changed_matrices_is_that_of_float32(
    case_folder, folder, monkeypatch, library
):
    checked = []
    monkeypatch.setattr(loading, "check_room", lambda what, needed, *_: checked.append(needed))
    for options in ({}, {"adapter": str(folder)}, {"dtype": "float32"}, {"dtype": "int8"}):
        gpt_cli.load(str(case_folder("bf16")), device="cpu", **options)
    for dtype in ("int8", "bfloat16"):
        gpt_cli.load(str(case_folder("bf16")), device="cpu", dtype=dtype, adapter=str(folder))
    stored, adapted, wide, int8, adapted_int8, rounded = checked
    assert stored < adapted == wide
    assert int8 == adapted_int8
    assert rounded == stored


def test_a_saved_module_replaces_its_lora(model, folder):
    saved = f"{PREFIX}{C_ATTN.format(1)}"
    configure(folder, modules_to_save=["h.1.attn.c_attn"])
    tensors = ADAPTERS["plain"].tensors()
    tensors |= {f"{saved}.weight": zeros(32, 96), f"{saved}.bias": zeros(96)}
    write_tensors(folder, tensors)
    assert not merge(model, folder)[1]["h.1.attn.c_attn.weight"][:].any()


# --- what is refused ------------------------------------------------------------------------------

TYPES = {
    "r": ("8", None, 1.5, 0, -1, 2**20 + 1, 10**400, True, [8]),
    "lora_alpha": ("8", math.nan, math.inf, 1e300, [8]),
    "use_rslora": (1, "true"),
    "rank_pattern": ([], ["c_attn"], "c_attn", {"c_attn": 0}, {"c_attn": "4"}, {"c_attn": 1.5}),
    "alpha_pattern": (5, {"c_attn": math.nan}, {"c_attn": None}, {"c_attn": [1]}),
    "modules_to_save": (5, [5], {"wte": 1}, ["a"] * 501),
    "base_model_name_or_path": (5, ["gpt2"]),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in TYPES.items() for value in values]
)
def test_a_field_of_another_type_or_out_of_range_is_named(name, value, model, folder):
    configure(folder, **{name: value})
    if not value and name != "r":  # as in PEFT
        merge(model, folder)
    elif value is None:
        assert "lora_A.weight has the shape [4, 32], not [8, 32]" in refusal(model, folder)
    else:
        assert f"{ADAPTER_CONFIG}: {name} must be " in refusal(model, folder)


@pytest.mark.parametrize(
    "key",
    [
        *("(a|a)*", "(a+)+$", "((a))(b)", ".*.*.*", "a?", "a{1000}", "(?=a)", "x" * 101, "é"),
        *("", "(", "[", "*", r"\\(", "[[a]", "[a--b]", "[a||b]", "a\nb"),
    ],
)
def test_a_pattern_that_could_take_long_is_refused(key, model, folder):
    configure(folder, alpha_pattern={key: 4})
    assert "1048576 by the names of modules, or by simple patterns" in refusal(model, folder)


def test_the_most_costly_patterns_are_matched_in_seconds(model, folder):
    costly = ".*.*" + "x" * 94
    either = "(" + "|".join("." * 24) + ")(" + "|".join("." * 23) + ")"
    for key in (costly, either):
        configure(folder, alpha_pattern={f"{key}{i}": 4 for i in range(10)})
        start = time.perf_counter()
        merge(model, folder)
        assert time.perf_counter() - start < 1
    configure(folder, alpha_pattern={f"module{i}": 4 for i in range(501)})
    assert "alpha_pattern must be up to 500 numbers from -1048576" in refusal(model, folder)


@pytest.mark.parametrize(
    "fields",
    [
        *({"peft_type": kind} for kind in ("IA3", "PROMPT_TUNING", "ADALORA", None, ["LORA"])),
        *({"bias": value} for value in ("all", "lora_only", 1)),
        *({"init_lora_weights": value} for value in ("pissa", "pissa_niter_4", "loftq", "olora")),
        *({name: True} for name in ("use_dora", "use_qalora", "lora_bias", "ensure_weight_tying")),
        *({name: [1]} for name in ("layer_replication", "trainable_token_indices", "new_in_2027")),
        *({name: {"a": 1}} for name in ("megatron_config", "use_bdlora", "loftq_config")),
    ],
    ids=str,
)
def test_what_asks_for_more_than_lora_is_refused_by_name(fields, model, folder):
    configure(folder, **fields)
    ((name, value),) = fields.items()
    message = refusal(model, folder)
    assert f"{ADAPTER_CONFIG}: {name} is {value!r:.40}" in message
    assert message.endswith(": merge it into its model with PEFT (merge_and_unload), and load that")


def changed(name: str, tensor: Stored | None):
    def change(tensors: dict[str, Stored]) -> None:
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    return change


def zeros(*shape: int, dtype: str = "F32", size: int = 4) -> Stored:
    return Stored(dtype, shape, bytes(size * math.prod(shape)))


NAMED = A.removeprefix(PREFIX).removeprefix("transformer.")
WRONG = {
    "no partner": (changed(B, None), f"{NAMED.replace('_A', '_B')} is missing"),
    "other rank": (changed(A, zeros(5, 32)), f"{NAMED} has the shape [5, 32], not [4, 32]"),
    "other width": (changed(A, zeros(4, 31)), "[4, 31], not [4, 32]"),
    "transposed": (changed(B, zeros(4, 96)), "[4, 96], not [96, 4]"),
    "no matrix": (changed(A, zeros(128)), "[128], not [4, 32]"),
    "doubles": (changed(A, zeros(4, 32, dtype="F64", size=8)), f"{NAMED} is F64, which is not"),
    "integers": (changed(A, zeros(4, 32, dtype="I8", size=1)), f"{NAMED} is I8, which is not"),
    "nan": (changed(A, Stored("F32", (4, 32), b"\xff" * 512)), "of h.1.attn.c_attn are not"),
    "another layer": (changed(A.replace("h.1", "h.3"), zeros(4, 32)), "h.3.attn.c_attn.lora_A"),
    "a bias": (
        changed(f"{PREFIX}transformer.h.0.attn.c_attn.bias", zeros(96)),
        "attn.c_attn.bias is",
    ),
    "wte": (changed(f"{PREFIX}transformer.wte.lora_embedding_A", zeros(4, 290)), "wte.lora_embe"),
    "the head": (
        changed(f"{PREFIX}lm_head.lora_A.weight", zeros(4, 32)),
        "lm_head.lora_A.weight is",
    ),
    "magnitude": (
        changed(A.replace("A.weight", "magnitude_vector"), zeros(96)),
        "magnitude_vector",
    ),
    "another head": (changed(f"{PREFIX}qa.weight", zeros(2, 32)), "qa.weight is neither"),
    "twice": (changed(A.replace("transformer.", ""), zeros(4, 32)), f"duplicate tensor {NAMED}"),
    "none": (dict.clear, "it has no tensors"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_tensor_that_does_not_fit_is_named(fault, model, folder):
    change, complaint = WRONG[fault]
    tensors = ADAPTERS["plain"].tensors()
    change(tensors)
    write_tensors(folder, tensors)
    configure(folder, base_model_name_or_path=model.name)
    message = refusal(model, folder)
    assert message.startswith(f"{folder / ADAPTER_WEIGHTS}: ")
    assert complaint in message
    again = f": get it again, or use {model.name}"
    assert message.endswith((again, "(merge_and_unload), and load that", ": get it again"))
    assert ("get it again" in message) != ("is neither" in message or "not supported" in message)


def test_a_change_that_overflows_is_found_in_the_results(model, folder):
    large = Stored("F32", (4, 32), b"\x7b" * 512)
    configure(folder, lora_alpha=2**20)
    write_tensors(folder, ADAPTERS["plain"].tensors() | {A: large})
    with pytest.raises(CheckpointError, match="results are not finite"):
        gpt_cli.load(str(model), adapter=str(folder)).score("Once")


def test_a_saved_module_must_be_there_and_have_its_shape(model, folder):
    configure(folder, modules_to_save=["ln_f"])
    assert "the tensor ln_f.weight is missing" in refusal(model, folder)
    saved = {f"{PREFIX}transformer.ln_f.{part}": zeros(32) for part in ("weight", "bias")}
    write_tensors(folder, saved)
    assert not merge(model, folder)[1]["ln_f.weight"][:].any()
    write_tensors(folder, saved | {f"{PREFIX}transformer.ln_f.bias": zeros(33)})
    assert "ln_f.bias has the shape [33], not [32]" in refusal(model, folder)


def test_a_view_in_a_file_of_pytorch_is_refused(model, folder):
    views, storages = views_of(ADAPTERS["plain"].tensors())
    views[A] = views[A]._replace(strides=(0, 0))  # one number, any number of times
    (folder / ADAPTER_WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(zip_bytes(pickled(views), storages))
    assert f"{NAMED} is a view, which is not supported" in refusal(model, folder)


@pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
def test_a_missing_file_is_named(name, model, folder):
    (folder / name).unlink()
    assert f"{folder} has no {name}: give an adapter of PEFT" in refusal(model, folder)
