"""The commands of `gpt-cli show`."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import typer

from gpt_cli.cli import flags, inputs
from gpt_cli.cli.files import check_file, check_picture
from gpt_cli.cli.help import EXAMPLES, add_command
from gpt_cli.cli.output import note, write
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.options.declare import Declared, between, option
from gpt_cli.system.atomic import write_file
from gpt_cli.system.startup import prepare


def _refuse_picture(context: typer.Context, file: str | None) -> str | None:
    """Raise InputError for --png of a view that is a text."""
    if file is not None:
        name = context.info_name
        raise InputError(f"--png: show {name} has no picture: use --html FILE, or its text")
    return file


WORDS = flags.text_argument("[PROMPT]...", "Text to show")


@dataclass(kw_only=True, eq=False, repr=False)
class Output(Declared):
    """The options that all views have. Only a `PictureOutput` draws pictures."""

    special: bool = flags.SPECIAL
    html: Path | None = option(None, "Write an interactive web page.", metavar="FILE")
    open_page: bool = option(
        False, "Open the page in a browser; without --html, from a temporary file.", flag="--open"
    )
    png: Path | None = option(None, "Not for a text.", callback=_refuse_picture, hidden=True)
    force: bool = flags.FORCE
    as_json: bool = flags.JSON

    def show_prompt(
        self,
        name: str,
        words: list[str] | None,
        file: str | None,
        loading: flags.Loading,
        **details: Any,
    ) -> None:
        """Compute a view of a prompt: see `show`."""
        self.check(loading)
        self.show(name, inputs.read_prompt(words, file, quiet=loading.quiet), loading, **details)

    def check(self, loading: flags.Loading) -> None:
        """Check the names of files before anything is read or computed."""
        prepare(loading.threads)
        if self.html is not None:
            check_file("--html", self.html, (".html", ".htm"), force=self.force)
        if self.png is not None:
            check_picture("--png", self.png, force=self.force)

    def show(
        self, name: str, prompt: str | list[str], loading: flags.Loading, **details: Any
    ) -> None:
        """Compute a view of a prompt, or of two, and write its files or print it."""
        texts = [prompt] if isinstance(prompt, str) else prompt
        page = loading.load().show(name, *texts, special=self.special, **details)
        view: Any = page.view
        files = {}
        html = self.html
        if html is None and self.open_page:
            html = Path(mkdtemp(prefix="gpt-cli-")) / f"{name}.html"
        if html is not None:
            files[html] = page.html.encode()
        if self.png is not None:
            from gpt_cli.cli.show.picture import picture

            files[self.png] = picture(view, self.png)
        for file, data in files.items():
            write_file(file, data, replace=self.force)
        if self.as_json:
            for piece in view.json():
                write(piece)
        elif not files:
            from gpt_cli.cli.show.terminal import print_view

            print_view(view)
        elif not loading.quiet:
            note(*(f"gpt-cli: wrote {file}" for file in files))
        if html is not None and self.open_page:
            _open(html)


def _open(page: Path) -> None:
    """Show a page in a browser; raise ResourceError if there is none."""
    import webbrowser  # few commands need it

    if not webbrowser.open(page.absolute().as_uri()):
        raise ResourceError(f"--open: there is no browser here; the page is {page}")


@dataclass(kw_only=True, eq=False, repr=False)
class PictureOutput(Output):
    """The options of a view that is a map of numbers."""

    png: Path | None = option(
        None, "Write a picture: .png, .svg or .pdf (matplotlib).", metavar="FILE"
    )


@dataclass(kw_only=True, eq=False, repr=False)
class Answers(Declared):
    """The answers whose logits are the measure."""

    answer: str = option(
        ..., "The answer: one token, such as ' Leo'; words begin with their space.", metavar="TOKEN"
    )
    wrong: str | None = option(
        None, "A wrong answer: the logit of --answer minus this one's counts.", metavar="TOKEN"
    )


show = typer.Typer(
    help="Show what happens inside the model.",
    epilog=f"{EXAMPLES}  gpt-cli show surprise -m tiny 'The moon was round and hungry.'",
    rich_markup_mode=None,
)


@show.callback(invoke_without_command=True)
def _list(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def attention(
    words: list[str] | None = WORDS,
    *,
    layer: int | None = option(
        None, "Layer to show, counted from 0; all if not set.", aliases=("-l",), metavar="L"
    ),
    head: int | None = option(
        None, "Head to show, counted from 0; all if not set.", metavar="H", needs="--layer"
    ),
    file: str | None = flags.PROMPT_FILE,
    output: PictureOutput,
    loading: flags.Loading,
) -> None:
    """Show how much tokens attend to the tokens before them.

    A row is a token; the cells of the row are the tokens that it attends to. The default is the
    mean of all heads, with a list of notable heads. --layer shows the mean of one layer; --layer
    with --head shows one head.

    Examples:
        gpt-cli show attention -m tiny 'There was a girl named Emma.'
        gpt-cli show attention -m tiny --layer 1 --head 0 'A girl named Emma.'
        gpt-cli show attention -m tiny --open 'A girl named Emma.'
    """
    output.show_prompt("attention", words, file, loading, layer=layer, head=head)


def lens(
    words: list[str] | None = WORDS,
    *,
    top: int = option(
        5,
        "Number of tokens per layer; text shows those that fit.",
        between(1, 100),  # per token of the prompt and layer
        aliases=("-k",),
    ),
    file: str | None = flags.PROMPT_FILE,
    output: Output,
    loading: flags.Loading,
) -> None:
    """Show the next token that each layer would predict.

    The output of a layer goes through the final layer norm and the output matrix, as if the model
    ended there (the "logit lens"). The page and the JSON show the predictions after every token of
    PROMPT.

    Examples:
        gpt-cli show lens -m tiny 'Every day, the fox'
        gpt-cli show lens -m tiny --html new.html 'Every day, the fox'
    """
    output.show_prompt("lens", words, file, loading, count=top)


def surprise(
    words: list[str] | None = WORDS,
    *,
    file: str | None = flags.PROMPT_FILE,
    bos: bool = flags.BOS,
    output: Output,
    loading: flags.Loading,
) -> None:
    """Show how surprising the tokens of PROMPT are.

    Surprise is the negative base-2 logarithm of the probability, in bits: 1 bit is a probability of
    1/2, and 10 bits is about 1/1000. Tokens that form one character are shown as one, with the sum
    of their bits.

    Examples:
        gpt-cli show surprise -m tiny 'The moon was round and hungry.'
        echo 'The moon was round.' | gpt-cli show surprise -m tiny --html new.html
    """
    output.show_prompt("surprise", words, file, loading, bos=bos)


def tree(
    words: list[str] | None = WORDS,
    *,
    # More are hard to read, and a tree may be as deep as it has continuations.
    top: int = option(20, "Number of continuations.", between(1, 200), aliases=("-k",)),
    file: str | None = flags.PROMPT_FILE,
    output: Output,
    loading: flags.Loading,
) -> None:
    """Show the likeliest continuations of PROMPT as a tree.

    Continuations may have any length. The percentages are the probability of the token after those
    before it, and of the whole path from PROMPT.

    Examples:
        gpt-cli show tree -m tiny 'Once upon a time'
        gpt-cli show tree -m tiny -k 60 --html new.html 'Once upon a time'
    """
    output.show_prompt("tree", words, file, loading, count=top)


def attribution(
    words: list[str] | None = WORDS,
    *,
    file: str | None = flags.PROMPT_FILE,
    answers: Answers,
    output: PictureOutput,
    loading: flags.Loading,
) -> None:
    """Show what each head and MLP adds to the logit of an answer.

    The logit is that of the token after PROMPT, or the difference of two with --wrong. The scale of
    the final layer norm is held. A row is a layer; attn is the sum of its heads and their bias.

    Examples:
        gpt-cli show attribution -m tiny --answer ' moon' 'Emma looked at the'
    """
    output.show_prompt("attribution", words, file, loading, **vars(answers))


def patch(
    clean: str = typer.Argument(metavar="CLEAN", help="Text with the activations to patch in."),
    corrupt: str = typer.Argument(metavar="CORRUPT", help="Text of as many tokens."),
    *,
    what: Literal["resid_pre", "attn_out", "mlp_out", "z"] = option(
        "resid_pre",
        "Activations to patch: of each token in each layer; with z, of each head in each layer.",
    ),
    answers: Answers,
    output: PictureOutput,
    loading: flags.Loading,
) -> None:
    """Show which activations carry an answer from one text into another.

    One activation of CLEAN at a time replaces that of CORRUPT. Its value is the share of the logit
    of the answer, or of the difference of two with --wrong, that this recovers: 0 as after CORRUPT,
    1 as after CLEAN.

    Examples:
        gpt-cli show patch -m tiny --answer ' moon' 'She saw the' 'She ate the'
    """
    output.check(loading)
    output.show("patch", [clean, corrupt], loading, what=what, **vars(answers))


def ablate(
    words: list[str] | None = WORDS,
    *,
    file: str | None = flags.PROMPT_FILE,
    answers: Answers,
    output: PictureOutput,
    loading: flags.Loading,
) -> None:
    """Show how the logit of an answer changes without each head and MLP.

    The logit is that of the token after PROMPT, or the difference of two with --wrong. The output
    of one head (z) or of one MLP at a time is set to 0.

    Examples:
        gpt-cli show ablate -m tiny --answer ' moon' 'Emma looked at the'
    """
    output.show_prompt("ablate", words, file, loading, **vars(answers))


for command in (attention, lens, surprise, tree, attribution, patch, ablate):
    add_command(show, command.__name__, command)
