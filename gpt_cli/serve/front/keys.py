"""The keys of clients, and their names."""

import os
import re
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from gpt_cli.options.declare import OptionError
from gpt_cli.serve.settings import KEY
from gpt_cli.system.files import read_small

_COMMENT = re.compile(r"(?:^|\s)#.*")
_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,64}")
_FORBIDDEN = 0o137  # rights of others, and of the group to write


class Keys:
    """The keys that clients may send: one without a name, or those of a file, or none.

    Only their hashes are kept, so that nothing can show a key.
    """

    def __init__(self, key: str | None, file: Path | None):
        """Take a key, or read a file; raise OptionError if it has no valid keys."""
        self._file = file
        self._names = {} if key is None else {_hash(key): ""}
        if file:
            self.reload()

    @property
    def are_needed(self) -> bool:
        """Return whether a client needs a key."""
        return bool(self._names)

    def name_of(self, sent: str) -> str | None:
        """Return the name of a key, "" if it has none; None if there is no such key.

        All keys are compared, so that the time says nothing about them.
        """
        name = None
        hashed = _hash(sent)
        for known, its_name in self._names.items():
            if compare_digest(known, hashed):
                name = its_name
        return name

    def reload(self) -> int:
        """Read the file again; return the number of keys.

        Raise OptionError and keep the earlier keys if it is not valid.
        """
        assert self._file  # noqa: S101 (narrows the type)
        self._names = _read(self._file)
        return len(self._names)


def _read(path: Path) -> dict[bytes, str]:
    """Return the names of the keys in a file, by the hashes of the keys."""
    try:
        if path.is_dir():
            raise OptionError("api_key_file", f"{path} is a directory: name a file")
        if os.name == "posix":
            _check_rights(path, path.stat())
        lines = read_small(path).decode().split("\n")
    except UnicodeDecodeError:
        raise OptionError("api_key_file", f"{path}: it is not text in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError("api_key_file", f"{path}: cannot be read: {reason}") from None
    names: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = _COMMENT.sub("", line).split()
        if not words:
            continue
        # The message shows nothing of the line: it may be a key.
        if len(words) != 2 or not KEY.contains(words[0]) or not _NAME.fullmatch(words[1]):
            form = "KEY NAME: a key in ASCII, and a name of letters, digits and . _ @ + -"
            raise OptionError("api_key_file", f"{path}: line {number} must be {form}")
        key, name = words
        if len(name) > len(key):
            reason = "the name is longer than the key: write KEY NAME, the key first"
            raise OptionError("api_key_file", f"{path}: line {number}: {reason}")
        if _hash(key) in names:
            raise OptionError(
                "api_key_file", f"{path}: line {number} has the key of an earlier one"
            )
        names[_hash(key)] = name
    if not names:
        raise OptionError("api_key_file", f"{path} has no keys: write KEY NAME in a line of it")
    return names


def _check_rights(path: Path, about: os.stat_result) -> None:
    if about.st_mode & _FORBIDDEN:
        reason = "others can read or change it"
        raise OptionError("api_key_file", f"{path}: {reason}: run `chmod 600` on it, or 640")
    if about.st_uid not in (0, os.geteuid()):
        reason = "it belongs to another user"
        raise OptionError("api_key_file", f"{path}: {reason}: it must be root's or this user's")


def _hash(key: str) -> bytes:
    return sha256(key.encode()).digest()
