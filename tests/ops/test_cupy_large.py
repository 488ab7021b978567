"""A model of the size of gpt2 on a GPU: the bits of the CPU, and checks by NVIDIA's sanitizer."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpt_cli
from gpt_cli.compression.archive import ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.gpt2.model import forward
from gpt_cli.options.request import SamplingParams
from gpt_cli.system import gpu
from support.checkpoints import write_checkpoint
from support.models import DTYPES
from support.pairs import assert_same, decoded, random_ids

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

CONFIG = {
    "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024,
    "vocab_size": 50257,
}  # fmt: skip
TEXT = b"The cat sat on the mat, and the dog ran.\nThen the cat ran to the old man.\n"
TOOLS = ("memcheck", "racecheck", "synccheck")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if problem := gpu.problem():
        pytest.exit(f"nothing was tested: {problem}", returncode=1)
    return write_checkpoint(tmp_path_factory.mktemp("large"), CONFIG)


@pytest.fixture(scope="module", params=DTYPES)
def engines(request, folder):
    """Return an engine on the GPU and one on the CPU, of one dtype."""
    return [gpt_cli.load(str(folder), device=x, dtype=request.param) for x in ("cuda", "cpu")]


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (1, 896)])
def test_logits(engines, shape):
    ids = random_ids(*shape)
    models = [engine.model for engine in engines]
    assert_same(*[m.ops.to_host(forward(m, m.ops.xp.asarray(ids))) for m in models])


@pytest.mark.parametrize("B", [1, 8, 32, 64])
def test_decode(engines, B):
    random = np.random.default_rng(B)
    lengths, uniforms = random.integers(1, 30, B), random.random((8, B))
    params, banned = SamplingParams(top_k=40, top_p=0.95), np.array([3, 50256])
    assert_same(*[decoded(x.model, lengths, uniforms, banned, params) for x in engines])


def test_texts_of_ten_seeds(engines):
    def texts(engine):
        options = {"max_tokens": 24, "ignore_eos": True}
        return [engine.generate(["The cat"], seed=seed, **options)[0].ids for seed in range(10)]

    assert texts(engines[0]) == texts(engines[1])


def test_what_one_compresses_the_other_decompresses(engines):
    codecs = [Codec(engine.model, engine.loaded.tokenizer) for engine in engines]
    packed = [b"".join(codec.compress(io.BytesIO(TEXT))) for codec in codecs]
    assert packed[0] == packed[1]
    for codec in codecs:
        assert b"".join(codec.decompress(ArchiveReader(io.BytesIO(packed[0])))) == TEXT


@pytest.mark.parametrize("tool", TOOLS)
def test_the_sanitizer_finds_nothing(tool):
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("needs compute-sanitizer, of CUDA's toolkit")
    tests = Path(__file__).parents[1]
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable]
    command += ["-m", "support.gpu_model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[:9000] + done.stderr[-3000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout
