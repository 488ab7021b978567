"""The commands of `gpt-cli show`: JSON, text in a pipe, colours, pictures."""

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

import gpt_cli
from gpt_cli.cli.show import picture, terminal
from gpt_cli.display import views
from support.in_process import records_here, refusal, run_here, terminal_here
from support.pages import GRIDS, KINDS, view_of
from support.processes import COMMAND, posix, run_on_terminal

TEXT = "Every day, the fox"
ODD = 'Zoë 😀 said:\n"\x1b[31m中文字很宽\x07\t$\\'


def run(view, *arguments, **env):
    """Run a command in a pipe; return its standard output and standard error."""
    out, errors = run_here("show", view, "--model", "tiny", *arguments, **env)
    return out.decode(), errors


def record(view, *arguments):
    (record,) = records_here("show", view, "--model", "tiny", *arguments, "--json")
    assert (record["view"], record["model"]) == (view, "tiny")
    return record


def look(engine, view, text=TEXT, top=5):
    return view_of(engine, view, text, top)


# --- JSON ----------------------------------------------------------------------------------------


def test_attention_equals_the_trace(tiny):
    inner = tiny.trace(TEXT)
    every = [0, 1, 2, 3]
    for layers, heads, flags in (
        (every, every, []),
        ([2], every, ["--layer", "2"]),
        ([2], [1], ["--layer", "2", "--head", "1"]),
    ):
        shown = record("attention", TEXT, *flags)
        assert (shown["layers"], shown["heads"]) == (layers, heads)
        assert [token["id"] for token in shown["tokens"]] == inner.ids
        assert "".join(token["token"] for token in shown["tokens"]) == TEXT
        assert np.allclose(shown["weights"], inner.attention[np.ix_(layers, heads)], atol=1e-5)


def test_the_json_of_attention_is_written_head_by_head(tiny):
    weights = np.random.default_rng(1).exponential(0.01, (2, 3, 200, 200)).clip(0, 1)
    weights[0, 0, range(4), 0] = 1, 0, 0.5e-6, 1.5e-6
    view = replace(look(tiny, "attention"), weights=np.tril(weights).astype(np.float32))
    pieces = [*view.json()]
    assert max(map(len, pieces)) < 200 * 200 * len("0.123456,")
    rounded = view.weights.astype(float).round(6).tolist()
    assert json.loads("".join(pieces)) == view.record() | {"weights": rounded}
    assert "".join(pieces).count("\n") == 1


def test_lens_equals_the_trace(tiny):
    ids, logprobs = tiny.trace(TEXT).lens(3)
    lens = record("lens", TEXT, "-k", "3")
    assert lens["layers"] == ["embedding", "h.0", "h.1", "h.2", "h.3"]
    shown = [
        [[(token["id"], token["logprob"]) for token in at] for at in layer]
        for layer in lens["predictions"]
    ]
    assert np.allclose(shown, np.stack([ids, logprobs], axis=-1), atol=1e-3)


def test_surprise_equals_the_score(tiny):
    score = tiny.score(TEXT)
    surprise = record("surprise", TEXT)
    assert [token["id"] for token in surprise["tokens"]] == score.ids
    assert surprise["tokens"][0]["logprob"] is None
    rest = [token["logprob"] for token in surprise["tokens"][1:]]
    assert np.allclose(rest, score.token_logprobs[1:], atol=1e-3)
    assert surprise["perplexity"] == pytest.approx(score.perplexity, rel=1e-3)


def test_tree_equals_the_engine(tiny):
    def check(branches, nodes):
        for branch, node in zip(branches, nodes, strict=True):
            assert branch["token"]["id"] == node.id
            assert branch["token"]["logprob"] == pytest.approx(node.logprob, abs=1e-3)
            assert branch["probability"] == pytest.approx(math.exp(node.total_logprob), rel=1e-3)
            check(branch["branches"], node.children)

    tree = record("tree", TEXT, "-k", "30")
    assert tree["prompt"] == TEXT
    check(tree["branches"], tiny.tree(TEXT, 30))


