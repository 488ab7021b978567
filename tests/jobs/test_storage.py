"""Files here and at addresses, and standard input: content and errors."""

import io
import os
import sys
from types import SimpleNamespace

import fsspec
import pytest

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.jobs import storage

MEBIBYTE = 1 << 20


@pytest.fixture
def write_both(tmp_path, memory):
    """Write a file here and at an address; return both names."""

    def write(data):
        (tmp_path / "file").write_bytes(data)
        memory.pipe_file("/bucket/file", data)
        return str(tmp_path / "file"), "memory://bucket/file"

    return write


@pytest.fixture
def all_names(write_both, stdin):
    """Return a function that writes a file here, at an address and to standard input."""

    def write(data):
        stdin(data)
        return *write_both(data), "-"

    return write


@pytest.fixture
def free(monkeypatch):
    """Set the free memory; None is unknown."""
    return lambda count: monkeypatch.setattr(storage, "free_memory", lambda: count)


def caught(kind, function, *arguments):
    with pytest.raises(kind) as error:
        function(*arguments)
    return str(error.value)


def lines_of(name):
    return [line for lines in storage.read_lines(name) for line in lines]


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("a/b.txt", False),
        ("a/.b", True),
        ("_a", True),
        ("_a/b", False),
        ("a/_b/", True),
        ("s3://c/_d", True),
        ("s3://_c/d_.", False),
        ("x_", False),
    ],
)
def test_names_of_hidden_files(name, hidden):
    assert storage.is_hidden(name) is hidden


def test_a_name_has_a_file_system_and_a_path(here, memory):
    fs, path = storage.filesystem("a")
    assert (type(fs), path) == (type(fsspec.filesystem("file")), f"{here.as_posix()}/a")
    assert storage.filesystem("memory://b/c") == (memory, "/b/c")


def test_files_and_folders_are_distinguished(write_both, tmp_path, monkeypatch):
    for name in write_both(b"four"):
        folder = name.removesuffix("/file")
        assert (storage.exists(name), storage.exists(folder)) == (True, True)
        assert storage.exists(f"{name}2") is False
        assert (storage.is_folder(name), storage.is_folder(folder)) == (False, True)
        assert storage.size(name) == 4
    monkeypatch.setitem(sys.modules, "fsspec", None)  # files on this machine do not need it
    assert (storage.exists(str(tmp_path)), storage.is_folder(str(tmp_path))) == (True, True)
    monkeypatch.undo()
    for function in (storage.exists, storage.is_folder, storage.find):
        assert "cannot access nope://x: " in caught(InputError, function, "nope://x")


@pytest.mark.parametrize("function", ["exists", "isdir", "info", "size"])
def test_errors_at_an_address_name_it(function, write_both, memory, monkeypatch):
    def fail(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    _, name = write_both(b"x")
    monkeypatch.setattr(memory, function, fail)
    call = {"isdir": storage.is_folder, "info": storage.find}.get(function)
    said = caught(InputError, call or getattr(storage, function), name)
    doing, cure = "access", "check the address"
    if function in ("info", "size"):
        doing, cure = "read", "name a file that can be read"
    assert said == f"cannot {doing} {name}: Permission denied; {cure}"


def test_files_of_a_folder_at_an_address(memory):
    for name in ("b", "a", "X", ".c", "_d", "e/f", "x*y"):
        memory.pipe_file(f"/bucket/in/{name}", b"")
    expected = [f"memory:///bucket/in/{name}" for name in ("X", "a", "b", "x*y")]
    assert storage.find("memory://bucket/in") == expected
    assert storage.find("memory://bucket/in/a") == ["memory://bucket/in/a"]
    assert storage.find("memory://bucket/in/*")[-1] == expected[-1]
    assert "memory:///bucket/in/e" not in storage.find("memory://bucket/in/*")


def test_a_file_system_that_cannot_name_its_files_is_refused(write_both, memory, monkeypatch):
    write_both(b"x")
    monkeypatch.setattr(type(memory), "unstrip_protocol", lambda self, name: f"memory:/{name}x")
    assert "memory://bucket: folders and patterns are not supported at this address" in caught(
        InputError, storage.find, "memory://bucket"
    )


# --- reading -------------------------------------------------------------------------------------


def test_a_whole_file_is_read(all_names):
    data = "é\r\n".encode() * 500_000  # 2 MB: two chunks
    for name in all_names(data):
        assert storage.read_bytes(name) == data


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_text_has_no_byte_order_mark(mark, all_names):
    for name in all_names(mark + b"\xc3\xa9\r\n"):
        assert storage.read_text(name) == "é\r\n"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty: a text is needed"),
        (b"\xef\xbb\xbf", "is empty: a text is needed"),
        (b"ab\xff", "is not UTF-8: byte 2 cannot be decoded; convert it, for example with iconv"),
    ],
)
def test_a_text_must_be_utf8_and_not_empty(data, says, all_names):
    for name in all_names(data):
        assert caught(InputError, storage.read_text, name) == f"{storage.label(name)} {says}"


