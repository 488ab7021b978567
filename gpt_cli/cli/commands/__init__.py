"""The commands, most of them in a module of their own: they parse, call and print."""
