"""Texts in a notebook, as HTML without scripts."""

import math
import re
from html import unescape

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


def test_text_stays_text():
    for text in HOSTILE:
        html = inline.text_html(tokens_of((text.encode(), -1.0)), text)
        parts = Parts(html)
        assert [tag for tag, _ in parts.tags][-2:] == ["div", "span"]
        assert {tag for tag, _ in parts.tags} == {"div", "small", "span"}
        shown = re.findall(r"<span[^>]*>([^<]*)</span>", html)[-1]
        assert unescape(shown) == text.translate({0: r"\u0000", 0x1B: r"\u001b", 0x7F: r"\u007f"})


def test_a_long_text_is_cut():
    html = inline.text_html(tokens_of(*[(b" a", -1.0)] * 2345), "long")
    assert html.count(" a</span>") == 0
    assert html.count(">a</span>") == 2000
    assert "… and 345 more tokens" in html
