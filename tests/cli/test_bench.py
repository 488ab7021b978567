"""The command `gpt-cli bench`: table and curves, JSON, picture."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gpt_cli
from gpt_cli.checks.bench import Benchmark, Mode, Plan, Spread
from gpt_cli.cli import app, bench_format
from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.hub.local import bundled
from gpt_cli.system.library import native_library
from support.in_process import records_here, refusal, run_here, terminal_here

BENCH = ["bench", "--model", "tiny"]
FEW = [*BENCH, "-p", "4", "-n", "5", "-r", "2"]
LEGEND_ON = "with the cache: only the new token is computed"
LEGEND_SPECULATION = "with speculation: a pass gives one or more tokens"
LEGEND_OFF = "without the cache: the whole text is computed again for each token"


def run(*arguments):
    out, errors = run_here(*FEW, *arguments)
    assert errors == ""
    return out.decode()


def mode(token_s, growth):
    spreads = dict.fromkeys(bench_format._ROWS, Spread(0.25, 0.125, 0.5))
    return Mode(**spreads, token_s=token_s, growth=growth)


@pytest.fixture
def benchmark():
    """120 tokens after 32: 2 ms each with the cache; without it, 1 ms more every 5 tokens."""
    return Benchmark(
        model="made up",
        adapter=None,
        parameters=1_234_567,
        weights_bytes=4_938_268,
        dtype="float7",
        ops="by hand",
        threads=1,
        prompt_tokens=32,
        max_tokens=120,
        batch=2,
        repetitions=3,
        load_s=0.012345,
        peak_bytes=123_456_789,
        positions=list(range(33, 153)),
        early=(34, 43),
        late=(143, 152),
        cache_on=mode([0.002] * 120, 1.04),
        cache_off=mode([0.001 * (1 + token // 5) for token in range(120)], 12.34),
        speculation=None,
        drafted=None,
        accepted=None,
        ratio={"decode_tok_s": 123.4, "model_s": 5.678},
        ids_equal=True,
        ids=[[1] * 120] * 2,
    )


@pytest.fixture
def speculation(benchmark):
    """The same with speculation instead of the mode without the cache."""
    both = {"cache_off": None, "speculation": mode([0.001] * 120, 0.96)}
    return replace(benchmark, **both, drafted=1912, accepted=1754)


# --- text ----------------------------------------------------------------------------------------


def test_output_to_a_pipe_is_plain_text():
    text = run()
    assert text.isascii()
    assert "\x1b" not in text
    assert "\r" not in text
    head, table, notes, *_ = text.split("\n\n")
    dtype, size = ("float16", "5 MB") if native_library() else ("float32", "9 MB")
    assert head.startswith(f"tiny: 2,271,360 parameters in {dtype}, computed by ")
    assert head.endswith("\n4 prompt tokens, 5 new tokens, 1 row, 2 repetitions")
    assert re.match(r"median \(min-max\) +cache on +cache off +ratio\n", table)
    assert len(table.splitlines()) == 8
    assert f"weights {size}" in notes
    assert LEGEND_ON in text
    assert LEGEND_OFF in text
    number = r"\d+\.\d"
    assert re.fullmatch(
        rf"With the cache, tokens 8 to 9 of the text took {number} times as long as tokens 6 to 7; "
        rf"without it, {number} times\. All ids agree\.",
        text.splitlines()[-1],
    )


def test_one_mode_alone_has_no_ratio():
    on, off = ("cache on", LEGEND_ON), ("cache off", LEGEND_OFF)
    for flag, shown, other in (("--cache", on, LEGEND_OFF), ("--no-cache", off, LEGEND_ON)):
        text = run(flag)
        assert all(words in text for words in shown)
        assert other not in text
        assert "ratio" not in text


def test_the_table_has_each_figure_with_its_range_and_its_ratio(benchmark):
    table = bench_format.as_text(benchmark).split("\n\n")[1].splitlines()
    cells = [re.split(r"  +", line) for line in table]
    assert cells[0] == ["median (min-max)", "cache on", "cache off", "ratio"]
    milliseconds, seconds = "250 (125-500)", "0.250 (0.125-0.500)"
    assert cells[1:] == [
        ["tokenization, ms", milliseconds, milliseconds, "-"],
        ["first token, ms", milliseconds, milliseconds, "-"],
        ["prefill, tokens/s", seconds, seconds, "-"],
        ["decode, tokens/s", seconds, seconds, "123"],
        ["model, ms per token", milliseconds, milliseconds, "5.7"],
        ["other, ms per token", milliseconds, milliseconds, "-"],
        ["whole text, s", seconds, seconds, "-"],
    ]
    for start in map(table[0].index, cells[0][1:]):
        assert all(line[start - 1] == " " != line[start] for line in table)


def test_speculation_has_a_column_and_its_drafts(speculation):
    _, table, notes, *_ = bench_format.as_text(speculation).split("\n\n")
    header, *_ = table.splitlines()
    assert re.split(r"  +", header) == ["median (min-max)", "cache on", "speculation", "ratio"]
    accepted = "speculation: 1,754 of 1,912 drafted tokens accepted"
    assert notes.splitlines()[1:] == [
        "ratio: speed with speculation / speed without it",
        f"{accepted} in each text, on average",
        "ms per token: time in which each row gets one token",
    ]
    alone = bench_format.as_text(replace(speculation, batch=1))
    assert f"\n{accepted}\n\n" in alone


def test_the_notes_report_memory_and_loading_and_one_token_has_no_rate(benchmark):
    text = bench_format.as_text(benchmark)
    assert "loaded in 0.0123 s; peak memory of the process 123 MB, weights 5 MB\n" in text
    assert "ms per token: time in which each row gets one token\n" in text
    assert "ratio: speed with the cache / speed without it\n" in text
    assert "drafted" not in text
    single = replace(mode([0.5], None), total_s=Spread(2, 2, 2), decode_tok_s=None)
    alone = {"positions": [33], "cache_on": single, "cache_off": None, "ratio": None}
    text = bench_format.as_text(
        replace(benchmark, early=None, late=None, peak_bytes=None, batch=1, **alone)
    )
    assert "peak memory of the process unknown" in text
    assert "ms per token: " not in text
    assert re.search(r"^decode, tokens/s +-$", text, re.MULTILINE)
    assert re.search(r"^whole text, s +2\.00$", text, re.MULTILINE)


def test_the_conclusion_reports_only_measured_facts(benchmark, speculation):
    said = "With the cache, tokens 143 to 152 of the text took 1.0 times as long as tokens 34 to 43"
    assert bench_format.conclusion(benchmark) == f"{said}; without it, 12.3 times. All ids agree."
    other = f"{said}; with speculation, 1.0 times. All ids agree."
    assert bench_format.conclusion(speculation) == other
    alone = replace(benchmark, cache_off=None, ratio=None)
    assert bench_format.conclusion(alone) == f"{said}. All ids agree."
    assert bench_format.conclusion(replace(alone, repetitions=1)) == f"{said}."
    without = replace(benchmark, cache_on=None, early=(34, 34), late=(35, 35), repetitions=1)
    assert bench_format.conclusion(without) == (
        "Without the cache, token 35 of the text took 12.3 times as long as token 34."
    )
    short = replace(benchmark, early=None, late=None)
    assert bench_format.conclusion(short) == "All ids agree."
    shortest = replace(short, cache_off=None, repetitions=1)
    assert bench_format.conclusion(shortest) == ""
    assert bench_format.as_text(shortest).endswith(f"{LEGEND_ON}\n")


def after_a_slow_token(benchmark):
    """Return the figures with a slow first token, as after a long prompt."""
    on, off = benchmark.cache_on, benchmark.cache_off
    return replace(
        benchmark,
        positions=[benchmark.positions[0] - 1, *benchmark.positions],
        cache_on=replace(on, token_s=[9.0, *on.token_s]),
        cache_off=replace(off, token_s=[9.0, *off.token_s]),
    )


def test_the_curves_are_where_the_axes_say(benchmark):
    lines = bench_format.curves(after_a_slow_token(benchmark)).splitlines()
    assert lines[0] == "milliseconds for each token after the first"
    marks = [line[9:].ljust(60) for line in lines[2:14]]
    assert {line[8] for line in lines[2:14]} == {"|"}
    assert lines[2].split()[0] == "24.0"
    assert lines[13].split()[0] == "0"
    for column in range(60):
        drawn = {11 - row: line[column] for row, line in enumerate(marks) if line[column] != " "}
        height = (
            1 + (2 * column // 5 + (2 * column + 1) // 5) / 2
        )  # milliseconds, mean of two tokens
        assert drawn == {round(height / 24 * 11): "o"} | {1: "*"}, column
    assert lines[15].split(None, 1)[0] == "33"
    assert lines[15].endswith(" 152")
    assert len(lines[15]) == 69
    assert lines[17:] == [f"{'':9}o  {LEGEND_OFF}", f"{'':9}*  {LEGEND_ON}"]


def test_the_curve_of_speculation_has_its_mark_and_legend(speculation):
    lines = bench_format.curves(speculation).splitlines()
    assert [line[9:] for line in lines[2:14] if line[9:]] == ["*" * 60, "+" * 60]
    assert lines[17:] == [f"{'':9}*  {LEGEND_ON}", f"{'':9}+  {LEGEND_SPECULATION}"]


@pytest.mark.parametrize("tokens", [1, 2, 7, 59, 61, 1000])
def test_any_number_of_tokens_fills_the_width(benchmark, tokens):
    times = [0.1 + 0.001 * token for token in range(tokens)]
    shown = replace(
        benchmark,
        positions=list(range(2, tokens + 2)),
        cache_on=None,
        cache_off=mode(times, None),
    )
    lines = bench_format.curves(shown).splitlines()
    marks = [line[9:].ljust(60) for line in lines[2:14]]
    assert lines[15].split()[0] == ("2" if tokens == 1 else "3")
    assert all(sum(line[column] == "o" for line in marks) == 1 for column in range(60))
    assert marks[0][59] == "o"
    assert LEGEND_ON not in "".join(lines)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.012345, "0.0123"), (1, "1.00"), (99.94, "99.9"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits(value, shown):
    assert bench_format.number(value) == shown


def test_a_terminal_shows_progress_unless_quiet():
    code, shown = terminal_here(*FEW)
    assert code == 0
    for what in ("warming up", "cache on, repetition 1 of 2", "cache off, repetition 2 of 2"):
        assert f"\rgpt-cli: {what} " in shown
    progress, table = shown.split("median (min-max)")
    assert "All ids agree." in table
    assert progress.count("\r\n") == 3  # those of the head; the progress was erased
    *_, last, blank = re.findall(r"\r([^\r\n]+)\r", progress.split("tiny: ")[0])
    assert last.startswith("gpt-cli: cache off, repetition 2 of 2 ")
    assert blank.isspace()
    assert len(blank) == len(last)
    code, shown = terminal_here(*FEW, "--quiet")
    assert code == 0
    assert shown.startswith("tiny: ")


# --- JSON ----------------------------------------------------------------------------------------


def test_json_is_one_object_with_everything():
    (told,) = records_here(*FEW, "--json", "-b", "2")
    assert (told["model"], told["batch"], told["repetitions"]) == ("tiny", 2, 2)
    assert (told["prompt_tokens"], told["max_tokens"]) == (4, 5)
    assert told["positions"] == [5, 6, 7, 8, 9]
    assert (told["early"], told["late"]) == ([6, 7], [8, 9])
    assert [len(row) for row in told["ids"]] == [5, 5]
    config = GPT2Config.from_folder(bundled("tiny"))
    assert told["weights_bytes"] == weights_bytes(config, told["dtype"])
    assert told["peak_bytes"] is None or told["peak_bytes"] > told["weights_bytes"]
    assert told["load_s"] > 0
    assert told["threads"] >= 1
    for name in ("cache_on", "cache_off"):
        assert len(told[name]["token_s"]) == 5
        assert set(told[name]["first_token_s"]) == {"median", "min", "max"}
        assert told[name]["growth"] > 0
    for name, ratio in told["ratio"].items():
        pair = told["cache_off"][name]["median"], told["cache_on"][name]["median"]
        more_is_better = name.endswith("_tok_s")
        assert ratio == pytest.approx((pair[0] / pair[1]) ** (-1 if more_is_better else 1))


@pytest.mark.usefixtures("library")
def test_json_has_speculation_with_the_same_ids():
    (told,) = records_here(*FEW, "--json", "--speculate")
    (plain,) = records_here(*FEW, "--json")
    assert told["ids"] == plain["ids"]
    assert told["ids_equal"] is True
    assert told["cache_off"] is None
    assert told["speculation"].keys() == told["cache_on"].keys()
    assert len(told["speculation"]["token_s"]) == 5
    assert 0 <= told["accepted"] <= told["drafted"]
    pair = [told[name]["total_s"]["median"] for name in ("cache_on", "speculation")]
    assert told["ratio"]["total_s"] == pytest.approx(pair[0] / pair[1])
    assert told.keys() == plain.keys()
    assert (plain["speculation"], plain["drafted"], plain["accepted"]) == (None, None, None)


# --- flags ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
def test_the_number_of_threads_can_be_set():
    for flags, env in ((["--threads", "5"], {}), ([], {"GPT_CLI_THREADS": "5"})):
        (told,) = records_here(*FEW, "--json", *flags, GPT_CLI_OPS="native", **env)
        assert told["threads"] == 5


def test_speculation_needs_the_library():
    error = refusal(*FEW, "--speculate", GPT_CLI_OPS="numpy")
    assert "speculation needs the compiled library or a GPU, and here numpy computes: " in error


@pytest.fixture
def seen(monkeypatch, benchmark):
    """Return the arguments of loading and measuring, which are replaced."""
    seen = {}

    def load(name, **options):
        seen["load"] = {"name": name} | options

    def measure(engine, plan, starting):
        seen["plan"] = plan
        return benchmark

    monkeypatch.setattr(gpt_cli, "load", load, raising=False)
    monkeypatch.setattr("gpt_cli.checks.bench.measure", measure)
    return seen


def test_every_flag_has_its_effect(seen, capfd, thread_variables):
    flags = (
        "-m some/model -p 3 -n 5 -b 7 -r 9 --no-cache --device cpu --dtype float16 --revision v1 "
        "--adapter some/adapter "
        "--offline --threads 3 -q"
    )
    assert app.run(["bench", *flags.split()]) == 0
    assert seen["plan"] == Plan(3, 5, 7, 9, ("cache off",))
    assert seen["load"] == {
        "name": "some/model",
        "device": "cpu",
        "dtype": "float16",
        "revision": "v1",
        "adapter": "some/adapter",
        "offline": True,
        "quiet": True,
        "bos_token": None,
        "edits": (),
    }
    assert os.environ["GPT_CLI_THREADS"] == "3"
    head = "made up: 1,234,567 parameters in float7, computed by by hand"
    assert capfd.readouterr().out.startswith(head)


@pytest.mark.parametrize(
    ("flags", "modes"),
    [
        ([], ("cache on", "cache off")),
        (["--cache"], ("cache on",)),
        (["--no-cache"], ("cache off",)),
        (["--speculate"], ("speculation", "cache on")),
        (["--speculate", "--cache"], ("speculation", "cache on")),
    ],
)
def test_flags_choose_the_modes(flags, modes, seen):
    assert app.run(["bench", *flags]) == 0
    assert seen["plan"] == Plan(modes=modes)
    assert seen["load"]["name"] == "gpt2"


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["-p", "0"], "--prompt-tokens must be from 1 to"),
        (["-p", "many"], "--prompt-tokens"),
        (["text"], "unexpected argument text; see"),
        (["--plot", "curves.jpg"], "curves.jpg: the name must end with .png or .svg or .pdf"),
        (["--plot", "curves"], "curves: the name must end with"),
        (["--speculate", "--no-cache"], "--speculate cannot be used with --no-cache: leave"),
        (["--plot", "no/such/folder/x.png"], "the folder no/such/folder does not exist"),
        (["--plot", "folder.png"], "folder.png is a folder"),
        (["--plot", "old.svg"], "--plot old.svg exists: name another output, or add --force"),
    ],
)
def test_bad_input_is_a_one_line_error_before_loading(flags, what, seen, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    Path("old.svg").touch()
    assert what in refusal(*BENCH, *flags)
    assert seen == {}


def test_without_matplotlib_the_error_says_how_to_install_it(seen, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refusal(*BENCH, "--plot", tmp_path / "x.png", code=5)
    assert error.startswith("gpt-cli: error: --plot needs matplotlib (")
    assert error.endswith("): pip install matplotlib\n")
    assert seen == {}


@pytest.mark.parametrize("command", [["bench", "--plot"], ["show", "attention", "Once", "--png"]])
def test_threads_are_set_before_matplotlib_imports_numpy(command, thread_variables, tmp_path):
    def import_module(name):
        raise ImportError(os.environ["GPT_CLI_THREADS"])

    thread_variables.setattr("gpt_cli.errors.import_module", import_module)
    error = refusal(*command, tmp_path / "x.png", "--threads", "3", code=5)
    assert "needs matplotlib (3): " in error


# --- the picture ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "beginning"),
    [("a.png", b"\x89PNG\r\n\x1a\n"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")],
)
def test_the_ending_chooses_the_format_of_the_picture(seen, name, beginning, capfd, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / name
    file.touch()
    assert app.run([*BENCH, "--force", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(beginning)
    printed = capfd.readouterr()
    assert LEGEND_ON in printed.out
    assert printed.err == ""


def test_the_picture_shows_both_curves_with_labels(benchmark, monkeypatch, tmp_path):
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure,
        "savefig",
        lambda figure, *args, **options: drawn.append(figure) or save(figure, *args, **options),
    )
    bench_format.draw(replace(after_a_slow_token(benchmark), model="a $model$"), tmp_path / "x.png")
    (figure,) = drawn
    (axes,) = figure.axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert list(curves) == [LEGEND_OFF, LEGEND_ON]
    for label, mode in ((LEGEND_OFF, benchmark.cache_off), (LEGEND_ON, benchmark.cache_on)):
        milliseconds = [1000 * seconds for seconds in mode.token_s]
        assert curves[label] == [
            [*pair] for pair in zip(benchmark.positions, milliseconds, strict=True)
        ]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [*curves]
    assert [text.get_text() for text in axes.texts] == ["cache off", "cache on"]
    assert figure.get_suptitle() == (
        "a $model$, 120 tokens after a prompt of 32, 2 rows side by side: time for each token"
    )
    assert "tokens" in axes.get_xlabel()
    assert "milliseconds" in axes.get_ylabel()
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_after_the_table(seen, capfd, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "full.png"
    file.symlink_to("/dev/full")
    assert app.run([*BENCH, "--plot", str(file)]) == 5
    printed = capfd.readouterr()
    assert printed.out.endswith("All ids agree.\n")
    assert printed.err == f"gpt-cli: error: cannot write {file}: No space left on device\n"
