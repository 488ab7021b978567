"""Measure one engine on one checkpoint, in this process, and print one JSON line.

    python benchmarks/measure.py gpt-cli FOLDER
    python benchmarks/measure.py transformers FOLDER     # needs torch and transformers
    python benchmarks/measure.py ctranslate2 CONVERTED   # needs ctranslate2
    python benchmarks/measure.py llama.cpp FILE          # needs llama-cpp-python
    python benchmarks/measure.py openvino CONVERTED      # needs optimum-intel[openvino]

The last three read the output of convert.py. All compute in float32. With --dtype int8, weights
have 8 bits, and llama.cpp and gpt-cli read converted files. --dtype bfloat16 is for gpt-cli, with
a checkpoint in bfloat16.

Prompts are random ids; decoding is greedy and never ends early. Rates are tokens per second:
    decode      128 new tokens after a prompt of 32, without the prefill
    decode_896  64 new tokens after a prompt of 896, without the prefill
    decode_busy 64 new tokens after a prompt of 32, without the prefill, beside processes that keep
                all cores busy
    prefill     a prompt of 896, up to its first new token
    batch_8     8 prompts of 32 with 64 new tokens, with the prefill
    batch_64    64 prompts of 32 with 64 new tokens, with the prefill
llama.cpp computes logits without sampling, and is not measured with batches.
Of gpt-cli only, the median of three runs:
    forward     a text of 1024, with the logits of every token
    score       a text of 1024, with the log-likelihood of every token
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt_cli.folder.tokenizer import Tokenizer
    from gpt_cli.gpt2.model import GPT2

# Seconds to continue `batch` random prompts of `prompt` tokens by `new` tokens.
Generate = Callable[[int, int, int], float]
# Seconds for a random text of a number of tokens.
Seconds = Callable[[int], float]


def greedy(model: "GPT2", tokenizer: "Tokenizer") -> Generate:
    """Return a function that continues random ids with a model of this repository."""
    import numpy as np

    from gpt_cli.generation.generate import Run
    from gpt_cli.generation.row import Request
    from gpt_cli.options.request import Options
    from gpt_cli.texts.loaded import LoadedModel
    from gpt_cli.texts.text import Text

    rng = np.random.default_rng(0)
    loaded = LoadedModel(model, tokenizer)

    def generate(batch: int, prompt: int, new: int) -> float:
        ids = rng.integers(model.config.vocab_size, size=(batch, prompt)).tolist()
        options = Options(max_tokens=new, temperature=0, ignore_eos=True)
        requests = [Request(Text(row), options, index) for index, row in enumerate(ids)]
        start = time.perf_counter()
        for _ in Run(loaded, requests):
            pass
        return time.perf_counter() - start

    return generate


def gpt_cli_engine(folder: Path, threads: int, dtype: str) -> tuple[Generate, dict[str, Seconds]]:
    """Return gpt-cli."""
    from gpt_cli.system.startup import prepare

    prepare(threads)
    import numpy as np

    from gpt_cli.folder.tokenizer import read_tokenizer
    from gpt_cli.gpt2 import checkpoint
    from gpt_cli.gpt2.model import forward
    from gpt_cli.ops import get_ops
    from gpt_cli.scoring import score
    from gpt_cli.texts.loaded import LoadedModel
    from gpt_cli.texts.text import Text

    model = checkpoint.load(folder, get_ops("cpu", dtype))
    tokenizer = read_tokenizer(folder)
    rng = np.random.default_rng(0)

    def forward_seconds(tokens: int) -> float:
        ids = rng.integers(model.config.vocab_size, size=(1, tokens))
        start = time.perf_counter()
        forward(model, ids)
        return time.perf_counter() - start

    def score_seconds(tokens: int) -> float:
        ids = rng.integers(model.config.vocab_size, size=tokens).tolist()
        start = time.perf_counter()
        score.score(LoadedModel(model, tokenizer), [Text(ids)])
        return time.perf_counter() - start

    return greedy(model, tokenizer), {"forward": forward_seconds, "score": score_seconds}


def transformers_engine(
    folder: Path, threads: int, dtype: str
) -> tuple[Generate, dict[str, Seconds]]:
    """Return transformers on PyTorch, always in float32."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(threads)
    return as_transformers(GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()), {}


