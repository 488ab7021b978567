"""A GPU, here an emulated one, gives what the CPU gives: models, texts, files, checks."""

import json
import queue
from io import BytesIO

import numpy as np
import pytest

import gpt_cli
from gpt_cli.checks import computed, verify
from gpt_cli.compression.archive import ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.engine import Engine
from gpt_cli.generation.generate import Completion
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.digests import logits_digest, weights_digest
from gpt_cli.ops import get_ops, ops_for
from gpt_cli.ops.numpy_ops import NumPyOps
from gpt_cli.options.request import Options
from gpt_cli.serve.prompts import PendingText
from gpt_cli.serve.scheduler import Scheduler
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator
from gpt_cli.texts.text import Text
from support import emulated_cuda
from support.adapters import ADAPTERS
from support.drafting import planned
from support.in_process import run_here
from support.models import DTYPES, completions_of, model_of, outcomes
from support.native_arrays import assert_same_bits

SHAPES = [
    {},
    {"n_embd": 36, "n_head": 3, "n_inner": 70, "tie_word_embeddings": False, "n_layer": 1},
]
TINY = np.float32(1e-40)  # CuPy's own kernels would take it for 0


@pytest.fixture
def emulated(monkeypatch, library):
    emulated_cuda.install(monkeypatch)
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    return monkeypatch


@pytest.fixture
def both(emulated):
    """Return a function that makes a model on the CPU, and the same on a GPU."""

    def make(dtype="float32", **changes):
        return [model_of(get_ops(device, dtype), dtype, **changes) for device in ("cpu", "cuda")]

    return make


def engines_of(models, tokenizer):
    return [Engine(LoadedModel(model, tokenizer), "m", 0) for model in models]


# --- weights and operations ----------------------------------------------------------------------


def matrices(model):
    return model.wte, model.h[0].mlp.c_proj.weight, model.lm_head.weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", SHAPES)
