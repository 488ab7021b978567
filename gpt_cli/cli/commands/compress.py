"""`gpt-cli compress` and `decompress`: a model as both ends of a compressor."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gpt_cli.cli import options as flags
from gpt_cli.cli.output import note, on_terminal, write
from gpt_cli.cli.progress import StatusLine
from gpt_cli.compression.archive import SEGMENT_RANGE, SEGMENT_TOKENS, ArchiveReader
from gpt_cli.errors import InputError, RowsError
from gpt_cli.jobs import storage
from gpt_cli.options.declare import option
from gpt_cli.system.atomic import new_file
from gpt_cli.system.machine import format_size
from gpt_cli.system.startup import prepare

if TYPE_CHECKING:
    from gpt_cli.compression.codec import Codec

_OUTPUT = option(
    None,
    "The new file; standard output if not set, or -.",
    aliases=("-o",),
    metavar="OUT",
    callback=flags.dash_as_none,
)


def compress(
    file: str | None = flags.argument("[FILE]", "The data, any bytes"),
    *,
    output: Path | None = _OUTPUT,
    block: int = option(
        SEGMENT_TOKENS,
        f"Tokens of a block, {SEGMENT_RANGE.name}. Blocks are decompressed side by side, so small "
        "ones are ready sooner; large ones take fewer bytes.",
        SEGMENT_RANGE,
    ),
    dtype: str = option(
        "auto", "Weights in float32 or int8; auto: as stored. decompress uses the same."
    ),
    model: flags.Adapted,
    threads: int | None = flags.THREAD_COUNT,
) -> None:
    """Compress a file with a model.

    The better the model predicts a text, the smaller the file: a token takes -log2 of its
    probability in bits. Blocks that would not become smaller are stored as they are. To decompress
    the file, you need the same model. That takes about as long as to generate the text, and may be
    done on another machine: both ends compute the same bits.

    Examples:
        echo 'Once upon a time' | gpt-cli compress -m tiny -o new.gptz
        gpt-cli compress book.txt -o book.gptz -m gpt2
    """
    file = flags.or_pipe(file, "no data: give a FILE")
    if output is None and on_terminal(sys.stdout):
        raise InputError("compressed data is not for a terminal: give --output OUT, or a pipe")
    prepare(threads)
    with _copying(file, output, model) as copy:
        codec = _codec(model, dtype)
        copy.write(codec.compress(copy, block, copy.advance))


def decompress(
    file: str | None = flags.argument("[FILE]", "What `gpt-cli compress` has written"),
    *,
    output: Path | None = _OUTPUT,
    salvage: bool = option(False, "Write what is undamaged; the exit code is 6 if data is lost."),
    model: flags.Adapted,
    threads: int | None = flags.THREAD_COUNT,
) -> None:
    """Restore a file that `compress` has written.

    It needs the same model and adapter. The file of another model, or of a machine that computes
    other bits, is refused before anything is written, and each block is checked before it is
    written.

    Examples:
        echo 'The fox ran.' | gpt-cli compress -m tiny | gpt-cli decompress -m tiny
        gpt-cli decompress book.gptz -o book.txt -m gpt2
        gpt-cli decompress book.gptz --salvage -o rest.txt -m gpt2
    """
    file = flags.or_pipe(file, "no data: give a FILE")
    prepare(threads)
    with _copying(file, output, model) as copy:
        reader = ArchiveReader(copy, storage.label(file), salvage=salvage)
        # 16-bit weights are used as they are stored.
        codec = _codec(model, reader.dtype if reader.dtype in ("float32", "int8") else "auto")
        copy.write(codec.decompress(reader, copy.advance))
    if reader.lost:
        raise RowsError(f"{storage.label(file)}: {'; '.join(reader.lost)}; all else is written")


def _codec(model: flags.Adapted, dtype: str) -> "Codec":
    import gpt_cli
    from gpt_cli.compression.codec import Codec

    # Not on a GPU, whose results depend on what is computed side by side.
    options = model.options | {"device": "cpu", "dtype": dtype, "speculate": False}
    engine = gpt_cli.load(model.model, **options)
    return Codec(engine.model, engine.tokenizer)


class _Copy(StatusLine):
    """Read a file and write another, and show their bytes and the tokens between them."""

    def __init__(self, name: str, source: BinaryIO, target: BinaryIO | None, *, shown: bool):
        super().__init__(shown=shown)
        self._name, self._source, self._target = name, source, target
        self._read = self._written = self._tokens = 0

    def read(self, size: int) -> bytes:
        """Read from the file."""
        with storage.reading(self._name):  # or it would be an error of writing
            data = self._source.read(size)
        self._read += len(data)
        return data

    def write(self, pieces: Iterable[bytes]) -> None:
        """Write all pieces to the other file, or to standard output."""
        with self:
            for piece in pieces:
                self._target.write(piece) if self._target else write(piece)
                self._written += len(piece)
        if self.shown:
            note(f"gpt-cli: {self._line()}")

    def advance(self, tokens: int) -> None:
        """Count tokens."""
        self._tokens += tokens
        self.show(self._line())

    def _line(self) -> str:
        rate = f", {self.rate(self._tokens)}" if self._tokens else ""  # else all is stored
        return f"{format_size(self._read)} read, {format_size(self._written)} written{rate}"


@contextmanager
def _copying(file: str, output: Path | None, model: flags.Model) -> Iterator[_Copy]:
    """Open the input and the output, which appears only if no error is raised."""
    shown = not (model.quiet or (output is None and on_terminal(sys.stdout)))
    opened = nullcontext() if output is None else new_file(output)
    with storage.open_file(file) as source, opened as target:
        yield _Copy(storage.label(file), source, target, shown=shown)
