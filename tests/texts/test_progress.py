"""Bars of progress: nothing by default, and what has been computed if they are wanted."""

import re

import pytest

HOOK = "ln_final.hook_normalized"
PROMPT = "The moon was round and"
SETS = ["Good", "Fine"], ["Bad", "Sad", "Poor"]
ROWS = [(PROMPT, [" silver", " golden"]), ("The fire was", [" hot", " cold", " red"])]
LONG = "the moon " * 1500  # 3002 tokens
CALLS = {
    "generate": (
        lambda e, how: e.generate(["a", "b"], max_tokens=5, seed=1, ignore_eos=True, **how),
        10,
    ),
    "batch": (lambda e, how: list(e.batch(iter([{"prompt": "a", "seed": 1}] * 2), **how)), 2),
    "score": (lambda e, how: e.score(LONG, **how), 1 + -(-(3002 - 512) // 256)),  # windows
    "score_many": (lambda e, how: e.score_many(["a moon"] * 9 + ["a", ""], **how), 9),
    "layers": (lambda e, how: e.score_many(["a moon"] * 9, layers=True, words=True, **how), 9),
    "rank_many": (lambda e, how: e.rank_many(ROWS, **how), 2 + 5),
    "calibrated": (lambda e, how: e.rank_many(ROWS, calibrate="", **how), 2 * (2 + 5)),
    "activations": (lambda e, how: list(e.activations(["a", "b", "c"], [HOOK], **how)), 3),
    "vector": (lambda e, how: e.vector(*SETS, HOOK, **how), 5),
    "patch": (lambda e, how: e.patch(PROMPT, "A fox was round and", " silver", **how), 3 + 4 * 5),
    "ablate": (lambda e, how: e.ablate(PROMPT, " silver", **how), 1 + 4 * (4 + 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bar_counts_what_is_computed(name, tiny, capsys):
    call, count = CALLS[name]
    quiet = call(tiny, {})
    assert capsys.readouterr().err == ""
    assert str(call(tiny, {"progress": True}))[:40] == str(quiet)[:40]
    last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
    assert re.match(rf"{count}token \[|100%.*\| {count}/{count} \[|{count}row \[", last), last
    assert tiny.score("a moon").ids  # counts in no bar any more
