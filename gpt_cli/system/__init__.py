"""The machine, files and the process: what does not know GPT-2."""
