"""The targets of the fuzzer: functions of any bytes, which raise if the program handles them badly.

The bytes must give a result, which the target checks, or an error message for a user.
"""

import atexit
import json
import math
import pickle
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from itertools import takewhile, zip_longest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from zlib import crc32

import numpy as np

import gpt_cli.folder.torch_file  # noqa: F401 (before imports are watched)
from gpt_cli.compression import archive
from gpt_cli.compression.archive import ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.errors import CheckpointError, InputError, ResourceError
from gpt_cli.folder import weight_files
from gpt_cli.folder.base_tokenizer import Stream
from gpt_cli.folder.byte_bpe import ByteBPE
from gpt_cli.folder.config import ACTIVATIONS, GPT2Config, expected_shapes
from gpt_cli.folder.special_tokens import SpecialIds
from gpt_cli.folder.tensors import Tensor, open_unchanged
from gpt_cli.folder.tokenizer import Tokenizer, read_tokenizer, with_special_tokens
from gpt_cli.generation.matcher import Matcher
from gpt_cli.generation.row import StopStrings
from gpt_cli.gpt2 import assembly, checkpoint
from gpt_cli.gpt2.adapter import open_adapter
from gpt_cli.gpt2.edits import EditError, ModelEdit, bind
from gpt_cli.gpt2.memory import count_parameters, weights_bytes
from gpt_cli.jobs import Generation
from gpt_cli.jobs.rows import Source
from gpt_cli.ops import get_ops
from gpt_cli.ops.int8 import Int8Rows
from gpt_cli.options.request import CONSTRAINTS, Options
from gpt_cli.records import json_line, of_error
from support.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS
from support.checkpoints import CASES

FOLDER = Path(tempfile.mkdtemp(prefix="gpt-cli-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def fresh(folder: str) -> Path:
    """Make an empty folder."""
    path = FOLDER / folder
    path.mkdir()
    return path


# --- safetensors ---------------------------------------------------------------------------------

BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32}
BITS |= {"F16": 16, "BF16": 16, "I16": 16, "U16": 16, "BOOL": 8, "I8": 8, "U8": 8}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}

WEIGHTS = fresh("weights") / "model.safetensors"


def safetensors(data: bytes) -> None:
    """The bytes are `model.safetensors`."""
    WEIGHTS.write_bytes(data)
    try:
        stored = checkpoint.find_tensors(WEIGHTS.parent)
    except CheckpointError as error:
        assert str(error)
        return
    tensors: list[Tensor] = []
    for rows in stored.values():
        tensors += (rows.weight, rows.scale) if isinstance(rows, Int8Rows) else (rows,)
    end_of_last = 8 + int.from_bytes(data[:8], "little")
    for tensor in sorted(tensors, key=span):
        start, end = span(tensor)
        assert end_of_last <= start <= end <= len(data)
        end_of_last = end
        # GPT-2 has only vectors and matrices; other tensors are refused before they are read.
        if len(tensor.shape) in (1, 2) and start < end:
            check_numbers(tensor, data[start:end])


