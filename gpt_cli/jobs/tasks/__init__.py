"""What can be computed for rows: a task in each module, which `gpt_cli.jobs` exports."""
