"""Train `weights/tiny`, the bundled GPT-2, on the stories of `stories.py`.

    pip install torch==2.13.0 transformers tokenizers safetensors
    python tools/train_tiny.py                   repeat the bundled training
    python tools/train_tiny.py --minutes 5       train for 5 minutes
    python tools/train_tiny.py --report          evaluate and sample an existing model

Only this script needs those packages; the program does not. The tokenizer and the model are those
of the libraries, so that no code of this project influences the reference of its tests.

No story is used twice: the grammar writes new ones during the training. The perplexity of the
grammar is known exactly (see `stories.py`), and the model's can be compared with it.
"""

import argparse
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from stories import write_story
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

OUT = Path(__file__).resolve().parent.parent / "weights" / "tiny"

VOCABULARY = 2048
END = "<|endoftext|>"
END_ID = VOCABULARY - 1
CONFIG = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=512,
    n_layer=4,
    n_head=4,
    n_embd=192,
    # The same function as `gelu_new` in config.json, but fused.
    activation_function="gelu_pytorch_tanh",
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=END_ID,
    eos_token_id=END_ID,
    use_cache=False,
)

STEPS = 5_555
ROWS = 8
PEAK_RATE = 2e-3
WARM_UP = 0.02  # fraction of the run
SHORT_ROW = 320  # tokens
FULL_ROWS = 0.6  # fraction of the run with short rows

# Separate streams of stories for the tokenizer, training and evaluation.
TOKENIZER_SEED, TRAINING_SEED, HELD_OUT_SEED = 1_000, 2_000, 3_000
TOKENIZER_STORIES, HELD_OUT_STORIES = 20_000, 500
SAMPLE_SEEDS = (1, 2, 3)


def train_tokenizer() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Learn byte pairs; number tokens like GPT-2: bytes, merges in order, then the end token.

    The trainer may produce one string by two merges. Only the first is kept, so that the n-th merge
    always makes token 256 + n. A few spare merges replace the others.
    """
    tokenizer = finish(BPE())
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=VOCABULARY + 64, initial_alphabet=alphabet, show_progress=False)
    rng = random.Random(TOKENIZER_SEED)
    tokenizer.train_from_iterator(
        (write_story(rng).text for _ in range(TOKENIZER_STORIES)), trainer
    )
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    first_ways = {left + right: (left, right) for left, right in reversed(merges)}
    kept = [(left, right) for left, right in merges if first_ways[left + right] == (left, right)]
    kept = kept[: VOCABULARY - len(alphabet) - 1]
    tokens = [*alphabet, *(left + right for left, right in kept), END]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != VOCABULARY or vocabulary[END] != END_ID:
        raise SystemExit("too few stories to train a tokenizer with this vocabulary")
    return vocabulary, kept


def finish(pairs: BPE) -> Tokenizer:
    """Return a tokenizer that splits text as GPT-2 does and then merges these pairs."""
    tokenizer = Tokenizer(pairs)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """Load `vocab.json` and `merges.txt`."""
    return finish(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))


def training_batches(tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Yield rows of new stories, which are followed by the end token.

    Every other row starts with the end token, as an empty prompt does; the others start with a
    story, as a typed prompt does. The last story of a row is cut at the row's end.
    """
    rng = random.Random(TRAINING_SEED)
    while True:
        rows = []
        for number in range(ROWS):
            row = [END_ID] if number % 2 else []
            while len(row) <= CONFIG.n_positions:
                row += tokenizer.encode(write_story(rng).text).ids
                row.append(END_ID)
            rows.append(row[: CONFIG.n_positions + 1])
        yield torch.tensor(rows)


def row_length(progress: float) -> int:
    """Return the tokens per row: about one story at first, which is faster, then the context."""
    return CONFIG.n_positions if progress >= FULL_ROWS else SHORT_ROW


def train(
    tokenizer: Tokenizer,
    steps: int,
    minutes: float | None,
    write: Callable[[Path, GPT2LMHeadModel], None],
) -> GPT2LMHeadModel:
    """Train for a number of steps, or for a number of minutes."""
    torch.manual_seed(TRAINING_SEED)
    model = GPT2LMHeadModel(CONFIG)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=True,
    )
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    start = checkpoint = time.monotonic()
    recent: list[float] = []
    step = tokens = 0
    for step, rows in enumerate(training_batches(tokenizer)):
        elapsed = time.monotonic() - start
        progress = elapsed / 60 / minutes if minutes else step / steps
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        batch = rows[:, : row_length(progress) + 1]
        tokens += batch[:, 1:].numel()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if step % 100 == 99:
            speed = tokens / (time.monotonic() - start)
            print(
                f"step {step + 1}: loss {sum(recent) / len(recent):.4f}, "
                f"{elapsed / 60:.1f} min, {speed:,.0f} tokens/s",
                flush=True,
            )
            recent.clear()
        if time.monotonic() - checkpoint > 240:
            write(Path(tempfile.gettempdir()) / "tiny-checkpoint", model)
            checkpoint = time.monotonic()
    print(f"{step} steps, {tokens:,} tokens, {(time.monotonic() - start) / 60:.1f} minutes")
    return model


