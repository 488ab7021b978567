"""`python -m gpt_cli` is `gpt-cli`."""

from gpt_cli.cli.app import main

main()
