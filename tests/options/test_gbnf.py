"""Grammars of llama.cpp give the texts that they describe."""

import json
import re

import pytest

import gpt_cli
from gpt_cli.errors import InputError
from gpt_cli.options.request import Options

pytest.importorskip("llguidance", reason="the extra constrain is not installed")

# Grammars, the first of those of llama.cpp, and a regular expression of what they describe.
LIST = r"""root ::= item+

# Excludes various line break characters
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS = {
    "list": (LIST, r"(- [^\r\n]+\n)+"),
    "arithmetic": (
        'root ::= (expr "=" term "\\n"){2}\nexpr ::= term ([-+*/] term){0,3}\n'
        'term ::= num | "(" expr ")"\nnum ::= [0-9]{1,3}',
        r"([-0-9()+*/]+=[-0-9()+*/]+\n){2}",
    ),
    "escapes": (r'root ::= "\u00e9\x41\u0042\\\"\n" [\u4e00-\u4e03]{3} "\U0001F600"',
                'éAB\\\\"\n[\u4e00-\u4e03]{3}😀'),
    "any character": ("root ::= .{20}", r"(?s).{20}"),
    "signs of regular expressions": ("root ::= [a&&b]{9} [~~]{2} [+--]{5} [/.*]{5} [^^]",
                                     r"[ab&]{9}~~[+,-]{5}[/.*]{5}[^^]"),
    "a full stop in a text": ('root ::= "a.b # c" [.]  # the end', r"a\.b # c\."),
    "names": ('root ::= Some-Name some_other\nSome-Name ::= "x"\nsome_other ::= root? "y"', "x+y+"),
    "after a bar": ('root ::= "a" |\n  "b" |\n  "c"', "[abc]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    return gpt_cli.load("tiny")


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_match(name, engine):
    grammar, pattern = GRAMMARS[name]
    options = {"grammar": grammar, "max_tokens": 150, "seed": 1, "temperature": 2, "top_k": 0}
    texts = engine.generate(["Say:\n"] * 10, **options)
    for done in texts:
        assert done.finish_reason in ("complete", "eos", "length")
        if done.finish_reason != "length":
            assert re.fullmatch(pattern, done.text)
    assert len({done.text for done in texts}) > 1 or name in ("a full stop in a text", "names")


def test_the_grammar_of_json_gives_json(engine):
    texts = engine.generate(["Say:\n"] * 20, grammar=JSON, seed=1, max_tokens=200)
    ended = [done for done in texts if done.finish_reason != "length"]
    assert ended
    assert all(isinstance(json.loads(done.text), dict) for done in ended)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('root ::= "a" b', ": Rule 'b' not found"),
        ('a ::= "b"', ": No 'root' rule found"),
        ('root ::= "a"\nb = "c"', " at line 2: Expected ::= before '= \"c\"'"),
        ('root ::= "a', " at line 1: Unexpected end of input before ''"),
        ('root ::= ("a"', " at line 1: Expected ')' before ''"),
        (r'root ::= "\ud800"', r": \ud800 is no character"),
        (r'root ::= "\z"', " at line 1: Invalid escape sequence \\z before 'z\"'"),
        ("root ::= " + "(" * 4000 + '"a"' + ")" * 4000, ": it is nested too deeply"),
    ],
)
def test_an_error_names_its_line(text, says):
    with pytest.raises(InputError) as caught:
        Options(grammar=text).validate()
    message = str(caught.value)
    assert message == f"grammar is not valid as a GBNF grammar{says}"
