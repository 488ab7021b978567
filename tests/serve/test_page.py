"""The page of `gpt-cli serve`, in a browser (`make test-browser`).

Most tests have a server that only pretends, so that it can be slow, busy or broken.
"""

import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import gpt_cli
from gpt_cli.options.request import Options
from support.pages import HOSTILE, Parts
from support.server_process import serving

pytest.importorskip("uvicorn")
from gpt_cli.serve.app import _page

PAGE = (Path(gpt_cli.__file__).parent / "serve" / "page.html").read_text(encoding="utf-8")
LIMIT = 30_000  # milliseconds that anything may take, on a busy machine
WORDS = [" the", " old", " fox", " saw", " a", " red", " moon", ",", " and", " ran", "."]


def text_of(seed, index, count):
    """Return the tokens that the server makes up."""
    return [WORDS[(seed + 3 * index + 5 * place) % len(WORDS)] for place in range(count)]


def logprobs(tokens):
    """Return the token and four others, all of other probabilities."""
    tops = [
        {word: -1.0 - 0.5 * place for place, word in enumerate(dict.fromkeys([token, *WORDS[:4]]))}
        for token in tokens
    ]
    tops = [dict(reversed(top.items())) for top in tops]  # JSON objects have no order
    chosen = [top[token] for top, token in zip(tops, tokens, strict=True)]
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": []}


class Handler(BaseHTTPRequestHandler):
    """Speak as much of the protocol as the page needs."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/":
            policy = ("Content-Security-Policy", _page().headers["Content-Security-Policy"])
            self.reply(200, PAGE.encode(), "text/html", policy)
        elif self.refused():
            pass
        elif self.path == "/v1/models":
            models = [{"id": name, "max_model_len": n} for name, n in self.server.models.items()]
            self.reply(200, {"data": models})
        else:
            self.reply(404, b"")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.refused():
            return
        if self.path == "/tokenize":
            ids = list(range(len(body["prompt"].split())))
            self.reply(200, {"tokens": ids, "count": len(ids), "max_model_len": 64})
            return
        if not body.get("stream"):
            words = self.server.scripted[0][0] if self.server.scripted else WORDS[:1]
            self.reply(200, {"choices": [{"text": words[0], "logprobs": logprobs(words)}]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.stream(body)
        except OSError:
            self.server.left.set()

    def stream(self, body):
        scripted = self.server.scripted
        texts = scripted or [
            [[word] for word in text_of(body["seed"], index, body["max_tokens"])]
            for index in range(body["n"])
        ]
        for step in range(max(map(len, texts))):
            for index, text in enumerate(texts):
                if step < len(text):
                    token, *shown = text[step]
                    last = step == len(text) - 1
                    self.event(
                        choices=[
                            {
                                "index": index,
                                "text": shown[0] if shown else token,
                                "logprobs": logprobs([token]),
                                "finish_reason": "length" if last else None,
                            }
                        ]
                    )
            if step == self.server.steps:
                if self.server.breaks:
                    return
                if self.server.error:
                    self.event(error={"message": self.server.error})
                    return
                while not self.server.gate.wait(0.02):
                    self.wfile.write(b": wait\n\n")  # fails once the page has left
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, **found):
        self.wfile.write(b"data: " + json.dumps(found).encode() + b"\n\n")

    def refused(self):
        """Answer as the test says, or with 401 without the key."""
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.reply(401, {"error": {"message": "the API key is missing or wrong"}})
            return True
        if not self.server.refusals or self.command == "GET":
            return False
        status, message, field, *headers = self.server.refusals.pop(0)
        self.reply(status, {"error": {"message": message, "param": field}}, "x", *headers)
        return True

    def reply(self, status, body, kind="application/json", *headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        found = [("Content-Type", kind), ("Content-Length", str(len(data))), *headers]
        for name, value in found:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    fake = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.asked, fake.refusals, fake.scripted, fake.key = [], [], None, ""
    fake.models = {"tiny": 64}
    fake.steps, fake.breaks, fake.error = 2, False, ""
    fake.gate, fake.left = threading.Event(), threading.Event()
    fake.gate.set()
    fake.daemon_threads = True
    thread = threading.Thread(target=fake.serve_forever)
    thread.start()
    fake.address = f"http://127.0.0.1:{fake.server_port}/"
    yield fake
    fake.gate.set()
    fake.shutdown()
    thread.join()
    fake.server_close()


@pytest.fixture
def look(window, server):
    """Open the page; it must not fail, exceed the window's width, or ask anybody else."""
    said, asked, opened = [], [], []
    window.set_default_timeout(LIMIT)

    def look(expected=(), address=server.address):
        tab = window.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.expected = list(expected)
        tab.server = f"{address.rstrip('/')}/"
        opened.append(tab)
        tab.goto(tab.server)
        return tab

    yield look
    expected = [text for tab in opened for text in tab.expected]
    assert [text for text in said if not any(part in text for part in expected)] == []
    own = tuple(tab.server for tab in opened)
    assert all(url.startswith((*own, "blob:", "data:")) for url in asked)
    for tab in opened:
        assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def wait(locator, text):
    """Wait until a place of the page has this text, a string or a pattern."""
    api = pytest.importorskip("playwright.sync_api")
    api.expect(locator).to_have_text(text, use_inner_text=True, timeout=LIMIT)