def test_digests(both, tokenizer, dtype, changes):
    cpu, cuda = both(dtype, **changes)
    for matrix, other in zip(*map(matrices, (cpu, cuda)), strict=True):
        for panel, expected in zip(other.library_panels(), matrix.library_panels(), strict=True):
            assert (panel.dtype, panel.shape) == (expected.dtype, expected.shape)
            assert panel.tobytes() == expected.tobytes()
    assert logits_digest(cuda, tokenizer) == logits_digest(cpu, tokenizer)
    for other in [dtype] if dtype == "int8" else ["float32", "float16", "bfloat16"]:
        assert weights_digest(cuda, tokenizer, other) == weights_digest(cpu, tokenizer, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_an_engine(both, tokenizer, dtype):
    cpu, cuda = (engine.weights for engine in engines_of(both(dtype), tokenizer))
    assert cpu.keys() == cuda.keys()
    for name in cpu:
        assert_same_bits(cuda[name], cpu[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_damaged_weights_are_named(both, dtype):
    (_, model) = both(dtype)
    matrix = model.h[0].mlp.c_fc.weight
    assert matrix.is_finite()
    matrix.panels.view(np.uint16)[0, -1] = 0x7F80 if dtype != "float16" else 0x7C00
    assert not matrix.is_finite()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_new_weights_are_not_rounded(both, tokenizer, dtype):
    models = both(dtype)
    name = "h.0.mlp.c_fc.weight"
    shape = engines_of(models, tokenizer)[0].weights[name].shape
    new = np.random.default_rng(3).standard_normal(shape, np.float32)
    cpu, cuda = (engine.with_weights({name: new}) for engine in engines_of(models, tokenizer))
    assert cuda.model.ops.dtype == "float32"
    assert_same_bits(cuda.weights[name], new)
    assert_same_bits(cuda.logits([[1, 2, 3]]), cpu.logits([[1, 2, 3]]))


def test_add_keeps_tiny_numbers(emulated):
    x, y = (np.array(row, np.float32) * TINY for row in ([1, 2, 0, -1], [3, -1, 0, 1]))
    ops = get_ops("cuda", "float32")
    total = ops.add(ops.xp.asarray(x), ops.xp.asarray(y))
    assert_same_bits(ops.to_host(total), x + y)


# --- loading -------------------------------------------------------------------------------------


def test_auto_holds_weights_as_they_are_stored(emulated):
    for stored in DTYPES:
        for device, name in (("cuda", "cupy"), ("auto", "cupy"), ("cpu", "native")):
            ops = ops_for(stored, device)
            assert (ops.name, ops.dtype) == (name, stored)
    assert ops_for("float16", "cuda", mixed=True).dtype == "float32"
    assert ops_for("float16", "cpu", mixed=True).dtype == "float16"
    assert gpt_cli.load("tiny", device="cuda").model.ops.dtype == "float16"


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("case", ["saved", "bf16"])
def test_each_dtype_of_a_checkpoint(emulated, case_folder, case, dtype):
    engines = [
        gpt_cli.load(case_folder(case), device=device, dtype=dtype) for device in ("cpu", "cuda")
    ]
    cpu, cuda = (engine.logits([[1, 2, 3, 4]]) for engine in engines)
    assert engines[0].model.ops.dtype == engines[1].model.ops.dtype
    assert_same_bits(cuda, cpu)
    cpu, cuda = (weights_digest(engine.model, engine.tokenizer) for engine in engines)
    assert cuda == cpu


def test_an_adapter_on_a_gpu_widens_16_bit_weights(emulated, case_folder, tmp_path):
    adapter = ADAPTERS["plain"].write(tmp_path / "adapter")
    how = {"adapter": str(adapter)}
    cpu, cuda = (
        gpt_cli.load(case_folder("bf16"), device=device, **how) for device in ("cpu", "cuda")
    )
    assert (cpu.model.ops.dtype, cuda.model.ops.dtype) == ("bfloat16", "float32")
    assert_same_bits(cuda.logits([[1, 2, 3]]), cpu.logits([[1, 2, 3]]))
    packed = cuda.compress(b"the cat sat on the mat")
    assert cpu.decompress(packed) == b"the cat sat on the mat"


# --- texts, files, checks ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_drafts_change_no_text(both, tokenizer, dtype):
    prompts = [[1, 2, 3, 1, 2, 3, 1], [4, 5, 4, 5, 4]]
    options = Options(max_tokens=10, seed=2, temperature=0.7)
    requests = [Request(Text(prompt), options, row) for row, prompt in enumerate(prompts)]
    texts = []
    for model in both(dtype):
        for speculator in (None, Speculator(model)):
            with planned((2, False)):
                texts.append(outcomes(completions_of(model, tokenizer, requests, speculator)))
    assert texts[1:] == texts[:1] * 3


def test_shared_prefixes_are_kept_on_a_gpu(both, tokenizer):
    beginning = list(range(1, 20)) * 2
    requests = [
        Request(Text([*beginning, id]), Options(max_tokens=3, seed=1), id) for id in range(8)
    ]
    cpu, cuda = (outcomes(completions_of(model, tokenizer, requests)) for model in both())
    assert cuda == cpu


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_one_device_compresses_the_other_decompresses(both, tokenizer, dtype):
    data = b"The cat sat on the mat.\nThe dog ran to the old man.\n" * 2
    codecs = [Codec(model, tokenizer) for model in both(dtype)]
    packed = [b"".join(codec.compress(BytesIO(data), segment=64)) for codec in codecs]
    assert packed[0] == packed[1]
    for codec in codecs:
        assert b"".join(codec.decompress(ArchiveReader(BytesIO(packed[0])))) == data


def test_commands_compress_and_decompress_on_a_device(emulated, case_folder):
    data, model = b"The cat sat on the mat.\n", case_folder("saved")
    for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
        packed, _ = run_here("compress", "-m", model, "--device", here, input=data)
        assert run_here("decompress", "-m", model, "--device", there, input=packed)[0] == data


def served(model, tokenizer, requests):
    """Return the completions of requests that a server computes side by side."""
    shared, events = Scheduler(LoadedModel(model, tokenizer), max_batch=2), queue.Queue()
    completions = [Completion(len(request.prompt), request.seed) for request in requests]
    shared.submit(
        [
            PendingText(request, lambda event, number=number: events.put((number, event)))
            for number, request in enumerate(requests)
        ]
    )
    left = len(requests)
    while left:
        number, event = events.get(timeout=60)
        completions[number].add(event)
        left -= event.finish_reason is not None
    shared.stop()
    shared.join()
    return outcomes(completions)


def test_a_server_on_a_gpu_gives_the_texts_of_the_cpu(both, tokenizer):
    how = {"temperature": 0.9, "ignore_eos": True}
    requests = [
        Request(Text([1, 2, id]), Options(max_tokens=3 + id, seed=id, **how)) for id in range(3)
    ]
    cpu, cuda = both()
    (expected, *_), *others = (
        (served(model, tokenizer, requests), outcomes(completions_of(model, tokenizer, requests)))
        for model in (cpu, cuda)
    )
    assert others[0] == (expected, expected)


def test_a_job_that_began_on_a_cpu_is_resumed_on_a_gpu(emulated, case_folder, tmp_path):
    rows, out = tmp_path / "rows.txt", tmp_path / "out.jsonl"
    rows.write_text("The cat\nThe dog\na b c\n")
    job = ("batch", rows, "-o", out, "-m", case_folder("saved"), "-n", "4", "--seed", "1")

    def records():
        return [json.loads(line) | {"timing": None} for line in out.read_text().splitlines()]

    run_here(*job, "--device", "cpu")
    expected = records()
    out.write_text(out.read_text().splitlines(keepends=True)[0])
    run_here(*job, "--device", "cuda", "--resume")
    assert records() == expected
    assert len(expected) == 3


def checks_of(folder):
    return {check.name: check for check in verify.verify("x", folder)}


def test_verify_compares_a_gpu_to_the_last_bit(emulated, case_folder):
    emulated.setattr(computed, "PROMPTS", ("The cat", "a b"))
    emulated.setattr(computed, "TEXT", "The cat sat on the mat. ")
    checks = checks_of(case_folder("bf16"))
    for dtype, bits in (("float32", "bits"), ("bfloat16", "bits"), ("int8", "bits in int8")):
        check = checks[f"cuda in {dtype} = cpu"]
        assert check.passed, check.detail
        assert check.digest == checks[bits].digest
        assert check.detail.endswith("the same texts, values at hook points, compressed files")


def test_verify_finds_other_bits_of_a_gpu(emulated, case_folder):
    emulated.setattr(computed, "PROMPTS", ("The cat", "a b"))
    emulated.setattr(computed, "TEXT", "The cat sat on the mat. ")
    kind = type(get_ops("cuda", "float32"))
    counts = kind.cumulative_counts
    emulated.setattr(kind, "cumulative_counts", lambda ops, logits: counts(ops, -logits))
    check = checks_of(case_folder("saved"))["cuda in float32 = cpu"]
    assert (check.passed, check.detail) == (False, "other bits: compressed files")


def test_verify_without_the_library_compares_a_gpu_with_numpy(emulated, case_folder):
    emulated.setattr(computed, "PROMPTS", ("The cat", "a b"))
    emulated.setattr(verify, "get_ops", _without_library)
    check = checks_of(case_folder("saved"))["cuda in float32 = cpu"]
    assert check.passed
    assert check.detail.startswith("log-probabilities differ by at most")


def _without_library(device, dtype):
    return NumPyOps(dtype) if device == "cpu" else get_ops(device, dtype)
