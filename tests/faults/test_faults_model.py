"""An untrusted model folder: its files may be damaged or malicious in many ways."""

import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.checkpoints import CONFIG, VOCAB, stored_tensors, write_checkpoint
from support.damaged import INDEX, WEIGHTS, poison, tensor, tensors
from support.in_process import records_here, run_here
from support.processes import posix
from support.torch_files import Name, pickled, write_torch, zip_bytes
from support.world import fault_row

FOLDER = "the model's folder"
# A tokenizer.json with a table of characters that is damaged.
PANIC = json.dumps(
    {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "YWJj"},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
)
Damage = Callable[[Path], object]


def fault(number: int, name: str, damage: Damage, says: str, do: str):
    """Return a row of the table: a change of the folder, and the expected message."""
    return fault_row(number, name, 4, number, damage, says, do, intact=FOLDER)


def write(name: str, content: bytes | str) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def edit(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def configure(**changes: object) -> Damage:
    return edit("config.json", lambda raw: json.dumps(json.loads(raw) | changes).encode())


def header(text: bytes, data: bytes = b"", length: int | None = None) -> Damage:
    """Write a file with this header, whose declared length may be wrong."""
    lead = struct.pack("<Q", len(text) if length is None else length)
    return write(WEIGHTS, lead + text + data)


def entries(*spans: tuple[object, object, object], data: int = 8) -> Damage:
    """Write a file of tensors t0, t1, ... of (shape, begin, end), with `data` bytes of data."""
    fields = {
        f"t{i}": {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        for i, (shape, begin, end) in enumerate(spans)
    }
    return header(json.dumps(fields).encode(), bytes(data))


def many_tensors(folder: Path) -> None:
    """Write a header of 400,000 tensors, made here since that takes long."""
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header(b"{" + b",".join(entry % i for i in range(400_000)) + b"}")(folder)


def sharded(change: Callable[[dict[str, str]], object]) -> Damage:
    """Make it a model of three shards, with an index that was changed."""

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        write_checkpoint(folder, CONFIG, shards=3)
        index = json.loads((folder / INDEX).read_bytes())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return damage


def first_in(file: str) -> Damage:
    """Name another shard for the first tensor."""
    return sharded(lambda weight_map: weight_map.update({next(iter(weight_map)): file}))


def of_torch(change: Callable[[bytes], bytes] = bytes, **options: object) -> Damage:
    """Make it a model in files of PyTorch, of which the first was changed."""

    def damage(folder: Path) -> None:
        write_torch(folder, stored_tensors(CONFIG), **options)
        first = min(folder.glob("*.bin"))
        first.write_bytes(change(first.read_bytes()))

    return damage


def as_torch(data: bytes) -> Damage:
    return of_torch(lambda _: data)


def without_shard(folder: Path) -> None:
    of_torch(shards=3)(folder)
    (folder / "pytorch_model-00002-of-00003.bin").unlink()


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def longer_vocabulary(folder: Path) -> None:
    """Add four tokens that the model does not have, more than 1%."""
    vocab = json.loads((folder / "vocab.json").read_bytes())
    added = {"he" * count: len(vocab) + count - 2 for count in range(2, 6)}
    (folder / "vocab.json").write_text(json.dumps(vocab | added))
    with (folder / "merges.txt").open("a") as file:
        file.writelines(f"{'he' * count} he\n" for count in range(1, 5))


def only(name: str, content: bytes) -> Damage:
    """Replace the files of the tokenizer by one."""

    def damage(folder: Path) -> None:
        (folder / "vocab.json").unlink()
        (folder / "merges.txt").unlink()
        (folder / name).write_bytes(content)

    return damage


AGAIN = "get it again"
MATCHING = "get the weights and the config.json of the same GPT-2"
MEND = "correct the file or get it again"
SAFETENSORS = "get the model as safetensors"
STATE_DICT = "save `model.state_dict()` alone"
RENAME = "name it pytorch_model.bin"
SAME = "of the same model"
ONE = b'"h.9.x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'  # a tensor, in a header
HUGE = 2**63


def odd_file(name: str, make: Damage) -> Damage:
    """Replace a file by something that is not a regular file."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def link(target: str) -> Damage:
    return lambda path: path.symlink_to(target)


def pipe(path: Path) -> None:
    os.mkfifo(path)  # only named here, because Windows does not have it


def reordered(folder: Path) -> None:
    """List the tensors in the header in another order than their data."""
    raw = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    pairs = list(json.loads(raw[8 : 8 + length]).items())
    text = json.dumps(dict(reversed(pairs))).encode().ljust(length)
    (folder / WEIGHTS).write_bytes(raw[:8] + text + raw[8 + length :])


# fmt: off
FAULTS = [
    # the file of the weights
    fault(1, "weights cut short", edit(WEIGHTS, lambda raw: raw[:-1]), "not fully covered", AGAIN),
    fault(1, "weights cut in the length", write(WEIGHTS, b"\x10\0\0"), "", AGAIN),
    fault(1, "weights without the length", edit(WEIGHTS, lambda raw: raw[8:]), "", AGAIN),
    fault(2, "a byte too many", edit(WEIGHTS, lambda raw: raw + b"0"), "not fully covered", AGAIN),
    fault(3, "empty weights", write(WEIGHTS, b""), "it is empty", AGAIN),
    fault(4, "a Git LFS pointer", write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"),
          "a Git LFS pointer", "run `git lfs pull`"),
    fault(5, "a web page", write(WEIGHTS, "\n<!DOCTYPE html><html>404</html>"), "a web page",
          AGAIN),
    fault(6, "only a pickle", as_torch(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR."),
          "names os.system, which is never called", SAFETENSORS),
    *(fault(6, f"a pytorch_model.bin {name}", of_torch(change, older=older), says, AGAIN)
      for name, older, change, says in (
          ("cut short", False, lambda raw: raw[:-30], "is not a zip file"),
          ("without its middle", False, lambda raw: raw[:999] + raw[2999:], "damaged or"),
          ("of the older form cut short", True, lambda raw: raw[:-1], "ends 1 bytes early"),
          ("that is empty", False, lambda raw: b"", "damaged or incomplete"),
          ("that is a web page", False, lambda raw: b"<!DOCTYPE html>", "a web page"))),
    fault(6, "a pytorch_model.bin that is a Git LFS pointer",
          as_torch(b"version https://git-lfs.github.com/spec/v1\n"), "a Git LFS pointer",
          "run `git lfs pull`"),
    fault(6, "a checkpoint of a training", as_torch(zip_bytes(pickled({"epoch": 3}), {})),
          "epoch is a int, not a tensor, as in a checkpoint of a training", STATE_DICT),
    fault(6, "a model that was saved whole",
          as_torch(zip_bytes(pickled(Name("__main__", "GPT2")), {})),
          "names __main__.GPT2, which is never called", STATE_DICT),
    fault(6, "a pytorch_model.bin of no tensors", as_torch(zip_bytes(pickled({}), {})),
          "the tensor wte.weight is missing", MATCHING),
    fault(6, "a pickle under the name of the weights", write(WEIGHTS, b"\x80\x04\x95}\x94."),
          "a file of PyTorch", RENAME),
    fault(6, "a PyTorch archive under that name", write(WEIGHTS, b"PK\x03\x04\x14\0\0"),
          "a file of PyTorch", RENAME),
    *(fault(7, f"a header that claims {length} bytes", header(b"{}", bytes(16), length),
            "is not safetensors", AGAIN)
      for length in (0, 1, 3, 17, 18, 19, 10_000_001, 2**31, 2**32 + 2, HUGE - 1, HUGE, 2**64 - 1)),
    fault(8, "a tensor named twice", header(b"{" + ONE + b"," + ONE + b"}", bytes(4)),
          "duplicate tensor h.9.x", "get a file that was written correctly"),
    fault(8, "a field named twice",
          header(b'{"x":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
          "duplicate field", AGAIN),
    *(fault(9, name, entries(*spans), says, AGAIN)
      for name, says, *spans in (
          ("tensors that overlap", "invalid offset", ([1], 0, 4), ([1], 2, 6)),
          ("a shape of another size", "", ([2], 0, 4)),
          ("a hole between tensors", "invalid offset", ([1], 4, 8)),
          ("an end before its beginning", "invalid offset", ([1], 4, 0)),
          ("an end beyond the file", "is not safetensors", ([3], 0, 12)),
          ("an offset of 2**64", "expected usize", ([1], 0, 2**64)),
          ("an offset below 0", "expected usize", ([1], -4, 0)),
          ("an offset that is no whole number", "expected", ([1], 0.0, 4.0)),
          ("an offset that is text", "expected usize", ([1], "0", "4")))),
    fault(10, "a tensor is missing", tensors(lambda all: all.pop("h.1.mlp.c_fc.bias")),
          "the tensor h.1.mlp.c_fc.bias is missing", MATCHING),
    fault(10, "a tensor too many", tensor("h.3.ln_1.weight", (32,)), "h.3.ln_1.weight", MATCHING),
    fault(10, "no tensor at all", header(b"{}"), "the tensor wte.weight is missing", MATCHING),
    fault(11, "a tensor of another shape", tensor("wpe.weight", (63, 32)),
          "wpe.weight has the shape [63, 32], but config.json requires [80, 32]", MATCHING),
    fault(11, "a tensor of another rank", tensor("ln_f.bias", (32, 1)), "[32, 1]", MATCHING),
    fault(11, "a tensor of no numbers", tensor("ln_f.bias", (0,)), "the shape [0]", MATCHING),
    fault(11, "a shape of 2**64 numbers", entries(([HUGE, 2], 0, 4)), "overflow", AGAIN),
    fault(11, "a shape whose size wraps to 0", entries(([2**62, 4], 0, 0), data=0), "overflow",
          AGAIN),
    fault(11, "a shape below 0", entries(([-1], 0, 4)), "expected usize", AGAIN),
    fault(12, "a matrix transposed", tensor("h.2.mlp.c_fc.weight", (128, 32)),
          "has the shape [128, 32], but config.json requires [32, 128]", MATCHING),
    fault(13, "a tensor in F8", tensor("ln_f.bias", (32,), "F8_E4M3"),
          "ln_f.bias is F8_E4M3, which is not supported", "save the model in F32, F16 or BF16"),
    *(fault(14, f"a weight that is {value}", poison(value), "results are not finite",
          "get the model again")
      for value in (math.nan, math.inf, -math.inf, 3e38)),
    # shards
    fault(15, "a shard of PyTorch is missing", without_shard,
          "pytorch_model-00002-of-00003.bin is missing", "get it too"),
    fault(15, "a shard is missing", first_in("model-00009-of-00003.safetensors"),
          "model-00009-of-00003.safetensors is missing", "get it too"),
    *(fault(16, f"a shard named {name}", first_in(name),
            "not a safetensors file beside it", "do not trust this model")
      for name in ("../model.safetensors", "/etc/hosts.safetensors", "a/../../b.safetensors",
            "..")),
    fault(16, "an index that is no JSON", lambda folder: (sharded(lambda _: 0)(folder),
          write(INDEX, "{")(folder)), "cannot be read as JSON", AGAIN),
    # the configuration
    fault(17, "no config.json", without("config.json"), "is missing", "get the model again"),
    fault(17, "an empty config.json", write("config.json", ""), "cannot be read as JSON", AGAIN),
    fault(17, "a config.json cut short", edit("config.json", lambda raw: raw[:50]),
          "cannot be read as JSON", AGAIN),
    fault(17, "a config.json in Latin-1", write("config.json", b'{"a": "\xe9"}'), "JSON", AGAIN),
    fault(17, "a config.json that is a list", write("config.json", "[]"), "JSON object", AGAIN),
    fault(17, "a config.json nested too deeply", write("config.json", "[" * 200_000), "JSON",
          AGAIN),
    fault(17, "a config.json without end", lambda folder: os.truncate(folder / "config.json",
          2**40), "1099511627776 bytes", AGAIN),
    *(fault(17, f"{name} is {value!r:.20}", configure(**{name: value}), f"{name} must be ", MEND)
      for name, value in (("n_layer", "12"), ("n_embd", -1), ("n_layer", 10**4000), ("n_head", 0),
                          ("n_positions", 2**21), ("vocab_size", 1.5), ("n_inner", True),
                          ("layer_norm_epsilon", math.nan), ("layer_norm_epsilon", 1e400),
                          ("eos_token_id", -1), ("bos_token_id", "end"))),
    fault(17, "an absurd number of layers", configure(n_layer=12), "the tensor h.3.", MATCHING),
    fault(18, "heads that do not divide the width", configure(n_head=5),
          "n_head 5 does not divide n_embd 32", MEND),
    fault(19, "an unknown activation", configure(activation_function="mish"),
          "activation_function must be one of gelu_new, ", MEND),
    fault(20, "another architecture", configure(model_type="llama"), "'llama'", "GPT-2 only"),
    fault(20, "an unknown quantization", configure(quantization_config={"bits": 4}),
          "quantization_config", "use a GPT-2"),
    # the tokenizer
    fault(21, "merges of another model", edit("merges.txt", lambda raw: raw + b"zz zz\n"),
          "not in the vocabulary", SAME),
    fault(21, "merges cut short", edit("merges.txt", lambda raw: raw[:60]), "no merge makes", SAME),
    fault(21, "a merge that is missing", edit("merges.txt", lambda raw: raw.replace(b"h e\n", b"")),
          "", SAME),
    fault(21, "merges that are no UTF-8", write("merges.txt", b"\xff"), "damaged", AGAIN),
    fault(21, "no vocabulary", without("vocab.json"), "has no tokenizer",
          "or spiece.model, or sentencepiece.bpe.model"),
    fault(21, "a vocabulary that is no JSON", write("vocab.json", "{"),
          "vocab.json cannot be read", AGAIN),
    fault(21, "a vocabulary that is a list", write("vocab.json", "[]"), "JSON object", AGAIN),
    *(fault(21, f"an id that is {value}", edit("vocab.json", lambda raw, value=value:
            raw.replace(b": 5,", b": " + value.encode() + b",")), "damaged", AGAIN)
      for value in ("-5", "5.5", '"5"', "1e5", "null", "9" * 30)),
    fault(21, "an id that is true",
          edit("vocab.json", lambda raw: raw.replace(b": 5,", b": true,")), "", AGAIN),
    fault(21, "two tokens of one id", edit("vocab.json", lambda raw: raw.replace(b": 5,", b": 6,")),
          "", AGAIN),
    fault(21, "settings of the tokenizer that are a list", write("tokenizer_config.json", "[]"),
          "tokenizer_config.json is not a JSON object", AGAIN),
    fault(21, "a vocabulary that is larger than the model", longer_vocabulary,
          "the vocabulary has 294 tokens, and the model has 290", SAME),
    fault(21, "special tokens that are no JSON", write("special_tokens_map.json", "{"),
          "special_tokens_map.json cannot be read as JSON", AGAIN),
    fault(21, "added tokens that are a list", write("added_tokens.json", "[1]"),
          "added_tokens.json is not a JSON object", AGAIN),
    fault(21, "an added token with the id of another", write("added_tokens.json", '{"<a>": 5}'),
          "the added token '<a>' has the id 5, where transformers gives it",
          "save the tokenizer again"),
    *(fault(21, f"{name} that {fault_name}", only(name, content), f"{name}: damaged", AGAIN)
      for name, fault_name, content in (
          ("vocab.txt", "is no UTF-8", b"[UNK]\n\xff"),
          ("vocab.txt", "has no unknown token", b"a\nb"),
          ("spiece.model", "is a page of HTML", b"<html>"),
          ("spiece.model", "is cut short", b"\x0a\x0c\x0a\x05<unk>\x15\0\0\0\0\x18"),
          ("spiece.model", "has a number without an end", b"\x0a" + b"\xff" * 30),
          ("sentencepiece.bpe.model", "is empty", b""))),
    fault(21, "a tokenizer.json that is no JSON", write("tokenizer.json", "{"),
          "tokenizer.json cannot be read as JSON", AGAIN),
    fault(21, "a tokenizer.json without a vocabulary", write("tokenizer.json", '{"model": {}}'),
          "tokenizer.json: damaged", AGAIN),
    fault(21, "a tokenizer.json that makes its library panic", write("tokenizer.json", PANIC),
          "tokenizer.json: damaged (PanicException(", AGAIN),
    # other files
    fault(54, "a header that is a list", header(b"[]"), "is not safetensors", AGAIN),
    fault(54, "a header that is no JSON", header(b"{nothing"), "", AGAIN),
    fault(54, "a tensor that is a list", header(b'{"x":["F32",[1],[0,4]]}', bytes(4)), "", AGAIN),
    fault(54, "a dtype that is an object",
          header(b"{" + ONE.replace(b'"F32"', b'{"F32":null}') + b"}", bytes(4)),
          "is not a dtype", AGAIN),
    fault(54, "a header behind spaces", header(b"  {}"), "does not begin with a brace", AGAIN),
    fault(54, "a header before zeros", header(b"{}\0\0"), "is not safetensors", AGAIN),
    fault(54, "a header that is no UTF-8", header(b'{"\xff":{}}'), "is not safetensors", AGAIN),
    fault(54, "a header nested too deeply", header(b'{"x":' + b"[" * 99_999), "recursion", AGAIN),
    fault(54, "metadata that is no text", header(b'{"__metadata__":{"a":1}}'), "a string", AGAIN),
    fault(55, "a header of 400,000 tensors", many_tensors, "header claims", AGAIN),
    fault(56, "a name that drives a terminal", tensor("h.\x1b]0;pwned\x07\x1b[2J\x9b", (1,)),
          "\N{SYMBOL FOR ESCAPE}]0;pwned", MATCHING),
    fault(56, "a name of 100,000 letters", tensor("h." + "x" * 100_000, (1,)),
          "such as h.xxx", "x"),
    fault(57, "a pipe in place of config.json", odd_file("config.json", pipe),
          "not a regular file", AGAIN),
    fault(57, "a device in place of config.json", odd_file("config.json", link("/dev/zero")),
          "not a regular file", AGAIN),
    fault(57, "a link to itself in place of config.json",
          odd_file("config.json", link("config.json")), "is a link to itself or to nothing",
          "get the model again"),
    *(fault(57, f"a {kind} in place of the weights", odd_file(WEIGHTS, make),
            "model.safetensors is not a regular file", AGAIN)
      for kind, make in (("pipe", pipe), ("device", link("/dev/zero")), ("folder", Path.mkdir),
                         ("link to itself", link(WEIGHTS)))),
    fault(57, "a pipe in place of the vocabulary", odd_file("vocab.json", pipe),
          "has no tokenizer", "or spiece.model, or sentencepiece.bpe.model"),
]
# fmt: on


OF_WEIGHTS = (1, 2, 3, 5, 7, 9, 54)  # of the file of the weights, not of its tensors
PROCESSES = {
    *("weights cut short", "no config.json"),
    "a tokenizer.json that makes its library panic",  # which it writes past sys.stderr
}


@posix
@pytest.mark.parametrize(("number", "damage", "says", "do"), FAULTS)
def test_a_damaged_model_is_refused(number, damage, says, do, model, world, suffer, request):
    damage(model)
    alone = number == 57 or request.node.callspec.id in PROCESSES  # 57 might never end
    options = {"run": world.run if alone else world.run_here, "says": says, "do": do}
    message = suffer("generate", "-m", model, "-n", 3, "Once", code=4, **options)
    if do == AGAIN:
        assert message.startswith("PATH/model/")
        assert number not in OF_WEIGHTS or f"{WEIGHTS} is not safetensors: " in message


def text_of(folder) -> bytes:
    out, errors = run_here("generate", "-m", folder, "-n", 8, "-s", 1, "Once")
    assert errors == ""
    return out


UNUSUAL = [
    (13, "weights in BF16", lambda folder: write_checkpoint(folder, CONFIG, dtype="BF16")),
    (21, "merges without a line end", edit("merges.txt", bytes.rstrip)),
    (
        21,
        "merges with the line ends of Windows",
        edit("merges.txt", lambda raw: raw.replace(b"\n", b"\r\n")),
    ),
    (9, "tensors named in another order", reordered),
]


@pytest.mark.parametrize(
    "damage",
    [fault_row(number, name, 0, damage, intact="the text") for number, name, damage in UNUSUAL],
)
def test_what_is_unusual_but_right_gives_the_text(damage, model):
    expected = text_of(model)
    damage(model)
    assert text_of(model) == expected or b'"BF16"' in (model / WEIGHTS).read_bytes()


@pytest.mark.fault(14, "a weight that is nan, with -v", 4, intact=FOLDER)
def test_verbose_names_the_weight_that_is_damaged(model, world):
    poison(math.nan)(model)
    finished = world.run("generate", "-m", model, "-v", "-n", 3, "Once")
    assert finished.returncode == 4
    assert b"gpt-cli: not finite: h.1.mlp.c_fc.weight\n" in finished.stderr


@pytest.mark.fault(21, "a tokenizer that needs a package that is missing", 5, intact=FOLDER)
def test_a_missing_package_of_tokenizers_is_named(model, suffer_here, monkeypatch):
    only("vocab.txt", b"[UNK]\n")(model)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    says = "vocab.txt needs the package tokenizers"
    suffer_here("generate", "-m", model, "a", code=5, says=says, do="pip install tokenizers")


@pytest.mark.fault(22, "a special token that the model does not have", 0, intact="the text")
def test_a_special_token_beyond_the_model_is_no_error(model):
    expected = text_of(model)
    (model / "added_tokens.json").write_text('{"[PAD]": 290}')
    assert text_of(model) == expected


@pytest.mark.fault(22, "rows of wte that are no tokens", 0, intact="no such token is drawn")
def test_rows_of_padding_are_never_drawn(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG | {"vocab_size": 400})
    flags = ("--temperature", 100, "--top-k", 0, "--top-p", 1, "-n", 60, "--logprobs", 0)
    (record,) = records_here("generate", "-m", folder, *flags, "--json", "Once")
    assert max(token["id"] for token in record["logprobs"]) < len(VOCAB)
