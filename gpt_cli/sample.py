"""The sample text: the prompt of `bench`, and the input whose results `verify` compares."""

TEXT = (
    "A librarian once copied a long book by hand. Before each new word she went back to the first "
    "page and read everything again, and so the work became slower and slower. Then a child gave "
    'her a notebook. "Write down what you learn from each page," said the child, "and you need not '
    'read it twice." From that day on, the last word took no longer than the first, and the book '
    "was finished before the winter came.\n"
)
