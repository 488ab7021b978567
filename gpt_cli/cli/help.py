"""The help of commands: its layout, and the examples at its end."""

import shutil
from collections.abc import Callable, Sequence

import typer

from gpt_cli.cli.options import command as with_groups

# Each line is an example of its last command.
_EXAMPLES = r"""
gpt-cli generate -m tiny 'Once upon a time'
echo 'Once upon a time' | gpt-cli generate -m tiny --seed 1 --echo
gpt-cli generate -m tiny --samples 3 --json 'Every day, the fox'
printf 'Once\nThe fox\n' | gpt-cli batch -m tiny -n 20
printf 'Once\nThe fox\n' | gpt-cli batch -m tiny -n 20 -o new.jsonl
echo 'The fox was happy.' | gpt-cli score -m tiny
echo 'The fox was happy.' | gpt-cli score -m tiny --tokens
printf 'The fox ran.\nFox ran the.\n' | gpt-cli score -m tiny --lines
gpt-cli rank -m tiny 'The fox was very' --choices happy,sad,stone
gpt-cli next -m tiny 'Every day, the fox' -k 5
gpt-cli bench -m tiny -n 64
gpt-cli bench -m tiny -n 32 --batch 4 --json
gpt-cli tokenize -m tiny 'Once upon a time'
echo 'Once upon a time' | gpt-cli tokenize -m tiny --count
gpt-cli tokenize -m tiny 'Once' | gpt-cli detokenize -m tiny
gpt-cli download gpt2
gpt-cli download distilgpt2 --to here
gpt-cli quantize tiny -o tiny-int8
gpt-cli quantize gpt2 -o gpt2-int8
gpt-cli models
gpt-cli models --json
gpt-cli info tiny
gpt-cli info gpt2 --json
gpt-cli show attention -m tiny 'There was a girl named Emma.'
gpt-cli show attention -m tiny --layer 1 --head 0 'A girl named Emma.'
gpt-cli show attention -m tiny --html new.html 'A girl named Emma.'
gpt-cli show lens -m tiny 'Every day, the fox'
gpt-cli show lens -m tiny --html new.html 'Every day, the fox'
gpt-cli show surprise -m tiny 'The moon was round and hungry.'
echo 'The moon was round.' | gpt-cli show surprise -m tiny --html new.html
gpt-cli show tree -m tiny 'Once upon a time'
gpt-cli show tree -m tiny -k 60 --html new.html 'Once upon a time'
gpt-cli verify tiny
gpt-cli doctor
"""


def add_command(app: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Add a command, such as `show tree`, with its help and examples."""
    ends = {line: f"{line} ".rpartition("gpt-cli ")[2] for line in _EXAMPLES.splitlines()}
    examples = [line for line, end in ends.items() if end.startswith(f"{name} ")]
    # After a backspace, typer does not rewrap the lines of a paragraph.
    epilog = "\n  ".join(["\b\nExamples:", *examples])
    # A given short help is wrapped; without one, typer would cut the docstring.
    short_help = (function.__doc__ or "").partition("\n")[0]
    app.command(name.split()[-1], epilog=epilog, short_help=short_help)(with_groups(function))


class HelpFormatter(typer.Context.formatter_class):  # type: ignore[valid-type,misc]
    """A formatter for narrow terminals: typer's needs 50 columns, and 30 of them for names."""

    def __init__(self, **limits: int | None):
        columns = shutil.get_terminal_size().columns
        super().__init__(width=max(min(columns, 80), 20) - 2)

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write names and their descriptions in two columns."""
        super().write_dl(rows, 30 if self.width >= 60 else 12)
