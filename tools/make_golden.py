"""Make tests/golden: results of transformers for small checkpoints.

It needs PyTorch and transformers, which the tests do not. Use a separate environment:

    python -m venv .venv-golden
    .venv-golden/bin/pip install -e ".[train]"
    .venv-golden/bin/python tools/make_golden.py

Nothing is downloaded. Run it again only if its cases, tests/support/checkpoints.py or the bundled
model change: the files are the reference, not a snapshot of gpt_cli.
"""
# ruff: noqa: RUF001 (a tokenizer must distinguish characters that look alike)

import hashlib
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformers import (
    GPT2LMHeadModel,
    GPT2Tokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
KNOWN = ROOT / "gpt_cli" / "checks" / "known.json"  # also has the published models
sys.path.insert(0, str(ROOT / "tests"))

from support.checkpoints import CASES, END, noise, write_tokenizer  # noqa: E402 (it is not installed)

NEW_TOKENS = 64
ROWS = [[72, 5, 258, 286, 199], [287, 41, 41, 120, 7]]
RAGGED = [[72, 5, 258, 286, 0, 199, 33, 80, 256], [41, 7, 130, 9], [11]]

STRIDES = [1, 16, 40, 79]  # of windows over a text longer than the context of 80

SCORED = "The sand and the re-entering waves... 2000 of them!\n\nL'été, 中 and 😀 — in a ring."

TEXTS = [
    "",
    "Hello world, the answer is and was in the ring",
    "He's they'll I'm we've you're isn't I'd 'tis S'S 'LL",
    "0 00 000 1234567890 3.14 1,000,000 ½ ² ٣ Ⅷ",
    "👩‍👩‍👧‍👦 😀😁 🏳️‍🌈 👍🏽 é é ạ̈ Å Z͑ͫ̓a̴l̕g̨o",
    "中文字符 日本語テキスト 한국어 中中",
    "العربية لا إله ١٢٣ עברית",
    "naïve café déjà vu straße Ünïcödé ﬁ ſ ǆ",
    " leading and trailing ",
    "a  b   c    d     e      f\t\tg \t h\n\ni\r\nj\n \n k",
    "\n\n\n   \n\t\v\f\r \x1c\x1d\x1e\x1f\x85",
    "\u00a0a\u00a0\u00a0b \u2003 \u2003c\u200b\u3000d\u2028e\u2029f\ufeffg\u180eh",
    "        indented\n        code():  return  0  ",
    "x" * 50 + " " * 50 + "\n" * 50 + "é" * 50,
    "".join(map(chr, range(256))),
    "".join(map(chr, range(128))) + "\x00\x01\x7f\x80\x9f",
    f"{END} in the text {END}{END} and<|endoftext |>",
    "!?...—–‘’“”«»#$%&()*+,-./:;<=>@[\\]^_`{|}~",
    "\U0010ffff\U0001f9ff\ufffd\ufffe\ue000\ud7ff",
    "the\u0301 a\u200d\u200d b\u202ec",
]

SAMPLING: list[dict[str, float]] = [  # unnamed filters are off
    {},
    {"repeat_penalty": 1.3},
    {"repeat_penalty": 0.8},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.001},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_p": 0.6},
    {"temperature": 0.5, "min_p": 0.2},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 30, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.3},
    {"repeat_penalty": 1.5, "temperature": 1.4, "top_k": 25, "top_p": 0.85, "min_p": 0.02},
    {"repeat_penalty": 1.2, "temperature": 0.6, "top_k": 40, "top_p": 0.97, "min_p": 0.05},
    {"no_repeat_ngram": 1},
    {"no_repeat_ngram": 2},
    {"no_repeat_ngram": 3},
    {"no_repeat_ngram": 4},
    {"no_repeat_ngram": 7},
    {"repeat_penalty": 1.3, "no_repeat_ngram": 2, "top_k": 8},
    {"typical_p": 0.9},
    {"typical_p": 0.4},
    {"typical_p": 0.001},
    {"temperature": 0.5, "typical_p": 0.6},
    {"top_k": 9, "typical_p": 0.7},
    {"top_p": 0.8, "typical_p": 0.8},
    {"min_p": 0.1, "typical_p": 0.5},
    {"repeat_penalty": 1.2, "no_repeat_ngram": 2, "temperature": 1.5, "top_k": 40, "typical_p": 0.9}
    | {"top_p": 0.95, "min_p": 0.02},
]


