"""Examples at the end of the help of each command."""

_EXAMPLES = {
    "generate": [
        "gpt-cli generate -m tiny 'Once upon a time'",
        "echo 'Once upon a time' | gpt-cli generate -m tiny --seed 1 --echo",
        "gpt-cli generate -m tiny --samples 3 --json 'Every day, the fox'",
    ],
    "batch": [
        r"printf 'Once\nThe fox\n' | gpt-cli batch -m tiny -n 20",
        r"printf 'Once\nThe fox\n' | gpt-cli batch -m tiny -n 20 -o new.jsonl",
    ],
    "score": [
        "echo 'The fox was happy.' | gpt-cli score -m tiny",
        "echo 'The fox was happy.' | gpt-cli score -m tiny --tokens",
        r"printf 'The fox ran.\nFox ran the.\n' | gpt-cli score -m tiny --lines",
    ],
    "rank": ["gpt-cli rank -m tiny 'The fox was very' --choices happy,sad,stone"],
    "next": ["gpt-cli next -m tiny 'Every day, the fox' -k 5"],
    "bench": [
        "gpt-cli bench -m tiny -n 64",
        "gpt-cli bench -m tiny -n 32 --batch 4 --json",
    ],
    "tokenize": [
        "gpt-cli tokenize -m tiny 'Once upon a time'",
        "echo 'Once upon a time' | gpt-cli tokenize -m tiny --count",
    ],
    "detokenize": ["gpt-cli tokenize -m tiny 'Once' | gpt-cli detokenize -m tiny"],
    "download": [
        "gpt-cli download gpt2",
        "gpt-cli download distilgpt2 --to here",
    ],
    "quantize": [
        "gpt-cli quantize tiny -o tiny-int8",
        "gpt-cli quantize gpt2 -o gpt2-int8",
    ],
    "models": [
        "gpt-cli models",
        "gpt-cli models --json",
    ],
    "info": [
        "gpt-cli info tiny",
        "gpt-cli info gpt2 --json",
    ],
    "show attention": [
        "gpt-cli show attention -m tiny 'There was a girl named Emma.'",
        "gpt-cli show attention -m tiny --layer 1 --head 0 'A girl named Emma.'",
        "gpt-cli show attention -m tiny --html new.html 'A girl named Emma.'",
    ],
    "show lens": [
        "gpt-cli show lens -m tiny 'Every day, the fox'",
        "gpt-cli show lens -m tiny --html new.html 'Every day, the fox'",
    ],
    "show surprise": [
        "gpt-cli show surprise -m tiny 'The moon was round and hungry.'",
        "echo 'The moon was round.' | gpt-cli show surprise -m tiny --html new.html",
    ],
    "show tree": [
        "gpt-cli show tree -m tiny 'Once upon a time'",
        "gpt-cli show tree -m tiny -k 60 --html new.html 'Once upon a time'",
    ],
    "verify": ["gpt-cli verify tiny"],
    "doctor": ["gpt-cli doctor"],
}


def epilog(command: str) -> str:
    """Return the examples of a command for its help."""
    # After a backspace, click does not rewrap the lines of a paragraph.
    return "\n  ".join(["\b\nExamples:", *_EXAMPLES[command]])
