"""The commands of `gpt-cli show`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpt_cli.atomic import check_file, write_file
from gpt_cli.cli import options as flags
from gpt_cli.cli.examples import epilog
from gpt_cli.cli.text import note, read_prompt, write
from gpt_cli.errors import InputError

if TYPE_CHECKING:
    from gpt_cli.cli.show.views import View

Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page to be explored in a browser."),
]
Png = Annotated[
    Path | None, typer.Option("--png", metavar="FILE", help="Draw a picture (matplotlib).")
]
Prompt = Annotated[
    str | None,
    typer.Argument(metavar="[PROMPT]", help="The text; without it, what comes through a pipe."),
]

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
def attention(
    prompt: Prompt = None,
    layer: Annotated[
        int | None, typer.Option("--layer", "-l", metavar="L", help="Only this layer, from 0.")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="H", help="Only this head of it, from 0.")
    ] = None,
    file: flags.PromptFile = None,
    special: flags.Special = False,
    html: Html = None,
    png: Png = None,
    model: flags.Model = "gpt2",
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Show what each token takes from those before it.

    A row is a token, and its blocks are the tokens that it looks at. Without --layer it is the
    mean of all heads, with a list of those that are worth a look; with it that of a layer, and
    with --head as well the attention of one head.
    """
    if head is not None and layer is None:
        raise InputError("--head is a head of a layer: give --layer, too")
    text = _prepare(prompt, file, threads, html, png)
    import gpt_cli
    from gpt_cli.cli.show import views

    engine = gpt_cli.load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
    )
    view = views.attention(engine, text, layer, head, special=special)
    _deliver(view, html, png, as_json=as_json, quiet=quiet)


@show.command(epilog=epilog("show lens"))
def lens(
    prompt: Prompt = None,
    top: Annotated[
        int,
        typer.Option(
            "--top",
            "-k",
            metavar="N",
            min=1,
            max=100,  # of each token of the prompt, in each layer
            help="How many tokens of each layer; text and pictures have as many as fit.",
        ),
    ] = 5,
    file: flags.PromptFile = None,
    special: flags.Special = False,
    html: Html = None,
    png: Png = None,
    model: flags.Model = "gpt2",
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Show the next token as each layer would predict it.

    Each layer's state goes through the last layer norm and the head, as if the model ended there
    (the "logit lens"). The page and the JSON have it after each token of PROMPT.
    """
    text = _prepare(prompt, file, threads, html, png)
    import gpt_cli
    from gpt_cli.cli.show import views

    engine = gpt_cli.load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
    )
    view = views.lens(engine, text, top, special=special)
    _deliver(view, html, png, as_json=as_json, quiet=quiet)


@show.command(epilog=epilog("show surprise"))
def surprise(
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="The text; without it, what comes through a pipe."),
    ] = None,
    file: flags.PromptFile = None,
    html: Html = None,
    png: Png = None,
    model: flags.Model = "gpt2",
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Show how surprising each token of TEXT is.

    Bits are minus the logarithm of the probability, to base 2: 1 bit is a chance of one half, 10
    bits one in a thousand.
    """
    given = _prepare(text, file, threads, html, png)
    import gpt_cli
    from gpt_cli.cli.show import views

    engine = gpt_cli.load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
    )
    _deliver(views.surprise(engine, given), html, png, as_json=as_json, quiet=quiet)


@show.command(epilog=epilog("show tree"))
def tree(
    prompt: Prompt = None,
    top: Annotated[
        int,
        # More are no help to the eye, and a tree may be as deep as it has continuations.
        typer.Option("--top", "-k", metavar="N", min=1, max=200, help="How many continuations."),
    ] = 20,
    file: flags.PromptFile = None,
    special: flags.Special = False,
    html: Html = None,
    png: Png = None,
    model: flags.Model = "gpt2",
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Show the likeliest continuations of PROMPT, as a tree.

    They are of all lengths: a long continuation is there if it is, as a whole, likelier than every
    shorter one that was left out. The percentages are the chance of a token after those before it,
    and the chance of all since PROMPT.
    """
    text = _prepare(prompt, file, threads, html, png)
    import gpt_cli
    from gpt_cli.cli.show import views

    engine = gpt_cli.load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
    )
    view = views.tree(engine, text, top, special=special)
    _deliver(view, html, png, as_json=as_json, quiet=quiet)


def _prepare(
    prompt: str | None, file: Path | None, threads: int | None, html: Path | None, png: Path | None
) -> str:
    """Return the text, after checking the options; after this NumPy may be imported."""
    from gpt_cli.cli import plot

    if html is not None:
        check_file("--html", html, (".html", ".htm"))
    if png is not None:
        check_file("--png", png, (".png",))
        plot.check_library("--png")
    text = read_prompt(prompt, file)
    flags.prepare(threads)
    return text


def _deliver(
    view: "View", html: Path | None, png: Path | None, *, as_json: bool, quiet: bool
) -> None:
    """Print a view, or else write the files that are wanted of it."""
    from gpt_cli import records

    files = {}
    if html is not None:
        from gpt_cli.cli.show.page import page

        files[html] = page(view).encode()
    if png is not None:
        from gpt_cli.cli.show.picture import picture

        files[png] = picture(view)
    for file, data in files.items():
        write_file(file, data)
    if as_json:
        write(records.json_line(view.record()))
    elif not files:
        from gpt_cli.cli.show.terminal import print_view

        print_view(view)
    elif not quiet:
        note(*(f"gpt-cli: wrote {file}" for file in files))