def load_model(case: str, folder: Path) -> GPT2LMHeadModel:
    """Write a checkpoint, and load it with transformers."""
    return GPT2LMHeadModel.from_pretrained(
        CASES[case].write(folder / case), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def model_arrays(case: str, model: GPT2LMHeadModel) -> dict[str, np.ndarray]:
    """Return logits of ROWS, and their greedy continuations with the margins of the choices."""
    ids = torch.tensor(ROWS)
    logits = model(ids).logits
    margins = []
    for _ in range(NEW_TOKENS):
        best = model(ids).logits[:, -1].topk(2)
        margins.append(best.values[:, 0] - best.values[:, 1])
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return {
        f"{case}/logits": logits.numpy(),
        f"{case}/greedy": ids[:, len(ROWS[0]) :].numpy().astype(np.int32),
        f"{case}/margins": torch.stack(margins, dim=1).numpy(),
    }


def padded_arrays(model: GPT2LMHeadModel) -> dict[str, np.ndarray]:
    """Return logits of the real tokens of a left-padded batch, row by row, and its greedy ids."""
    longest = max(map(len, RAGGED))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in RAGGED])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in RAGGED])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    generated = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return {
        "padded/logits": logits[mask.bool()].numpy(),
        "padded/greedy": generated[:, longest:].numpy().astype(np.int32),
    }


def inner_arrays(model: GPT2LMHeadModel) -> dict[str, np.ndarray]:
    """Return the inner states of a pass over the first row of ROWS, and the logits by layer."""
    output = model(torch.tensor(ROWS[:1]), output_attentions=True, output_hidden_states=True)
    states = []  # transformers returns the last one after ln_f
    handle = model.transformer.h[-1].register_forward_hook(
        lambda module, inputs, result: states.append(
            result[0] if isinstance(result, tuple) else result
        )
    )
    model(torch.tensor(ROWS[:1]))
    handle.remove()
    residual = torch.stack([*output.hidden_states[:-1], states[0]])[:, 0]
    return {
        "residual": residual.numpy(),
        "attention": torch.stack(output.attentions)[:, 0].numpy(),
        "logits": model.lm_head(model.transformer.ln_f(residual)).numpy(),
    }


def scored(model: GPT2LMHeadModel, ids: list[int]) -> dict[str, Any]:
    """Return log-likelihoods of a text, and the perplexity by the loss of transformers."""
    row = torch.tensor([ids])
    output = model(row, labels=row)
    logprobs = output.logits[0, :-1].double().log_softmax(dim=-1)
    return {
        "text": SCORED,
        "ids": ids,
        "token_logprobs": logprobs.gather(1, row[0, 1:, None])[:, 0].tolist(),
        "perplexity": output.loss.double().exp().item(),
    }


def windows(model: GPT2LMHeadModel) -> dict[str, Any]:
    """Return perplexities of a long text, by the sliding windows of transformers' documentation."""
    ids = (np.abs(noise("windows", 333)) * 1000).astype(int) % model.config.vocab_size
    text, length = torch.tensor(ids[None]), model.config.n_positions
    perplexities = {}
    for stride in STRIDES:
        total = count = scored = 0
        for start in range(0, len(ids), stride):
            end = min(start + length, len(ids))
            window = text[:, start:end]
            labels = window.clone()
            labels[:, : scored - end] = -100  # scored by an earlier window
            known = int((labels[:, 1:] != -100).sum())
            total += model(window, labels=labels).loss.double().item() * known
            count, scored = count + known, end
            if end == len(ids):
                break
        perplexities[str(stride)] = math.exp(total / count)
    return {"ids": ids.tolist(), "perplexities": perplexities}


