"""Calls that mypy must accept, or refuse where a comment ignores an error: see `make check`."""

import gpt_cli


def calls(engine: gpt_cli.Engine) -> None:
    engine.generate(["a"], temperature=1, stop=".", logit_bias={1: -100}, seed=None)
    engine.generate(["a"], temperatur=1)  # type: ignore[call-arg]
    engine.stream("a", max_tokens="many")  # type: ignore[arg-type]
    engine.score("a", stride=None, bos=True, words=True)
    engine.score("a", word=True)  # type: ignore[call-arg]
    engine.score("a", stride="1")  # type: ignore[arg-type]
    direction = engine.vector(["a", "b"], ["c", "d"], "hook_embed")
    engine.with_edits(["hook_embed=0", gpt_cli.Edit("hook_embed", [1.0], slice(2)), direction])
    engine.generate(["a"], edits=[2.5 * direction, -direction])
    engine.generate(["a"], edits=[2.5])  # type: ignore[list-item]
    engine.with_hooks({"hook_embed": lambda value, positions: value * 2})
    engine.with_hooks({"hook_embed": lambda value: value})  # type: ignore[dict-item, misc]