def learning_rate(progress: float) -> float:
    """Warm up linearly, then decay along a cosine to 1 % of the peak."""
    if progress < WARM_UP:
        return PEAK_RATE * (progress + 1e-4) / WARM_UP
    cosine = math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))
    return PEAK_RATE * (0.01 + 0.99 * (1 + cosine) / 2)


def write_model(
    out: Path,
    model: GPT2LMHeadModel,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
) -> None:
    """Write a folder like the published GPT-2's, in half precision, and replace an existing one."""
    new, old = out.with_name(f"{out.name}.new"), out.with_name(f"{out.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    weights = {
        name: weight.detach().to(torch.float16).contiguous()
        for name, weight in model.transformer.named_parameters()
    }
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise SystemExit("the weights do not fit half precision")
    save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
    (new / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_layer": CONFIG.n_layer,
        "n_head": CONFIG.n_head,
        "n_embd": CONFIG.n_embd,
        "n_positions": CONFIG.n_positions,
        "vocab_size": VOCABULARY,
        "layer_norm_epsilon": CONFIG.layer_norm_epsilon,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "tie_word_embeddings": True,
    }
    (new / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (new / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (new / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def read_model(folder: Path) -> GPT2LMHeadModel:
    """Load a model in single precision."""
    return GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def evaluate(folder: Path) -> None:
    """Print the perplexity of the model and of the grammar on held-out stories.

    Both are per token, including end tokens.
    """
    model, tokenizer = read_model(folder), read_tokenizer(folder)
    rng = random.Random(HELD_OUT_SEED)
    tokens, model_nats, grammar_nats = 0, 0.0, 0.0
    for _ in range(HELD_OUT_STORIES):
        story = write_story(rng)
        ids = torch.tensor([END_ID, *tokenizer.encode(story.text).ids, END_ID])
        logits = model(ids[None, :-1]).logits[0]
        model_nats += cross_entropy(logits, ids[1:], reduction="sum").item()
        grammar_nats += story.nats
        tokens += len(ids) - 1
    print(f"{HELD_OUT_STORIES} held-out stories, {tokens:,} tokens")
    for whose, nats in (("model", model_nats), ("grammar", grammar_nats)):
        print(
            f"{whose}: perplexity per token {math.exp(nats / tokens):.4f}, "
            f"{nats / HELD_OUT_STORIES:.1f} nats per story"
        )


@torch.inference_mode()
def print_samples(folder: Path, seeds: tuple[int, ...]) -> None:
    """Print stories that begin with "Once upon a time": one per seed, and a greedy one."""
    model, tokenizer = read_model(folder), read_tokenizer(folder)
    prompt = torch.tensor([tokenizer.encode("Once upon a time").ids])
    limits = {"max_length": CONFIG.n_positions, "pad_token_id": END_ID, "use_cache": True}
    for seed in seeds:
        torch.manual_seed(seed)
        ids = model.generate(prompt, do_sample=True, temperature=0.8, top_k=40, **limits)[0]
        print(f"\n--- seed {seed}\n{tokenizer.decode(ids.tolist()).removesuffix(END)}")
    ids = model.generate(prompt, do_sample=False, **limits)[0]
    print(f"\n--- greedy\n{tokenizer.decode(ids.tolist()).removesuffix(END)}")


def main() -> None:
    """Train and write the model, then evaluate and sample it."""
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--minutes", type=float, help="train for this time, not for --steps")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true", help="do not train")
    parser.add_argument("--samples", type=int, nargs="*", default=SAMPLE_SEEDS, metavar="SEED")
    options = parser.parse_args()
    if not options.report:
        vocabulary, merges = train_tokenizer()
        write = partial(write_model, vocabulary=vocabulary, merges=merges)
        tokenizer = finish(BPE(vocabulary, merges))
        write(options.out, train(tokenizer, options.steps, options.minutes, write))
    evaluate(options.out)
    print_samples(options.out, tuple(options.samples))


if __name__ == "__main__":
    main()
