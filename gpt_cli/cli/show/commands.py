"""The commands of `gpt-cli show`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpt_cli.atomic import check_file, write_file
from gpt_cli.cli import options as flags
from gpt_cli.cli.examples import epilog
from gpt_cli.cli.inputs import read_prompt
from gpt_cli.cli.streams import note, write
from gpt_cli.declare import PATH, Declared, option
from gpt_cli.errors import InputError

if TYPE_CHECKING:
    from gpt_cli.cli.show.views import View

Prompt = Annotated[
    str | None,
    typer.Argument(metavar="[PROMPT]", help="The text; if not given, from a pipe."),
]


@dataclass(kw_only=True, eq=False, repr=False)
class Output(Declared):
    """The forms of output of a view."""

    html: Path | None = option(
        None, "Write an interactive page for a browser.", kind=PATH, metavar="FILE"
    )
    png: Path | None = option(None, "Draw a picture (matplotlib).", kind=PATH, metavar="FILE")
    as_json: bool = option(False, "Print JSON.", flag="--json")

    def check(self) -> None:
        """Raise InputError if a file cannot be written, before a model is loaded."""
        from gpt_cli.cli import plot

        if self.html is not None:
            check_file("--html", self.html, (".html", ".htm"))
        if self.png is not None:
            check_file("--png", self.png, (".png",))
            plot.check_library("--png")

    def deliver(self, view: "View", *, quiet: bool) -> None:
        """Write the files of a view, or else print it."""
        files = {}
        if self.html is not None:
            from gpt_cli.cli.show.page import page

            files[self.html] = page(view).encode()
        if self.png is not None:
            from gpt_cli.cli.show.picture import picture

            files[self.png] = picture(view)
        for file, data in files.items():
            write_file(file, data)
        if self.as_json:
            from gpt_cli import records

            write(records.json_line(view.record()))
        elif not files:
            from gpt_cli.cli.show.terminal import print_view

            print_view(view)
        elif not quiet:
            note(*(f"gpt-cli: wrote {file}" for file in files))


show = typer.Typer(
    help="Show what happens inside the model.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@show.callback(invoke_without_command=True)
def _list(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@show.command(epilog=epilog("show attention"))
@flags.command
def attention(
    prompt: Prompt = None,
    *,
    layer: Annotated[
        int | None, typer.Option("--layer", "-l", metavar="L", help="Only this layer, from 0.")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="H", help="Only this head of it, from 0.")
    ] = None,
    file: flags.PromptFile = None,
    special: flags.Special = False,
    output: Output,
    loading: flags.Loading,
) -> None:
    """Show how much each token attends to those before it.

    A row is a token, and its blocks are the tokens that it attends to. Without --layer it is the
    mean of all heads, with a list of notable heads; with --layer the mean of that layer; with
    --head, too, the attention of one head.
    """
    if head is not None and layer is None:
        raise InputError("--head needs --layer")
    output.check()
    text = read_prompt(prompt, file)
    engine = loading.load()
    from gpt_cli.cli.show import views

    view = views.attention(engine, text, layer, head, special=special)
    output.deliver(view, quiet=loading.quiet)


@show.command(epilog=epilog("show lens"))
@flags.command
def lens(
    prompt: Prompt = None,
    *,
    top: Annotated[
        int,
        typer.Option(
            "--top",
            "-k",
            metavar="N",
            min=1,
            max=100,  # of each token of the prompt, in each layer
            help="Number of tokens per layer; text and pictures show as many as fit.",
        ),
    ] = 5,
    file: flags.PromptFile = None,
    special: flags.Special = False,
    output: Output,
    loading: flags.Loading,
) -> None:
    """Show the next token as each layer would predict it.

    The state of each layer goes through the last layer norm and the head, as if the model ended
    there (the "logit lens"). The page and the JSON have it after each token of PROMPT.
    """
    output.check()
    text = read_prompt(prompt, file)
    engine = loading.load()
    from gpt_cli.cli.show import views

    output.deliver(views.lens(engine, text, top, special=special), quiet=loading.quiet)


@show.command(epilog=epilog("show surprise"))
@flags.command
def surprise(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="The text; if not given, from a pipe."),
    ] = None,
    *,
    file: flags.PromptFile = None,
    output: Output,
    loading: flags.Loading,
) -> None:
    """Show how surprising each token of TEXT is.

    Surprise is minus the logarithm of the probability to base 2, in bits: 1 bit is a probability of
    one half, 10 bits one in a thousand.
    """
    output.check()
    given = read_prompt(text, file)
    engine = loading.load()
    from gpt_cli.cli.show import views

    output.deliver(views.surprise(engine, given), quiet=loading.quiet)


@show.command(epilog=epilog("show tree"))
@flags.command
def tree(
    prompt: Prompt = None,
    *,
    top: Annotated[
        int,
        # More do not help the eye, and a tree may be as deep as it has continuations.
        typer.Option("--top", "-k", metavar="N", min=1, max=200, help="Number of continuations."),
    ] = 20,
    file: flags.PromptFile = None,
    special: flags.Special = False,
    output: Output,
    loading: flags.Loading,
) -> None:
    """Show the likeliest continuations of PROMPT, as a tree.

    They have all lengths: a long continuation is shown if, as a whole, it is likelier than every
    shorter one that was left out. The percentages are the probability of a token given those before
    it, and the probability of all tokens since PROMPT.
    """
    output.check()
    text = read_prompt(prompt, file)
    engine = loading.load()
    from gpt_cli.cli.show import views

    output.deliver(views.tree(engine, text, top, special=special), quiet=loading.quiet)
