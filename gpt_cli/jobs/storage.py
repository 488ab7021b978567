"""Files on this machine, at an address such as s3://bucket/name, or standard input ("-").

Functions raise InputError if a name cannot be accessed or read, and ResourceError if the package
for an address is missing.
"""

import errno
import os
import select
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from glob import glob
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

from gpt_cli.errors import GPTCLIError, InputError, ResourceError
from gpt_cli.options.declare import OptionError
from gpt_cli.system import atomic
from gpt_cli.system.machine import free_memory

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

NO_FILE = os.strerror(errno.ENOENT)
_READABLE = "name a file that can be read"
_OTHER_MARKS = {  # UTF-32 first: one of its marks begins with one of UTF-16
    "UTF-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"),
    "UTF-16": (b"\xff\xfe", b"\xfe\xff"),
}
READ_BYTES = 1 << 20  # to read at once, if available
_GROWTH = 32  # memory of a text as tokens, in multiples of its bytes; measured: 14


def is_address(name: str) -> bool:
    """Return whether a name is an address and not a path on this machine."""
    return "://" in name


def with_slashes(name: str) -> str:
    """Return a name with slashes between its folders, which Windows takes, too."""
    return name if is_address(name) else name.replace(os.sep, "/")


def is_pattern(address: str) -> bool:
    """Return whether an address is a pattern: to move or remove it would affect all that match."""
    return any(mark in address for mark in "*?[")


def filesystem(name: str) -> "tuple[AbstractFileSystem, str]":
    """Return the file system of a path or an address, and the path within it."""
    import fsspec

    if not is_address(name):
        return fsspec.filesystem("file"), Path(name).absolute().as_posix()
    with _accessing(name):
        return fsspec.core.url_to_fs(name)


class _LocalFiles:
    """The files of this machine, with the methods of a file system of fsspec, without its import.

    Names that cannot be accessed do not exist.
    """

    def isdir(self, path: str) -> bool:
        return os.path.isdir(path)  # noqa: PTH112

    def exists(self, path: str) -> bool:
        return os.path.exists(path)  # noqa: PTH110

    def size(self, path: str) -> int:
        return Path(path).stat().st_size

    def open(self, path: str, mode: Literal["rb"]) -> FileIO:
        return Path(path).open(mode, buffering=0)

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        with Path(path).open("rb") as stream:
            stream.seek(start)
            return stream.read(end - start)


def _files(name: str) -> "tuple[AbstractFileSystem | _LocalFiles, str]":
    """Return the file system of a name, and the path within it; a local one needs no fsspec."""
    return filesystem(name) if is_address(name) else (_LocalFiles(), name)


def is_hidden(name: str) -> bool:
    """Return whether a file in a folder is not input: its name begins with `.` or `_`."""
    return Path(name).name.startswith((".", "_"))


def is_stream(name: str) -> bool:
    """Return whether a name is that of a pipe or a device, which can be read once."""
    with reading(name):
        path = Path(name)
        return name == "-" or path.is_fifo() or path.is_char_device()


def find(name: str) -> list[str]:
    """Return the sorted files of a pattern or a folder (except hidden ones), or the file itself."""
    if is_stream(name):
        return [name]
    with reading(name):
        files = _find_at_address(name) if is_address(name) else _find_here(name)
    if not files:
        raise InputError(f"cannot read {name}: no files found")
    return sorted(files)


def _find_here(name: str) -> list[str]:
    path = Path(name)
    if path.is_dir():
        files = [str(file) for file in path.iterdir() if file.is_file()]
        return [file for file in files if not is_hidden(file)]
    if "*" in name and not path.exists():
        matches = glob(name, recursive=True)  # noqa: PTH207 (leaves ./ as it is)
        return [file for file in matches if Path(file).is_file()]
    path.stat()
    return [name]


def _find_at_address(name: str) -> list[str]:
    fs, path = filesystem(name)
    if "*" in path:
        paths = [file for file in fs.glob(path) if not fs.isdir(file)]
    elif fs.info(path)["type"] == "file":
        return [name]
    else:
        listed = [info["name"] for info in fs.ls(path, detail=True) if info["type"] == "file"]
        folder = path.rstrip("/")  # a bucket may hold an empty file with its name
        paths = [file for file in listed if file.rstrip("/") != folder and not is_hidden(file)]
    files = [fs.unstrip_protocol(file) for file in paths]
    if any(filesystem(file) != (fs, path) for file, path in zip(files, paths, strict=True)):
        raise InputError(f"{name}: folders and patterns are not supported at this address")
    return files