def openvino_engine(folder: Path, threads: int, dtype: str) -> tuple[Generate, dict[str, Seconds]]:
    """Return OpenVINO behind the interface of transformers.

    Its default is not float32. With int8 weights, it may also quantize activations to int8.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    from optimum.intel import OVModelForCausalLM

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(threads)}
    if dtype == "float32":
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    return as_transformers(OVModelForCausalLM.from_pretrained(folder, ov_config=settings)), {}


def wait(device: str) -> None:
    """Wait until PyTorch's device has finished."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def as_transformers(model: Any, device: str = "cpu", **settings: Any) -> Generate:
    """Return a function that continues random ids with `generate` of transformers."""
    import torch

    def generate(batch: int, prompt: int, new: int) -> float:
        ids = torch.randint(0, model.config.vocab_size, (batch, prompt), device=device)
        wait(device)
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                **settings,
            )
        wait(device)
        return time.perf_counter() - start

    return generate


def ctranslate2_engine(
    folder: Path, threads: int, dtype: str
) -> tuple[Generate, dict[str, Seconds]]:
    """Return CTranslate2."""
    import ctranslate2

    generator = ctranslate2.Generator(
        str(folder), compute_type=dtype, intra_threads=threads, inter_threads=1
    )
    vocabulary = json.loads((folder / "vocabulary.json").read_text())

    def generate(batch: int, prompt: int, new: int) -> float:
        prompts = [random.choices(vocabulary[:50000], k=prompt) for _ in range(batch)]  # noqa: S311
        start = time.perf_counter()
        generator.generate_batch(
            prompts,
            max_length=new,
            min_length=new,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return time.perf_counter() - start

    return generate, {}


def llama_engine(file: Path, threads: int, dtype: str) -> tuple[Generate, dict[str, Seconds]]:
    """Return llama.cpp through its Python binding, which evaluates one text at a time."""
    from llama_cpp import Llama

    model = Llama(
        str(file),
        n_ctx=1024,
        n_batch=1024,
        n_ubatch=1024,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def generate(batch: int, prompt: int, new: int) -> float:
        ids = random.choices(range(model.n_vocab()), k=prompt + new - 1)  # noqa: S311
        model.reset()
        start = time.perf_counter()
        model.eval(ids[:prompt])
        for id in ids[prompt:]:
            model.eval([id])
        return time.perf_counter() - start

    return generate, {}


ENGINES = {
    "gpt-cli": gpt_cli_engine,
    "transformers": transformers_engine,
    "ctranslate2": ctranslate2_engine,
    "llama.cpp": llama_engine,
    "openvino": openvino_engine,
}
BATCHES = ENGINES.keys() - {"llama.cpp"}


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep the cores busy with a power of two of processes, at most one per core."""
    forks = (os.cpu_count() or 1).bit_length() - 1  # a fork doubles the processes
    loops = f"import os\nfor _ in range({forks}): os.fork()\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", loops], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def figures(generate: Generate, others: dict[str, Seconds], batches: bool) -> dict[str, float]:
    """Measure all figures once."""
    generate(1, 32, 8)  # warm-up
    generate(1, 896, 65)  # warm-up: memory for a long text is allocated once
    rates_once = {
        "decode": 128 / (generate(1, 32, 129) - generate(1, 32, 1)),
        "decode_896": 64 / (generate(1, 896, 65) - generate(1, 896, 1)),
        "prefill": 896 / generate(1, 896, 1),
    }
    with busy_cores():
        rates_once["decode_busy"] = 64 / (generate(1, 32, 65) - generate(1, 32, 1))
    if batches:
        generate(8, 32, 32)  # warm-up for small batches
        rates_once["batch_8"] = 8 * 64 / generate(8, 32, 64)
        rates_once["batch_64"] = 64 * 64 / generate(64, 32, 64)
    # In turns, because they are compared.
    rates: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(3):
        for name, seconds in others.items():
            rates[name].append(1024 / seconds(1024))
    return rates_once | {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    """Measure one engine and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    generate, others = ENGINES[arguments.engine](arguments.path, arguments.threads, arguments.dtype)
    print(json.dumps(figures(generate, others, arguments.engine in BATCHES)))


if __name__ == "__main__":
    main()
