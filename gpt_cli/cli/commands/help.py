"""`gpt-cli help`."""

import typer

from gpt_cli.cli.commands import NAMES

_TOPIC = typer.Argument(None, metavar="[TOPIC]", help="A page, such as models, or a command.")


def help_page(topic: str | None = _TOPIC) -> None:
    """Show a page of the guide, or the --help of a command that has no page.

    Without TOPIC, list the pages. In a pipe, a page is Markdown.

    Examples:
        gpt-cli help
        gpt-cli help generate
        gpt-cli help show tree
    """
    from gpt_cli.cli import guide  # it imports rich

    if topic is None:
        guide.list_topics()
    else:
        guide.show_page(topic, NAMES)
