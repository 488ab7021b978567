"""The inputs that arguments and flags name. All commands follow the same rules.

"-" is the pipe. Words are one text, with spaces between them; after a first "-", they continue the
text of the pipe. In `rank` and `tokenize`, words that all name files are files instead; in
`tokenize`, at least two.
"""

import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from glob import glob
from itertools import chain
from typing import TYPE_CHECKING

from gpt_cli import jobs
from gpt_cli.cli.output import note, on_terminal, remark
from gpt_cli.errors import InputError
from gpt_cli.jobs import formats, storage
from gpt_cli.options.request import Options

if TYPE_CHECKING:
    from gpt_cli.jobs.rows import Source


def read_prompt(words: Sequence[str] | None, file: str | None, *, quiet: bool) -> str:
    """Return the text of `file` or of the pipe, followed by the words.

    Without words, one line end is dropped from the end of the text, where editors and `echo` put
    it.
    """
    name, text = parts_of_text(words, file, "no prompt: give a PROMPT, --file FILE", quiet=quiet)
    if name is None:
        return text or ""
    begin = storage.read_text(name)
    return storage.without_line_end(begin) if text is None else begin + text


def read_texts(source: "Source", *, quiet: bool) -> list[tuple[str, str]]:
    """Return the texts of files, or of the rows of JSON Lines and tables, each after its place.

    Raise InputError for a text that cannot be read.
    """
    texts = []
    for row in chain.from_iterable(source.rows()):
        place = storage.label(row.file or "")
        if row.line is not None:
            place += f", line {row.line}"
        if row.error:
            raise row.error if row.line is None else InputError(f"{place}: {row.error}")
        texts.append((place, row.fields["text"]))
    if not texts:
        raise InputError(
            f"{', '.join(map(storage.label, source.names)):.200} has no rows: texts are needed"
        )
    if source.ignored and not quiet:
        note(f"gpt-cli: note: ignored columns: {', '.join(source.ignored)}")
    return texts


def parts_of_text(
    words: Sequence[str] | None, file: str | None, missing: str, *, quiet: bool
) -> tuple[str | None, str | None]:
    """Return the file that a text begins with ("-" for the pipe), and the words after it.

    One of them may be None. If neither is given, the text is that of the pipe.
    """
    words = words or []
    if words[:1] == ["-"]:
        _refuse_both(file, "-")
        file = "-"
        words = words[1:]
    if file is None and not words:
        file = or_pipe(None, missing)
    text = " ".join(words) if words else None
    if file != "-" and not quiet:
        _note_pipe(file is not None)
    if file is None and text and os.path.isfile(text) and not quiet:  # noqa: PTH113 (any text)
        _note_name(text)
    return file, text


def files_or_pipe(
    arguments: Sequence[str] | None, options: Sequence[str] | None, missing: str, *, quiet: bool
) -> list[str]:
    """Return the files of arguments or of --file, else "-" for the pipe."""
    if arguments:
        _refuse_both(options, "an argument")
    names = list(arguments or options or [or_pipe(None, missing)])
    if "-" not in names and not quiet:
        _note_pipe(not arguments)
    return names


def check_files(words: Sequence[str] | None, cure: str) -> None:
    """Raise InputError with a cure for a word that names no file, folder, pattern or address."""
    for word in words or []:
        if word in ("", "-") or "*" in word or storage.is_address(word):
            continue
        if not storage.exists(word):
            raise storage.missing(word, cure)


def are_files(words: Sequence[str], *, quiet: bool, cure: str | None = None) -> bool:
    """Return whether all words name files, and are not a text.

    Raise InputError if all look like names of files and one is missing; with a cure, also if only
    some words name files. A folder has a slash at its end. A single word with spaces is a text. A
    note says that a word of a text names a file or a folder.
    """
    if len(words) == 1 and any(map(str.isspace, words[0])):
        return False
    missing = [word for word in words if not _names_file(word)]
    if not all(word.endswith(formats.ENDINGS) for word in missing):
        present = [word for word in words if word != "-" and os.path.exists(word)]  # noqa: PTH110
        files = [word for word in present if word not in missing]
        if files and cure:
            raise InputError(f"{files[0]} is a file, and {missing[0]} is not: {cure}")
        if present and not quiet:
            _note_name(present[0])
        return False
    if missing:
        raise storage.missing(missing[0])
    return True


def _names_file(word: str) -> bool:
    if word == "-" or storage.is_address(word):
        return True
    if storage.exists(word):
        return word.endswith("/") or not storage.is_folder(word)
    return "*" in word and bool(glob(word, recursive=True))  # noqa: PTH207


def or_pipe(file: str | None, missing: str) -> str:
    """Return the name of a file, or "-" for the pipe; raise InputError if there is neither."""
    if file is not None:
        return file
    if sys.stdin is None or on_terminal(sys.stdin):
        raise InputError(f"{missing}, or a pipe on standard input")
    return "-"


def _refuse_both(option: object, argument: str) -> None:
    """Raise InputError if --file is used with this argument."""
    if option is not None:
        raise InputError(f"--file and {argument} are both given: leave one of them out")


def _note_name(name: str) -> None:
    cure = f"{name}/ is the folder" if storage.is_folder(name) else f"--file {name} reads the file"
    note(f"gpt-cli: note: {name} is read as a text; {cure}")


def _note_pipe(by_option: bool) -> None:
    if _pipe_has_data():
        remark(f"the pipe is not read: {'--file' if by_option else 'the argument'} - reads it")


def _pipe_has_data() -> bool:
    """Return whether standard input is a pipe that has bytes to read now."""
    try:
        import fcntl
        import termios

        number = sys.stdin.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(number).st_mode)
        return is_pipe and any(fcntl.ioctl(number, termios.FIONREAD, bytes(4)))
    except (ImportError, AttributeError, OSError):  # Windows; a closed standard input
        return False


def read_choices(
    listed: Sequence[str] | None, file: str | None, others: Sequence[str]
) -> tuple[str, ...]:
    """Return the choices that a flag lists, or the lines of a file.

    Raise InputError if the file and one of the other inputs are the pipe.
    """
    if file is None:
        return tuple(listed or ())
    if file == "-" and "-" in others:
        raise InputError("--choices-file and another input cannot both be read from the pipe")
    text = storage.read_text(file, "write a choice on each line")
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return tuple(filter(None, lines))


def with_choices(options: Options, file: str | None, others: Sequence[str]) -> Options:
    """Return options with the choices in a file, if there is one; see `read_choices`."""
    if file is not None:
        options = replace(options, choices=read_choices(options.choices, file, others))
        options.validate()
    return options


def read_template(source: str | None) -> "jobs.Template | None":
    """Return the template in a file or a text; raise InputError if it is not valid."""
    if source is None:
        return None
    if not storage.is_address(source) and storage.exists(source):
        text = storage.read_text(source).replace("\r\n", "\n")  # as the lines of an input
        return jobs.Template(storage.without_line_end(text))
    if "{" not in source:
        raise InputError(
            f"--template {source:.80}: {storage.NO_FILE}, and a text needs "
            "{line} or {NAME} for a field"
        )
    return jobs.Template(source)
