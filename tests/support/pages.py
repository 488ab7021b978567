"""Views of `gpt-cli show`, and pages of HTML, taken apart."""

from html.parser import HTMLParser

KINDS = ["attention", "lens", "surprise", "tree"]
GRIDS = ["attribution", "patch", "ablate"]


def view_of(engine, kind, text, top):
    """Return a view of a text, with `top` tokens or continuations if it is a lens or a tree."""
    if kind in GRIDS:
        texts = [f"{text} moon", f"{text} fox"] if kind == "patch" else [text]
        more = {"what": "z"} if kind == "patch" else {}
        return engine.show(kind, *texts, answer=" Emma", wrong=" Leo", **more).view
    details = {"count": top} if kind in ("lens", "tree") else {}
    return engine.show(kind, text, **details).view


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script> \u2028 \u2029 ]]>",
    "'\"` \\ ${1} $title &lt; \x00\x1b\x7f",
    "<img src=x onerror=alert(1)>",
]


class Parts(HTMLParser):
    """The tags of a page with their attributes, and the texts in them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.texts = [], "", {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        self.texts.setdefault(self.inside, []).append(data)
