"""`gpt-cli compress` and `decompress`: a model as both ends of a compressor."""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, BinaryIO

from gpt_cli.cli import flags, inputs
from gpt_cli.cli.output import note, on_terminal, write
from gpt_cli.cli.progress import StatusLine
from gpt_cli.compression.archive import (
    SEGMENT_RANGE,
    SEGMENT_TOKENS,
    ArchiveReader,
    count_tokens,
)
from gpt_cli.errors import InputError, RowsError
from gpt_cli.jobs import storage
from gpt_cli.options.declare import option
from gpt_cli.system.machine import format_size
from gpt_cli.system.startup import prepare

if TYPE_CHECKING:
    from gpt_cli.compression.codec import Codec

_OUTPUT = option(
    None,
    "The new file, or its address such as s3://BUCKET/NAME; standard output if not set, or -.",
    aliases=("-o",),
    metavar="OUT",
    callback=flags.dash_as_none,
)


def compress(
    files: list[str] | None = flags.argument("[FILE]...", "The data, any bytes"),
    *,
    output: str | None = _OUTPUT,
    segment: int = option(
        SEGMENT_TOKENS,
        "Tokens of a segment. Segments are decompressed side by side, so small ones are ready "
        "sooner; large ones take fewer bytes.",
        SEGMENT_RANGE,
        old_flag="--block",
    ),
    model: flags.Adapted,
    device: str = flags.DEVICE,
    dtype: str = option(
        "auto",
        "Weights in float32, bfloat16, float16 or int8; auto: as stored, also in decompress.",
    ),
    threads: int | None = flags.THREAD_COUNT,
) -> None:
    """Compress files with a model; several become one, as with cat.

    The better the model predicts a text, the smaller the file: a token takes -log2 of its
    probability in bits. Segments that would not become smaller are stored as they are. To
    decompress the file, you need the same model. That takes about as long as to generate the text,
    and may be done on another machine or device: both ends compute the same bits.

    Examples:
        echo 'Once upon a time' | gpt-cli compress -m tiny -o new.gptz
        gpt-cli compress book.txt -o book.gptz -m gpt2
    """
    names = inputs.files_or_pipe(files, None, "no data: give a FILE", quiet=model.quiet)
    if output is None and on_terminal(sys.stdout):
        raise InputError("compressed data is not for a terminal: give --output OUT, or a pipe")
    prepare(threads)
    with _copying(names, output, model) as copy:
        codec = _codec(model, device, dtype)
        copy.write(codec.compress(copy, segment, copy.advance, copy.store), ratio=True)


def decompress(
    file: str | None = flags.argument("[FILE]", "What `gpt-cli compress` has written"),
    *,
    output: str | None = _OUTPUT,
    salvage: bool = option(False, "Write what is undamaged; the exit code is 6 if data is lost."),
    model: flags.Adapted,
    device: str = flags.DEVICE,
    threads: int | None = flags.THREAD_COUNT,
) -> None:
    """Restore a file that `compress` has written.

    It needs the same model and adapter. The file of another model, or of a machine that computes
    other bits, is refused before anything is written, and each segment is checked before it is
    written.

    Examples:
        echo 'The fox ran.' | gpt-cli compress -m tiny | gpt-cli decompress -m tiny
        gpt-cli decompress book.gptz -o book.txt -m gpt2
        gpt-cli decompress book.gptz --salvage -o rest.txt -m gpt2
    """
    file = inputs.or_pipe(file, "no data: give a FILE")
    prepare(threads)
    with _copying([file], output, model) as copy:
        copy.count(salvage=salvage)
        reader = ArchiveReader(copy, storage.label(file), salvage=salvage)
        copy.write(_codec_of(reader, model, device).decompress(reader, copy.advance))
    if reader.lost:
        raise RowsError(f"{storage.label(file)}: {'; '.join(reader.lost)}; all else is written")


