"""Pages: as files, and in a browser (`make test-browser`)."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gpt_cli.cli.show import terminal
from gpt_cli.display import page, views
from gpt_cli.errors import InputError
from support.in_process import run_here
from support.pages import GRIDS, HOSTILE, KINDS, Parts, view_of

PROMPT = "The moon was round.\nThe fox"


@pytest.fixture(scope="module")
def see(tiny):
    """Return a function that computes a view of a text."""
    return lambda kind, text=PROMPT: view_of(tiny, kind, text, 20 if kind == "tree" else 5)


def data_of(text):
    """Return the data of a page, as its script reads it."""
    data, _script = Parts(text).texts["script"]
    return json.loads(data)


def weights_of(text):
    """Return the weights of a page: (layers, heads, weights of the lower triangle)."""
    packed = data_of(text)["weights"]
    return np.array([[np.frombuffer(base64.b64decode(h), "<u2") for h in row] for row in packed])


# --- the file ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS + GRIDS)
def test_a_page_is_one_file_that_loads_nothing(kind, see):
    text = page.page(see(kind))
    parts = Parts(text)
    assert parts.texts["title"] == [f"tiny · {kind}"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|import\(|eval\(|innerHTML", text)
    attributes = {name for _, attributes in parts.tags for name in attributes}
    assert attributes <= {"lang", "charset", "http-equiv", "content", "name", "type", "id"}
    (policy,) = [named["content"] for _, named in parts.tags if "http-equiv" in named]
    texts = parts.texts["style"][0], parts.texts["script"][1]
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    hashes = [base64.b64encode(digest).decode() for digest in digests]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


@pytest.mark.parametrize("prompt", HOSTILE)
@pytest.mark.parametrize("kind", KINDS + GRIDS)
def test_every_prompt_stays_data(kind, prompt, see):
    view = see(kind, prompt)
    text = page.page(view)
    harmless = Parts(page.page(see(kind)))
    assert Parts(text).tags == harmless.tags
    assert Parts(text).texts["script"][1] == harmless.texts["script"][1]
    data, record = data_of(text), json.loads("".join(view.json()))
    if kind == "attention":
        del data["weights"], record["weights"]
    assert data == record


def test_the_name_of_a_model_can_be_any_path(see):
    token = {"id": 0, "token": "a", "bytes": [97], "logprob": -1.0}
    model = "/a & b/</title><script>alert(1)</script>$data\udcff"
    view = views.SurpriseView(model, [token | {"logprob": None}, token], math.e)
    text = page.page(view)
    assert text.encode()
    assert Parts(text).tags == Parts(page.page(see("surprise"))).tags
    assert Parts(text).texts["title"] == [model.replace("\udcff", "?") + " · surprise"]
    assert data_of(text)["model"] == model


def test_weights_are_exact_to_a_65535th(see):
    view = see("attention")
    layers, heads, T, _ = view.weights.shape
    packed = weights_of(page.page(view))
    assert packed.shape == (layers, heads, T * (T + 1) // 2)
    unpacked = np.zeros(view.weights.shape)
    unpacked[..., *np.tril_indices(T)] = packed / 65535
    assert abs(unpacked - view.weights).max() <= 0.51 / 65535
    assert unpacked[:, :, 0, 0].tolist() == [[1.0] * heads] * layers


def test_a_page_too_large_for_browsers_is_refused_early(see, monkeypatch):
    weights = np.broadcast_to(np.float32(0), (48, 25, 1024, 1024))  # takes no memory
    attention = views.AttentionView("gpt2-xl", [], list(range(48)), list(range(25)), weights)
    with monkeypatch.context() as patch:
        patch.setattr(page.base64, "b64encode", None)
        with pytest.raises(
            InputError, match=r"^the page would have 1,679 MB, more than 64: .*--layer, --h"
        ):
            page.page(attention)
    monkeypatch.setattr(page, "_MAX_BYTES", 1000)
    with pytest.raises(InputError, match="--top"):
        page.page(see("lens"))


def test_a_text_with_too_many_tokens_is_refused(see):
    token = see("surprise").tokens[1]
    page.page(views.SurpriseView("x", [token] * 20_000, 1.0))
    with pytest.raises(InputError, match=r"20,001 tokens.*shorten the text"):
        page.page(views.SurpriseView("x", [token] * 20_001, 1.0))


def test_a_page_is_shown_and_saved_from_python(see, tiny, tmp_path, monkeypatch):
    shown = tiny.show("attention", PROMPT, layer=1)
    assert repr(shown) == "<Page: tiny, attention>"
    assert shown.view.layers == [1]
    file = tmp_path / "page.html"
    file.write_text("an earlier page")
    shown.save(str(file))
    assert file.read_text("utf-8") == shown.html == page.page(shown.view)
    with pytest.raises(InputError, match=r"^path must end with .html or .htm, not 'page.png': a "):
        shown.save(tmp_path / "page.png")
    with pytest.raises(InputError, match=r"folder .* does not exist"):
        shown.save(tmp_path / "missing" / "page.html")
    ((tag, frame),) = Parts(shown._repr_html_()).tags
    assert (tag, frame["sandbox"], frame["srcdoc"]) == ("iframe", "allow-scripts", shown.html)
    # What is left if a notebook that is not trusted removes the frame.
    assert Parts(shown._repr_html_()).texts["iframe"][0].startswith("<Page: tiny, attention>: run ")
    monkeypatch.setattr(page, "_MAX_FRAME", 1000)
    assert "attention has 0 MB, much for a notebook" in shown._repr_html_()
    monkeypatch.setattr(page, "_MAX_BYTES", 1000)
    again = tiny.show("lens", PROMPT, count=1, special=True)
    assert re.fullmatch("<p>the page would have .*</p>", again._repr_html_())


def test_a_view_refuses_what_it_cannot_show(tiny):
    for arguments, options, error, message in (
        (("heads", PROMPT), {}, InputError, "view must be one of attention, lens, .* not 'heads'"),
        (("attention", PROMPT), {"layer": 4}, InputError, "layer must be from 0 to 3"),
        (("attention", PROMPT), {"head": 0}, InputError, "head needs layer: give both"),
        (("lens", PROMPT), {"cout": 1}, TypeError, r"keyword cout \(did you mean count\?\)"),
        (("lens", PROMPT), {"x": 1}, TypeError, "x: the keywords are count, text, special$"),
        (("tree", PROMPT), {"layer": 1}, TypeError, "layer"),
        (("patch", PROMPT), {"answer": " Emma"}, TypeError, "corrupt"),
    ):
        with pytest.raises(error, match=message):
            tiny.show(*arguments, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_writes_a_page(kind, see, tmp_path):
    file = tmp_path / "page.html"
    command = ["show", kind, "--model", "tiny", "--html", file, PROMPT]
    assert run_here(*command) == (b"", f"gpt-cli: wrote {file}\n")
    written = data_of(file.read_text(encoding="utf-8"))
    assert list(written) == list(see(kind).record())
    assert written["view"] == kind


# --- in a browser --------------------------------------------------------------------------------

browser_only = pytest.mark.browser


@pytest.fixture
def look(window, tmp_path):
    """Open the page of a view; it must not load anything, fail, or exceed the window's width."""
    messages, requests, opened = [], [], []

    def look(view):
        file = tmp_path / f"{len(opened)}.html"
        file.write_text(page.page(view), encoding="utf-8", newline="")
        tab = window.new_page()
        tab.set_default_timeout(5000)
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.on("dialog", lambda dialog: messages.append(dialog.message))
        tab.on("request", lambda request: requests.append(request.url))
        opened.append((tab, file.as_uri()))
        tab.goto(file.as_uri())
        introduction, keys = tab.locator("header p").all_inner_texts()
        assert introduction.endswith(".")
        assert keys.startswith("Tap" if is_phone(tab) else "Tab goes to the ")
        return tab

    yield look
    assert messages == []
    assert requests == [uri for _, uri in opened]
    for tab, _ in opened:
        wide = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0