def test_a_text_must_fit_the_memory(write_both, stdin, free):
    data = b"x" * (3 * MEBIBYTE)
    says = "has a text of more than 3 MB, which does not fit the free memory: split it"
    for name in (*write_both(data), "-"):
        for read in (storage.read_bytes, lambda name: b"".join(*storage.read_lines(name))):
            stdin(data)
            free(32 * len(data) - 1)
            assert caught(ResourceError, read, name) == f"{storage.label(name)} {says}"
            for enough in (32 * len(data), None):
                stdin(data)
                free(enough)
                assert read(name) == data


def test_a_file_has_a_label():
    assert [*map(storage.label, ("-", "a/b"))] == ["standard input", "a/b"]


def test_lines_may_be_longer_than_a_chunk(write_both, free):
    free(32 * 3 * MEBIBYTE)  # of one line, not of all
    long = b"y" * (5 * MEBIBYTE // 2) + b"\n"
    data = [b"a\n", long, b"\n", long, b"b\r\n", b"c"]
    for name in write_both(b"".join(data)):
        assert lines_of(name) == data


@pytest.mark.parametrize("data", [b"", b"\n", b"a", b"a\n", b"a\n\nb"])
def test_lines_keep_their_ends(data, write_both):
    for name in write_both(data):
        assert lines_of(name) == data.splitlines(keepends=True)


def test_a_pipe_is_read_as_it_is_written(monkeypatch):
    ours, theirs = os.pipe()
    with open(ours) as stream:  # noqa: PTH123 (of a number)
        monkeypatch.setattr(sys, "stdin", stream)
        blocks = storage.read_lines("-")
        os.write(theirs, b"a\nb\n")
        os.write(theirs, b"c")
        assert next(blocks) == [b"a\n", b"b\n"]
        os.write(theirs, b"d\ne")
        assert next(blocks) == [b"cd\n"]
        os.close(theirs)
        assert list(blocks) == [[b"e"]]


@pytest.mark.parametrize(
    ("ready", "blocks"),
    [
        ([True] * 3, [[b"ab\n", b"cd"]]),
        ([True, False, True], [[b"ab\n"], [b"cd"]]),
        ([OSError("sockets only")] * 4, [[b"ab\n"], [b"cd"]]),
    ],
)
def test_lines_come_together_if_they_are_ready(ready, blocks, monkeypatch):
    pieces = [b"a", b"b\nc", b"d"]

    def select(reading, writing, failing, timeout):
        assert timeout == 0
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return (reading if answer else [], [], [])

    answers = list(ready)
    stream = SimpleNamespace(read1=lambda count: pieces.pop(0) if pieces else b"")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    monkeypatch.setattr("select.select", select)
    assert list(storage.read_lines("-")) == blocks


def test_a_range_of_a_file(write_both):
    for name in write_both(b"0123456789"):
        assert storage.read_range(name, 2, 5) == b"234"
        assert storage.read_range(name, 0, 10) == b"0123456789"
        assert storage.read_range(name, 3, 3) == b""
        said = caught(InputError, storage.read_range, name, 8, 11)
        assert said == f"{name} became shorter while it was read: run the command again"
        said = caught(InputError, storage.read_range, f"{name}2", 0, 1)
        assert said.startswith(f"cannot read {name}2: ")


def test_a_server_without_range_requests_is_an_error(write_both, memory, monkeypatch):
    _, name = write_both(b"0123456789")
    monkeypatch.setattr(type(memory), "cat_file", lambda self, path, start, end: b"0123456789")
    said = caught(InputError, storage.read_range, name, 4, 7)
    assert said == f"{name}: the server does not support range requests; copy the file here"


def test_a_pattern_may_span_folders(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").touch()
    assert storage.find(f"{tmp_path}/**/c") == [f"{tmp_path}/a/b/c"]


def test_standard_input_may_be_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert caught(InputError, storage.read_bytes, "-") == "standard input is closed"


@pytest.mark.parametrize(
    ("text", "without"),
    [("a\n", "a"), ("a\r\n", "a"), ("a\r", "a\r"), ("a\n\n", "a\n"), ("\r\n", ""), ("", "")],
)
def test_one_line_end_is_removed(text, without):
    assert storage.without_line_end(text) == without


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "full"), FileNotFoundError("mine"), ValueError("x")])
def test_errors_of_the_callers_block_come_out_unchanged(error, all_names):
    for name in all_names(b"x"):
        with pytest.raises(type(error)) as caught, storage.open_file(name) as stream:
            assert stream.read() == b"x"
            raise error
        assert caught.value is error


