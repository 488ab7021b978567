"""The methods of an engine that look inside its model: logits, activations, attribution, ..."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import InputError, compute_valid, single
from gpt_cli.folder.tokenizer import Tokenizer, check_bytes
from gpt_cli.generation import sampling
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.gpt2.edits import Bound, editor
from gpt_cli.gpt2.hooks import Hook, has_keys, select_hooks
from gpt_cli.gpt2.model import GPT2, hidden_states, unembed
from gpt_cli.gpt2.prefill import next_logits
from gpt_cli.gpt2.weights import Weights
from gpt_cli.options.arguments import checks_arguments
from gpt_cli.options.declare import AT_LEAST_1, OptionError, check
from gpt_cli.scoring.activations import (
    Pool,
    TextActivations,
    check_pool,
    text_activations,
)
from gpt_cli.scoring.attribution import (
    Ablation,
    Answers,
    Attribution,
    Patching,
    What,
    ablate,
    attribute,
    patch,
)
from gpt_cli.scoring.trace import Trace, trace
from gpt_cli.scoring.tree import Node, tree
from gpt_cli.scoring.vectors import Direction, VectorPool, direction
from gpt_cli.scoring.words import split_words


class Introspection:
    """The part of `Engine` that looks inside the model."""

    loaded: LoadedModel
    model: GPT2
    tokenizer: Tokenizer

    @cached_property
    def weights(self) -> Weights:
        """The weights by their names in the checkpoint: float32 copies in its layout."""
        return Weights(self.model)

    def start(self, *, bos: bool) -> list[int]:
        """Return the tokens before a text to score."""
        return [self.model.config.start_token("bos (--bos) is set")] if bos else self.loaded.start

    def _bounds(self, ids: Sequence[int]) -> list[Bound]:
        """Return the edits of all texts for one text."""
        return self.loaded.bound_edits((), len(ids), len(ids))

    def _editor(self, rows: Sequence[Sequence[int]]) -> Hook:
        """Return the editor of texts, as ids."""
        return editor([*map(self._bounds, rows)], self.model.ops)

    @checks_arguments()
    def logits(self, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the logits of the next token at all positions.

        Args:
            ids: (B, T) token ids, T from 1 to n_positions.

        Returns:
            (B, T, V) float32, on the host.
        """
        ops, config = self.model.ops, self.model.config
        if len({len(row) for row in ids}) != 1 or not 1 <= len(ids[0]) <= config.n_positions:
            raise InputError(f"all rows must have the same length, from 1 to {config.n_positions}")
        rows = np.array([config.check_ids(row) for row in ids])
        hook = self._editor(ids)
        x = hidden_states(self.model, ops.xp.asarray(rows), hook=hook)
        return ops.to_host(unembed(self.model, x, hook))

    @checks_arguments()
    def trace(self, text: str, *, special: bool = False) -> Trace:
        """Return the residual stream, the attention and the lens of a text."""
        ids = self.loaded.fitting_ids(text, special=special)
        return trace(self.model, ids, self._editor([ids]))

    @checks_arguments()
    def activations(
        self,
        texts: Iterable[str | Mapping[str, Any]],
        hooks: Sequence[str],
        *,
        pool: Pool | None = None,
        bos: bool = False,
        special: bool = False,
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Return an iterator over the values at hook points of texts, float32 by name, in order.

        A text that is empty or longer than the context is an InputError when it is its turn.

        Args:
            texts: any number, or mappings with a "text" and its "edits", a list.
            hooks: names or globs; `gpt-cli activations --hooks` lists the names.
            pool: the values of the "last" token, the "mean" over the tokens of the text, or the
                mean over the tokens of each "word": (words, ...), with "word", "start" and "end".
            bos: put the start token before texts; it is no part of a mean.
            special: read names such as `<|endoftext|>` in texts as special tokens.
        """
        rows = map(single, zip(self.activation_rows(texts, hooks, pool, bos=bos, special=special)))
        if pool in ("last", "mean"):
            return ({name: value[0] for name, value in row.values.items()} for row in rows)
        return (row.word_columns | row.values for row in rows)

    def activation_rows(
        self,
        texts: Iterable[str | Mapping[str, Any]],
        hooks: Sequence[str],
        pool: Pool | None,
        *,
        bos: bool = False,
        special: bool = False,
    ) -> Iterator[TextActivations | InputError]:
        """Return an iterator over `activations` with their tokens and words, or errors."""
        start = self.start(bos=bos)
        names = select_hooks(self.model.config, hooks)
        check_pool(pool, names)
        if pool == "word":
            check_bytes(self.tokenizer, "pool word")

        def ids_of(row: str | Mapping[str, Any]) -> tuple[list[int], list[Bound]]:
            ids, bounds, _ = self._text_ids(row, special=special, start=len(start))
            if not ids:
                raise InputError("the text is empty: it has no tokens")
            if pool == "word" and not split_words(self.tokenizer, ids):
                raise InputError("the text has no words, only white space")
            self.loaded.check_fits(len(start) + len(ids), "text")
            return ids, bounds

        return compute_valid(
            texts, ids_of, lambda rows: text_activations(self.loaded, rows, names, pool, start)
        )

    @checks_arguments()
    def next_tokens(
        self, prompt: str, count: int = 10, *, special: bool = False
    ) -> list[tuple[int, float]]:
        """Return the ids of the likeliest next tokens, best first, with log-probabilities."""
        check("count", count, AT_LEAST_1)
        ops = self.model.ops
        ids = self.loaded.fitting_ids(prompt, special=special)
        logits = next_logits(self.model, [ids], hook=self._editor([ids]))
        best = sampling.likeliest(ops, logits, count)
        return list(zip(*(ops.to_host(row[0]).tolist() for row in best), strict=True))

    @checks_arguments()
    def vector(
        self,
        positive: Sequence[str | Mapping[str, Any]],
        negative: Sequence[str | Mapping[str, Any]],
        hook: str,
        *,
        pool: VectorPool = "mean",
        pca: bool = False,
    ) -> Direction:
        """Return the vector from the activations of some texts to those of others, at a hook point.

        Args:
            positive: texts that it points to, at least two; they may have edits: see `activations`.
            negative: the other texts, at least two.
            hook: the name of a hook point without keys: no scores and no pattern.
            pool: the activations of the last token of a text ("last"), or their mean.
            pca: return the first principal component of all texts, not the difference of the means.
        """
        name, *others = select_hooks(self.model.config, [hook])
        if others:
            raise OptionError("hook", f"must name one hook point: {hook} names {len(others) + 1}")
        if has_keys(name):
            raise OptionError("hook", f"cannot be {name}: a vector has no tokens")
        if pool not in get_args(VectorPool):
            raise OptionError("pool", f"must be one of {', '.join(get_args(VectorPool))}")
        sets = (
            np.array([values[name] for values in self.activations(texts, [name], pool=pool)])
            for texts in (positive, negative)
        )
        return direction(name, *sets, pca=pca)

    @checks_arguments()
    def tree(self, prompt: str, count: int = 20, *, special: bool = False) -> list[Node]:
        """Return the likeliest continuations of a prompt, of any length, as a tree."""
        check("count", count, AT_LEAST_1)
        ids = self.loaded.fitting_ids(prompt, special=special)
        bounds = self.loaded.bound_edits((), len(ids), self.model.config.n_positions)
        return tree(self.model, ids, count, editor([bounds], self.model.ops))

    def _text_ids(
        self, row: str | Mapping[str, Any], *, special: bool, start: int
    ) -> tuple[list[int], list[Bound], int]:
        """Return the ids of a text, its edits, with `start` tokens before it, and its bytes."""
        fields = row if isinstance(row, Mapping) else {"text": row}
        if not isinstance(text := fields.get("text"), str):
            raise InputError('a row needs a string "text"')
        ids = self.loaded.text_ids(text, special=special)
        length = start + len(ids)
        bounds = self.loaded.bound_edits(fields.get("edits"), length, length)
        return ids, bounds, len(text.encode())

    @checks_arguments()
    def attribution(
        self, prompt: str, answer: str, wrong: str | None = None, *, special: bool = False
    ) -> Attribution:
        """Return what each part of the model adds to the logit of the token after a prompt.

        Args:
            prompt: a text.
            answer: one token; a word usually begins with its space.
            wrong: another token. If given, the logit of the answer minus that of this token counts.
            special: read names such as `<|endoftext|>` in the prompt as special tokens.
        """
        ids = self.loaded.fitting_ids(prompt, special=special)
        return attribute(self.model, ids, self._answers(answer, wrong), self._bounds(ids))

    @checks_arguments()
    def patch(
        self,
        clean: str,
        corrupt: str,
        answer: str,
        wrong: str | None = None,
        *,
        what: What = "resid_pre",
        special: bool = False,
    ) -> Patching:
        """Return the logit after a corrupt text with activations of a clean one, one at a time.

        The texts have equally many tokens. `what` names the activations: those of each layer and
        position, or "z" of each head. For the other arguments, see `attribution`.
        """
        ids, corrupt_ids = (self.loaded.fitting_ids(x, special=special) for x in (clean, corrupt))
        answers, edits = self._answers(answer, wrong), self._bounds(ids)
        return patch(self.model, ids, corrupt_ids, answers, edits, what)

    @checks_arguments()
    def ablate(
        self, prompt: str, answer: str, wrong: str | None = None, *, special: bool = False
    ) -> Ablation:
        """Return the logit after a prompt without each head, and each MLP: see `attribution`."""
        ids = self.loaded.fitting_ids(prompt, special=special)
        return ablate(self.model, ids, self._answers(answer, wrong), self._bounds(ids))

    def _answers(self, answer: str, wrong: str | None) -> Answers:
        """Return the ids of answers; OptionError if one is not a token, or both are the same."""
        texts = {"answer": answer} if wrong is None else {"answer": answer, "wrong": wrong}
        ids = []
        for name, text in texts.items():
            ids += (tokens := self.loaded.text_ids(text))
            if len(tokens) != 1:
                parts = " ".join(f'"{self.tokenizer.decode([id])}"' for id in tokens)
                hint = "a word usually begins with its space"
                raise OptionError(name, f"must be one token, not {parts or 'empty'}; {hint}")
        if len({*ids}) < len(ids):
            raise OptionError("wrong", "must be another token than the answer")
        return ids