def is_phone(tab):
    return tab.viewport_size["width"] < 500


def point(tab, locator, **options):
    """Tap or hover over an element."""
    if is_phone(tab):
        locator.tap(**options)
    else:
        locator.hover(**options)


def check_percents(shown, shares):
    """Compare percentages with shares, up to rounding; a page has shares in 1/65535."""
    for text, share in zip(shown, shares, strict=True):
        number = float(text.lstrip("<").removesuffix("%"))
        if text.startswith("<"):
            assert 100 * share < number + 0.002
        else:
            assert number == pytest.approx(100 * float(share), abs=0.052)


def check_chips(tab, weights, row):
    """Check that the tokens up to a row show its weights (T, T), and those after it nothing."""
    flow = tab.locator(".flow .token")
    shown = flow.evaluate_all("all => all.map(one => one.dataset.percent)")
    assert shown[row + 1 :] == [""] * (len(weights) - row - 1)
    check_percents(shown[: row + 1], weights[row, : row + 1])


def chosen(tab, selector):
    selected = tab.locator(f"{selector}[aria-selected=true]")
    assert selected.count() == 1
    return selected


@browser_only
def test_a_chosen_token_shows_its_attention_in_the_chosen_head(look, see):
    view = see("attention")
    tab = look(view)
    tokens = tab.locator(".flow .token")
    labels = ["The", "·moon", "·was", "·round", ".", "↵", "The", "·fox"]
    assert tokens.evaluate_all("all => all.map(one => one.textContent)") == labels
    tab.get_by_label("layer 0, head 0", exact=True).click()
    point(tab, tokens.nth(3))
    check_chips(tab, view.weights[0, 0], 3)
    assert chosen(tab, ".flow .token").get_attribute("data-i") == "3"
    assert f"→ token {view.weights[0, 0, 3].argmax()} " in tab.locator(".panel strong").inner_text()

    tab.get_by_label("layer 2, head 1", exact=True).click()
    check_chips(tab, view.weights[2, 1], 3)
    assert tab.locator("h2").inner_text() == "Layer 2, head 1"
    layer, head = tab.locator(".pickers select").all()
    head.select_option(label="3")
    check_chips(tab, view.weights[2, 3], 3)
    pressed = tab.locator(".heads [aria-pressed=true]")
    assert pressed.get_attribute("aria-label") == "layer 2, head 3"
    layer.select_option(label="all")
    assert pressed.get_attribute("aria-label") == "mean of all heads"
    assert head.is_disabled()