def value(tab):
    return tab.locator("#editor").input_value()


def status(tab):
    return tab.locator("#status")


def options(tab, **values):
    """Set options; on a phone they are folded."""
    if not tab.locator("#options").is_visible():
        tab.locator("#settings summary").click()
    for name, setting in values.items():
        tab.locator(f"#options [name={name}]").fill(str(setting))
    tab.keyboard.press("Tab")


def write_and_continue(tab, text="Once", done=r"continuations|Done", **chosen):
    if chosen:
        options(tab, **chosen)
    if text:
        tab.locator("#editor").fill(text)
    tab.locator("#editor").press("Control+Enter")
    wait(status(tab), re.compile(done))


def cards(tab):
    return tab.locator(".cards p").evaluate_all("all => all.map(one => one.textContent)")


def joined(seed, index, count=64):
    return "".join(text_of(seed, index, count))


# --- the file ------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_loads_nothing():
    parts = Parts(PAGE)
    assert [tag for tag, _ in parts.tags].count("script") == 1
    assert [tag for tag, _ in parts.tags].count("style") == 1
    code = PAGE.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"https?:|url\(|@import|import\(|eval\(|(inner|outer|adjacent)HTML|document\.write", code
    )
    attributes = {name for _, attributes in parts.tags for name in attributes}
    assert not [name for name in attributes if name.startswith("on") or name in ("style", "src")]


def test_every_field_and_button_has_a_name():
    parts = Parts(PAGE)
    labels = re.findall(r"<label.*?</label>", PAGE, re.DOTALL)
    for tag, found in parts.tags:
        if tag in ("input", "textarea"):
            labelled = any(f'name="{found.get("name")}"' in label for label in labels)
            assert labelled or "aria-label" in found or f'for="{found["id"]}"' in PAGE


# --- in a browser --------------------------------------------------------------------------------

once = pytest.mark.parametrize("window", ["desktop-light"], indirect=True)
browser_only = pytest.mark.browser


@browser_only
def test_several_continuations_are_written_side_by_side_and_one_is_chosen(look, server):
    tab = look()
    wait(tab.locator("#model"), "· tiny")
    assert tab.title() == "tiny · gpt-cli"
    server.gate.clear()
    options(tab, seed=7, n=3, max_tokens=9, temperature=0.5, top_k=0, top_p=0.9, min_p=0.1)
    options(tab, stop="END\n\\n\\n")
    write_and_continue(tab, "Once upon a time", "Writing 3 texts")
    for index, card in enumerate(tab.locator(".cards p").all()):
        wait(card, joined(7, index, 3))
    server.gate.set()
    wait(status(tab), "3 continuations: choose one.")
    texts = [joined(7, index, 9) for index in range(3)]
    assert cards(tab) == texts
    assert [row.split("\n") for row in tab.locator(".cards .row").all_inner_texts()] == [
        [f"Choose {i}", f"seed 7 · {i}"] for i in (1, 2, 3)
    ]
    path, body = server.asked[-1]
    assert path == "/v1/completions"
    assert body == {
        "prompt": "Once upon a time",
        "n": 3,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["END", "\n\n"],
        "stream": True,
        "logprobs": 10,
    }
    tab.get_by_role("button", name="Choose 2").click()
    assert value(tab) == "Once upon a time" + texts[1]
    assert tab.locator("#place").inner_text() == "2 of 3"
    write_and_continue(tab, None)
    assert server.asked[-1][1]["prompt"] == "Once upon a time" + texts[1]


@browser_only
@once
def test_several_models_can_be_chosen_and_the_choice_is_kept(look, server):
    tab = look()
    write_and_continue(tab, "Once", seed=7)
    assert "model" not in server.asked[-1][1]
    assert not tab.get_by_label("Model").is_visible()
    server.models = {"tiny": 64, "<b>other</b>": 8}
    tab.reload()
    wait(tab.locator("#model"), "· tiny")
    tab.get_by_label("Model").select_option("<b>other</b>")
    wait(tab.locator("#model"), "· <b>other</b>")
    tab.reload()
    wait(tab.locator("#model"), "· <b>other</b>")
    write_and_continue(tab, "one two three four five six", seed=8)
    asked = [(path, body["model"]) for path, body in server.asked[-2:]]
    assert asked == [("/tokenize", "<b>other</b>"), ("/v1/completions", "<b>other</b>")]
    tab.get_by_label("Model").select_option("tiny")
    tab.locator(".seed").first.click()  # takes over the options of the text, with its model
    wait(tab.locator("#model"), "· <b>other</b>")
    tab.locator("#editor").focus()
    tab.keyboard.press("Alt+Enter")
    wait(tab.locator("#token h2"), "Next tokens")
    assert server.asked[-1][1]["model"] == "<b>other</b>"
    server.models = {"tiny": 64}
    tab.reload()
    wait(tab.locator("#model"), "· tiny")
    write_and_continue(tab, "Once", seed=7)
    assert "model" not in server.asked[-1][1]


