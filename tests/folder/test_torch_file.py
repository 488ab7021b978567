"""PyTorch's files of weights are read as data; whatever else they hold is refused, not called."""

import struct
import sys
import zipfile
from functools import cache

import numpy as np
import pytest

import gpt_cli.folder.torch_file  # noqa: F401 (before imports are watched)
from gpt_cli.errors import CheckpointError
from gpt_cli.folder.weight_files import read_tensors, weight_files
from support.checkpoints import store
from support.torch_files import (
    MAGIC,
    ORDERED,
    PROTOCOL,
    Call,
    Name,
    Storage,
    View,
    older_bytes,
    opcodes,
    pickled,
    torch_bytes,
    zip_bytes,
)

MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
TENSORS = {"a": store(MATRIX), "b": store(MATRIX[0], "F16"), "c": store(MATRIX, "BF16")}
WHOLE = Storage("0", "F32", 12)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "pytorch_model.bin"


def read(file, data):
    file.write_bytes(data)
    return dict(read_tensors(file))


watched = []  # the list of the events of a read, while one is watched


def watch(event, arguments):
    if watched and event.split(".")[0] in ("import", "exec", "os", "subprocess", "pickle"):
        watched[-1].append(event)


@cache
def start_watching():
    """Add the hook once: it stays, and Python would call each of several at every event."""
    sys.addaudithook(watch)


def refusal(file, data):
    """Return the message of a refusal; nothing is imported, opened elsewhere or run."""
    "".encode("cp437")  # zipfile imports it
    start_watching()
    events = []
    file.write_bytes(data)
    watched.append(events)
    try:
        with pytest.raises(CheckpointError) as caught:
            read_tensors(file)
    finally:
        watched.clear()
    assert events == []
    message = str(caught.value)
    assert message.startswith(f"{file} is not a file of PyTorch's weights: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("older", [False, True])
def test_both_forms_give_the_arrays_that_were_saved(file, older):
    tensors = read(file, torch_bytes(TENSORS, older=older))
    assert [tensor.dtype for tensor in tensors.values()] == ["F32", "F16", "BF16"]
    for name, stored in TENSORS.items():
        assert tensors[name].shape == stored.shape
        assert tensors[name].strides is None
        assert np.array_equal(tensors[name][:], MATRIX[0] if name == "b" else MATRIX)
    assert np.array_equal(tensors["a"][1:3], MATRIX[1:3])


@pytest.mark.parametrize("older", [False, True])
def test_files_of_pytorch_itself_are_read(file, older):
    torch = pytest.importorskip("torch")
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"view": whole[1:], "turned": whole.t(), "half": whole.half(), "mask": whole > 3}
    state |= {"parameter": torch.nn.Parameter(whole.bfloat16()), "tied": whole}
    torch.save(state, file, _use_new_zipfile_serialization=not older)
    tensors = dict(read_tensors(file))
    for name in state.keys() - {"mask"}:
        assert np.array_equal(tensors[name][:], state[name].detach().float().numpy())
    assert tensors["view"].offset == tensors["tied"].offset + 16


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (View(WHOLE, 4, (2, 4), (4, 1)), MATRIX[1:]),
        (View(WHOLE, 0, (4, 3), (1, 4)), MATRIX.T),
        (View(WHOLE, 1, (3, 2), (4, 2)), MATRIX[:, 1::2]),
        (View(WHOLE, 5, (3, 3), (0, 0)), np.full((3, 3), 5)),
        (View(WHOLE, 2, (1, 4), (99, 1)), MATRIX.reshape(-1)[None, 2:6]),
        (View(WHOLE, 12, (0, 4), (4, 1)), np.empty((0, 4))),
        (View(WHOLE, 12, (0, 4), (0, 1)), np.empty((0, 4))),
    ],
)
def test_a_view_of_a_storage_is_copied(file, dtype, view, expected):
    view = view._replace(storage=WHOLE._replace(dtype=dtype))
    data = zip_bytes(pickled({"x": view}), {"0": store(MATRIX, dtype).data})
    tensor = read(file, data)["x"]
    assert np.array_equal(tensor[:], expected)
    assert np.array_equal(tensor[1:2], expected[1:2])
    if view.shape[0] == 1:  # then its stride means nothing
        assert tensor.strides is None