def is_folder(name: str) -> bool:
    """Return whether a name is that of a folder."""
    files, path = _files(name)
    with _accessing(name):
        return bool(files.isdir(path))


def exists(name: str) -> bool:
    """Return whether a file or a folder has this name."""
    files, path = _files(name)
    with _accessing(name):
        return bool(files.exists(path))


def size(name: str) -> int:
    """Return the size of a file in bytes."""
    with reading(name):
        files, path = _files(name)
        return int(files.size(path))


@contextmanager
def open_file(file: str) -> Iterator[BufferedReader]:
    """Open a file to read bytes; errors in the block pass through: see `reading`."""
    opened: AbstractContextManager[BufferedReader]
    with reading(label(file)):
        if file == "-":
            if sys.stdin is None:
                raise InputError("standard input is closed")
            opened = nullcontext(cast(BufferedReader, sys.stdin.buffer))  # stays open
        else:
            files, path = _files(file)
            opened = BufferedReader(files.open(path, "rb"))
    with opened as stream:
        yield stream


@contextmanager
def new_file(name: str) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that writes to a file, which appears if the block succeeds.

    InputError if it exists, and ResourceError if it cannot be written.
    """
    if not name:  # such as of a variable that is not set
        raise OptionError("output", "is empty: name a file")
    if not is_address(name):
        with atomic.new_file(Path(name)) as stream:
            yield stream.write
        return
    if is_pattern(name):
        raise OptionError("output", f"{name}: an address must not contain *, ? or [")
    _check_new(name)
    fs, path = filesystem(name)
    cure = "check the address"

    def write(data: bytes) -> None:
        with writing(name, cure):
            stream.write(data)

    with new_object(fs, path, name, cure) as stream:
        yield write
        _check_new(name)  # another program may have created it


def _check_new(name: str) -> None:
    """Raise InputError if a name exists."""
    if exists(name):
        raise InputError(f"{name} exists: name another output")


@contextmanager
def new_object(fs: "AbstractFileSystem", path: str, name: str, cure: str) -> Iterator[BinaryIO]:
    """Yield a file of a file system that replaces `path` if the block succeeds.

    ResourceError with the name and the cure if that fails; errors of the block stay as they are.
    """
    from fsspec.implementations.local import LocalFileSystem

    folder, _, base = path.rpartition("/")
    new = f"{folder}/.{base}.{uuid.uuid4().hex}"
    try:
        with writing(name, cure):
            fs.pipe_file(new, b"")  # or a wrong bucket would be noticed at the end
            stream = fs.open(new, "wb")
        try:
            yield stream
        finally:
            with writing(name, cure):
                stream.close()
        with writing(name, cure):
            if isinstance(fs, LocalFileSystem):
                Path(new).replace(path)  # atomic; older versions of fsspec copy
            else:
                fs.mv(new, path)
    except BaseException:
        with suppress(Exception):
            fs.rm(new)
        raise


def read_text(file: str, cure: str = "a text is needed") -> str:
    """Return the text of a file, without a byte order mark; raise InputError if it is empty."""
    return decoded(file, read_bytes(file), cure)


def decoded(file: str, data: bytes, cure: str = "a text is needed") -> str:
    """Return the content of a file as `read_text` does."""
    check_mark(file, data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{label(file)} is not UTF-8: byte {error.start} cannot be decoded; convert it, for "
            "example with iconv"
        ) from None
    if not text:
        raise InputError(f"{label(file)} is empty: {cure}")
    return text


def check_mark(file: str, data: bytes) -> None:
    """Raise InputError if the byte order mark at the beginning of a file is not that of UTF-8."""
    for encoding, marks in _OTHER_MARKS.items():
        if data.startswith(marks):
            cure = f"convert it with `iconv -f {encoding} -t UTF-8`"
            raise InputError(f"{label(file)} is {encoding}, by its byte order mark: {cure}")


def read_bytes(file: str) -> bytes:
    """Return the content of a file: see `bytes_of`."""
    with open_file(file) as stream:
        return bytes_of(stream, file)


def bytes_of(stream: BufferedReader, file: str) -> bytes:
    """Return the content of a stream; raise ResourceError if it does not fit the free memory."""
    limit = memory_limit()
    content = bytearray()
    with reading(label(file)):
        while True:
            data = stream.read(READ_BYTES)
            content += data
            check_size(file, len(content), limit)
            if len(data) < READ_BYTES:  # to read again would need a second Ctrl-D in a terminal
                return bytes(content)


def read_range(file: str, start: int, end: int) -> bytes:
    """Return the bytes of a file from `start` to `end`."""
    with reading(file):
        files, path = _files(file)
        # A stream would read ahead. The name of the second parameter differs between packages.
        data: bytes = files.cat_file(path, start=start, end=end)
    if len(data) < end - start:
        raise shorter(file)
    if len(data) > end - start:
        raise InputError(f"{file}: the server does not support range requests; copy the file here")
    return data


def shorter(file: str) -> InputError:
    """Return the error of a file that has lost bytes."""
    return InputError(f"{file} became shorter while it was read: run the command again")


def read_lines(file: str) -> Iterator[list[bytes]]:
    """Yield the lines of a file: see `lines_of`."""
    with open_file(file) as stream:
        yield from lines_of(stream, file)


def lines_of(stream: BufferedReader, file: str) -> Iterator[list[bytes]]:
    """Yield the lines of a stream with their ends, in lists of those that are available at once.

    Lines of a slow pipe come one by one. A line must fit the free memory, else ResourceError.
    """
    limit = memory_limit()
    rest = bytearray()  # a line without its end
    at_end = False
    while not at_end:
        with reading(label(file)):
            data, at_end = _read_available(stream)
        *ended, begun = data.split(b"\n")
        lines = [line + b"\n" for line in ended]
        if lines:
            lines[0] = bytes(rest) + lines[0]
            rest.clear()
        rest += begun
        check_size(file, len(rest), limit)
        if at_end and rest:
            lines.append(bytes(rest))
        if lines:
            yield lines


def without_line_end(text: str) -> str:
    r"""Return the text without one "\n" or "\r\n" at its end."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def memory_limit() -> int:
    """Return the bytes of text that fit the free memory with their tokens."""
    free = free_memory()
    return sys.maxsize if free is None else free // _GROWTH


