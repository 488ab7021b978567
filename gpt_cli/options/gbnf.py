r"""Grammars of llama.cpp, in GBNF: to the syntax of Lark, by llguidance's converter.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md

What llguidance 1.9 gets wrong is written in another way before: `\u` and `\U`, a full stop, which
matches a line break in GBNF, and signs that combine sets of characters in a regular expression.
"""

import re

_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:\\|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_SET_SIGNS = {"&&": r"\x26\x26", "~~": r"\x7e\x7e", "--": r"-\x2d"}


def is_gbnf(text: str) -> bool:
    """Return whether a grammar has a rule of GBNF, such as `root ::= "a"`."""
    return re.search(r"(?m)^[ \t]*[\w-]+[ \t]*::=", text) is not None


def to_lark(text: str) -> str:
    """Return a grammar in Lark's syntax; raise ValueError with its line and a complaint."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    corrected = _PART.sub(_corrected, text)
    try:
        return gbnf_to_lark(corrected)
    except GbnfToLarkError as error:
        line = error.pos.text.count("\n", 0, error.pos.pos) + 1
        complaint = str(error).partition(" at line ")[0]
        raise ValueError(f" at line {line}: {complaint} before {error.pos.peek(20)!r}") from None
    except RecursionError:
        raise
    except Exception as error:  # the converter has no other class for what it does not find
        raise ValueError(f": {error}") from None


def _corrected(match: re.Match[str]) -> str:
    """Return a literal, a set of characters, a comment or a full stop, for the converter."""
    part = match[0]
    if part == ".":
        return r"[^\n] | [\n]".join("()")
    if part.startswith("#"):
        return ""
    if part.startswith("["):
        for sign, escaped in _SET_SIGNS.items():
            part = part.replace(sign, escaped)
    return _ESCAPE.sub(_character, part)


def _character(match: re.Match[str]) -> str:
    r"""Return the character of an escape; as `\x` if it may have a meaning."""
    digits = match[1] or match[2]
    if digits is None:  # an escaped backslash
        return match[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f": {match[0]} is no character")
    return chr(code)