def test_errors_of_reading_name_the_file(write_both, memory, monkeypatch):
    class Failing(io.BytesIO):
        def readinto(self, buffer):
            raise OSError(5, "I/O error")

    _, name = write_both(b"x")
    monkeypatch.setattr(memory, "open", lambda path, mode: Failing())
    for read in (storage.read_bytes, lines_of):
        said = caught(InputError, read, name)
        assert said == f"cannot read {name}: I/O error; name a file that can be read"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_new_file_appears_complete_or_not_at_all(error, tmp_path, memory):
    for name in (str(tmp_path / "new"), "memory://bucket/new", f"file://{tmp_path}/new2"):
        with pytest.raises(error), storage.new_file(name) as write:
            write(b"half")
            raise error
        assert [*tmp_path.iterdir(), *memory.ls("/bucket")] == []
        with storage.new_file(name) as write:
            write(b"whole")
            assert not storage.exists(name)
        assert storage.read_bytes(name) == b"whole"
        with pytest.raises(InputError, match="exists: name another output"), storage.new_file(name):
            pass
        fs, path = storage.filesystem(name)
        fs.rm(path)


def test_a_file_that_another_program_has_written_meanwhile_stays(memory):
    name = "memory://bucket/new"
    with pytest.raises(InputError, match=f"^{name} exists"), storage.new_file(name) as write:
        write(b"ours")
        memory.pipe_file("/bucket/new", b"theirs")
    assert memory.cat_file("/bucket/new") == b"theirs"
    assert len(memory.ls("/bucket")) == 1


@pytest.mark.parametrize("function", ["pipe_file", "open", "mv", "write"])
def test_a_file_that_cannot_be_written_is_an_error(function, memory, monkeypatch):
    def fail(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    name, changed = "memory://bucket/new", memory
    if function == "write":
        changed = fsspec.implementations.memory.MemoryFile
    monkeypatch.setattr(changed, function, fail)
    with pytest.raises(ResourceError) as caught, storage.new_file(name) as write:
        write(b"x")
    assert str(caught.value) == f"cannot write {name}: Permission denied; check the address"
    monkeypatch.undo()
    assert memory.ls("/bucket") == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "output is empty: name a file"),
        ("memory://bucket/a*", "output memory://bucket/a*: an address must not contain *, ? or ["),
        ("memory://bucket/", "memory://bucket/ exists: name another output"),
        ("nope://a", "cannot access nope://a: Protocol not known: nope"),
    ],
)
def test_names_of_no_file_are_refused(name, complaint, memory):
    assert caught(InputError, storage.new_file(name).__enter__) == complaint


READ = "cannot read NAME: {}; name a file that can be read"


@pytest.mark.parametrize(
    ("name", "error", "kind", "says"),
    [
        ("a", FileNotFoundError("/a"), InputError, READ.format("No such file or directory")),
        ("a", OSError(5, "I/O error"), InputError, READ.format("I/O error")),
        ("a", OSError("no number"), InputError, READ.format("no number")),
        ("a", ValueError("a bug"), ValueError, "a bug"),
        ("m://a", ValueError("x" * 400), InputError, f"cannot read NAME: {'x' * 300}"),
        ("m://a", ImportError("no s3fs"), ResourceError, "cannot read NAME: no s3fs"),
        ("a", ResourceError("as it is"), ResourceError, "as it is"),
    ],
)
def test_errors_of_a_file_system(name, error, kind, says):
    def fail():
        with storage.reading(name):
            raise error

    assert caught(kind, fail) == says.replace("NAME", name)


def test_errors_of_writing():
    def fail():
        with storage.writing("a", "do this"):
            raise OSError(28, "full")

    assert caught(ResourceError, fail) == "cannot write a: full; do this"
    with storage.writing("a", "b"), storage.reading("c"):
        pass
