"""The machine, its files and the process; nothing here is specific to GPT-2."""