def span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its file."""
    bits = math.prod(tensor.shape) * BITS[tensor.dtype]
    assert bits % 8 == 0
    return tensor.offset, tensor.offset + bits // 8


def check_numbers(tensor: Tensor, data: bytes) -> None:
    """Read a tensor, and compare it with its bytes."""
    if tensor.dtype in ("F32", "F16", "BF16", "I8"):
        with open_unchanged(tensor.path, tensor.version) as file:
            file.seek(tensor.offset)
            assert file.read(len(data)) == data
    if tensor.dtype in ("F32", "I8"):
        assert tensor[:].tobytes() == data
    elif tensor.dtype == "F16":
        expected = np.frombuffer(data, "<f2").astype("<f4")
        assert np.array_equal(tensor[:].ravel(), expected, equal_nan=True)
    elif tensor.dtype == "BF16":
        halves = tensor[:].view("<u2").reshape(-1, 2)
        assert halves[:, 1].tobytes() == data
        assert not halves[:, 0].any()


# --- PyTorch -------------------------------------------------------------------------------------

TORCH = fresh("torch") / "pytorch_model.bin"
STORAGES = {"0": bytes(range(48)), "1": bytes(8)}
HEX = b"hex:"  # before the inputs that are kept, so that no file is a pickle
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
FORBIDDEN = ("exec", "os.system", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")
for codec in ("cp437", "raw-unicode-escape", "latin-1", "ascii"):  # imported on first use
    "".encode(codec)
reading = []  # while it is not empty, FORBIDDEN must not happen


def watch(event: str, arguments: object) -> None:
    assert not (reading and event in FORBIDDEN), event


sys.addaudithook(watch)


def torch_files(data: bytes) -> Iterator[bytes]:
    """Yield files with this pickle of a state dict, or the bytes themselves if they are a zip."""
    if data.startswith(b"PK"):
        yield data
        return
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for key, storage in STORAGES.items():
            archive.writestr(f"archive/data/{key}", storage)
    yield file.getvalue()
    lead = [pickle.dumps(value, 2) for value in (MAGIC, PROTOCOL, {})]
    end = [len(data).to_bytes(8, "little") + data for data in STORAGES.values()]
    yield b"".join([*lead, data, pickle.dumps(list(STORAGES), 2), *end])


def torch(data: bytes) -> None:
    """The bytes are the pickle in `pytorch_model.bin`, or that file; after HEX in hexadecimal."""
    if data.startswith(HEX):
        with suppress(ValueError):  # the fuzzer changes digits to others
            data = bytes.fromhex(data[len(HEX) :].decode())
    for file in torch_files(data):
        TORCH.write_bytes(file)
        reading.append(True)
        try:
            tensors = weight_files.read_tensors(TORCH)
        except CheckpointError as error:
            assert str(error)
            continue
        finally:
            reading.pop()
        for _, tensor in tensors:
            assert 0 <= tensor.offset <= len(file)
            assert min(tensor.shape, default=0) >= 0
            if tensor.dtype in ("F32", "F16", "BF16", "I8") and 0 < math.prod(tensor.shape) < 10**6:
                assert tensor.shape == () or tensor[:].shape == tensor.shape


# --- arrays of edits ------------------------------------------------------------------------------

ARRAYS = fresh("arrays")
ATTENTION = "blocks.0.attn.hook_"
SHAPES = {"hook_embed": (4, 16), f"{ATTENTION}v": (4, 2, 8), f"{ATTENTION}pattern": (4, 2, 4)}
USES = ("hook_embed+=0.5*{0}", "hook_embed=mean:{0}", "hook_embed@:2={0}", "hook_embed@0={0}:a",
        ATTENTION + "v[1]@1:={0}", ATTENTION + "pattern@:2={0}")  # fmt: skip


def arrays(data: bytes) -> None:
    """The first byte chooses .npy, .npz, its members or .safetensors; the others are the file."""
    kind, data = data[0] % 4 if data else 0, data[1:]
    file = ARRAYS / ("a.npy", "a.npz", "a.npz", "a.safetensors")[kind]
    if kind == 2:
        size = int.from_bytes(data[:2], "little")
        with zipfile.ZipFile(file, "w") as members:
            for name in (*SHAPES, "a"):
                members.writestr(f"{name}.npy", data[2 : 2 + size])
            members.writestr("position.npy", data[2 + size :])
    else:
        file.write_bytes(data)
    for use in USES:
        try:
            edit = ModelEdit.of(use.format(file.name), SMALL_CONFIG, ARRAYS)
            (bound,) = bind([edit], 4, 4)
        except EditError as error:
            assert str(error)
            continue
        (hook,) = edit.hooks
        positions = bound.places(np.arange(4))
        values = np.zeros(SHAPES[hook], np.float32)[positions]
        edited = edit.apply(hook, values, positions)
        assert edited.shape == values.shape
        assert edited.dtype == np.float32
        assert np.isfinite(edited).all()


SHARDS = fresh("shards")
for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "other.bin"):
    (SHARDS / file).touch()
fresh("shards/folder.safetensors")
(fresh("shards/below") / "model.safetensors").touch()


def shards(data: bytes) -> None:
    """The bytes are `model.safetensors.index.json`, beside two shards and other files."""
    (SHARDS / "model.safetensors.index.json").write_bytes(data)
    try:
        paths = weight_files.weight_files(SHARDS)
    except CheckpointError as error:
        assert str(error)
        return
    beside = [path for path in SHARDS.glob("*.safetensors") if path.is_file()]
    assert len(set(paths)) == len(paths)
    assert set(paths) <= set(beside)


# --- configuration -------------------------------------------------------------------------------

CONFIG = fresh("config")
NO_TOKENS = SimpleNamespace(special_ids=SpecialIds(), size=0)  # of a tokenizer


def config(data: bytes) -> None:
    """The bytes are `config.json`, and after a zero byte `generation_config.json`."""
    first, *others = data.split(b"\0", 1)
    (CONFIG / "config.json").write_bytes(first)
    generation = CONFIG / "generation_config.json"
    generation.unlink(missing_ok=True)
    for other in others:
        generation.write_bytes(other)
    try:
        config = with_special_tokens(GPT2Config.from_folder(CONFIG), NO_TOKENS, CONFIG)
    except CheckpointError as error:
        assert str(error)
        return
    V, S, C, L = config.vocab_size, config.n_positions, config.n_embd, config.n_layer
    inner = config.inner_size
    for size in (V, S, C, L, inner, config.n_head):
        assert type(size) is int
        assert 1 <= size <= 4 * 2**20
    assert S > 1
    assert config.head_size * config.n_head == C
    assert 0 < config.layer_norm_epsilon < 1
    assert config.activation_function in ACTIVATIONS
    for flag in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"):
        assert type(getattr(config, flag)) is bool
    for id in (config.bos_token_id or 0, *config.eos_token_id):
        assert type(id) is int
        assert 0 <= id <= 2**20
    assert next(expected_shapes(config)) == ("wte.weight", (V, C))
    per_block = 4 * C * C + 2 * C * inner + inner + 9 * C
    heads = 1 if config.tie_word_embeddings else 2
    for dtype in ("float32", "bfloat16", "float16", "int8"):
        parameters = count_parameters(config)
        assert parameters == (heads * V + S + 2) * C + L * per_block
        assert parameters < weights_bytes(config, dtype) <= 4 * parameters


# --- adapters ------------------------------------------------------------------------------------

ADAPTER = ADAPTERS["patterns"].write(fresh("adapter"))
ADAPTER_FILE = (ADAPTER / ADAPTER_WEIGHTS).read_bytes()


@cache
def adapted_model() -> tuple[Path, dict[str, Tensor]]:
    """Return the folder and the tensors of a small model."""
    folder = CASES["saved"].write(fresh("model"))
    return folder, checkpoint.find_tensors(folder)


def adapter(data: bytes) -> None:
    """The bytes are `adapter_config.json`, and after a zero byte `adapter_model.safetensors`."""
    first, *weights = data.split(b"\0", 1)
    (ADAPTER / ADAPTER_CONFIG).write_bytes(first)
    (ADAPTER / ADAPTER_WEIGHTS).write_bytes(*weights or [ADAPTER_FILE])
    folder, tensors = adapted_model()
    try:
        merged = open_adapter(ADAPTER, folder).merge(tensors)
    except CheckpointError as error:
        assert str(error)
        return
    assert merged.keys() - {"lm_head.weight"} == tensors.keys()
    for name, tensor in tensors.items():
        assert merged[name].shape == merged[name][:].shape
        assert merged[name].shape == tensor.shape or name == "wte.weight"


# --- tokenizer -----------------------------------------------------------------------------------

TOKENIZER = fresh("tokenizer")
TOKENIZER_FILES = (
    *("vocab.json", "merges.txt", "added_tokens.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "spiece.model"),
)
TEXTS = ("", " the  then\n\n", "H\u00e9, \U0001f600\u200d <|endoftext|>'s", "\0\x85\u3000\ufffd")


def byte_tokens() -> bytes:
    """Return the part that all vocabularies have: the tokens of single bytes."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (chr(0x100 + index) for index in range(256 - len(visible)))
    tokens = [*map(chr, sorted(visible)), *hidden]
    return json.dumps({token: id for id, token in enumerate(tokens)})[1:-1].encode()


