"""The commands, most of them in a module of their own: they parse, call and print."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# The commands, in the order of the help, and the function of each in a module of this folder. A
# process imports only the module that it needs. `show` is a group of commands: `cli/show/`.
COMMANDS = {
    "generate": "generate.generate",
    "batch": "generate.batch",
    "serve": "serve.serve",
    "score": "score.score",
    "rank": "rank.rank",
    "next": "rank.next_tokens",
    "classify": "classify.classify",
    "compare": "checks.compare",
    "compress": "compress.compress",
    "decompress": "compress.decompress",
    "tokenize": "tokens.tokenize",
    "detokenize": "tokens.detokenize",
    "activations": "activations.activations",
    "vector": "vector.vector",
    "download": "models.download",
    "models": "models.models",
    "info": "models.info",
    "quantize": "models.quantize",
    "verify": "checks.verify",
    "bench": "checks.bench",
    "doctor": "checks.doctor",
    "help": "help.help_page",
}
NAMES = (*COMMANDS, "show")


def import_command(name: str) -> Callable[..., None]:
    """Import the module of a command; return the command's function."""
    module, function = COMMANDS[name].split(".")
    command: Any = getattr(import_module(f"gpt_cli.cli.commands.{module}"), function)
    return command