@browser_only
@once
def test_the_focus_stays_on_a_card_when_all_are_there(look, server):
    tab = look()
    server.gate.clear()
    write_and_continue(tab, "Once", "Writing 3 texts", seed=7)
    tab.get_by_role("button", name="Choose 2").focus()
    server.gate.set()
    wait(status(tab), "3 continuations: choose one.")
    tab.keyboard.press("Enter")
    assert value(tab) == "Once" + joined(7, 1)
    assert tab.evaluate("document.activeElement.id") == "editor"


@browser_only
def test_one_continuation_is_written_into_the_text(look, server):
    tab = look()
    server.gate.clear()
    write_and_continue(tab, "Once", "Writing …", n=1, seed=3, max_tokens=9)
    wait(tab.locator("#drawn"), re.compile("Once" + joined(3, 0, 3)))
    assert value(tab) == "Once" + joined(3, 0, 3)
    assert not tab.locator("#editor").is_editable()  # the server writes
    server.gate.set()
    touched = tab.evaluate("navigator.maxTouchPoints")
    wait(status(tab), re.compile("Done. Tap a word of the model" if touched else "^Done.$"))
    assert value(tab) == "Once" + joined(3, 0, 9)
    tab.locator("#editor").press("End")
    tab.keyboard.type(" mine")
    assert value(tab) == "Once" + joined(3, 0, 9) + " mine"


@browser_only
@once
def test_every_text_stays_in_the_tree(look, server):
    tab = look()
    write_and_continue(tab, "Once upon a time", seed=7, max_tokens=5)
    first, second, third = (joined(7, index, 5) for index in range(3))
    tab.keyboard.press("Alt+2")
    assert value(tab) == "Once upon a time" + second
    assert tab.evaluate("document.activeElement.id") == "editor"
    for key, text in [
        ("ArrowRight", third),
        ("ArrowRight", third),  # the last
        ("ArrowLeft", second),
        ("ArrowUp", ""),
        ("ArrowDown", second),  # where it was before
        ("ArrowLeft", first),
        ("ArrowLeft", first),
    ]:
        tab.keyboard.press(f"Alt+{key}")
        assert value(tab) == "Once upon a time" + text
    # An edit of what the model wrote is a new branch; so is the loss of many of one's own words.
    edited = "Once upon" + first[:-3] + "!"
    tab.locator("#editor").fill(edited)
    tab.locator("#editor").fill("Twice")
    tab.locator("#editor").fill("Twices")  # its own words go on
    tab.keyboard.press("Alt+ArrowUp")
    assert value(tab) == ""
    assert tab.locator("#after-title").inner_text() == "Your texts"
    assert cards(tab) == ["Once upon a time", edited, "Twices"]
    tab.get_by_role("button", name="Choose 2").click()
    assert value(tab) == edited
    lines = tab.locator("#tree li").all_inner_texts()
    assert [line.strip() for line in lines] == [
        "(start)",
        "Once upon a time\n+3",
        "Twices",
        edited.strip(),
    ]


@browser_only
@once
def test_a_corrected_typo_is_no_branch_and_a_deleted_continuation_is_its_beginning(look, server):
    tab = look()
    tab.locator("#editor").focus()
    tab.keyboard.type("The moom")
    tab.keyboard.press("Backspace")
    tab.keyboard.type("n and a long line of words")
    assert tab.locator("#tree li").count() == 2
    for _ in range(30):
        tab.keyboard.press("Backspace")
    tab.keyboard.press("Alt+ArrowUp")
    shown = cards(tab)
    assert shown[0] == "The moon and a long line of words"
    assert len(shown) == 2
    tab.get_by_role("button", name="Choose 1").click()
    write_and_continue(tab, None, n=1)
    tab.locator("#editor").press("End")
    tab.keyboard.type("!")
    tab.keyboard.press("Backspace")
    tab.keyboard.press("Alt+ArrowUp")
    assert tab.locator("#forth").get_attribute("aria-disabled") == "true"  # nothing was written
    tab.locator("#editor").fill(shown[0])
    assert tab.locator("#after-title").inner_text() == "Continuations"
    assert tab.locator(".cards p").count() == 1