BYTE_TOKENS = byte_tokens()


def tokenizer(data: bytes) -> None:
    """The bytes are the files, with zero bytes between them; empty files are left out.

    A byte 1 stands for the tokens of single bytes, with the ids 0 to 255, so that inputs are short.
    """
    parts = data.split(b"\0", len(TOKENIZER_FILES) - 1)
    for name, part in zip_longest(TOKENIZER_FILES, parts, fillvalue=b""):
        if part:
            (TOKENIZER / name).write_bytes(part.replace(b"\1", BYTE_TOKENS))
        else:
            (TOKENIZER / name).unlink(missing_ok=True)
    try:
        tokenizer = read_tokenizer(TOKENIZER)
    except (CheckpointError, ResourceError) as error:
        assert str(error)
        return
    if not isinstance(tokenizer, ByteBPE) or tokenizer.decode(tokenizer.encode("a")) != "a":
        other_tokenizer(tokenizer, data)
        return
    for text in (*TEXTS, *tokenizer.special):
        for special in (False, True):
            ids = tokenizer.encode(text, special=special)
            assert tokenizer.decode(ids) == text
            assert tokenizer.encode_with_spans(text, special=special)[0] == ids
    ids = tokenizer.encode_bytes(data)
    assert b"".join(map(tokenizer.token_bytes, ids)) == data
    assert not set(ids) & set(tokenizer.missing_ids(300))