def check_size(file: str, size: int, limit: int) -> None:
    """Raise ResourceError if a text is larger than the limit."""
    if size > limit:
        raise ResourceError(
            f"{label(file)} has a text of more than {limit / 1e6:,.0f} MB, which does not fit the "
            "free memory: split it"
        )


def label(file: str) -> str:
    """Return the name of a file in messages."""
    return "standard input" if file == "-" else file


def _read_available(stream: BufferedReader) -> tuple[bytes, bool]:
    """Wait for bytes; return all that are available, and whether the end was reached."""
    data = more = stream.read1(READ_BYTES)
    while more and len(data) < READ_BYTES and _ready(stream):
        more = stream.read1(READ_BYTES)
        data += more
    return data, not more


def _ready(stream: BufferedReader) -> bool:
    try:
        return bool(select.select([stream], [], [], 0)[0])
    except OSError:  # Windows supports only sockets
        return False


def reading(name: str) -> AbstractContextManager[None]:
    """Raise InputError for an empty name, and for the errors of a file system that cannot read."""
    if not name:  # such as of a variable that is not set; a path would be the current folder
        raise InputError("the name of a file is empty: give a FILE, or - for standard input")
    return _errors(name, "read", _READABLE)


def _accessing(name: str) -> AbstractContextManager[None]:
    """Raise InputError for the errors of a file system that does not answer."""
    return _errors(name, "access", "check the address")


def missing(name: str, cure: str = _READABLE) -> InputError:
    """Return the error of `reading` for a name without a file."""
    return InputError(f"cannot read {name:.80}: {NO_FILE}; {cure}")


def writing(name: str, cure: str) -> AbstractContextManager[None]:
    """Raise ResourceError for the errors of a file system that cannot write."""
    return _errors(name, "write", cure, ResourceError)


@contextmanager
def _errors(
    name: str, doing: str, cure: str, kind: type[GPTCLIError] = InputError
) -> Iterator[None]:
    try:
        yield
    except (GPTCLIError, BrokenPipeError):  # the latter: the reader of our output has left
        raise
    except OSError as error:
        # fsspec's FileNotFoundError has only the path as its text.
        reason = error.strerror or error
        if isinstance(error, FileNotFoundError):
            reason = NO_FILE
        raise kind(f"cannot {doing} {name}: {reason}; {cure}") from None
    except Exception as error:
        if not is_address(name):
            raise
        # The packages for addresses raise errors without a common base.
        kind = ResourceError if isinstance(error, ImportError) else kind
        raise kind(f"cannot {doing} {name}: {error!s:.300}") from None
