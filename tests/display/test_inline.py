"""Texts in a notebook, as HTML without scripts."""

import math
import re

from gpt_cli.display import inline
from gpt_cli.display.colours import BITS
from support.pages import HOSTILE, Parts


def tokens_of(*pairs):
    return [
        {"id": 1, "token": data.decode(errors="replace"), "bytes": list(data), "logprob": logprob}
        for data, logprob in pairs
    ]


def test_each_token_has_the_colour_of_its_bits():
    logprobs = [None, -0.5 * math.log(2), -4 * math.log(2), -100.0, -1.0, -1.0]
    texts = [b"The", b" moon", b" was", b"\n\n", b" \xf0\x9f", b"\x98\x80"]
    html = inline.text_html(tokens_of(*zip(texts, logprobs, strict=True)), "6 tokens")
    _legend, text = html.split('<div dir="auto"')
    found = re.findall(r"( *)<span style=\"border-radius: 2px(.*?)\"(.*?)>([^<]*)</span>", text)
    colours = [re.sub(r"; background: (.*); .*", r"\1", style) for _, style, _, _ in found]
    assert colours == ["", "", BITS[4], BITS[32], BITS[2]]
    assert [before + shown for before, _, _, shown in found] == [
        "The", " moon", " was", "\n\n", " 😀",
    ]  # fmt: skip
    titles = [title for _, _, title, _ in found]
    assert titles == ["", *(f' title="{bits} bits"' for bits in ("0.50", "4.00", "144.27", "2.89"))]


def test_text_stays_text(tiny):
    for text in HOSTILE:
        for result in (tiny.score(text), tiny.generate([""], choices=None, max_tokens=2)[0]):
            parts = Parts(result._repr_html_())
            assert {tag for tag, _ in parts.tags} == {"div", "small", "span"}
        html = tiny.score(text)._repr_html_()
        assert not re.search("[\\x00-\\x08\\x1b\\x7f\\u202a-\\u202e]", html)


def test_a_long_text_is_cut():
    html = inline.text_html(tokens_of(*[(b" a", -1.0)] * 2345), "long")
    assert html.count(" a</span>") == 0
    assert html.count(">a</span>") == 2000
    assert "… and 345 more tokens" in html