def other_tokenizer(tokenizer: Tokenizer, data: bytes) -> None:
    """A text is what its ids add to the decoded prompt; the library may refuse a text."""
    with suppress(CheckpointError):
        ids = tokenizer.encode(TEXTS[1] + data.decode(errors="replace"))
        stream = tokenizer.stream(ids[:3])
        text = "".join(map(stream.push, ids[3:])) + stream.flush()
        whole, before = tokenizer.decode(ids), tokenizer.decode(ids[:3])
        assert not whole.startswith(before) or before + text == whole
        if tokenizer.byte_ids:
            assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_bytes(data))) == data


# --- rows of a batch -----------------------------------------------------------------------------

ROWS = fresh("rows") / "rows"
FORMATS = ("auto", "lines", "jsonl", "csv", "tsv")
DEFAULTS = Options(seed=1)


def rows(data: bytes) -> None:
    """The first byte chooses the format, the others are the file."""
    format, data = FORMATS[data[0] % len(FORMATS) if data else 0], data[1:]
    ROWS.write_bytes(data)
    try:
        source = Source([str(ROWS)], format, Generation(Options()).layout, rows_together=3)
    except InputError as error:
        assert str(error)
        return
    rows = [row for window in source.rows() for row in window]
    assert source.total == len(rows)
    assert [row.index for row in rows] == list(range(len(rows)))
    if source.files[0].delimiter or source.files[0].compression:
        return
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    filled = [number for number, line in enumerate(lines, 1) if line.strip()]
    assert [row.line for row in rows] == filled
    for row in rows:
        request = row.fields
        record = {"index": row.index, "id": row.id}
        if row.error:
            json_line(record | of_error(row.error)).encode()
            continue
        if format == "lines":
            line = lines[row.line - 1]
            ended = row.line < len(lines)
            assert request == {"prompt": (line.removesuffix(b"\r") if ended else line).decode()}
        fields = {name: value for name, value in request.items() if name != "prompt"}
        try:
            options = DEFAULTS.with_row(fields)
        except InputError as error:
            json_line(record | of_error(error)).encode()
            continue
        check_options(options)
        json_line(record | vars(options)).encode(errors="surrogatepass")


