"""Record `docs/pictures/terminal.svg`: commands in a terminal, as an animated SVG.

    pip install ".[docs]"
    python tools/record.py

The commands are typed slowly and run by bash on a pseudo-terminal. Their output appears at the real
speed, but long waits are shortened. pyte emulates the terminal. All versions of a row are parts of
the SVG, and CSS shows them for the time that they were on the screen, first the last ones. This
needs no script, so it also works in an <img>. With reduced motion, the last screen stays.
"""

import os
import pty
import re
import subprocess
import sys
import tempfile
import termios
import time
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char

OUT = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "terminal.svg"

# Commands, and the seconds that their output is shown before the next command.
COMMANDS = [
    ('gpt-cli generate -m tiny --echo -s 2 -n 100 "Once upon a time"', 4.0),
    ('gpt-cli next -m tiny -k 5 "One cold morning, a"', 3.0),
    ("cat lines.txt", 1.5),
    ("gpt-cli score -m tiny --max-perplexity 100 lines.txt", 2.0),
    ('gpt-cli show surprise -m tiny "Once upon a time, there was a tractor."', 4.0),
]
LINES = """\
Once upon a time, there was a little girl who loved the moon.
moon the loved who girl little a was there time, a upon Once.
The moon was round and silver.
"""

PROMPT = b"\x1b[1;32m$\x1b[0m "
COLUMNS, ROWS = 80, 26
KEY = 0.04  # seconds to type a character
LONGEST_WAIT = 0.6  # seconds; longer waits are shortened to this
FRAME = 1 / 15  # seconds; only the last state within a frame is shown
PAUSE = 4.0  # seconds of the last screen, with which the animation begins

CELL, LINE, MARGIN = 8.4, 19, 16  # pixels
FONT = "14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
HIDDEN, VISIBLE = "{visibility:hidden}", "{visibility:visible}"
BACKGROUND, FOREGROUND = "#161b22", "#e6edf3"
SECOND = "\0"  # stands for the second cell of a wide character
BLOCKS = "▏▎▍▌▋▊▉█"
COLOURS = {
    "default": FOREGROUND,
    "black": "#484f58", "brightblack": "#6e7681",
    "red": "#ff7b72", "brightred": "#ffa198",
    "green": "#3fb950", "brightgreen": "#56d364",
    "brown": "#d29922", "brightbrown": "#e3b341",  # pyte's names for yellow
    "blue": "#58a6ff", "brightblue": "#79c0ff",
    "magenta": "#bc8cff", "brightmagenta": "#d2a8ff",
    "cyan": "#39c5cf", "brightcyan": "#56d4dd",
    "white": "#b1bac4", "brightwhite": "#ffffff",
}  # fmt: skip


def run(command: str, folder: Path) -> Iterator[tuple[float, bytes]]:
    """Run a command on a pseudo-terminal; yield waits in seconds, and output."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # finds gpt-cli
    env = {"PATH": path, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    env["COLUMNS"] = str(COLUMNS)
    process = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],  # noqa: S607
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | env,
        cwd=folder,
    )
    os.close(theirs)
    last = time.monotonic()
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux raises it at the end of the output
            data = b""
        if not data:
            break
        now = time.monotonic()
        yield now - last, data
        last = now
    os.close(ours)
    if process.wait():
        sys.exit(f"exit code {process.returncode}: {command}")


def record(commands: list[tuple[str, float]], folder: Path) -> list[tuple[float, list[str]]]:
    """Return the screens as parts of an SVG, with their start times; the last one is the end."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    frames: dict[int, list[str]] = {}
    now = 0.0

    def feed(seconds: float, data: bytes) -> None:
        nonlocal now
        now += min(seconds, LONGEST_WAIT)
        stream.feed(data)
        frames[round(now / FRAME)] = parts(screen)

    feed(0, PROMPT)
    now += 1.0
    for command, pause in commands:
        for key in command:
            feed(KEY, key.encode())
        feed(0.3, b"\r\n")
        for seconds, data in run(command, folder):
            feed(seconds, data)
        feed(0, PROMPT)
        now += pause
    return [(number * FRAME, frame) for number, frame in frames.items()] + [(now + PAUSE, [])]


