"""`gpt-cli serve`: answer requests over HTTP."""

import logging

from gpt_cli.cli import flags
from gpt_cli.cli.output import note
from gpt_cli.errors import ResourceError, counted
from gpt_cli.serve import Settings


def serve(*, settings: Settings, loading: flags.Serving) -> None:
    """Serve models over HTTP, as OpenAI's completions and embeddings, with a page at /.

    Load each model once, and answer requests side by side until SIGTERM or Ctrl+C.

    Examples:
        gpt-cli serve -m gpt2 -m distilgpt2@int8 --unix-socket gpt.sock
        GPT_CLI_API_KEY=... gpt-cli serve -m gpt2 --host 0.0.0.0
        gpt-cli serve -m gpt2 --api-key-file keys.txt --trusted-proxy 127.0.0.1
    """
    settings.check_models(len(loading.models))
    try:
        import prometheus_client  # noqa: F401 (needed after the model is loaded)

        from gpt_cli.serve import run
    except ImportError as error:
        packages = "uvicorn starlette prometheus-client"
        raise ResourceError(f"serve needs a web server ({error}): pip install {packages}") from None

    if settings.access_log:  # `run` writes lines of JSON, and all messages become such lines
        from gpt_cli.serve.front.log import JsonFormatter

        for handler in (logging.lastResort, *logging.getLogger().handlers):
            if handler:
                handler.setFormatter(JsonFormatter())
        run(loading.load_all, settings)
        return

    def show_wait(requests: int) -> None:
        note(
            f"gpt-cli: draining: waiting for {counted(requests, 'request')}, up to "
            f"{settings.grace:g} s; a second signal or Ctrl+C ends the server at once"
        )

    def show_cut(requests: int) -> None:
        ending = "was" if requests == 1 else "were"
        note(f"gpt-cli: {counted(requests, 'request')} {ending} cut off")

    def show_address(url: str) -> None:
        note(f"gpt-cli: listening on {url}")

    def show_keys(keys: int) -> None:
        note(f"gpt-cli: read {counted(keys, 'key')} from {settings.api_key_file}")

    run(loading.load_all, settings, show_address, show_wait, show_cut, show_keys)