@browser_only
def test_attention_begins_with_the_mean_that_the_text_shows(look, see, tiny):
    one_layer = tiny.show("attention", PROMPT, layer=1, head=None).view
    titles = "Mean of all heads", "Layer 1, mean of the heads"
    for view, title in zip((see("attention"), one_layer), titles, strict=True):
        tab = look(view)
        assert tab.locator("h2").inner_text() == title
        check_chips(tab, view.weights.mean(axis=(0, 1)), len(view.tokens) - 1)
        assert tab.evaluate("[...mean([Uint16Array.of(1), Uint16Array.of(2)])]") == [1.5]


@browser_only
@pytest.mark.parametrize("count", [8, 60])
def test_no_panel_covers_the_chosen_row(count, look, see):
    tab = look(see("attention", "Once upon a time, " * (count // 4)))
    bottom = "one => one.getBoundingClientRect().bottom"
    row, panel = tab.locator(".cross").first, tab.locator(".panel")
    if is_phone(tab):  # the panel is at the lower edge
        tab.locator(".plane canvas").press("End")
        assert row.evaluate(bottom) <= panel.bounding_box()["y"]
    else:
        assert row.evaluate(bottom) <= tab.viewport_size["height"]
        side = panel.bounding_box()
        assert side["x"] + side["width"] <= tab.locator(".chosen").bounding_box()["x"]
    last = tab.locator(".flow .token").last
    assert last.evaluate(bottom) <= tab.locator(".flow").evaluate(bottom)


@browser_only
@pytest.mark.parametrize("heads", [4, 12])
def test_maps_that_do_not_fit_are_faded_at_the_edge(heads, look, see):
    view = see("attention")
    weights = np.tile(view.weights, (1, heads // 4, 1, 1))
    tab = look(replace(view, heads=[*range(heads)], weights=weights))
    faded = tab.locator(".choice .scroll").evaluate("box => getComputedStyle(box).maskImage")
    assert (faded != "none") == (is_phone(tab) and heads == 12)


@browser_only
def test_the_map_describes_each_pair_of_tokens(look, see):
    view = see("attention")
    tab = look(view)
    tab.get_by_label("layer 0, head 0", exact=True).click()
    canvas = tab.locator(".plane canvas")
    canvas.scroll_into_view_if_needed()
    size = canvas.bounding_box()["width"] / len(view.tokens)
    point(tab, canvas, position={"x": 1.5 * size, "y": 3.5 * size}, force=True)
    pair = tab.locator(".panel strong").inner_text()
    assert re.fullmatch(r"token 3 “·round” → token 1 “·moon”: [\d.]+%", pair)
    check_percents([pair.split()[-1]], [view.weights[0, 0, 3, 1]])
    check_chips(tab, view.weights[0, 0], 3)
    canvas.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight"):
        canvas.press(key)
    pair = tab.locator(".panel strong").inner_text()
    assert pair.startswith("token 4 “.” → token 4 “.”: ")
    check_percents([pair.split()[-1]], [view.weights[0, 0, 4, 4]])
    canvas.press("Home")
    assert tab.locator(".panel strong").inner_text().startswith("token 0 “The” → token 0 ")
    canvas.press("End")
    assert tab.locator(".panel strong").inner_text().startswith("token 7 “·fox” → token 7 ")


@browser_only
def test_the_maps_have_the_colours_of_the_weights(look, see):
    view = see("attention")
    tab = look(view)
    tab.get_by_label("layer 1, head 2", exact=True).click()
    read = """canvas => [canvas.width,
        ...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data]"""
    maps = tab.locator(".plane"), tab.get_by_label("layer 1, head 2", exact=True)
    for canvas in (map.locator("canvas") for map in maps):
        width, *data = canvas.evaluate(read)
        assert width == len(view.tokens)
        pixels = np.reshape(data, (width, width, 4))
        assert pixels[0, 0].tolist() == [0xFD, 0xE7, 0x25, 255]  # attends only to itself
        assert (pixels[..., 3] == 255 * np.tri(width)).all()
        rows, columns = np.tril_indices(width)
        order = np.argsort(view.weights[1, 2][rows, columns])
        greens = pixels[rows, columns, 1][order]  # green grows along viridis
        assert (np.diff(greens) >= 0).all()


@browser_only
def test_a_page_of_one_head_has_no_grid(look, tiny):
    view = tiny.show("attention", PROMPT, layer=2, head=3).view
    tab = look(view)
    assert tab.locator("h2").inner_text() == "Layer 2, head 3"
    assert tab.locator(".heads").count() == 0
    check_chips(tab, view.weights[0, 0], len(view.tokens) - 1)


@browser_only
def test_the_keyboard_moves_among_heads_and_tokens(look, see):
    tab = look(see("attention"))
    tab.get_by_label("layer 0, head 0", exact=True).focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowUp", "ArrowUp", "ArrowRight"):
        tab.keyboard.press(key)
    assert tab.locator("h2").inner_text() == "Layer 0, head 2"
    tab.keyboard.press("Home")
    assert tab.locator("h2").inner_text() == "Mean of all heads"
    tab.keyboard.press("Tab")  # the maps are one tab stop
    assert tab.evaluate("document.activeElement.className").startswith("token")
    tab.keyboard.press("End")
    assert chosen(tab, ".flow .token").get_attribute("data-i") == "7"
    tab.keyboard.press("Home")
    before = int(tab.evaluate("document.activeElement.dataset.i"))
    assert before == 0
    tab.keyboard.press("ArrowRight")
    assert chosen(tab, ".flow .token").get_attribute("data-i") == str(before + 1)
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowDown")
    below = int(chosen(tab, ".flow .token").get_attribute("data-i"))
    line = "i => document.querySelectorAll('.flow .token')[i].offsetTop"
    assert tab.evaluate(line, below) > tab.evaluate(line, before)


def bars(tab):
    return [
        tuple(row.locator(".token, .number").all_inner_texts())
        for row in tab.locator(".bars li").all()
    ]


@browser_only
def test_a_cell_of_the_lens_shows_its_likeliest_tokens(look, see):
    view = see("lens", "Every day, the fox went to the")
    tab = look(view)

    def expected(layer, token):
        return [
            (
                candidate["token"].replace(" ", "·"),
                terminal._percent(math.exp(candidate["logprob"])),
            )
            for candidate in view.predictions[layer][token]
        ]

    assert bars(tab) == expected(-1, -1)
    api = pytest.importorskip("playwright.sync_api")
    api.expect(chosen(tab, "td")).to_be_in_viewport(ratio=0.9)
    api.expect(tab.locator(".more-right")).to_have_count(0)
    tab.locator(".scroll").evaluate("box => box.scrollTo(0, 0)")
    api.expect(tab.locator(".more-right")).to_have_count(int(is_phone(tab)))
    assert tab.locator("tbody th").all_inner_texts() == view.layers
    cells = tab.locator("tbody td")
    assert cells.all_inner_texts() == [
        row[0]["token"].replace(" ", "·") for layer in view.predictions for row in layer
    ]
    ids = [token["id"] for token in view.tokens]
    first = [[token[0]["id"] for token in layer] for layer in view.predictions]
    right = (np.array(first)[:, :-1] == ids[1:]).tolist()
    right = [hit for layer in right for hit in (*layer, False)]  # nothing follows the last token
    assert any(right)
    marked = cells.evaluate_all("all => all.map(one => one.classList.contains('right'))")
    assert marked == right
    T = len(view.tokens)
    point(tab, cells.nth(2 * T + T - 2))
    assert bars(tab) == expected(2, -2)
    chosen(tab, "td").focus()
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowLeft")
    assert bars(tab) == expected(1, -3)
    assert "after token 6 “·went”" in tab.locator(".panel strong").inner_text()
    tab.keyboard.press("Home")
    assert bars(tab) == expected(0, 0)
    assert bars(tab)[-1][1] == "<0.1%"
    tab.keyboard.press("End")
    assert bars(tab) == expected(-1, -1)


@browser_only
def test_a_cell_of_a_grid_shows_its_value(look, see):
    view = see("ablate")
    tab, values = look(view), np.array(view.values)
    assert tab.locator("header p").first.inner_text().startswith("The redder a cell, the more the ")
    assert tab.locator("h2").evaluate("one => one.textContent").startswith("the change of logit")

    def check(layer, column):
        cell = chosen(tab, "td")
        assert [cell.get_attribute(name) for name in ("data-i", "data-j")] == [layer, column]
        text, value = tab.locator(".panel strong").inner_text().rsplit(": ", 1)
        assert text == f"layer {layer}, {'mlp' if column == '4' else f'head {column}'}"
        assert float(value.replace("\N{MINUS SIGN}", "-")) == pytest.approx(
            values[int(layer), int(column)], abs=1e-3
        )

    largest = np.unravel_index(abs(values).argmax(), values.shape)
    check(*map(str, largest))
    point(tab, tab.locator("td").nth(5 * 2 + 1))
    check("2", "1")
    chosen(tab, "td").focus()
    steps = {"ArrowDown": "31", "ArrowRight": "32", "End": "34", "ArrowUp": "24", "Home": "00"}
    for key, place in [*steps.items(), ("ArrowLeft", "00")]:
        tab.keyboard.press(key)
        check(*place)
    colours = tab.locator("td").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor.match(/\\d+/g).map(Number))"
    )
    red, _, blue = np.array(colours).T
    assert ((red >= blue) == (values.ravel() <= 0)).all()


def luminance(colours):
    """Return the relative luminance of colours (n, 3) in 0..255, as WCAG defines it."""
    parts = np.array(colours) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


@browser_only
@pytest.mark.parametrize("kind", GRIDS)
def test_the_numbers_of_a_grid_are_readable_on_every_colour(kind, look, see):
    values = np.linspace(-1, 1, 200).reshape(10, 20).tolist()
    names = [str(number) for number in range(20)]
    tab = look(replace(see(kind), rows=names[:10], columns=names, values=values))
    text, behind = (
        luminance(
            tab.locator("td").evaluate_all(
                f"all => all.map(one => getComputedStyle(one).{name}.match(/\\d+/g).map(Number))"
            )
        )
        for name in ("color", "backgroundColor")
    )
    contrast = (np.maximum(text, behind) + 0.05) / (np.minimum(text, behind) + 0.05)
    assert contrast.min() >= 4.5  # WCAG AA


@browser_only
def test_quotes_of_a_prompt_are_shown_as_they_are(look, see):
    tab = look(see("attribution", 'The fox said "yes" and "no'))
    assert '“The fox said "yes" and "no”' in tab.locator(".note").first.inner_text()


@browser_only
def test_a_grid_begins_with_its_largest_value_in_view(look, see):
    view = see("patch")
    values = np.zeros((40, 30))
    values[30, 20] = 3
    rows, columns = ([str(i) for i in range(size)] for size in values.shape)
    tab = look(
        replace(view, axes=["token", "layer"], rows=rows, columns=columns, values=values.tolist())
    )
    assert tab.locator(".panel strong").inner_text().startswith("token 30, layer 20: +3.")
    cell, box, panel = (
        tab.locator(x).bounding_box() for x in ("[aria-selected=true]", ".scroll", ".panel")
    )
    assert box["x"] < cell["x"] < box["x"] + box["width"] - cell["width"]
    assert box["y"] < cell["y"] < panel["y"] - cell["height"]


@browser_only
def test_surprise_shows_the_bits_of_each_token(look, see):
    text = "The moon was\n\thungry 🦊, naïve. "
    view = see("surprise", text)
    tab = look(view)
    pieces = tab.locator(".text span")
    assert tab.locator(".text").evaluate("one => one.textContent") == text
    bits = [-(token["logprob"] or 0) / math.log(2) for token in view.tokens]
    mean = math.fsum(bits[1:]) / (len(bits) - 1)
    totals = f"{len(bits)} tokens ({len(bits) - 1} scored), {mean:.2f} bits each"
    assert totals in tab.locator("main > p").first.inner_text()
    point(tab, pieces.nth(0))
    assert "the first token has no prediction" in tab.locator(".panel").inner_text()
    point(tab, pieces.nth(1))
    panel = tab.locator(".panel").inner_text()
    assert f"“·moon”: {bits[1]:.2f} bits" in panel
    assert f"id {view.tokens[1]['id']}; " in panel
    # The tokens of one character are merged.
    parts = [i for i, token in enumerate(view.tokens) if "\ufffd" in token["token"]]
    fox = tab.locator(".text span", has_text="🦊")
    assert fox.inner_text() == "🦊"
    point(tab, fox)
    total = math.fsum(bits[i] for i in parts[:4])
    assert f"“🦊”: {total:.2f} bits" in tab.locator(".panel").inner_text()
    # The bars below select tokens.
    last = tab.locator(".strip span").last
    point(tab, last)
    assert f": {bits[-1]:.2f} bits" in tab.locator(".panel strong").inner_text()
    assert last.get_attribute("class") == "here"


@browser_only
def test_a_space_before_a_word_has_no_colour(look, see):
    pieces = look(see("surprise", "Once  upon\n keyboard")).locator(".text span")
    assert pieces.evaluate_all("all => all.map(one => one.textContent)")[:3] == [
        "Once",
        " ",
        "upon",
    ]


@browser_only
def test_the_perplexity_looks_as_on_a_terminal(look, see):
    for perplexity, shown in (9.71109, "9.711"), (4271312.0, "4,271,000"), (2e41, "2.000e+41"):
        view = replace(see("surprise"), perplexity=perplexity)
        assert f", perplexity {shown}" in look(view).locator("main > p").first.inner_text()
        last = [*terminal.parts(view, 80, coloured=False)][-1].plain
        assert last.endswith(f", perplexity {shown}")


@browser_only
def test_surprise_counts_a_first_token_after_the_start_token(look, tiny):
    tab = look(tiny.show("surprise", "The moon", bos=True).view)
    assert "(2 scored)" in tab.locator("main > p").first.inner_text()


@browser_only
def test_the_colours_of_surprise_are_in_steps(look):
    steps = {
        0.99: "rgba(0, 0, 0, 0)",
        1.01: "rgb(254, 240, 217)",
        2.01: "rgb(253, 204, 138)",
        7.99: "rgb(252, 141, 89)",
        8.01: "rgb(227, 74, 51)",
        31.9: "rgb(179, 0, 0)",
        99.0: "rgb(92, 0, 16)",
    }
    token = {"id": 0, "token": "a", "bytes": [97]}
    tokens = [token | {"logprob": -bits * math.log(2)} for bits in steps]
    tab = look(views.SurpriseView("m", [token | {"logprob": None}, *tokens], None))
    colours = tab.locator(".text span").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    assert colours == ["rgba(0, 0, 0, 0)", *steps.values()]
    edges = tab.locator(".text span").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    gaps = [left - right for (_, right), (left, _) in pairwise(edges[2:])]
    assert gaps == pytest.approx([1.0] * 5, abs=0.1)  # between colours
    assert "perplexity infinite" in tab.locator("main").inner_text()


@browser_only
def test_invisible_characters_are_shown(look, tiny):
    tab = look(tiny.show("surprise", "a\u202eb\x07 \u200bc").view)
    assert tab.locator(".text").inner_text() == "a\\u202eb\\u0007 \u200bc"
    tab = look(tiny.show("attention", "a\u202eb\x07 \u200bc", layer=0, head=0).view)
    chips = tab.locator(".flow").inner_text()
    assert "\u202e" not in chips
    assert "\\u0007" in chips


@browser_only
def test_a_long_text_has_a_bar_for_several_tokens(look):
    token = {"id": 0, "token": " a", "bytes": [32, 97]}
    logprobs = [None, *(-1 - i % 7 / 10 for i in range(7999))]
    logprobs[4300:4400] = [-20.0] * 100
    tab = look(views.SurpriseView("m", [token | {"logprob": value} for value in logprobs], 3.0))
    assert tab.locator(".text span").count() == 8000
    assert tab.locator(".strip span").count() == 300
    assert chosen(tab, ".text span").get_attribute("data-i") == "4300"  # the most surprising
    point(tab, tab.locator(".strip span").nth(4350 * 300 // 8000))
    assert "28.85 bits" in tab.locator(".panel").inner_text()


@browser_only
def test_the_tree_shows_and_folds_branches(look, see):
    view = see("tree", "Once upon a time")
    tab = look(view)

    def flat(branches, before=""):
        for branch in branches:
            text = before + branch["token"]["token"]
            yield text, branch
            yield from flat(branch["branches"], text)

    expected = list(flat(view.branches))
    lines = tab.locator("button.line")
    assert lines.count() == len(expected) == 20
    for line, (_, branch) in zip(lines.all(), expected, strict=True):
        probability = math.exp(branch["token"]["logprob"])
        token = branch["token"]["token"].replace(" ", "·")
        assert line.locator(".token").inner_text() == token
        numbers = line.locator(".number").all_inner_texts()
        check_percents(numbers, [probability, branch["probability"]])
    lines.first.focus()
    for _ in range(5):
        tab.keyboard.press("ArrowDown")
    text, _ = expected[5]
    assert tab.locator(".panel .after").inner_text() == text
    assert tab.locator(".panel .before").inner_text() == "Once upon a time"
    path = "".join(tab.locator(".path .token").all_inner_texts())
    assert path.replace("·", " ") == text

    first = len(list(flat(view.branches[0]["branches"])))
    assert first > 0
    visible = "all => all.filter(one => one.offsetParent).length"
    lines.first.click()
    assert lines.first.get_attribute("aria-expanded") == "false"
    assert lines.evaluate_all(visible) == 20 - first
    tab.keyboard.press("ArrowRight")
    assert lines.first.get_attribute("aria-expanded") == "true"
    assert lines.evaluate_all(visible) == 20
    tab.keyboard.press("ArrowLeft")
    assert lines.evaluate_all(visible) == 20 - first
    tab.keyboard.press("End")
    assert tab.locator(".here").evaluate("one => one.offsetParent !== null")
    assert tab.locator(".panel .after").inner_text() == expected[-1][0]
    tab.keyboard.press("Home")
    assert tab.locator(".panel .after").inner_text() == expected[0][0]


@browser_only
@pytest.mark.parametrize("kind", KINDS + GRIDS)
def test_hostile_texts_are_shown_as_text(kind, look, see):
    text = " ".join(HOSTILE)
    tab = look(see(kind, text))
    if kind == "surprise":
        shown = re.sub(
            r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",
            lambda sign: f"\\u{ord(sign[0]):04x}",
            text,
        )
        assert tab.locator(".text").evaluate("one => one.textContent") == shown
    assert "alert(1)" in tab.locator("main").evaluate("one => one.textContent")
    assert (tab.locator("img").count(), tab.locator("script").count()) == (0, 2)


_CONTRASTS = """() => {
  const read = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => read(colour).slice(0, 3)
    .map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
  const ground = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    return read(colour)[3] === 0 ? ground(node.parentElement) : colour;
  };
  return [...document.body.querySelectorAll("*")]
    .filter((node) => node.offsetParent && [...node.childNodes].some((c) => c.nodeType === 3))
    .map((node) => {
      const pair = [light(getComputedStyle(node).color), light(ground(node))];
      return [Math.max(...pair) / Math.min(...pair), node.outerHTML.slice(0, 200)];
    });
}"""


@browser_only
@pytest.mark.parametrize("kind", KINDS + GRIDS)
def test_text_is_readable_on_every_colour(kind, look, see):
    contrasts = look(see(kind)).evaluate(_CONTRASTS)
    assert len(contrasts) > 20
    assert min(contrasts)[0] >= 4.5, min(contrasts)


@browser_only
def test_without_javascript_the_page_asks_for_it(browser, see, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(page.page(see("tree")), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(file.as_uri())
    assert "tiny · tree" in tab.locator("h1").inner_text()
    assert "allow JavaScript" in tab.locator("main").inner_text()
    context.close()