@browser_only
def test_a_token_shows_its_alternatives_and_another_makes_a_branch(look, server):
    tab = look()
    write_and_continue(tab, "Once", n=1, seed=7, max_tokens=6)
    tokens = text_of(7, 0, 6)
    place = tab.locator("#drawn span span").nth(3).bounding_box()
    x, y = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    if tab.evaluate("navigator.maxTouchPoints"):
        tab.touchscreen.tap(x, y)
    else:
        tab.mouse.click(x, y)
    assert tab.locator("#drawn .here").inner_text() == tokens[2]
    expected = sorted(logprobs([tokens[2]])["top_logprobs"][0].items(), key=lambda one: -one[1])
    rows = tab.locator(".bars button")
    shown = [
        tuple(row.locator(".token, .number").evaluate_all("all => all.map(one => one.textContent)"))
        for row in rows.all()
    ]
    assert shown == [(w.replace(" ", "·"), f"{math.exp(p):.1%}") for w, p in expected]
    assert tab.locator("[aria-pressed=true] .token").inner_text() == tokens[2].replace(" ", "·")
    other = next(i for i, (word, _) in enumerate(expected) if word != tokens[2])
    rows.nth(other).click()
    assert value(tab) == "Once" + "".join(tokens[:2]) + expected[other][0]
    assert tab.locator("#place").inner_text() == "2 of 2"
    tab.keyboard.press("Alt+ArrowLeft")
    assert value(tab) == "Once" + "".join(tokens)


@browser_only
@once
def test_the_keyboard_offers_next_tokens_at_the_end(look, server):
    tab = look()
    server.scripted = [[[" fox"]]]
    tab.locator("#editor").fill("The old")
    tab.keyboard.press("Alt+Enter")
    wait(tab.locator("#token h2"), "Next tokens")
    assert server.asked[-1][1] == {
        "prompt": "The old", "max_tokens": 1, "temperature": 0, "logprobs": 10
    }  # fmt: skip
    tab.locator(".bars button", has_text="fox").click()
    assert value(tab) == "The old fox"
    assert tab.evaluate("document.activeElement.id") == "editor"


@browser_only
def test_the_list_of_tokens_can_be_closed(look, server):
    tab = look()
    tab.locator("#editor").fill("The old")
    for place, close in (("#editor", "Escape"), (".bars button", "Escape"), ("#close", "Enter")):
        tab.locator("#editor").press("Alt+Enter")
        wait(tab.locator("#token h2"), "Next tokens")
        tab.locator(place).first.press(close)
        assert tab.locator("#token h2").count() == 0
        assert tab.evaluate("document.activeElement.id") == "editor"
    tab.locator("#editor").press("Alt+Enter")
    wait(tab.locator("#token h2"), "Next tokens")
    tab.locator("#close").click()
    tab.locator("#settings summary").click()  # nothing covers it


@browser_only
@once
def test_the_keyboard_reaches_alternatives(look, server):
    tab = look()
    write_and_continue(tab, "Once", n=1, seed=7, max_tokens=6)
    tokens = text_of(7, 0, 6)
    tab.keyboard.press("Home")
    for _ in range(4 + len(tokens[0])):
        tab.keyboard.press("ArrowRight")
    assert tab.locator("#drawn .here").inner_text() == tokens[1]
    tab.keyboard.press("Alt+Enter")
    assert tab.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    assert value(tab).startswith("Once" + tokens[0])
    assert tab.evaluate("document.activeElement.id") == "editor"


@browser_only
@once
def test_a_click_behind_a_line_is_on_its_end(look, server):
    server.scripted = [[[" a"], ["\n"], [" b"]]]
    tab = look()
    write_and_continue(tab, "x", n=1)
    first = tab.locator("#drawn span span").nth(1).bounding_box()
    tab.mouse.click(first["x"] + 200, first["y"] + 5)
    assert tab.locator("#token h2 .token").inner_text() == "↵"


@browser_only
@once
def test_tokens_of_one_character_are_joined(look, server):
    server.scripted = [
        [
            [" a"],
            ["bytes:\\xf0\\x9f", ""],
            ["bytes:\\xa6\\x8a", "🦊"],
            ["bytes:\\xe2\\x80", ""],
            [" b", "\ufffd b"],
            ["bytes:\\xf0\\x9f", "\ufffd"],
        ]
    ]
    tab = look()
    write_and_continue(tab, "x", n=1)
    assert value(tab) == "x a🦊\ufffd b"  # without half a character at the end
    spans = tab.locator("#drawn span span").all_inner_texts()
    assert spans == ["x", " a", "🦊", "\ufffd", " b"]
    fox = tab.locator("#drawn span span").nth(2).bounding_box()
    tab.mouse.click(fox["x"] + 5, fox["y"] + 5)
    assert tab.locator("#token h2").inner_text().startswith("🦊 had 13.5%")
    assert tab.locator(".bars button:disabled .token").all_inner_texts() == ["\\xf0\\x9f"]


