"""Make tests/golden/edits.npz: logits of small models whose values forward hooks change.

It needs PyTorch and transformers, in an environment of its own: see tools/make_golden.py. Run it
again only if tests/support/edits.py changes.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import GPT2LMHeadModel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.checkpoints import CASES  # noqa: E402 (it is not installed)
from support.edits import (  # noqa: E402
    EDITS,
    GENERATED,
    GENERATING,
    ODD,
    PROMPTS,
    edits_of,
    write_files,
)

EVERY = 32  # logits: the file stays small
NEW_TOKENS = 50
EDIT = re.compile(
    r"(?P<hook>.+?)(\[(?P<index>[^]]*)])?(@(?P<at>[^=+*]*))?(?P<op>[*+]?=)(?P<value>.*)"
)
Apply = Callable[[str, torch.Tensor], torch.Tensor]


def positions(text: str | None, prompt: int, total: int) -> range:
    """Return the positions that a text such as -1 or 2:7 names."""
    if text in ("prompt", "generated"):
        return range(total)[:prompt] if text == "prompt" else range(total)[prompt:]
    if text is None:
        return range(total)
    start, colon, end = text.partition(":")
    first = int(start or 0) + (prompt if start.startswith("-") else 0)
    if not colon:
        return range(first, first + 1)
    return range(first, int(end) + (prompt if end.startswith("-") else 0) if end else total)


def columns(text: str | None, size: int) -> list[int]:
    """Return the heads or dimensions of an index."""
    if text is None:
        return list(range(size))
    spans = [part.partition(":") for part in text.split(",")]
    return [n for a, colon, b in spans for n in range(int(a), int(b) if colon else int(a) + 1)]


def value_of(text: str, name: str, at: range, folder: Path) -> Any:
    """Return a number, or the array of a file: a vector, a mean, or that of positions."""
    factor, star, source = text.rpartition("*")
    file, _, key = source.removeprefix("mean:").partition(":")
    if "." + file.rpartition(".")[2] not in (".npy", ".npz", ".safetensors"):
        return float(text)
    if file.endswith(".npy"):
        array = np.load(folder / file)
    else:
        read = np.load if file.endswith(".npz") else load_file
        array = read(folder / file)[key or name]
    if source.startswith("mean:"):
        array = array.astype(np.float64).mean(axis=0)
    elif file != "v.safetensors":
        array = array[at.start : at.stop]
    return (float(factor) if star else 1.0) * torch.tensor(array, dtype=torch.float64)


def editing(edits: list[str], prompt: int, folder: Path) -> Apply:
    """Return a function that changes the value (T, heads or dimensions, ...) of a hook point."""

    def apply(name: str, value: torch.Tensor) -> torch.Tensor:
        for edit in edits:
            parts = EDIT.fullmatch(edit)
            assert parts  # noqa: S101
            if not fnmatchcase(name, parts["hook"]):
                continue
            value = value.clone()
            total = len(value)
            at = positions(parts["at"], prompt, total)
            new = value_of(parts["value"], name, at, folder)
            for row, position in enumerate(at):
                array = new
                if isinstance(new, torch.Tensor):
                    patched = parts["op"] == "=" and "mean:" not in parts["value"]
                    array = new[row] if patched else new
                for column in columns(parts["index"], value.shape[1]):
                    part = array[column] if isinstance(array, torch.Tensor) else array
                    target = value[position, column : column + 1]  # a view
                    if name.endswith(("scores", "pattern")):  # queries see no later keys
                        target = target[:, : position + 1]
                        part = part[: position + 1] if isinstance(part, torch.Tensor) else part
                    if parts["op"] == "=":
                        target[...] = part
                    else:
                        target[...] = target * part if parts["op"] == "*=" else target + part
        return value

    return apply


@contextmanager
def hooked(model: GPT2LMHeadModel, apply: Apply) -> Iterator[None]:
    """Give the values of the forward pass to a function, by the names of hook points."""
    softmax, layer, H = torch.nn.functional.softmax, [0], model.config.n_head

    def replaced(scores: torch.Tensor, dim: int, **options: Any) -> torch.Tensor:
        prefix = f"blocks.{layer[0]}.attn.hook_"
        scores = scores.clone()
        scores[0] = apply(prefix + "attn_scores", scores[0].swapaxes(0, 1)).swapaxes(0, 1)
        pattern = softmax(scores, dim=dim, **options)
        pattern[0] = apply(prefix + "pattern", pattern[0].swapaxes(0, 1)).swapaxes(0, 1)
        return pattern.float() if model.config.reorder_and_upcast_attn else pattern

    def output(*names: str) -> Callable[..., torch.Tensor]:
        def hook(module: Any, inputs: Any, result: torch.Tensor) -> torch.Tensor:
            x = result[0]
            for name in names:
                x = apply(name, x)
            return x[None]

        return hook

    def heads(name: str, x: torch.Tensor) -> torch.Tensor:
        return apply(name, x.unflatten(-1, (H, -1))).flatten(1)

    def split(prefix: str) -> Callable[..., torch.Tensor]:
        def hook(module: Any, inputs: Any, result: torch.Tensor) -> torch.Tensor:
            parts = zip("qkv", result[0].chunk(3, dim=-1), strict=True)
            return torch.cat([heads(f"{prefix}attn.hook_{n}", x) for n, x in parts], -1)[None]

        return hook

    def before(name: str, *, by_head: bool = False) -> Callable[..., None]:
        def hook(module: Any, inputs: Any) -> None:
            x = inputs[0][0]
            x.copy_(heads(name, x) if by_head else apply(name, x))  # in place: the stream itself

        return hook

    with ExitStack() as stack, patch.object(torch.nn.functional, "softmax", replaced):

        def after(module: torch.nn.Module, hook: Any) -> None:
            stack.callback(module.register_forward_hook(hook).remove)

        def ahead(module: torch.nn.Module, hook: Any) -> None:
            stack.callback(module.register_forward_pre_hook(hook).remove)

        after(model.transformer.wte, output("hook_embed"))
        after(model.transformer.wpe, output("hook_pos_embed"))
        for number, block in enumerate(model.transformer.h):
            b = f"blocks.{number}."
            ahead(block, before(b + "hook_resid_pre"))
            after(block.ln_1, output(b + "ln1.hook_normalized"))
            ahead(block.attn, lambda *_, number=number: layer.__setitem__(0, number))
            after(block.attn.c_attn, split(b))
            ahead(block.attn.c_proj, before(b + "attn.hook_z", by_head=True))
            after(block.attn.c_proj, output(b + "hook_attn_out"))
            ahead(block.ln_2, before(b + "hook_resid_mid"))
            after(block.ln_2, output(b + "ln2.hook_normalized"))
            after(block.mlp.c_fc, output(b + "mlp.hook_pre"))
            after(block.mlp.act, output(b + "mlp.hook_post"))
            after(block.mlp.c_proj, output(b + "hook_mlp_out"))
            after(block, output(b + "hook_resid_post"))
        after(model.transformer.ln_f, output("ln_final.hook_normalized"))
        yield


def logits_of(model: GPT2LMHeadModel, ids: list[int], apply: Apply) -> torch.Tensor:
    """Return the logits (T, V) of a text, computed without a cache."""
    with hooked(model, apply):
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def arrays_of(case: str, folder: Path) -> dict[str, Any]:
    """Return logits at all positions of prompts with edits, and greedy continuations."""
    model = GPT2LMHeadModel.from_pretrained(
        CASES[case].write(folder), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    write_files(case, folder)
    logits_parts, deviations = [], []
    for prompt, edits in EDITS:
        ids = PROMPTS[prompt]
        apply = editing(edits_of(case, edits), len(ids), folder)
        logits = logits_of(model, ids, apply)
        if edits and torch.allclose(logits, logits_of(model, ids, lambda _, value: value)):
            raise SystemExit(f"{case}: {edits} change nothing")
        logits_parts.append(logits[:, ::EVERY].float())
        deviations.append(logits.std().item())
    greedy, logprobs = [], []
    for prompt, edits in GENERATED if case in GENERATING else ():
        ids = [*PROMPTS[prompt]]
        apply = editing(edits_of(case, edits), len(ids), folder)
        for _ in range(NEW_TOKENS):
            row = logits_of(model, ids, apply)[-1]
            ids.append(int(row.argmax()))
            logprobs.append(row.log_softmax(-1)[ids[-1]].item())
        greedy += ids[-NEW_TOKENS:]
    return {
        f"{case}/logits": torch.cat(logits_parts).numpy(),
        f"{case}/std": np.array(deviations, np.float32),
        f"{case}/greedy": np.array(greedy, np.int16).reshape(-1, NEW_TOKENS),
        f"{case}/logprobs": np.array(logprobs, np.float32).reshape(-1, NEW_TOKENS),
    }


@torch.inference_mode()
def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    arrays: dict[str, Any] = {"every": np.array(EVERY)}
    for case in ODD:
        with tempfile.TemporaryDirectory() as temporary:
            arrays |= arrays_of(case, Path(temporary))
        print(f"{case}: logits of std {arrays[f'{case}/std'].mean():.3f}")
    np.savez_compressed(ROOT / "tests" / "golden" / "edits.npz", **arrays)


if __name__ == "__main__":
    main()