def tokenized(folder: Path) -> list[list[int]]:
    """Return the ids of TEXTS, with names of special tokens as ordinary text."""
    tokenizer = GPT2Tokenizer(
        vocab=str(folder / "vocab.json"),
        merges=str(folder / "merges.txt"),
        split_special_tokens=True,
    )
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def processors(params: dict[str, float]) -> LogitsProcessorList:
    """Return the filters of transformers, in the order in which it applies them."""
    filters = {
        "repeat_penalty": RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram": NoRepeatNGramLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
    }
    return LogitsProcessorList([filters[name](params[name]) for name in filters if name in params])


def sampling() -> dict[str, Any]:
    """Return the tokens that survive the sets of filters, with their probabilities."""
    logits = (1.8 * noise("sampling", 3, 60)).astype(np.float32)
    # Likely and unlikely ones. The last three were there before, followed by the likeliest.
    texts = [np.argsort(row)[[-3, -2, -5, 30, -1, 0, -2, -5, 30]].tolist() for row in logits]
    cases = []
    for params in SAMPLING:
        processed = processors(params)(torch.tensor(texts), torch.tensor(logits))
        probabilities = processed.double().softmax(dim=-1).numpy()
        survivors = [np.flatnonzero(row).tolist() for row in probabilities]
        pairs = zip(probabilities, survivors, strict=True)
        cases.append(
            {
                "params": params,
                "survivors": survivors,
                "probabilities": [row[ids].round(9).tolist() for row, ids in pairs],
            }
        )
    return {"logits": logits.tolist(), "texts": texts, "cases": cases}


def tiny_known() -> dict[str, Any]:
    """Return the hashes of the files of `tiny` and its greedy texts, for `gpt-cli verify tiny`."""
    folder = ROOT / "weights" / "tiny"
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    continuations = []
    for prompt in ("Once upon a time", "One day, a fox", "The old woman looked at the sea."):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new_ids = model.generate(ids, do_sample=False, max_new_tokens=60)[0, ids.shape[1] :]
        text = tokenizer.decode(new_ids, skip_special_tokens=True)
        continuations.append({"prompt": prompt, "tokens": len(new_ids), "text": text})
    files = ("config.json", "merges.txt", "model.safetensors", "vocab.json")
    return {
        "source": "tools/make_golden.py, by transformers",
        "sha256": {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files
        },
        "continuations": continuations,
    }


def write_json(name: str, value: Any) -> None:
    """Write a JSON file with a line per top-level entry."""
    lines = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
    (GOLDEN / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


@torch.inference_mode()
def main() -> None:
    """Write all files."""
    torch.set_num_threads(1)
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arrays = {"rows": np.array(ROWS, np.int32)}
        for case in CASES:
            arrays |= model_arrays(case, load_model(case, folder))
            print(f"{case}: logits of std {arrays[f'{case}/logits'].std():.3f}")
        model = load_model("saved", folder)
        np.savez_compressed(GOLDEN / "models.npz", **arrays, **padded_arrays(model))
        np.savez_compressed(GOLDEN / "inner.npz", **inner_arrays(model))
        write_json("padded.json", {"rows": RAGGED})
        write_json("windows.json", windows(model))

        write_tokenizer(folder)
        ids = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
        write_json("score.json", scored(model, ids(SCORED)["input_ids"]))
        tokens = {"texts": TEXTS, "small": tokenized(folder)}
    tiny = ROOT / "weights" / "tiny"
    if tiny.is_dir():
        merges = (tiny / "merges.txt").read_bytes()
        tokens |= {"tiny": tokenized(tiny), "tiny_merges": hashlib.sha256(merges).hexdigest()}
        known = json.loads(KNOWN.read_bytes()) | {"tiny": tiny_known()}
        KNOWN.write_text(json.dumps(known, indent=1) + "\n", encoding="ascii")
    write_json("tokenizer.json", tokens)
    write_json("sampling.json", sampling())
    print(f"{sum(file.stat().st_size for file in GOLDEN.iterdir()):,} bytes in {GOLDEN}")


if __name__ == "__main__":
    main()