@browser_only
@once
def test_shading_follows_probabilities_and_can_be_switched_off(look, server):
    tab = look()
    write_and_continue(tab, "Once", n=1, max_tokens=3)
    token = tab.locator("#drawn .b1").first
    colour = "one => getComputedStyle(one).backgroundColor"
    assert token.evaluate(colour) != "rgba(0, 0, 0, 0)"
    tab.get_by_role("checkbox").uncheck()
    assert token.evaluate(colour) == "rgba(0, 0, 0, 0)"
    tab.reload()
    assert not tab.get_by_role("checkbox").is_checked()


@browser_only
@once
def test_a_seed_repeats_a_text_with_its_options(look, server):
    tab = look()
    write_and_continue(tab, "Once", temperature=0.3, stop="\\n")
    first = server.asked[-1][1]
    texts = cards(tab)
    options(tab, temperature=1, stop="", n=1)
    tab.locator(".seed").nth(1).click()
    assert str(first["seed"]) in status(tab).inner_text()
    write_and_continue(tab, None)
    assert server.asked[-1][1] == first
    assert cards(tab) == texts * 2


@browser_only
@once
def test_an_option_out_of_its_range_asks_nothing(look, server):
    tab = look()
    options(tab, top_p=2)
    tab.locator("#editor").fill("Once")
    tab.locator("#editor").press("Control+Enter")
    assert tab.evaluate("document.activeElement.name") == "top_p"
    assert server.asked == []


@browser_only
@once
def test_stop_ends_the_request_and_keeps_what_came(look, server):
    tab = look()
    server.gate.clear()
    write_and_continue(tab, "Once", "Writing", seed=7)
    wait(tab.locator(".cards p").first, joined(7, 0, 3))
    tab.keyboard.press("Escape")
    wait(status(tab), "Stopped. The text so far is kept.")
    assert server.left.wait(LIMIT / 1000)
    assert cards(tab) == [joined(7, index, 3) for index in range(3)]
    assert "stopped" in tab.locator(".cards").inner_text()
    server.gate.set()
    write_and_continue(tab, None)
    assert tab.locator(".cards p").count() == 6


@browser_only
def test_faults_are_said_in_place_and_lose_nothing(look, server):
    tab = look(expected=["Failed to load resource", "ERR_"])
    server.refusals = [(400, "top_k must be 0 or more", "top_k")]
    write_and_continue(tab, "Once", "top_k must be 0 or more")
    assert tab.locator("[name=top_k]").get_attribute("aria-invalid") == "true"
    assert tab.locator(".cards p").count() == 0
    server.refusals = [(429, "busy", None, ("Retry-After", "1"))]
    write_and_continue(tab, None, "The server is busy. Trying again in 1 s.")
    wait(status(tab), "3 continuations: choose one.")
    assert tab.locator(".cards p").count() == 3
    server.breaks = True
    write_and_continue(tab, None, "The connection was lost. The text so far is kept.", seed=7)
    assert cards(tab)[0] == joined(7, 0, 3)
    server.breaks, server.error = False, "the model's memory is too short"
    write_and_continue(tab, None, "the model's memory is too short")
    server.error = ""
    server.refusals = [(503, "the server is shutting down", None)]
    write_and_continue(tab, None, "the server is shutting down")
    server.shutdown()
    server.socket.close()
    write_and_continue(tab, None, "The server does not answer")
    assert value(tab) == "Once"
    assert tab.locator(".cards p").count() == 9


@browser_only
def test_a_key_is_asked_for_only_if_the_server_wants_one(look, server):
    assert not look().locator("#unlock").is_visible()
    server.key = "secret"
    tab = look(expected=["401"])
    wait(status(tab), re.compile("This server is locked. Type its API key"))
    assert tab.evaluate("document.activeElement.id") == "key"
    tab.keyboard.type("wrong")
    tab.keyboard.press("Enter")
    wait(status(tab), "That is not the key of this server. Try again.")
    tab.locator("#key").fill("secret")
    tab.keyboard.press("Enter")
    wait(status(tab), "The key is right: the server is open.")
    wait(tab.locator("#model"), "· tiny")
    assert not tab.locator("#unlock").is_visible()
    write_and_continue(tab)


@browser_only
def test_a_text_that_is_done_first_is_the_news(look, server):
    server.key = "secret"
    tab = look(expected=["401"])
    write_and_continue(tab, "Once", re.compile("This server is locked"), n=1, max_tokens=3)
    held = []
    tab.route("**/v1/models", lambda route: held.append(route))
    tab.locator("#key").fill("secret")
    tab.keyboard.press("Enter")
    wait(status(tab), re.compile("Done"))
    held[0].continue_()
    wait(tab.locator("#model"), "· tiny")
    assert status(tab).inner_text().startswith("Done")


