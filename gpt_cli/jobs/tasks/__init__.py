"""The tasks for rows, one in each module. `gpt_cli.jobs` exports them."""