def test_names_of_one_storage_are_one_place(file):
    views = {name: View(WHOLE, 0, (3, 4), (4, 1)) for name in ("wte.weight", "lm_head.weight")}
    tensors = read(file, zip_bytes(pickled(views), {"0": store(MATRIX).data}))
    assert tensors["wte.weight"] == tensors["lm_head.weight"]


def test_parameters_are_tensors_and_other_types_have_their_names(file):
    parameter = Call(Name("torch._utils", "_rebuild_parameter"), (View(WHOLE, 0, (12,), (1,)),))
    mask = View(Storage("1", "U8", 4), 0, (2, 2), (2, 1))
    data = zip_bytes(pickled({"p": parameter, "m": mask}), {"0": bytes(48), "1": bytes(4)})
    tensors = read(file, data)
    assert (tensors["p"].shape, tensors["m"].dtype) == ((12,), "U8")


# --- what is refused -----------------------------------------------------------------------------


def code(*parts):
    return b"\x80\x02" + b"".join(parts) + b"."


SYSTEM = opcodes(Name("os", "system"))
FLOATS = Name("torch", "FloatStorage")
GETATTR = Name("builtins", "getattr")
MEMO_BOMB = b")" + b"q\0h\0\x86" * 60  # 2^60 values, if they are compared, shown or hashed
RUN = (opcodes(("touch /tmp/run",)), b"R")
HOSTILE = {
    "a call of os.system": (code(SYSTEM, *RUN), "names os.system"),
    "__import__": (code(opcodes(Call(Name("builtins", "__import__"), ("os",)))), "__import__"),
    "getattr": (code(opcodes(Call(Name("builtins", "getattr"), (1, "x")))), "builtins.getattr"),
    "a name of torch": (code(opcodes(Name("torch", "load"))), "torch.load"),
    "a storage that is called": (
        code(opcodes(Call(Name("torch", "FloatStorage"), (9,)))),
        "REDUCE of torch.FloatStorage, tuple",
    ),
    "a chain of getattr": (
        code(opcodes(Call(GETATTR, (Call(GETATTR, (Name("os", "path"), "os")), "system"))), *RUN),
        "builtins.getattr",
    ),
    "a name with dots": (code(b"ccollections\nOrderedDict.__init__\n"), "OrderedDict.__init__"),
    "a model": (
        code(opcodes(Name("transformers.models.gpt2.modeling_gpt2", "GPT2LMHeadModel")), b")\x81"),
        "GPT2LMHeadModel, which is never called; save `model.state_dict()` alone, or",
    ),
    "a parameter with a state": (
        code(opcodes(Call(Name("torch._utils", "_rebuild_parameter_with_state"), ()))),
        "_with_state, which is never called; save `model.state_dict()` alone, or",
    ),
    "__setstate__": (code(SYSTEM, opcodes({"__setstate__": 1}), b"b"), "names os.system"),
    "a state of an OrderedDict": (
        code(opcodes(ORDERED.name), opcodes({"__setstate__": 1}), b"b"),
        "BUILD of collections.OrderedDict, dict",
    ),
    "a state that is set": (code(opcodes(View(WHOLE, 0, (), ())), opcodes({}), b"b"), "_View"),
    "INST": (code(b"(ios\nsystem\n"), "opcode INST"),
    "OBJ": (code(b"(", SYSTEM, b"o"), "names os.system"),
    "NEWOBJ": (code(opcodes(ORDERED.name), b")\x81"), "opcode NEWOBJ"),
    "NEWOBJ_EX": (code(opcodes(ORDERED.name), b")}\x92"), "opcode NEWOBJ_EX"),
    "EXT1": (code(b"\x82\x01"), "opcode EXT1"),
    "EXT2": (code(b"\x83\x01\0"), "opcode EXT2"),
    "EXT4": (code(b"\x84\x01\0\0\0"), "opcode EXT4"),
    "STACK_GLOBAL": (code(opcodes("os"), opcodes("system"), b"\x93"), "opcode STACK_GLOBAL"),
    "PERSID": (code(b"Pstorage\n"), "opcode PERSID"),
    "a persistent id that is a text": (code(opcodes("storage"), b"Q"), "BINPERSID of str"),
    "a persistent id of a module": (
        code(opcodes(("module", Name("torch", "FloatStorage"), "0", "cpu", 1)), b"Q"),
        "BINPERSID of tuple",
    ),
    "a storage of a function": (
        code(opcodes(("storage", ORDERED.name, "0", "", 1)), b"Q"), "BINPERSID of tuple"
    ),
    **{
        f"a storage with {name}": (code(opcodes(("storage", *parts)), b"Q"), "BINPERSID of tuple")
        for name, *parts in (
            ("a number as its key", FLOATS, 0, "", 1),
            ("a text as its length", FLOATS, "0", "", "1"),
            ("a text as its type", "torch.FloatStorage", "0", "", 1),
        )
    },
    "an OrderedDict of arguments": (code(opcodes(Call(ORDERED.name, (1,)))), "OrderedDict, tuple"),
    "a parameter of a number": (
        code(opcodes(Call(Name("torch._utils", "_rebuild_parameter"), (1,)))),
        "REDUCE of torch._utils._rebuild_parameter, tuple",
    ),
    "a view of a storage": (
        code(opcodes(("storage", FLOATS, "0", "", 1, ("1", 0, 1))), b"Q"),
        "BINPERSID of tuple",
    ),
    "a call without a name": (code(opcodes("x"), b")R"), "REDUCE of str, tuple"),
    "a text of 2^31 bytes": (code(b"X\0\0\0\x80abc"), ""),
    "a text of 2^63 bytes": (code(b"\x8d" + b"\xff" * 7 + b"\x7f"), ""),
    "an endless memo": (code(b"}" + b"q\0h\0" * 60_000), "more than 100000 opcodes"),
    "a nested memo bomb": (code(MEMO_BOMB), "a tuple in place of a dict"),
    "a deep memo bomb": (code(b")" + b"q\0h\0\x86" * 30_000), "a tuple in place of a dict"),
    "endless calls": (code(opcodes(ORDERED) * 50_000), "more than 100000 opcodes"),
    "a memo bomb in a state dict": (code(b"}", opcodes("x"), MEMO_BOMB, b"s"), "x is a tuple"),
    "a memo bomb as a key": (code(b"}", MEMO_BOMB, b"Ns"), "a tuple in place of a str"),
    "a memo bomb as a shape": (
        code(opcodes(Name("torch._utils", "_rebuild_tensor_v2")), b"(", opcodes(WHOLE),
             opcodes(0), MEMO_BOMB, b"h\0tR"),
        "a tuple in place of a int",
    ),
    "a memo bomb as a persistent id": (code(MEMO_BOMB, b"Q"), "BINPERSID of tuple"),
    "a deep tuple": (code(b")" + b"\x85" * 90_000), "a tuple in place of a dict"),
    "a key that is a deep tuple": (code(b"})" + b"\x85" * 90_000 + b"Ns"), "in place of a str"),
    "an empty stack": (code(b"0"), ""),
    "TUPLE3 of nothing": (code(b"\x87"), ""),
    "a memo that is missing": (code(b"h\x07"), ""),
    "no end": (b"\x80\x02}", ""),
    "duplicate names": (code(b"}", opcodes("a"), b"Ns", opcodes("a"), b"Ns"), "a twice"),
    "a negative size": (pickled({"x": View(WHOLE, 0, (-1, 4), (4, 1))}), "negative"),
    "a negative stride": (pickled({"x": View(WHOLE, 8, (2, 4), (-4, 1))}), "negative"),
    "a negative offset": (pickled({"x": View(WHOLE, -1, (1,), (1,))}), "negative"),
    "a shape of floats": (code(opcodes(Call(Name("torch._utils", "_rebuild_tensor_v2"),
        (WHOLE, 0, (True,), (1,))))), "a bool in place of a int"),
    "a shape that could change": (
        pickled({"x": View(WHOLE, 0, [3, 4], (4, 1))}), "a list in place of a tuple"
    ),
    "strides that could change": (
        pickled({"x": View(WHOLE, 0, (3, 4), [4, 1])}), "a list in place of a tuple"
    ),
    "a tensor of a tensor": (
        pickled({"x": View(View(WHOLE, 0, (12,), (1,)), 0, (12,), (1,))}), "_rebuild_tensor_v2, t"
    ),
    "a storage of -1 elements": (
        pickled({"x": View(Storage("0", "F32", -1), 0, (0,), (1,))}), "goes beyond"
    ),
    "a tensor beyond its storage": (pickled({"x": View(WHOLE, 1, (3, 4), (4, 1))}), "goes beyond"),
    "2^40 elements": (pickled({"x": View(WHOLE, 0, (2**40, 4), (0, 1))}), "goes beyond"),
    "a size beyond 2^64": (pickled({"x": View(WHOLE, 0, (2**70,), (1,))}), "goes beyond"),
    "many axes": (pickled({"x": View(WHOLE, 0, (1,) * 99, (1,) * 99)}), "99 axes"),
    "axes without strides": (pickled({"x": View(WHOLE, 0, (3, 4), (1,))}), ""),
    "a checkpoint of a training": (
        pickled({"weights": {"x": View(WHOLE, 0, (1,), (1,))}}),
        "weights is a dict, not a tensor, as in a checkpoint of a training; save",
    ),
    "a list": (pickled([1]), "a list in place of a dict"),
    "one storage of two types": (
        pickled({"x": View(WHOLE, 0, (), ()), "y": View(Storage("0", "F64", 6), 0, (), ())}),
        "two types",
    ),
}  # fmt: skip