@browser_only
@once
def test_a_request_that_waits_for_the_key_goes_on(look, server):
    tab = look(expected=["401"])
    wait(tab.locator("#model"), "· tiny")
    server.key = "secret"
    write_and_continue(tab, "Once", re.compile("This server is locked"), n=1, seed=7, max_tokens=3)
    tab.locator("#key").fill("secret")
    tab.keyboard.press("Enter")
    wait(status(tab), "Done.")
    assert value(tab) == "Once" + "".join(text_of(7, 0, 3))


@browser_only
@once
def test_a_request_from_before_the_key_goes_on_with_it(look, server):
    server.key = "secret"
    tab = look(expected=["401"])
    wait(status(tab), re.compile("This server is locked"))
    held = []
    tab.route("**/v1/completions", lambda route: held.append(route), times=1)
    with tab.expect_request("**/v1/completions"):
        tab.locator("#editor").press("Control+Enter")
    tab.locator("#key").fill("secret")
    tab.keyboard.press("Enter")
    wait(tab.locator("#model"), "· tiny")
    held[0].continue_()
    wait(status(tab), re.compile("continuations|Done"))


@browser_only
@once
def test_a_text_beyond_the_context_sends_its_last_tokens(look, server):
    tab = look()
    write_and_continue(tab, "word " * 60, "saw the last 48 tokens", max_tokens=16)
    assert server.asked[-1][1]["prompt"] == list(range(12, 60))


@browser_only
@once
def test_the_tree_is_kept_in_the_browser(look, server):
    tab = look()
    write_and_continue(tab, "Once", seed=7)
    tab.keyboard.press("Alt+1")
    text = value(tab)
    tab.reload()
    assert value(tab) == text
    assert tab.locator("#drawn .b1").count() == 64
    other = look()  # a second tab has the same tree
    assert value(other) == text
    tab.locator("#editor").press("End")
    tab.keyboard.type(" here")
    other.locator("#editor").press("End")
    other.keyboard.type(" there")
    other.wait_for_timeout(700)
    tab.reload()
    tab.keyboard.press("Alt+ArrowUp")
    wait(tab.locator("#after-title"), "Continuations")
    assert sorted(cards(tab)) == [" here", " there"]


_REPLACE_TREE = """tree => {
  clearTimeout(saving);
  removeEventListener("pagehide", saveNow);
  localStorage.setItem("gpt-cli.tree", tree);
}"""

_FILL = """room => {
  localStorage.setItem("room", "x".repeat(room));
  for (let size = 4_000_000; size >= 1; size = Math.floor(size / 2)) {
    try { localStorage.setItem(`x${size}`, "x".repeat(size)); } catch { /* full */ }
  }
  localStorage.removeItem("room");
}"""


@browser_only
@once
def test_a_full_storage_is_said_and_loses_nothing(look, server):
    tab = look()
    tab.evaluate(_FILL, 0)
    write_and_continue(tab, "Once", seed=7, done=r"no room to keep")
    assert cards(tab)[0] == joined(7, 0)
    tab.evaluate("for (const key in localStorage) if (/^x/.test(key)) localStorage.removeItem(key)")
    tab.locator("#editor").press("End")
    tab.keyboard.type("!")
    tab.wait_for_timeout(500)
    tab.reload()
    assert value(tab) == "Once!"