def _codec_of(reader: ArchiveReader, model: flags.Adapted, device: str) -> "Codec":
    """Return a codec with the weights in the type of a file."""
    if reader.dtype in ("float32", "int8"):
        return _codec(model, device, reader.dtype)
    codec = _codec(model, device, "auto")
    if not codec.must_round_for(reader):
        return codec
    del codec  # its memory is needed
    return _codec(model, device, reader.dtype)


def _codec(model: flags.Adapted, device: str, dtype: str) -> "Codec":
    import gpt_cli
    from gpt_cli.compression.codec import Codec

    options = model.options | {"device": device, "dtype": dtype, "speculate": False}
    engine = gpt_cli.load(model.model, **options)
    return Codec(engine.model, engine.tokenizer)


class _Copy(StatusLine):
    """Read files and write another, and show progress: bytes read, bytes written, tokens."""

    def __init__(
        self,
        sources: Iterator[tuple[str, BinaryIO]],
        target: Callable[[bytes], object],
        *,
        shown: bool,
    ):
        super().__init__(shown=shown, logged=True)
        self._sources = sources
        self._target = target
        self._source = next(sources, None)  # that is read
        self._read = 0  # bytes
        self._written = 0
        self._stored = 0  # as they are
        self._tokens = 0
        self._total: int | None = None  # tokens to decode, if known

    def count(self, *, salvage: bool) -> None:
        """Count the tokens to decode, if progress is shown."""
        if self.shown and self._source:
            name, stream = self._source
            with storage.reading(name):
                self._total = count_tokens(stream, salvage=salvage)

    def read(self, size: int) -> bytes:
        """Read from the files, one after the other."""
        data = b""
        while self._source and len(data) < size:
            name, stream = self._source
            with storage.reading(name):  # or it would be an error of writing
                piece = stream.read(size - len(data))
            if not piece:
                self._source = next(self._sources, None)
            data += piece
        self._read += len(data)
        return data

    def write(self, pieces: Iterable[bytes], *, ratio: bool = False) -> None:
        """Write all pieces; the totals may show the ratio of the bytes."""
        with self:
            for piece in pieces:
                self._target(piece)
                self._written += len(piece)
        if self.shown:
            note(f"gpt-cli: {self._line(ratio=ratio)}")

    def store(self, size: int) -> None:
        """Count bytes that are stored as they are."""
        self._stored += size

    def advance(self, tokens: int) -> None:
        """Count tokens."""
        self._tokens += tokens
        self.show(self._line())

    def _line(self, *, ratio: bool = False) -> str:
        line = f"{format_size(self._read)} read, {format_size(self._written)} written"
        if ratio and self._read:
            stored = f", {format_size(self._stored)} stored" if self._stored else ""
            line += f" ({self._written / self._read:.1%}{stored})"
        if self._tokens:  # else all is stored
            line += f", {self.rate(self._tokens)}"
        if self._total and self._tokens < self._total:
            left = 1 - self._tokens / self._total
            line = f"{left:.0%} left, {line}"  # first: a narrow terminal cuts the end
        return line


@contextmanager
def _copying(files: Sequence[str], output: str | None, model: flags.Model) -> Iterator[_Copy]:
    """Open the inputs and the output, which appears only if no error is raised."""
    shown = not (model.quiet or (output is None and on_terminal(sys.stdout)))
    for file in files:
        if not storage.is_stream(file):
            with storage.open_file(file):  # to find errors before the work
                pass
    with ExitStack() as stack:
        sources = stack.enter_context(closing(_opened(files)))
        target = stack.enter_context(storage.new_file(output)) if output is not None else write
        yield _Copy(sources, target, shown=shown)


def _opened(files: Sequence[str]) -> Generator[tuple[str, BinaryIO]]:
    """Yield files with their labels. A file is open until the next one is requested."""
    for file in files:
        with storage.open_file(file) as stream:
            yield storage.label(file), stream
