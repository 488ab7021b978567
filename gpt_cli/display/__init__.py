"""Show results: as a line, a record, a picture in a notebook, or a page of `gpt-cli show`."""