def check_options(options: Options) -> None:
    """Check the types and ranges of the fields."""
    for whole, least in ("max_tokens", 1), ("top_k", 0), ("seed", 0):
        assert type(getattr(options, whole)) is int
        assert getattr(options, whole) >= least
    assert options.seed < 2**64
    assert options.temperature == 0 or 1e-6 <= options.temperature <= 1e6
    assert 1e-6 <= options.repeat_penalty <= 1e6
    assert 0 < options.top_p <= 1
    assert 0 <= options.min_p <= 1
    assert isinstance(options.stop, Sequence)
    assert all(type(stop) is str and stop for stop in options.stop)


# --- constraints ---------------------------------------------------------------------------------

# A small vocabulary makes matchers fast: single bytes, a few pairs and an end token.
SMALL = fresh("small")
PAIRS = ("he", "in", "an", "1,", '":', '{"', "ab")
TOKENS = json.loads("{" + BYTE_TOKENS.decode() + "}")
TOKENS |= {token: id for id, token in enumerate((*PAIRS, "<|endoftext|>"), 256)}
(SMALL / "vocab.json").write_text(json.dumps(TOKENS), encoding="utf-8")
(SMALL / "merges.txt").write_text("\n".join(map(" ".join, PAIRS)), encoding="utf-8")
SIZES = {"n_positions": 64, "n_embd": 16, "n_head": 2, "n_layer": 1}
SMALL_TOKENIZER = read_tokenizer(SMALL)
SMALL_CONFIG = GPT2Config.from_dict(
    SIZES | {"vocab_size": len(TOKENS), "eos_token_id": len(TOKENS) - 1}
)


def constraints(data: bytes) -> None:
    """The first byte chooses the kind, the second one the tokens; the others are the constraint."""
    if len(data) < 3:
        return
    kind = CONSTRAINTS[data[0] % len(CONSTRAINTS)]
    text = data[2:].decode(errors="surrogateescape")
    try:
        options = Options(**{kind: text.split("\n") if kind == "choices" else text})
        matcher = Matcher(SMALL_TOKENIZER, SMALL_CONFIG, options.constraint)
    except InputError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 700
        return
    ids: list[int] = []
    while not matcher.end and len(ids) < 40:
        allowed = np.flatnonzero(matcher.allowed())
        ids.append(int(allowed[data[1] * 7 % len(allowed)]))
        assert matcher.fitting(ids[-1:]) == ids[-1:]
        if ids[-1] in SMALL_CONFIG.eos_token_id:
            break
        matcher.push(ids[-1])
    if matcher.end == "complete" and kind == "choices":
        assert SMALL_TOKENIZER.decode(ids) in options.choices


# --- compressed data -----------------------------------------------------------------------------

FIELDS = re.compile(rb"\xb5(?:[\x80-\xff]*[\0-\x7f]){2}([\x80-\xff]{0,3}[\0-\x7f])..", re.DOTALL)
MOST = 64  # tokens of a block; more would only take longer


@cache
def codec() -> Codec:
    """Return a codec with few positions, likely tokens, and ids without a token."""
    sizes = SIZES | {"n_positions": 16, "vocab_size": len(TOKENS) + 2}
    config = GPT2Config.from_dict(sizes | {"bos_token_id": len(TOKENS) - 1})
    raw = np.random.Philox(1)

    def noise(shape: tuple[int, ...]) -> np.ndarray:
        whole = raw.random_raw(math.prod(shape)) >> 40
        return (whole.reshape(shape) / 2**23 - 1).astype(np.float32)

    weights = {name: noise(shape) for name, shape in expected_shapes(config)}
    ops = get_ops("cpu", "float32", threads=1)
    return Codec(assembly.assemble(config, ops, weights), SMALL_TOKENIZER)