@pytest.mark.parametrize("older", [False, True], ids=["zip", "older"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused_and_nothing_in_it_runs(file, name, older):
    pickle, reason = HOSTILE[name]
    storages = {"0": bytes(48)}
    data = older_bytes(pickle, storages, {"0": 4}) if older else zip_bytes(pickle, storages)
    assert reason in refusal(file, data)


def compress(entry):
    entry.compress_type = zipfile.ZIP_DEFLATED


VIEWS = pickled({"x": View(WHOLE, 0, (3, 4), (4, 1))})
DATA = {"0": bytes(48)}
WHOLE_ZIP = zip_bytes(VIEWS, DATA)
KEYS, END_OLDER = pickled(["0"]), older_bytes(VIEWS, DATA, {"0": 4})[-56:]


def listed(**fields):
    """Return a zip file whose directory has other values for a storage, in zip64 if large."""

    def relist(archive):
        for name, value in fields.items():
            setattr(archive.getinfo("archive/data/0"), name, value)

    return zip_bytes(VIEWS, DATA, relist=relist)


def zip64(size, offset):
    """Return a zip file whose end, in zip64, says this of its directory."""
    end = WHOLE_ZIP.index(b"PK\5\6")
    numbers = struct.pack("<Q2H2L4Q", 44, 45, 45, 0, 0, 4, 4, size, offset)
    locator = struct.pack("<LQL", 0, end, 1)
    last = WHOLE_ZIP[end : end + 8] + b"\xff" * 12 + bytes(2)
    return WHOLE_ZIP[:end] + b"PK\6\6" + numbers + b"PK\6\7" + locator + last


FILES = {
    "an empty file": (b"", ""),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "a web page": (b"<!DOCTYPE html>", "a web page"),
    "a zip that is cut": (WHOLE_ZIP[:-30], "not a zip file"),
    "a zip without its middle": (WHOLE_ZIP[:100] + WHOLE_ZIP[200:], ""),
    "compressed entries": (zip_bytes(VIEWS, DATA, change=compress), "compressed or damaged"),
    "an entry in the place of the first": (listed(header_offset=0), "entries overlap"),
    "an entry in the directory": (listed(file_size=70, compress_size=70), "entries overlap"),
    "an encrypted entry": (listed(flag_bits=1), "compressed or damaged"),
    "an entry that is listed as compressed": (listed(compress_type=8), "compressed or damaged"),
    "an entry without a header": (listed(header_offset=1), "compressed or damaged"),
    **{
        f"an entry at {offset}": (listed(header_offset=offset), "")
        for offset in (10**6, 2**32, 2**62, 2**63, 2**64 - 1)
    },
    **{
        f"an entry of {size} bytes": (listed(file_size=size, compress_size=size), "entries overlap")
        for size in (2**31, 2**32, 2**63, 2**64 - 1)
    },
    "an entry of two sizes": (listed(file_size=2**40), "compressed or damaged"),
    **{
        f"a directory of {size} bytes at {offset}": (zip64(size, offset), "")
        for size, offset in ((2**31, 0), (2**62, 0), (2**64 - 1, 2**64 - 1), (300, 2**62))
    },
    "two entries of one name": (
        zip_bytes(VIEWS, {"0": bytes(48), "1": b""}).replace(b"data/1", b"data/0"),
        "the same name",
    ),
    "a storage that is missing": (zip_bytes(VIEWS, {}), "archive/data/0"),
    "a storage that is short": (zip_bytes(VIEWS, {"0": bytes(47)}), "has 47 bytes"),
    "a storage that is long": (zip_bytes(VIEWS, {"0": bytes(49)}), "has 49 bytes"),
    "no pickle": (zip_bytes(VIEWS, DATA).replace(b"data.pkl", b"data.txt"), ""),
    "big-endian numbers": (zip_bytes(VIEWS, DATA, byteorder=b"big"), "big-endian"),
    "a large pickle": (zip_bytes(bytes(2_000_001), DATA), "has 2000001 bytes"),
    "an older file that is cut": (older_bytes(VIEWS, DATA, {"0": 4})[:-1], "ends 1 bytes early"),
    "an older file with another length": (older_bytes(VIEWS, DATA, {"0": 2}), "another length"),
    "an older file whose keys are a memo bomb": (
        pickled(MAGIC) + pickled(PROTOCOL) + pickled({}) + VIEWS + code(b"](", MEMO_BOMB, b"e"),
        "a tuple in place of a str",
    ),
    "an older file with the memo of another pickle": (
        code(opcodes(MAGIC), b"q\7") + pickled(PROTOCOL) + code(b"h\7") + VIEWS + KEYS + END_OLDER,
        "7; it is damaged",
    ),
    "an older file of five endless pickles": (
        code(b"\x8a\x01\0", b"q\0" * 39_999) * 5,
        "more than 100000 opcodes",
    ),
    "an older file without keys": (older_bytes(VIEWS, {}, {}), "not those of its tensors"),
    "another pickle": (pickled(1) * 5, "not PyTorch's"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused(file, name):
    data, reason = FILES[name]
    assert reason in refusal(file, data)


def test_a_zip_of_many_entries_is_refused(file):
    data = zip_bytes(VIEWS, DATA | {str(n): b"" for n in range(1, 40_000)})
    assert "a part of its description has 2" in refusal(file, data)


def test_safetensors_are_preferred_and_a_pickle_under_their_name_is_not_opened(tmp_path):
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(torch_bytes(TENSORS))
        assert weight_files(tmp_path) == [tmp_path / name]
    with pytest.raises(CheckpointError, match="a file of PyTorch; name it pytorch_model"):
        read_tensors(tmp_path / "model.safetensors")
