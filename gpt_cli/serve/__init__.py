"""A server: OpenAI's completions and embeddings over HTTP, by one loaded model or several.

    serve.run(gpt_cli.load("gpt2"), serve.Settings(port=8080))
    serve.run({"small": gpt_cli.load("distilgpt2"), "large": gpt_cli.load("gpt2-large")})

Requests in files are answered without a server:

    jobs.run(serve.Requests(), "requests.jsonl", "answers.jsonl", model="gpt2")

The names below are imported on first use.
"""

from typing import TYPE_CHECKING

from gpt_cli import on_first_use

if TYPE_CHECKING:
    from gpt_cli.serve.requests import Requests
    from gpt_cli.serve.server import run
    from gpt_cli.serve.settings import Settings

__all__ = ["Requests", "Settings", "run"]
__getattr__, __dir__ = on_first_use(__name__, "settings", "requests", "server")