@pytest.mark.parametrize("view", ["attention", "lens", "tree"])
def test_the_end_token_is_text_unless_it_is_special(view, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("<|endoftext|>\n", encoding="utf-8")
    plain, special = record(view, "--file", str(file)), record(view, "-f", str(file), "--special")
    assert plain != special
    if view != "tree":
        assert [token["id"] for token in special["tokens"]] == [2047]
        assert record(view, "") == special  # an empty prompt starts a text


def test_a_tree_can_be_one_long_branch():
    token = {"id": 1, "token": "a", "bytes": [97], "logprob": 0.0}
    branches = []
    for _ in range(200):
        branches = [{"token": token, "probability": 1.0, "branches": branches}]
    view = views.TreeView("x", "a", branches)
    assert len(shown(view, 80)) == 200 + 4
    assert "".join(view.json()).count('"branches"') == 201


ANSWERS = "--answer", " Emma", "--wrong", " Leo"


def test_attribution_equals_the_engine(tiny):
    shown, added = record("attribution", TEXT, *ANSWERS), tiny.attribution(TEXT, " Emma", " Leo")
    assert [shown[name]["token"] for name in ("answer", "wrong")] == [" Emma", " Leo"]
    assert shown["columns"] == ["0", "1", "2", "3", "attn", "mlp"]
    values = np.array(shown["values"])
    assert values[:, :4].tolist() == added.heads.tolist()
    measures = shown["measures"]
    total = values[:, 4:].sum() + sum(measures.values()) - measures["total"]
    assert total == pytest.approx(measures["total"], abs=1e-4)
    assert f"add up to it within {added.error:.1e}" in " ".join(
        run("attribution", TEXT, *ANSWERS)[0].split()
    )


def test_ablation_shows_changes(tiny):
    shown, without = record("ablate", TEXT, *ANSWERS[:2]), tiny.ablate(TEXT, " Emma")
    assert shown["wrong"] is None
    assert shown["measures"] == {"total": without.whole}
    assert shown["values"][3][4] == without.mlp[3] - without.whole
    assert shown["values"][2][1] == without.heads[2, 1] - without.whole


@pytest.mark.parametrize("what", ["attn_out", "z"])
def test_patches_of_tokens_have_a_row_for_each_token(tiny, what):
    texts = f"{TEXT} moon", f"{TEXT} fox"
    shown = record("patch", *texts, *ANSWERS, "--what", what)
    patching = tiny.patch(*texts, " Emma", " Leo", what=what)
    grids = patching.recovered, patching.patched
    assert [shown["values"], shown["patched"]] == [
        (grid if what == "z" else grid.T).tolist() for grid in grids
    ]
    assert shown["measures"] == {"clean": patching.clean, "corrupt": patching.corrupt}
    assert shown["prompts"] == [*texts]
    assert shown["axes"] == (["layer", "head"] if what == "z" else ["token", "layer"])
    last = "3" if what == "z" else '6 " moon"'
    assert (shown["rows"][-1], shown["columns"]) == (last, ["0", "1", "2", "3"])


def test_an_edit_changes_a_grid():
    edited = record("attribution", TEXT, *ANSWERS, "--edit", "blocks.3.attn.hook_z[1]=0")
    assert edited["values"][3][1] == 0
    assert record("attribution", TEXT, *ANSWERS)["values"][3][1] != 0


def test_a_grid_needs_an_answer_of_one_token():
    problem = 'must be one token, not "E" "mma"; a word usually begins with its space'
    for flags, message in (
        ([], "--answer is missing; see `gpt-cli show ablate --help`"),
        (["--answer", "Emma"], f"--answer {problem}"),
        (["--answer", " Leo", "--wrong", "Emma"], f"--wrong {problem}"),
    ):
        assert (
            refusal("show", "ablate", "-m", "tiny", TEXT, *flags) == f"gpt-cli: error: {message}\n"
        )


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("coloured", [False, True])
def test_a_grid_fits_the_width(tiny, kind, coloured):
    view = look(tiny, kind, ODD)
    for columns in (1, 3, 12):
        wide = replace(
            view,
            columns=[str(i) for i in range(4 * columns - 1)] + ["attn"],
            values=[row[:4] * columns for row in view.values],
        )
        for width in (80, 40, 30):
            console = Console(file=io.StringIO(), width=width, highlight=False)
            for part in terminal.parts(wide, width, coloured=coloured):
                console.print(part)
            assert max(map(cell_len, console.file.getvalue().split("\n"))) <= width


def test_a_grid_has_numbers_or_signs_and_lists_the_largest(tiny):
    values = [[-8.0, -2.0, 0.004, -0.004], [2.0, 7.0, 1.0, -4.0]]
    columns = ["0", "1", "2", "mlp"]
    view = replace(look(tiny, "ablate"), rows=["0", "1"], columns=columns, values=values)
    lines = shown(view, 80)[-6:-1]
    assert lines[0].split() == columns
    assert lines[1].split() == ["0", "-8.00", "-2.00", "+0.00", "+0.00"]
    assert lines[-1] == "largest: 0.0 -8.00; 1.1 +7.00; 1.3 -4.00; 0.1 -2.00; 1.0 +2.00".replace(
        "1.3", "1.mlp"
    )
    for row in values:
        row *= 8
    view = replace(view, columns=columns * 8, values=values)
    lines = shown(view, 80)
    assert "0 " + "==--····" * 8 in lines
    assert "1 " + "++##++==" * 8 in lines
    assert "= to -4  - to -1  + from +1  # from +4" in lines


@pytest.mark.parametrize("view", KINDS)
def test_output_to_a_pipe_is_plain_text_within_the_width(tiny, view):
    out, err = run(view, ODD, COLUMNS="80")
    assert err == ""
    assert out.split("\n") == shown(look(tiny, view, ODD, top=20 if view == "tree" else 5), 80)
    assert "\x1b" not in out
    assert "\x07" not in out
    for text in (TEXT, ODD, "the " * 70):
        for width in (80, 40):
            lines = shown(look(tiny, view, text), width)
            assert max(map(cell_len, lines)) <= width


def rows_of_map(lines):
    """Return the cells of the lines of a map without colours."""
    rows = [re.fullmatch(r' *(\d+) (".*(?:"|…)) *(\S.*)', line) for line in lines]
    return [row[3] for row in rows if row]


def test_a_wide_map_shows_numbers(tiny):
    view = look(tiny, "attention")
    lines = shown(view, 200)
    assert lines[0].endswith("attends to earlier tokens, mean of all 16 heads")
    for head, title in ((1, ", head 1 of layer 2"), (None, ", mean of the 4 heads of layer 2")):
        of_layer = tiny.show("attention", TEXT, layer=2, head=head).view
        assert shown(of_layer, 200)[0].endswith(title)
    check_ruler(lines, 5, 1)
    rows = rows_of_map(lines)
    expected = view.weights.mean(axis=(0, 1))
    assert len(rows) == len(expected)
    for i, row in enumerate(rows):
        assert row.split() == [f"{share:.0%}" for share in expected[i, : i + 1]]


def check_ruler(lines, columns, together):
    """Check that the numbers of a ruler are above their tokens, about one per ten columns."""
    first = next(first for first, line in enumerate(lines) if line.lstrip().startswith('0 "'))
    start = re.match(r' *0 "Once" *|0 "E" *', lines[first]).end()
    numbers = list(re.finditer(r"\d+", lines[first - 1]))
    for number in numbers:
        assert (number.start() - start) % columns == 0
        assert (number.start() - start) // columns * together == int(number[0])
    assert int(numbers[0][0]) == 0
    assert len(numbers) >= len(lines[first - 1]) // 10 - 1


@pytest.mark.parametrize(("count", "columns", "together"), [(20, 2, 1), (40, 1, 1), (120, 1, 2)])
def test_a_narrow_map_shows_characters(tiny, count, columns, together):
    view = look(tiny, "attention", "Once" + " sea" * (count - 1))
    lines = shown(view, 80)
    check_ruler(lines, columns, together)
    assert "· 0%  ░ 4%  ▒ 16%  ▓ 36%  █ 64%" in lines
    assert (f"maximum of {together} x {together} tokens" in "".join(lines)) == (together > 1)
    rows = rows_of_map(lines)
    expected = view.weights.mean(axis=(0, 1))
    assert len(rows) == count / together
    for i, row in enumerate(rows):
        part = expected[i * together : (i + 1) * together]
        shares = [part[:, j * together : (j + 1) * together].max() for j in range(i + 1)]
        steps = [sum(share >= bound for bound in (0.04, 0.16, 0.36, 0.64)) for share in shares]
        assert row == "".join("·░▒▓█"[step] * columns for step in steps)


def test_notable_heads_are_listed(tiny):
    view = look(tiny, "attention")
    weights = np.full((4, 4, 6, 6), 0.01, np.float32)
    # Without the last of five rows; the first token can attend only to itself.
    weights[2, 1, range(1, 5), range(4)] = 1
    weights[3, 0, :5, 0] = 0.8
    weights[0, 2, range(5), range(5)] = 0.7
    lines = shown(views.AttentionView("x", view.tokens, view.layers, view.heads, weights), 80)
    best = {line[:16].strip(): line[16:].split()[:2] for line in lines if line.startswith("the ")}
    assert best == {
        "the token before": ["2.1", "80%"],
        "the first token": ["3.0", "64%"],
        "the token itself": ["0.2", "56%"],
    }


def shown(view, width):
    """Return the lines of a view without colours."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in terminal.parts(view, width, coloured=False):
        console.print(part)
    return console.file.getvalue().split("\n")


def test_lens_as_text_has_the_tokens_of_each_layer(tiny):
    view = look(tiny, "lens")
    lines = shown(view, 300)[-6:-1]
    for line, name, layer in zip(lines, view.layers, view.predictions, strict=True):
        assert line.split()[0] == name
        for token in layer[-1]:
            assert re.search(
                re.escape(json.dumps(token["token"])) + f" +{math.exp(token['logprob']):.0%}", line
            )


def test_surprise_may_begin_after_the_start_token_and_read_special_tokens(tiny):
    text = "Once<|endoftext|>The"
    shown = record("surprise", text, "--bos", "--special")["tokens"]
    score = tiny.score(text, bos=True, special=True)
    assert [token["id"] for token in shown] == tiny.encode(text, special=True) == score.ids
    assert [token["logprob"] for token in shown] == score.token_logprobs
    bits = [-logprob / math.log(2) for logprob in score.token_logprobs]
    totals = f"tiny: 3 tokens (3 scored), {sum(bits) / 3:.2f} bits each, "
    assert totals in run("surprise", text, "--bos", "--special")[0]
    assert "tiny: 1 token (1 scored), " in run("surprise", "Once", "--bos")[0]


def test_surprise_as_text_has_the_bits_of_each_character(tiny):
    lines = shown(look(tiny, "surprise", "Once 😀 moon"), 80)
    score = tiny.score("Once 😀 moon")
    bits = [0.0, *(-logprob / math.log(2) for logprob in score.token_logprobs[1:])]
    face = slice(2, len(bits) - 1)  # its bytes are tokens
    assert [line.split()[:2] for line in lines[3:6]] == [
        [f"{bits[1]:.2f}", '"'],
        [f"{sum(bits[face]):.2f}", '"😀"'],
        [f"{bits[-1]:.2f}", '"'],
    ]
    mean = sum(bits) / (len(bits) - 1)
    assert lines[-2] == (
        f"tiny: {len(bits)} tokens ({len(bits) - 1} scored), {mean:.2f} bits each, "
        f"perplexity {float(f'{2**mean:.4g}'):,.0f}"
    )


def test_tree_as_text_has_a_line_for_each_token(tiny):
    view = look(tiny, "tree", "Once upon a time", 30)

    def every(branches):
        for branch in branches:
            yield branch
            yield from every(branch["branches"])

    lines = shown(view, 200)[3:-1]
    for line, branch in zip(lines, every(view.branches), strict=True):
        single, whole, rest = line.split(maxsplit=2)
        assert single == f"{math.exp(branch['token']['logprob']):.1%}"
        assert whole == f"{branch['probability']:.1%}"
        assert rest.lstrip("├│└ ") == json.dumps(branch["token"]["token"])


def test_surprise_can_be_zero_or_huge(tiny):
    def lines(*logprobs):
        tokens = look(tiny, "surprise").tokens[: len(logprobs)]
        tokens = [token | {"logprob": p} for token, p in zip(tokens, logprobs, strict=True)]
        return shown(views.SurpriseView("x", tokens, None), 40)

    assert lines(None, 0.0, 0.0)[3] == '  0.00  "very"'
    least = lines(None, -10000.0, -8 * math.log(2))
    assert least[0] == "    bits  token   bar: 0 to 32, >: more"
    assert least[3] == '14426.95  "very"  ' + 21 * "█" + ">"
    assert least[4] == '    8.00  " day"  ' + 5 * "█" + "▌"
    assert lines(None, -32 * math.log(2))[3] == ' 32.00  "very"  ' + 24 * "█"
    short = shown(look(tiny, "surprise", "a b"), 80)
    assert short[0] == "  bits  token  bar: 0 to 32"
    assert short[3].index("█") == short[0].index("bar")


def test_ids_unknown_to_the_tokenizer_have_a_name(case_folder):
    folder = str(case_folder("padded_vocabulary"))
    engine = gpt_cli.load(folder)
    count = engine.model.config.vocab_size
    missing = engine.tokenizer.missing_ids(count)
    assert missing
    names = [f"<{id}>" for id in missing]
    records = records_here("next", "the sand", "-m", folder, "-k", count)
    assert {token["token"] for token in records if not token["bytes"]} == set(names)
    view = look(engine, "lens", "the sand", count)
    assert any(names[0] in line for line in shown(view, 20_000))
    assert names[0] in "".join(view.json())
    assert any(names[0] in line for line in shown(look(engine, "tree", "the", count), 80))


# --- colours -------------------------------------------------------------------------------------


def on_terminal(view, *arguments, columns=80, **env):
    settings = {"TERM": "xterm-256color", "COLORTERM": "truecolor"} | env
    code, text = terminal_here("show", view, "-m", "tiny", *arguments, columns=columns, **settings)
    assert code == 0
    return text


@pytest.mark.parametrize("view", KINDS)
def test_output_to_a_terminal_has_colours_but_no_other_control_codes(view):
    for columns in (80, 40):
        text = on_terminal(view, ODD, columns=columns)
        codes = set(re.findall(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", text))
        assert any(code.startswith("\x1b[38;2;") for code in codes)
        plain = re.sub(r"\x1b\[(0|38;2;\d+;\d+;\d+;48;2;\d+;\d+;\d+)m", "", text)
        assert "\x1b" not in plain
        assert "\x07" not in plain
        assert max(map(cell_len, plain.replace("\t", " " * 8).split("\r\n"))) <= columns


@pytest.mark.parametrize(
    ("view", "env"),
    [
        *((view, {"NO_COLOR": "1"}) for view in KINDS),
        ("lens", {"TERM": "dumb"}),
        ("lens", {"TERM": "xterm", "COLORTERM": ""}),
    ],
)
def test_output_to_a_terminal_without_colours_equals_that_to_a_pipe(view, env):
    assert on_terminal(view, TEXT, **env).replace("\r\n", "\n") == run(view, TEXT, COLUMNS="80")[0]


@posix
def test_surprise_colours_the_unchanged_text_by_its_bits(tiny):
    text = "Once upon a time, the moon was round."
    env = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    code, output = run_on_terminal("show", "surprise", "-m", "tiny", text, columns=80, **env)
    line = output.split("\r\n")[0]
    assert (code, re.sub(r"\x1b\[[^m]*m", "", line)) == (0, text)
    score = tiny.score(text)
    colours = ["fef0d9", "fdcc8a", "fc8d59", "e34a33", "b30000", "5c0010"]
    steps = set()
    for id, logprob in list(zip(score.ids, score.token_logprobs, strict=True))[1:]:
        step = sum(-logprob / math.log(2) >= bound for bound in (1, 2, 4, 8, 16, 32))
        steps.add(step)
        word = re.escape(tiny.decode([id]).lstrip())
        if step:
            red, green, blue = bytes.fromhex(colours[step - 1])
            assert re.search(f"48;2;{red};{green};{blue}m[^\x1b]*{word}", line)
        else:
            assert not re.search(f"48;2;[0-9;]*m{word}", line)
    assert steps == {0, 2, 3, 4, 5, 6}


def test_text_is_readable_on_every_colour():
    def luminance(colour):
        parts = np.array([*bytes.fromhex(colour[1:])]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    shares = [terminal._share_style(share) for share in np.linspace(0, 1, 101)]
    signed = [terminal._signed_style(share) for share in np.linspace(-1, 1, 101)]
    bits = [terminal._bits_style(bits) for bits in (1, 2, 4, 8, 16, 32)]
    for style in shares + signed + bits:
        dark, light = sorted(
            luminance(colour.get_truecolor().hex) for colour in (style.color, style.bgcolor)
        )
        assert (light + 0.05) / (dark + 0.05) > 4.5  # WCAG AA


# --- pictures and pages --------------------------------------------------------------------------


ANSWER = ["--answer", " moon"]


@pytest.mark.parametrize(
    "words",
    [
        ["attention", ODD],
        pytest.param(["attribution", ODD, *ANSWER], marks=pytest.mark.slow),
        ["patch", "a $ b", "a \x1b b", *ANSWER],
        pytest.param(["patch", "a b c", "a d c", *ANSWER, "--what=z"], marks=pytest.mark.slow),
        pytest.param(["ablate", ODD, *ANSWER], marks=pytest.mark.slow),
    ],
)
def test_a_picture_is_a_colour_png(words, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    file = tmp_path / "picture.PNG"
    file.write_text("before", encoding="utf-8")
    out, err = run(*words, "--force", "--png", str(file))
    assert (out, err) == ("", f"gpt-cli: wrote {file}\n")
    pixels = image.imread(file)
    assert pixels.shape[0] > 100
    assert pixels.shape[1] > 500
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20  # it has colours
    assert [path.name for path in tmp_path.iterdir()] == ["picture.PNG"]


@pytest.mark.parametrize(
    ("words", "ending", "beginning"),
    [(["attention"], ".svg", b"<?xml"), (["attribution", *ANSWER], ".PDF", b"%PDF")],
)
def test_the_ending_chooses_the_format_and_a_picture_has_no_date(
    words, ending, beginning, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    pictures = []
    for time in ("0", "1000000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", time)  # the date that matplotlib would write
        file = tmp_path / f"{time}{ending}"
        run(*words, TEXT, "--png", str(file))
        pictures.append(file.read_bytes())
    assert pictures[0].startswith(beginning)
    assert pictures[0] == pictures[1]


def test_maps_form_a_grid_and_masked_weights_are_blank():
    weights = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
    whole = picture._grid(weights)
    assert whole.shape == (2 * 5 - 1, 3 * 5 - 1)
    for layer in range(2):
        for head in range(3):
            part = whole[5 * layer : 5 * layer + 4, 5 * head : 5 * head + 4]
            assert np.array_equal(np.nan_to_num(part), np.tril(weights[layer, head]))
    assert np.isnan(whole).sum() == whole.size - 2 * 3 * 10


def test_maps_are_labelled_with_tokens_or_heads(tiny):
    pytest.importorskip("matplotlib")

    def labels(view):
        axes = picture._attention(view).axes[0]
        sides = axes.get_xticklabels(), axes.get_yticklabels()
        return [[text.get_text() for text in side] for side in sides]

    one = tiny.show("attention", TEXT + " x" * 5, layer=2, head=1).view
    names = [json.dumps(token["token"]) for token in one.tokens]
    assert labels(one) == [names, names]
    layer = tiny.show("attention", TEXT, layer=2, head=None).view
    assert labels(layer) == [["0", "1", "2", "3"], ["2"]]


@pytest.mark.parametrize("kind", GRIDS)
def test_a_map_of_effects_has_their_values_with_0_in_the_middle_of_the_colours(kind, tiny):
    pytest.importorskip("matplotlib")
    view = look(tiny, kind)
    axes = picture._effects(view).axes[0]
    (image,) = axes.images
    assert np.array_equal(image.get_array(), view.values)
    assert image.norm(0) == 0.5
    assert [text.get_text() for text in axes.get_xticklabels()] == view.columns
    assert [text.get_text() for text in axes.get_yticklabels()] == view.rows
    assert (axes.get_ylabel(), axes.get_xlabel()) == (*view.axes,)


def test_a_dot_of_a_large_map_shows_the_maximum_of_its_tokens():
    weights = np.arange(7 * 7, dtype=np.float32).reshape(1, 1, 7, 7)
    dots, together = views.pooled(weights, 3)
    assert together == 3
    assert dots.tolist() == [[[[16, 19, 20], [37, 40, 41], [44, 47, 48]]]]
    same, together = views.pooled(weights, 7)
    assert together == 1
    assert np.array_equal(same, weights)


@pytest.mark.parametrize("view", ["lens", "surprise", "tree"])
def test_a_view_that_is_a_text_has_no_picture(view, tmp_path):
    files = ["--html", tmp_path / "a.html", "--png", tmp_path / "a.png"]
    error = f"gpt-cli: error: --png: show {view} has no picture: use --html FILE, or its text\n"
    assert refusal("show", view, "-m", "tiny", "x", *files) == error
    assert not [*tmp_path.iterdir()]
    assert "--png" not in run(view, "--help")[0]


@pytest.mark.parametrize(("flag", "name"), [("--html", "a.htm"), ("--png", "a.svg")])
def test_an_existing_file_is_replaced_only_by_force(flag, name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    file.write_text("before", encoding="utf-8")
    command = ["show", "attention", "-m", "tiny", "x", flag, file]
    with monkeypatch.context() as patch:
        patch.setattr("gpt_cli.load", None)
        error = refusal(*command)
    assert error == f"gpt-cli: error: {flag} {file} exists: name another output, or add --force\n"
    assert file.read_text(encoding="utf-8") == "before"
    run_here(*command, "--force")
    assert file.stat().st_size > 1000


def test_a_picture_a_page_and_json_can_be_combined(tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / "a.png", tmp_path / "a.html"]
    flags = "--json", "-q", "--png", str(files[0]), "--html", str(files[1])
    assert run("attention", TEXT, *flags) == (run("attention", TEXT, "--json")[0], "")
    assert all(file.stat().st_size > 1000 for file in files)


def test_a_page_is_opened_in_a_browser(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda uri: opened.append(uri) or True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("tree", TEXT, "--open", "--html", str(tmp_path / "tree.html"))
    run("tree", TEXT, "--open")
    assert opened[0] == (tmp_path / "tree.html").as_uri()
    (page,) = tmp_path.glob("gpt-cli-*/tree.html")
    assert opened[1] == page.as_uri()
    assert page.read_bytes() == (tmp_path / "tree.html").read_bytes()
    monkeypatch.setattr("webbrowser.open", lambda uri: False)
    _, errors = run_here("show", "tree", "-m", "tiny", TEXT, "--open", "-q", code=5)
    assert errors.startswith(
        f"gpt-cli: error: --open: there is no browser here; the page is {tmp_path}"
    )


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["attention", "x", "--head", "1"], "--layer"),
        (["attention", "x", "--layer", "4"], "from 0 to 3"),
        (["attention", "x", "--layer", "0", "--head", "-1"], "from 0 to 3"),
        (["attention", "once" + " once" * 511], "513 tokens"),
        (["lens", "x", "-k", "101"], "--top"),
        (["surprise", "x"], "2 tokens"),
        (["tree", "x", "-k", "201"], "--top"),
        (["tree", "x", "--html", "page.txt"], ".html or .htm"),
        (["tree", "x", "--html", "/no/such/folder/page.html"], "does not exist"),
        (["attention", "x", "--png", "picture.gif"], ".png or .svg or .pdf"),
    ],
)
def test_bad_input_is_a_one_line_error_with_exit_code_2(arguments, expected):
    assert expected in refusal("show", *arguments, "--model", "tiny")


@posix
def test_an_existing_file_survives_a_failed_write(tmp_path):
    file = tmp_path / "page.html"
    file.write_text("before", encoding="utf-8")
    limited = f"ulimit -f 1; {' '.join(COMMAND)} show tree -m tiny x --force --html {file}"
    finished = subprocess.run(["bash", "-c", limited], capture_output=True, timeout=60)
    assert finished.returncode == 5
    assert finished.stderr.decode() == f"gpt-cli: error: cannot write {file}: File too large\n"
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == ["before"]


def test_pictures_need_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refusal("show", "attention", "-m", "tiny", "x", "--png", "x.png", code=5)
    assert "pip install matplotlib" in error