@browser_only
@once
def test_old_tokens_leave_the_storage_before_texts_do(look, server):
    tab = look()
    write_and_continue(tab, "Once", seed=7)
    length = "localStorage.getItem('gpt-cli.tree')?.length"
    tab.evaluate("saveNow()")
    full = tab.evaluate(length)
    tab.evaluate("localStorage.removeItem('gpt-cli.tree')")
    tab.evaluate(_FILL, full // 4)
    tab.evaluate("saveNow()")
    assert 0 < tab.evaluate(length) < full / 4
    tab.reload()
    assert cards(tab)[0] == joined(7, 0)
    assert tab.locator(".cards .b1").count() == 0


@browser_only
@once
def test_a_tree_is_exported_and_imported(look, server, tmp_path, window):
    tab = look()
    write_and_continue(tab, "Once", seed=7, max_tokens=5)
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Export").click()
    file = tmp_path / "tree.json"
    download.value.save_as(file)
    assert download.value.suggested_filename == "gpt-cli-tree.json"
    tab.evaluate(_REPLACE_TREE, "")
    tab.reload()
    assert value(tab) == ""
    tab.locator("#editor").fill("Other")
    tab.locator("#file").set_input_files(file)
    wait(status(tab), "Imported: 4 new pieces of text.")
    tab.locator("#file").set_input_files(file)
    wait(status(tab), "Imported: 0 new pieces of text.")
    tab.keyboard.press("Alt+ArrowUp")
    assert sorted(cards(tab)) == ["Once", "Other"]
    tab.get_by_role("button", name="Choose 2").click()
    assert cards(tab) == [joined(7, index, 5) for index in range(3)]


HARMFUL = {"id": "a", "parent": "root", "text": "x", "tokens": [["x", "y", [["z"]]], 7, [8], None]}


@browser_only
@once
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "not a tree"),
        ("[1]", "not a tree"),
        ("null", "not a tree"),
        ('{"format":"gpt-cli tree","nodes":{}}', "not a tree"),
        (
            json.dumps(
                {
                    "format": "gpt-cli tree",
                    "current": 5,
                    "nodes": [
                        None,
                        {"id": "b", "parent": "b", "text": "a circle"},
                        {"id": "c", "parent": "root", "text": 5},
                        {"id": "root", "parent": "root", "text": "a second root"},
                        {**HARMFUL, "options": "n", "index": "1", "finish": {"x": 1}},
                        {"id": "d", "parent": "a", "text": HOSTILE[3], "options": {"seed": 1}},
                    ],
                }
            ),
            "2 new pieces",
        ),
    ],
)
def test_a_malformed_file_does_no_harm(text, found, look, server, tmp_path):
    tab = look()
    file = tmp_path / "tree.json"
    file.write_text(text, encoding="utf-8")
    tab.locator("#file").set_input_files(file)
    wait(status(tab), re.compile(found))
    tab.keyboard.press("Alt+ArrowDown")
    tab.keyboard.press("Alt+ArrowDown")
    tab.reload()
    assert tab.locator("img").count() == 0
    write_and_continue(tab, None)


@browser_only
@once
def test_hostile_texts_are_shown_as_text(look, server):
    server.scripted = [[[text] for text in HOSTILE]]
    tab = look()
    write_and_continue(tab, HOSTILE[3], n=1)
    assert value(tab) == HOSTILE[3] + "".join(HOSTILE)
    assert tab.locator("#drawn").evaluate("one => one.textContent") == value(tab) + "\n"
    tab.locator("#editor").press("Home")
    tab.keyboard.press("Alt+Enter")
    assert (tab.locator("img").count(), tab.locator("script").count()) == (0, 1)


@browser_only
@once
def test_a_branch_is_deleted_only_when_asked(look, server):
    tab = look()
    write_and_continue(tab, "Once", seed=7)
    tab.once("dialog", lambda dialog: dialog.dismiss())
    tab.get_by_role("button", name="Delete").click()
    assert value(tab) == "Once"
    tab.once("dialog", lambda dialog: dialog.accept())
    tab.get_by_role("button", name="Delete").click()
    assert value(tab) == ""
    assert tab.locator(".cards p").count() == 0
    tab.reload()
    assert value(tab) == ""


@browser_only
def test_the_drawn_text_lies_under_the_typed_one(look, server):
    tab = look()
    text = "A longer line, with  spaces and a wordthatistoolongforthewindow" + "x" * 200
    write_and_continue(tab, f"{text}\n\n\tindented\n{text}\n", n=1)
    drawn, typed, scrolled = tab.evaluate(
        "[drawn.clientHeight, editor.clientHeight, editor.scrollHeight]"
    )
    assert drawn == typed == scrolled
    # A click on the end of a drawn token puts the caret there: the letters lie on each other.
    for place in (4, 40):
        x, y, last = tab.evaluate(_TOKEN_END, place)
        tab.mouse.click(x - 1, y)
        assert last - 1 <= tab.evaluate("editor.selectionStart") <= last


_TOKEN_END = """place => {
  const spans = [...drawn.querySelectorAll("span > span")];
  spans[place].scrollIntoView({ block: "center" });
  const line = [...spans[place].getClientRects()].at(-1);
  const { length } = spans.slice(0, place + 1).map((one) => one.textContent).join("");
  return [line.right, line.top + line.height / 2, length];
}"""


_CONTRASTS = """() => {
  const read = (colour) => {
    const [r, g, b, alpha = 1] = colour.match(/[\\d.]+/g).map(Number);
    return [...[r, g, b].map((c) => (colour.startsWith("color") ? 255 * c : c)), alpha];
  };
  const light = (colour) => colour.slice(0, 3)
    .map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
  const ground = (node) => {
    const colour = read(getComputedStyle(node).backgroundColor);
    if (colour[3] === 1) return colour;
    const behind = ground(node.parentElement);
    return colour.slice(0, 3).map((c, i) => colour[3] * c + (1 - colour[3]) * behind[i]);
  };
  return [...document.body.querySelectorAll("*")]
    .filter((node) => node.checkVisibility() && [...node.childNodes].some((c) => c.nodeType === 3))
    .map((node) => {
      const pair = [light(read(getComputedStyle(node).color)), light(ground(node))];
      return [Math.max(...pair) / Math.min(...pair), node.outerHTML.slice(0, 200)];
    });
}"""


