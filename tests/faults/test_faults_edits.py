"""Edits, vectors and activations: their files may be damaged or hostile, and a run may be ended."""

import json
import os
import random
import time
from functools import partial

import numpy as np
import pytest
from safetensors.numpy import save

from support.in_process import records_here, run_here
from support.processes import posix
from support.signals import ENDS, SIGNALS, TINY, each_signal, interrupt, leave, limits
from support.world import fault_row

pytestmark = posix

SLOW = pytest.mark.slow
C = 32  # of the model
HOOK = "blocks.1.hook_resid_pre"
NOTHING = "nothing is computed"
PICKLE = b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR."
TEXTS = b"".join(b"Once, there were %d foxes.\n" % count for count in range(400))
HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(117) + "\n"


class Code:
    """An object whose pickle runs a command."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.fixture
def place(world):
    """Fill the working folder with files that edits may name."""
    place = world.place
    for name, array in {
        "v": np.ones(C), "wide": np.ones(48), "nan": np.full(C, np.nan), "large": np.full(C, 1e39),
        "code": np.array([Code()]), "number": np.float32(1), "words": np.array(["a"] * C),
    }.items():  # fmt: skip
        np.save(place / f"{name}.npy", array)
    np.savez(place / "rows.npz", **{HOOK: np.ones((2, C)), "position": np.array([0, 0])})
    stored = save({HOOK: np.ones((2, C), np.float32), "position": np.arange(2)})
    (place / "stored.safetensors").write_bytes(stored)
    whole = {path.name: path.read_bytes() for path in (place / "v.npy", place / "rows.npz")}
    for name, data in {
        "cut.npy": whole["v.npy"][:-7], "cut.npz": whole["rows.npz"][:-40], "empty.npy": b"",
        "cut.safetensors": stored[:-5], "pickle.npy": PICKLE, "pickle.npz": PICKLE,
        "v.npz": whole["v.npy"], "rows.npy": whole["rows.npz"],
        "huge.npy": b"\x93NUMPY\x01\0v\0" + HUGE.encode(),
        "damaged.npz": whole["rows.npz"].replace(np.float64(1).tobytes(), b"damaged!"),
    }.items():  # fmt: skip
        (place / name).write_bytes(data)
    return place


def row(name, edit, says, do="--edit '", code=2):
    return fault_row(130, name, code, edit, says, do, intact=NOTHING)


# fmt: off
WRONG_EDITS = [
    row("a hook point that is misspelt", "blocks.1.hook_resid_pree=0", "is not a hook point",
        f"did you mean {HOOK}?"),
    row("a head that is not there", "blocks.1.attn.hook_z[4]=0", "[4] must be heads from 0 to 3"),
    row("a position outside of the text", f"{HOOK}@9=0", "@9 is not in a text of"),
    row("a mean without a file", f"{HOOK}=mean:",
        "must end with .safetensors or .npz or .npy"),
    row("a mean of a file that is not there", f"{HOOK}=mean:gone.npy", "gone.npy does not exist"),
    row("a patch from a file that is not there", f"{HOOK}@0=gone.safetensors",
        "gone.safetensors does not exist"),
    row("a mean of one vector", f"{HOOK}=mean:v.npy", "a mean needs activations of tokens"),
    row("a patch past the stored tokens", f"{HOOK}@0:3=stored.safetensors",
        "the activations have 2 positions", "use only these"),
    row("a patch from several rows", f"{HOOK}@0=rows.npz", "has several rows",
        "give a file with the activations of one"),
    row("a vector of another width", f"{HOOK}+=wide.npy", "has the shape (48,), and "),
    row("a vector with NaN", f"{HOOK}+=nan.npy", "is not finite"),
    row("a vector too large for float32", f"{HOOK}+=large.npy", "is not finite"),
    row("a vector of text", f"{HOOK}+=words.npy", "holds <U1, not numbers"),
    row("a number for a vector", f"{HOOK}+=number.npy", "number.npy cannot be read"),
    *(row(name, f"{HOOK}@0={file}", says) for file, name, says in (
        ("empty.npy", "an empty .npy", "empty.npy cannot be read"),
        ("cut.npy", "a .npy cut short", "cut.npy cannot be read"),
        ("cut.npz", "a .npz cut short", "cut.npz cannot be read"),
        ("cut.safetensors", "a .safetensors cut short", "incomplete metadata"),
        ("damaged.npz", "a damaged .npz", "Bad CRC-32"),
        ("pickle.npy", "a pickle named .npy", "the magic string is not correct"),
        ("pickle.npz", "a pickle named .npz", "File is not a zip file"),
        ("code.npy", "objects that run code", "Object arrays cannot be loaded"),
        ("v.npz", "a .npy named .npz", "File is not a zip file"),
        ("rows.npy", "a .npz named .npy", "the magic string is not correct"),
        ("huge.npy", "a header of 4 TiB", "Unable to allocate"),
        ("\x1b]0;pwned\x07.npy", "a file's name that drives a terminal", r"\x07.npy does not"),
        ("a\ud800.npy", "half of a surrogate in a file's name", "cannot be read"),
    )),
    row("an edit whose results are not finite", f"{HOOK}*=3e38", "results are not finite",
        "give smaller numbers"),
]
# fmt: on


@pytest.mark.parametrize(("edit", "says", "do"), WRONG_EDITS)
@pytest.mark.usefixtures("place")
def test_a_wrong_edit_is_refused(edit, says, do, request, case_folder, suffer_here):
    code = request.node.get_closest_marker("fault").args[2]
    command = ("next", "-m", case_folder("saved"), "Once", "--edit", edit)
    suffer_here(*command, code=code, says=says, do=do)


WRONG_ROWS = {
    "head": (f"{HOOK}[32]=0", "[32] must be dimensions from 0 to 31"),
    "pickle": (f"{HOOK}@0=pickle.npz", "pickle.npz cannot be read"),
    "huge": (f"{HOOK}@0=huge.npy", "Unable to allocate"),
    "far": (f"{HOOK}@0:9=0", "@0:9 is not in a text"),
}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.fault(131, "rows with wrong edits", 6, intact="the results of all other rows")
def test_wrong_edits_are_errors_of_their_rows(case_folder, place, monkeypatch):
    monkeypatch.chdir(place)
    edits = {"set": f"{HOOK}@0=0", "steered": f"{HOOK}+=v.npy"}
    edits |= {id: edit for id, (edit, _) in WRONG_ROWS.items()}
    rows = [{"id": id, "text": "Once", "edits": [edit]} for id, edit in edits.items()]
    rows.append({"id": "plain", "text": "Ones"})
    good = [row for row in rows if row["id"] not in WRONG_ROWS]
    command = ("score", "-m", case_folder("saved"), "--format", "jsonl", "-q")
    out, errors = run_here(*command, input=jsonl(rows), code=6)
    assert errors.startswith(f"gpt-cli: error: {len(WRONG_ROWS)} of {len(rows)} rows failed")
    records = {record["id"]: record for record in map(json.loads, out.splitlines())}
    for id, (_, problem) in WRONG_ROWS.items():
        assert problem in records.pop(id)["error"]["message"]
    alone = records_here(*command, input=jsonl(good))
    for one in alone:
        assert records[one["id"]] | {"index": one["index"]} == one
    assert len(alone) == len(records)


# --- vectors -------------------------------------------------------------------------------------

VECTOR = ("vector", *TINY, "--hook", HOOK, "-o", "v.safetensors")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        fault_row(132, name, 2, data, says, intact="there is no output")
        for name, data, says in (
            ("an empty file for vector", b"", "at least 2 texts"),
            ("blank lines for vector", b"\n \n\n", "at least 2 texts"),
            ("one text for vector", b"Once\n", "at least 2 texts"),
            (
                "texts for vector that are no UTF-8",
                b"Once\n\xff\n",
                "in, line 2: the row is not UTF-8",
            ),
        )
    ],
)
def test_texts_that_give_no_vector_are_told(data, says, world, suffer_here):
    (world.place / "in").write_bytes(data)
    suffer_here(*VECTOR, "in", "-", stdin=b"One\nTwo\n", code=2, says=says, do="")


@pytest.mark.parametrize(
    ("command", "size"),
    [
        fault_row(
            133, f"a disk that fills under {name}", 5, command, size, intact=intact, marks=[SLOW]
        )
        for name, command, size, intact in (
            ("a vector", VECTOR, 300, "there is no output"),
            (
                "activations",
                ("activations", *TINY, "-q", "--hook", HOOK, "-o", "out.npz"),
                50_000,
                "there is no output",
            ),
        )
    ],
)
def test_an_output_that_finds_no_room_does_not_appear(command, size, world, suffer):
    (world.place / "in").write_bytes(TEXTS)
    (world.place / "other").write_bytes(TEXTS.replace(b"foxes", b"hares"))
    files = ("in", "other") if command[0] == "vector" else ("in",)
    options = {"changes": True, "preexec_fn": limits(FSIZE=size), "code": 5}
    suffer(*command, *files, says="cannot write", do="File too large", **options)


# --- activations ---------------------------------------------------------------------------------

ACTIVATIONS = ("activations", *TINY, "-q", "--threads", 1, "--hook", "*.hook_resid_*", "in", "-o")


def arrays_of(path):
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays if name != "metadata"}


def assert_same(arrays, others):
    assert arrays.keys() == others.keys()
    assert all(np.array_equal(arrays[name], others[name]) for name in others)


@SLOW
@each_signal(134, "at 8 moments of activations --resume", "every row, once", ENDS)
def test_no_activation_is_lost(number, world, survive):
    (world.place / "in").write_bytes(TEXTS)
    world.output(*ACTIVATIONS, "whole.npz")
    expected = arrays_of(world.place / "whole.npz")
    chance, output = random.Random(number), world.place / "out.npz"
    job = (*ACTIVATIONS, "out.npz", "--resume")
    killed = 0
    for _ in range(8):
        wait = partial(time.sleep, chance.uniform(0.3, 1.2))
        code, out, errors = interrupt(world, number, *job, until=wait)
        assert code in (0, -number, SIGNALS.get(number)), errors
        assert out == b""
        killed += code != 0
        if output.exists():  # it is whole: start again
            assert_same(arrays_of(output), expected)
            output.unlink()
    survive(killed)
    world.output(*job)
    assert_same(arrays_of(output), expected)


@pytest.mark.fault(135, "a reader that leaves show patch --json", 141, intact="nothing is said")
def test_a_reader_may_leave_a_view(world):
    texts = ("Once upon a time", "Once upon a hill")
    command = ("show", "patch", *TINY, *texts, "--answer", " a", "--wrong", " the", "--json")
    assert leave(world, *command, size=0) == (b"", 141)
