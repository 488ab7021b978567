"""Measure the loss of quality by int8 weights, and optionally by llama.cpp's Q8_0.

    python benchmarks/quality.py tiny FOLDER
    python benchmarks/quality.py tiny FOLDER --llama PYTHON --save NAME

PYTHON is an interpreter with llama-cpp-python, gguf and safetensors; convert.py converts the
checkpoint for it. Each checkpoint gives one JSON line. The reference at every position is gpt-cli
in float32 with the same ids:
    kl                 mean KL divergence from the probabilities of float32, in nats
    top1               fraction of positions with the same likeliest token as float32
    top1_clear         the same for the half of the positions with the largest lead in float32
    perplexity         only for texts by the model itself, without their first token
    perplexity_change  relative to that of float32
llama.cpp in float32 checks that texts and conversion agree. The remaining difference is its GELU,
which is a float16 lookup table. Its keys and values are float32 here; its default is float16.

A model in a FOLDER reads random ids, because its weights may be random, too. With --own, or with
a name such as `tiny`, a model reads texts that it has written itself, in float32 at temperature 1:
one after another, with their end tokens.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from run import PACKAGES, machine, versions

if TYPE_CHECKING:
    from gpt_cli import Engine

HERE = Path(__file__).parent
EVALUATE = "--evaluate"  # the script calls itself with this in the interpreter of llama.cpp

RANDOM = {"texts": 4, "tokens": 256}
OWN = {"texts": 8, "tokens": 400}
SLICE = 64  # positions at a time: in float64, all logits would take gigabytes

Ids = list[int]
Logits = NDArray[np.float32]  # (T, V)
Figures = dict[str, float]


def random_texts(engine: "Engine", texts: int, tokens: int, seed: int) -> list[Ids]:
    """Draw uniformly random ids."""
    vocab_size = engine.model.config.vocab_size
    return np.random.default_rng(seed).integers(vocab_size, size=(texts, tokens)).tolist()


def own_texts(engine: "Engine", texts: int, tokens: int, seed: int) -> list[Ids]:
    """Generate texts from the start token; when a text ends, start another after it."""
    start = engine.model.config.bos_token_id
    if start is None:
        raise SystemExit(f"{engine.name} has no start token")
    written: list[Ids] = [[start] for _ in range(texts)]
    while min(map(len, written)) < tokens:
        stories = engine.generate(
            [""] * texts, max_tokens=tokens - 1, temperature=1, top_k=0, top_p=1, seed=seed
        )
        for ids, story in zip(written, stories, strict=True):
            ids += story.ids
        seed += 1
    return [ids[:tokens] for ids in written]


def all_logits(engine: "Engine", texts: list[Ids]) -> list[Logits]:
    """Compute the logits of all texts."""
    return [engine.logits([ids])[0] for ids in texts]


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Return log-probabilities in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def compare(
    texts: list[Ids], reference: list[Logits], others: Iterable[Logits], written: bool
) -> Figures:
    """Return figures of the difference between other logits and the reference."""
    kl, same, lead, loss, change = [], [], [], [], []
    for ids, all_ours, all_theirs in zip(texts, reference, others, strict=True):
        if all_theirs.shape != all_ours.shape:
            raise SystemExit(f"logits have the shape {all_theirs.shape}, not {all_ours.shape}")
        for start in range(0, len(ids), SLICE):
            ours, theirs = all_ours[start : start + SLICE], all_theirs[start : start + SLICE]
            p, q = log_softmax(ours), log_softmax(theirs)
            kl.append((np.exp(p) * (p - q)).sum(axis=-1))
            same.append(ours.argmax(axis=-1) == theirs.argmax(axis=-1))
            second, first = np.partition(ours, [-2, -1], axis=-1)[:, -2:].T
            lead.append(first - second)
            following = np.array(ids[start + 1 : start + 1 + SLICE])
            rows = np.arange(len(following))
            loss.append(-q[rows, following])
            change.append(p[rows, following] - q[rows, following])
    agrees, leads = np.concatenate(same), np.concatenate(lead)
    figures = {
        "kl": float(np.concatenate(kl).mean()),
        "top1": float(agrees.mean()),
        "top1_clear": float(agrees[leads >= np.median(leads)].mean()),
    }
    if written:
        figures["perplexity"] = math.exp(np.concatenate(loss).mean())
        figures["perplexity_change"] = math.expm1(np.concatenate(change).mean())
    return figures


def in_float32(folder: Path, scratch: Path) -> Path:
    """Return the checkpoint, or a copy in float32: llama.cpp needs vectors in float32."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    if all(tensor.dtype == np.float32 for tensor in tensors.values()):
        return folder
    copy = scratch / "float32"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def llama_logits(python: str, folder: Path, dtype: str, texts: list[Ids]) -> Iterable[Logits]:
    """Yield the logits of all texts, computed by llama.cpp in a separate process."""
    with tempfile.TemporaryDirectory() as scratch:
        model, ids, out = (Path(scratch, name) for name in ("model.gguf", "ids.npz", "out.npz"))
        source = in_float32(folder, Path(scratch))
        command = [python, str(HERE / "convert.py"), "llama.cpp", str(source), str(model)]
        subprocess.run([*command, "--dtype", dtype], check=True, stdout=subprocess.DEVNULL)
        np.savez(ids, *map(np.array, texts))
        command = [python, __file__, EVALUATE, str(model), str(ids), str(out)]
        subprocess.run(command, check=True)
        with np.load(out, allow_pickle=False) as arrays:
            for name in arrays.files:
                yield arrays[name]  # reads one text at a time