@browser_only
def test_all_is_readable_and_named(look, server):
    tab = look()
    write_and_continue(tab, "Once upon a time", n=3, max_tokens=20)
    tab.locator("#history, #settings").evaluate_all("all => all.forEach(one => one.open = true)")
    tab.keyboard.press("Alt+1")
    tab.keyboard.press("Home")
    tab.keyboard.press("Alt+Enter")
    tab.evaluate(
        "document.querySelectorAll('[aria-disabled=true]').forEach(one => one.remove())"
    )  # what does nothing may be pale
    found = tab.evaluate(_CONTRASTS)
    assert len(found) > 40
    assert min(found)[0] >= 4.5, min(found)
    nameless = tab.locator("button, input, textarea").evaluate_all(
        "all => all.filter(one => !one.hidden && !one.labels?.length && !one.ariaLabel"
        " && !one.textContent.trim()).map(one => one.outerHTML)"
    )
    assert nameless == []


@browser_only
@once
def test_a_deep_story_of_many_steps_is_no_trouble(look, server):
    tab = look()
    nodes, parent = [], "root"
    for step in range(3000):
        nodes.append({"id": f"n{step}", "parent": parent, "text": f" {step}", "by": "model"})
        parent = f"n{step}"
    tree = json.dumps({"format": "gpt-cli tree", "current": parent, "nodes": nodes})
    tab.evaluate(_REPLACE_TREE, tree)
    tab.reload()
    assert value(tab).endswith(" 2998 2999")
    tab.keyboard.press("Alt+ArrowUp")
    assert value(tab).endswith(" 2998")
    tab.locator("#editor").press("End")
    tab.keyboard.type("x")
    assert value(tab).endswith(" 2998x")


# --- with the real server ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    with serving() as server:
        yield server


@browser_only
def test_the_page_writes_what_the_engine_does(look, real, tiny):
    tab = look(address=real.address)
    write_and_continue(tab, "Once upon a time", seed=7, max_tokens=40, stop="\\n")
    asked = Options(seed=7, max_tokens=40, temperature=0.8, top_k=40, top_p=0.95, stop=["\n"])
    found = list(tiny.batch(["Once upon a time"] * 3, asked, indices=range(3)))
    assert cards(tab) == [each.text for each in found]
    assert "shaded" in tab.locator("body").get_attribute("class")
    tab.keyboard.press("Alt+1")
    tab.locator("#editor").press("Control+Home")
    for _ in range(len("Once upon a time")):
        tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Alt+Enter")
    expected = tiny.next_tokens("Once upon a time", 10)
    tokens = tab.locator(".bars .token").all_inner_texts()
    assert tokens == [tiny.decode([id]).replace(" ", "·") for id, _ in expected]
    assert tab.locator(".bars .number").first.inner_text() == f"{math.exp(expected[0][1]):.1%}"


@browser_only
@once
def test_stop_frees_the_real_server(look, real):
    tab = look(address=real.address)
    write_and_continue(tab, "Once", "Writing", n=16, max_tokens=1000)
    wait(tab.locator(".cards p").first, re.compile(r"\w+ \w+"))
    tab.keyboard.press("Escape")
    wait(status(tab), "Stopped. The text so far is kept.")
    real.wait_until_idle()
    assert tab.locator(".cards p").count() > 0


@browser_only
@once
def test_a_long_text_goes_on_beyond_the_context(look, real):
    tab = look(address=real.address)
    text = "Once upon a time, there was a fox. " * 150
    write_and_continue(tab, text, r"saw the last \d{3} tokens", n=1)
    assert len(value(tab)) > len(text)


@browser_only
@once
def test_odd_texts_reach_the_real_server_unchanged(look, real):
    tab = look(address=real.address)
    text = "A 🦊 naïve\n\ttext <|endoftext|> \u202e"
    write_and_continue(tab, text, n=1, temperature=2, top_k=0, top_p=1)
    assert value(tab).startswith(text)
    shown = tab.locator("#drawn").evaluate("one => one.textContent")
    assert shown == value(tab) + "\n"
    assert "\r" not in shown


@browser_only
@once
def test_the_real_server_asks_for_its_key_and_may_die(look):
    with serving("--api-key", "secret") as server:
        tab = look(["401", "ERR_"], server.address)
        wait(status(tab), re.compile("This server is locked"))
        tab.keyboard.type("secret")
        tab.keyboard.press("Enter")
        wait(tab.locator("#model"), "· tiny")
        write_and_continue(tab, "Once", "Writing", n=3, max_tokens=1000)
        wait(tab.locator(".cards p").first, re.compile(r"\w+ \w+"))
        server.process.kill()
        wait(status(tab), "The connection was lost. The text so far is kept.")
        server.process.wait()
        assert value(tab) == "Once"
        assert tab.locator(".cards p").count() > 0
