"""Answers about a file from a server of the Xet protocol, as the Hub's client reads them.

A file is a list of chunks, which are stored one after the other, each behind a header. A client
asks how to put a range of the file together, and gets terms: ranges of chunks, and the bytes where
they are stored.
"""

import hashlib
import json
from functools import lru_cache

CHUNK = 1 << 16  # bytes of the file in a chunk; the last one may have fewer
_TERM = 16  # chunks in a term
_HEADER = 8


@lru_cache(maxsize=8)
def file_hash(content: bytes) -> str:
    """Return the name of a file in the storage: of this shape, but any 64 hexadecimal digits do."""
    return hashlib.sha256(b"xet" + content).hexdigest()


@lru_cache(maxsize=8)
def stored(content: bytes) -> bytes:
    """Return the chunks of a file as they are stored, not compressed."""
    parts = [content[start : start + CHUNK] for start in range(0, len(content), CHUNK)]
    return b"".join(b"\0" + _length(part) + b"\0" + _length(part) + part for part in parts)


def _length(chunk: bytes) -> bytes:
    return len(chunk).to_bytes(3, "little")


def reconstruction(content: bytes, start: int, end: int, url: str) -> bytes | None:
    """Return the terms of the bytes from start to end, inclusive; None if there are none.

    The chunks of the file are stored at `url`.
    """
    if start >= len(content):
        return None
    end = min(end, len(content) - 1)
    name, terms, fetches = file_hash(content), [], []
    last = end // CHUNK + 1
    for first in range(start // CHUNK, last, _TERM):
        chunks = {"start": first, "end": min(first + _TERM, last)}
        first_byte, end_byte = (min(chunks[key] * CHUNK, len(content)) for key in ("start", "end"))
        terms.append({"hash": name, "unpacked_length": end_byte - first_byte, "range": chunks})
        stored_end = end_byte + chunks["end"] * _HEADER
        stored_range = {"start": first_byte + first * _HEADER, "end": stored_end - 1}
        fetches.append({"range": chunks, "url": url, "url_range": stored_range})
    answer = {
        "offset_into_first_range": start % CHUNK,
        "terms": terms,
        "fetch_info": {name: fetches},
    }
    return json.dumps(answer).encode()
