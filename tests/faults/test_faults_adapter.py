"""An untrusted LoRA adapter: its files may be missing, damaged or malicious."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS, C_ATTN, PREFIX
from support.checkpoints import Stored, safetensors_bytes
from support.processes import posix
from support.world import fault_row

Damage = Callable[[Path], object]
A = f"{PREFIX}{C_ATTN.format(1)}.lora_A.weight"
SUMS = "h.1.attn.c_attn.lora_A.weight"
AGAIN, MEND, MERGE = "get it again", "correct the file or get it again", "merge_and_unload"
FLOOD = "\x1b]0;pwned\x07"


def fault(name: str, damage: Damage, says: str, do: str, number: int = 1):
    return fault_row(number, name, 4, damage, says, do, intact="the model and the adapter")


def configure(**fields: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / ADAPTER_CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def write(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def edit(change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / ADAPTER_WEIGHTS
        path.write_bytes(change(path.read_bytes()))

    return damage


def tensor(name: str, *shape: int, dtype: str = "F32", fill: bytes = b"\0") -> Damage:
    """Replace or add a tensor."""
    data = fill * (math.prod(shape) * {"F32": 4, "F64": 8, "I8": 1}[dtype])
    stored = ADAPTERS["plain"].tensors() | {name: Stored(dtype, shape, data)}
    return write(ADAPTER_WEIGHTS, safetensors_bytes(stored))


def without(name: str) -> Damage:
    stored = {other: data for other, data in ADAPTERS["plain"].tensors().items() if other != name}
    return write(ADAPTER_WEIGHTS, safetensors_bytes(stored))


def instead(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def only_a_pickle(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")


# fmt: off
FAULTS = [
    *(fault(f"no {name}", lambda folder, name=name: (folder / name).unlink(), f"has no {name}",
            "give an adapter of PEFT")
      for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)),
    *(fault(f"a {kind} in place of {name}", instead(name, make), f"has no {name}",
            "give an adapter of PEFT")
      for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
      for kind, make in (("pipe", lambda path: os.mkfifo(path)), ("folder", Path.mkdir),
                         ("device", lambda path: path.symlink_to("/dev/zero")))),
    *(fault(f"an adapter_config.json that is {name}", write(ADAPTER_CONFIG, data), says, AGAIN)
      for name, data, says in (("empty", b"", "JSON"), ("a list", b"[]", "JSON object"),
                               ("no UTF-8", b'{"r": "\xff"}', "JSON"),
                               ("nested too deeply", b"[" * 200_000, "JSON"))),
    fault("an adapter_config.json without end", lambda folder: os.truncate(folder / ADAPTER_CONFIG,
          2**40), "1099511627776 bytes", AGAIN),
    *(fault(f"{name} is {value!r:.20}", configure(**{name: value}), f"{name} must be ", MEND)
      for name, value in (("r", 2**40), ("r", "8"), ("r", 0), ("lora_alpha", math.nan),
                          ("lora_alpha", 1e400), ("use_rslora", "yes"), ("rank_pattern", [1]),
                          ("alpha_pattern", {"(a*)*b": 1}), ("alpha_pattern", {"(": 1}),
                          ("modules_to_save", 5), ("base_model_name_or_path", {}))),
    *(fault(f"{name} is {value!r}", configure(**{name: value}), f"{name} is {value!r:.40}", MERGE)
      for name, value in (("peft_type", "IA3"), ("use_dora", True), ("bias", "all"),
                          ("init_lora_weights", "pissa"), ("layer_replication", [[0, 2]]))),
    fault("a field that drives a terminal", configure(**{FLOOD: 1}),
          "\N{SYMBOL FOR ESCAPE}]0;pwned", MERGE),
    fault("a base model that drives a terminal",
          lambda folder: (configure(base_model_name_or_path=FLOOD + "x")(folder),
                          without(A)(folder)), "is missing", "]0;pwned"),
    fault("weights of an adapter cut short", edit(lambda raw: raw[:-1]), "not fully covered", AGAIN,
          2),
    fault("empty weights of an adapter", write(ADAPTER_WEIGHTS, b""), "it is empty", AGAIN, 2),
    fault("an adapter as a pickle", only_a_pickle, "names os.system, which is never called",
          "get the model as safetensors", 2),
    fault("an adapter that is a Git LFS pointer",
          write(ADAPTER_WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"),
          "a Git LFS pointer", "run `git lfs pull`", 2),
    fault("a half of LoRA", without(A), f"{SUMS} is missing", AGAIN, 2),
    fault("a rank that is not that of adapter_config.json", tensor(A, 5, 32),
          "has the shape [5, 32], not [4, 32]", AGAIN, 2),
    fault("LoRA of another width", tensor(A, 4, 48), "[4, 48], not [4, 32]", AGAIN, 2),
    fault("LoRA of no numbers", tensor(A, 0, 32), "[0, 32], not [4, 32]", AGAIN, 2),
    fault("LoRA of a layer that the model does not have", tensor(A.replace("h.1", "h.7"), 4, 32),
          "h.7.attn.c_attn.lora_A.weight is neither", MERGE, 2),
    fault("LoRA of the embeddings", tensor(f"{PREFIX}transformer.wte.lora_embedding_A", 4, 290),
          "wte.lora_embedding_A is neither", MERGE, 2),
    fault("LoRA in F64", tensor(A, 4, 32, dtype="F64"), f"{SUMS} is F64, which is not", MERGE, 2),
    fault("LoRA that is nan", tensor(A, 4, 32, fill=b"\xff"), "h.1.attn.c_attn are not finite",
          AGAIN, 2),
    fault("LoRA that is named twice", tensor(A.replace("transformer.", ""), 4, 32),
          f"duplicate tensor {SUMS}", AGAIN, 2),
    fault("a saved module that is missing", configure(modules_to_save=["wte"]),
          "the tensor wte.weight is missing", AGAIN, 2),
]
# fmt: on


@posix
@pytest.mark.parametrize(("damage", "says", "do"), FAULTS)
def test_a_damaged_adapter_is_refused(damage, says, do, model, world, suffer_here):
    folder = ADAPTERS["plain"].write(world.root / "adapter")
    damage(folder)
    command = "generate", "-m", model, "--adapter", folder, "-n", 3, "Once"
    message = suffer_here(*command, code=4, says=says, do=do)
    assert message.startswith("PATH/adapter")