def parts(screen: pyte.Screen) -> list[str]:
    """Return the rows of a screen and the cursor."""
    rows = [row(y, [screen.buffer[y][x] for x in range(COLUMNS)]) for y in range(ROWS)]
    cursor = rectangle(screen.cursor.x, screen.cursor.y, 1, FOREGROUND)
    return [part for part in [*rows, cursor] if part]


def row(y: int, cells: list[Char]) -> str:
    """Return a row, in which runs of words have explicit positions."""
    svg = ""
    x = 0
    # Characters beyond ASCII may come from another font, with another width.
    for (colour, behind, bold, is_ascii), group in groupby(cells, look):
        run = "".join(cell.data or SECOND for cell in group)
        if behind != BACKGROUND:
            svg += rectangle(x, y, len(run), behind)
        for words in re.finditer(r"\S+(?: \S+)*", run):
            start = x + words.start()
            if set(words[0]) <= set(BLOCKS):  # drawn as one, without seams
                eighths = sum(BLOCKS.index(block) + 1 for block in words[0])
                svg += rectangle(start, y, eighths / 8, colour)
                continue
            svg += f'<text x="{MARGIN + start * CELL:g}" y="{MARGIN + y * LINE + 14:g}"'
            svg += f' textLength="{len(words[0]) * CELL:g}"'
            svg += "" if is_ascii else ' lengthAdjust="spacingAndGlyphs"'
            svg += "" if colour == FOREGROUND else f' fill="{colour}"'
            svg += ' font-weight="bold"' if bold else ""
            svg += f">{escape(words[0].replace(SECOND, ''), quote=False)}</text>"
        x += len(run)
    return svg


def look(cell: Char) -> tuple[str, str, bool, bool]:
    """Return the colours of a cell, and whether it is bold and ASCII."""
    colour = COLOURS.get(cell.fg, f"#{cell.fg}")
    behind = BACKGROUND if cell.bg == "default" else COLOURS.get(cell.bg, f"#{cell.bg}")
    if cell.reverse:
        colour, behind = behind, colour
    return colour, behind, cell.bold, "" < cell.data < "\x80"


def rectangle(x: float, y: int, width: float, colour: str) -> str:
    """Return a coloured rectangle, `width` cells wide."""
    return (
        f'<rect x="{MARGIN + x * CELL:g}" y="{MARGIN + y * LINE:g}"'
        f' width="{width * CELL:g}" height="{LINE}" fill="{colour}"/>'
    )


def picture(frames: list[tuple[float, list[str]]]) -> str:
    """Return the SVG of the screens of `record`."""
    end = frames[-1][0]
    appeared: dict[str, float] = {}
    times: dict[tuple[float, float], str] = defaultdict(str)  # the parts from start to end
    for now, frame in frames:
        for part in [part for part in appeared if part not in frame]:
            times[appeared.pop(part), now] += part
        for part in frame:
            appeared.setdefault(part, now)
    width, height = 2 * MARGIN + COLUMNS * CELL, 2 * MARGIN + ROWS * LINE
    css = body = ""
    for number, ((start, stop), part) in enumerate(times.items()):
        steps = f"0%{HIDDEN}{start / end:.3%}{VISIBLE}"
        hidden = ""
        if stop < end:
            steps += f"{stop / end:.3%}{HIDDEN}"
            hidden = ' visibility="hidden"'  # with reduced motion
        css += f"@keyframes m{number}{{{steps}}}.m{number}{{animation-name:m{number}}}\n"
        body += f'<g class="m{number}"{hidden}>{part}</g>\n'
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" \
width="{width:g}" height="{height:g}" role="img">\
<title>gpt-cli in a terminal</title><style>
svg{{font:{FONT};fill:{FOREGROUND}}}
@media (prefers-reduced-motion:no-preference){{
g{{animation:{end:.2f}s step-end {PAUSE - end:.2f}s infinite}}
{css}}}
</style><rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>
{body}</svg>
"""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lines.txt").write_text(LINES, encoding="utf-8")
        svg = picture(record(COMMANDS, folder))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(svg, encoding="utf-8")
    print(f"{OUT.name}: {len(svg.encode()) / 1000:.0f} kB")