def compressed(data: bytes) -> None:
    """After a byte 0, the bytes are a file; else its blocks, which get a header and a CRC-32."""
    first, data = data[:1], data[1:]
    if first != b"\0":
        data = codec().header.pack() + repaired(data)
    with mock.patch.object(archive, "MAX_SEGMENT_TOKENS", MOST):
        try:
            reader = ArchiveReader(BytesIO(data), salvage=True)
            kept = b"".join(codec().decompress(reader))
        except InputError as error:
            if "no undamaged segment" not in str(error):
                assert first == b"\0", "only a header can name another version, model or machine"
            reader = None
        try:
            whole = b"".join(codec().decompress(ArchiveReader(BytesIO(data))))
        except InputError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 300
            assert reader is None or reader.lost
            return
    assert reader is not None
    assert not reader.lost
    assert whole == kept
    assert (len(whole), crc32(whole)) == (reader.size, reader.crc)


def repaired(data: bytes) -> bytes:
    """Return the data with the right CRC-32 in all blocks."""
    out, at = b"", 0
    while fields := FIELDS.search(data, at):
        length = sum((byte & 0x7F) << 7 * index for index, byte in enumerate(fields[1]))
        crc, at = fields.end(), fields.end() + 4 + length
        code = data[crc + 4 : at]
        out += fields[0] + crc32(code, crc32(fields[0][1:])).to_bytes(4, "little") + code
    return out + data[at:]


# --- streams of text -----------------------------------------------------------------------------


def stops(data: bytes) -> None:
    """The parts between bytes 255 are stop strings; the last part is the text.

    The lower two bits of a byte are a letter. The text is cut after a byte with the highest bit.
    """
    *parts, text_part = data.split(b"\xff")
    strings = [stop for stop in map(letters, parts) if stop]
    text = letters(text_part)
    filter = StopStrings(strings)
    passed, start = "", 0
    for end, byte in enumerate(text_part, 1):
        if byte < 0x80 and end < len(text):
            continue
        passed += filter.push(text[start:end])
        start = end
        expected, stopped = before_stop(text[:end], strings)
        assert (filter.stop is not None) == stopped
        if stopped:
            assert passed == expected
            assert filter.flush() == ""
            return
        assert passed == text[: end - undecided(text[:end], strings)]
    assert passed + filter.flush() == text


def letters(data: bytes) -> str:
    return "".join("ab\n\U0001f600"[byte & 3] for byte in data)


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the stop string that ends first, and whether there is one."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def undecided(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of a text that begins a stop string."""
    lengths = range(len(text) + 1)
    return max(n for n in lengths if n == 0 or any(stop.startswith(text[-n:]) for stop in stops))


# These bytes may follow the beginning of a character: none, or those that complete any character.
FOLLOWING = (b"", b"\x8f\xbf\xbf", b"\xbf\xbf\xbf")


def decoder(data: bytes) -> None:
    """The bytes before a byte 255 have the lengths of tokens in their lower two bits."""
    lengths, _, rest = data.partition(b"\xff")
    tokens = []
    for length in lengths:
        tokens.append(rest[: length & 3])
        rest = rest[length & 3 :]
    tokens.append(rest)
    decoder = Stream(SimpleNamespace(piece=lambda id, _: tokens[id]))
    data, text = b"", ""
    for id, token in enumerate(tokens):
        data += token
        text += decoder.push(id)
        late = certain(data).removeprefix(text)
        # Python waits for a third byte also where the first two can only be half of a surrogate.
        assert not late or (late == "\ufffd\ufffd" and data[-2] == 0xED), late
    assert text + decoder.flush() == data.decode(errors="replace")


def certain(data: bytes) -> str:
    """Return the part of a text that no further bytes can change."""
    texts = ((data + more).decode(errors="replace") for more in FOLLOWING)
    alike = takewhile(lambda signs: len(set(signs)) == 1, zip(*texts, strict=False))
    return "".join(signs[0] for signs in alike)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "safetensors": safetensors,
    "torch": torch,
    "arrays": arrays,
    "shards": shards,
    "config": config,
    "adapter": adapter,
    "tokenizer": tokenizer,
    "rows": rows,
    "constraints": constraints,
    "compressed": compressed,
    "stops": stops,
    "decoder": decoder,
}