def evaluate(model: str, ids: str, out: str) -> None:
    """Write llama.cpp's logits of texts; this runs in the other interpreter."""
    import llama_cpp

    with np.load(ids, allow_pickle=False) as arrays:
        texts = [arrays[name].tolist() for name in arrays.files]
    longest, threads = max(map(len, texts)), os.cpu_count()
    llama = llama_cpp.Llama(
        model,
        n_ctx=longest,
        n_batch=longest,
        n_ubatch=longest,
        n_threads=threads,
        n_threads_batch=threads,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        logits_all=True,
        verbose=False,
    )
    logits = []
    for text in texts:
        llama.reset()
        llama.eval(text)
        logits.append(llama.scores[: len(text)].copy())
    np.savez(out, *logits)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one checkpoint."""
    import gpt_cli
    from gpt_cli import hub

    folder = hub.resolve(name)
    written = arguments.own or not Path(name).is_dir()
    size = OWN if written else RANDOM
    engine = gpt_cli.load(name, dtype="float32")
    count = arguments.texts or size["texts"]
    tokens = min(arguments.tokens or size["tokens"], engine.model.config.n_positions)
    texts = (own_texts if written else random_texts)(engine, count, tokens, arguments.seed)
    reference = all_logits(engine, texts)
    del engine
    figures: dict[str, Any] = {
        "checkpoint": Path(name).absolute().name if Path(name).is_dir() else name,
        "texts": f"{count} x {tokens} {'own' if written else 'random'}",
    }
    ours = all_logits(gpt_cli.load(name, dtype="int8"), texts)
    figures["int8"] = compare(texts, reference, ours, written)
    del ours
    if arguments.llama:
        for label, dtype in (("Q8_0", "int8"), ("llama_float32", "float32")):
            theirs = llama_logits(arguments.llama, folder, dtype, texts)
            figures[label] = compare(texts, reference, theirs, written)
    return figures


def table(checkpoints: list[dict[str, Any]]) -> str:
    """Return a row per checkpoint; the ratio is our KL divergence / llama.cpp's."""
    kinds = ("int8", "Q8_0")
    units = {"top1": "same top-1", "top1_clear": "clear half", "perplexity_change": "perplexity"}
    columns = ["texts", "KL int8", "KL Q8_0", "ratio"]
    columns += [f"{unit} {kind}" for unit in units.values() for kind in kinds]
    columns += ["KL llama.cpp float32"]
    lines = ["| " + " | ".join(["", *columns]) + " |", "|" + "-|" * (len(columns) + 1)]
    for figures in checkpoints:
        kl = {kind: figures.get(kind, {}).get("kl") for kind in (*kinds, "llama_float32")}
        cells = [figures["checkpoint"], figures["texts"]]
        cells += ["" if kl[kind] is None else f"{kl[kind]:.2e}" for kind in kinds]
        cells += [f"{kl['int8'] / kl['Q8_0']:.3g}" if kl["Q8_0"] else ""]
        for unit in units:
            values = [figures.get(kind, {}).get(unit) for kind in kinds]
            form = "+.3%" if unit == "perplexity_change" else ".1%"
            cells += ["" if value is None else format(value, form) for value in values]
        cells += ["" if kl["llama_float32"] is None else f"{kl['llama_float32']:.2e}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and save with `--save`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument(
        "--own", action="store_true", help="models in folders write their texts, too"
    )
    parser.add_argument("--texts", type=int, help="number of texts (default: 4 random, 8 own)")
    parser.add_argument("--tokens", type=int, help="tokens per text (default: 256 random, 400 own)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--llama", metavar="PYTHON", help="also measure llama.cpp")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.md")
    arguments = parser.parse_args()
    where = machine() | {"seed": arguments.seed}
    where |= versions(sys.executable, ["gpt2-cli", "numpy"])
    if arguments.llama:
        where |= versions(arguments.llama, PACKAGES["llama.cpp"])
    checkpoints = []
    for name in arguments.checkpoints:
        checkpoints.append(measure(name, arguments))
        print(json.dumps(checkpoints[-1]), flush=True)
    if arguments.save:
        facts = "".join(f"- {key}: {value}\n" for key, value in where.items())
        results = HERE / "results" / f"{arguments.save}.md"
        results.write_text(f"{facts}\n{table(checkpoints)}")


if __name__ == "__main__":
    if sys.argv[1:2] == [EVALUATE]:
        evaluate(*sys.argv[2:])
    else:
        main()
