"""Texts and tokens as labels on one line, safe for any terminal."""

import json
from typing import Any

_MARKS = '"\\'  # that JSON escapes, although they are printable


def quoted(data: bytes) -> str:
    r"""Return bytes as quoted text on one line, like JSON but safe for any terminal.

    Characters that are not printable are escaped, and bytes that are not UTF-8 look like `\xf0`.
    """
    return f'"{"".join(map(_escaped, data.decode(errors="surrogateescape")))}"'


def in_quotation_marks(text: str) -> str:
    """Return a text on one line between quotation marks; characters not printable are escaped."""
    return f"“{''.join(one if one in _MARKS else _escaped(one) for one in text)}”"


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    if character.isprintable() and character not in _MARKS:
        return character
    return json.dumps(character)[1:-1]


def token_label(token: dict[str, Any]) -> str:
    """Return the text of a token, a record of `records.of_token`, on one line."""
    return quoted(bytes(token["bytes"])) if token["bytes"] else str(token["token"])


def token_data(token: dict[str, Any]) -> bytes:
    """Return the bytes of a token, a record of `records.of_token`, or its name without bytes."""
    return bytes(token["bytes"]) or str(token["token"]).encode()
