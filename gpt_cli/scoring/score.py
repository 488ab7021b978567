"""Log-likelihoods of texts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, TypeAlias, TypedDict

import numpy as np

from gpt_cli.errors import InputError
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.prefix_cache import passes, states_after
from gpt_cli.generation.sampling import log_probabilities
from gpt_cli.gpt2.edits import Bound, editor
from gpt_cli.gpt2.hooks import NO_HOOK, Hook, Recorder, select_hooks
from gpt_cli.gpt2.model import GPT2, hidden_states, unembed
from gpt_cli.gpt2.prefill import right_pad
from gpt_cli.ops import Array
from gpt_cli.options.declare import OptionError
from gpt_cli.scoring.words import Measure, Word

Measures: TypeAlias = Sequence[Measure]
Columns: TypeAlias = list[list[Any]]  # one per measure
Edits: TypeAlias = Sequence[Sequence[Bound]]  # of each text; empty if none has any

_LARGEST_EXPONENT = 709  # math.exp of more than this overflows
# Fields of a score that have values of one measure after each layer, by that of the last.
_LAYERS = {"token_logprobs": "layers", "initial_logprobs": "initial_layers"}


class ScoreOptions(TypedDict, total=False):
    """The keywords of `Engine.score_many`, as type checkers see those of `Engine.score`."""

    stride: int | None
    bos: bool
    special: bool
    ranks: bool
    entropies: bool
    gaps: bool
    words: bool
    layers: bool


@dataclass(frozen=True)
class Score:
    """Log-likelihoods in nats; the first token is scored only if the start token is before it.

    All fields from `ranks` on are None unless they were requested.
    """

    ids: list[int]  # of the text
    token_logprobs: list[float | None]  # of the ids; None if not scored
    bytes_scored: int  # of the text in UTF-8, in the tokens that are scored
    ranks: list[int | None] | None = None  # of the ids by probability; 1 is the likeliest
    moments: list[list[float] | None] | None = None  # mean and deviation of log p, under p
    gaps: list[float | None] | None = None  # to the log-probabilities of the likeliest tokens
    initial_logprobs: list[float | None] | None = None  # see `words.among`
    words: list[Word] | None = None  # of the text
    layers: list[list[float | None]] | None = None  # `token_logprobs` after 0 to n_layer layers
    initial_layers: list[list[float | None]] | None = None  # of `initial_logprobs`

    @property
    def entropies(self) -> list[float | None] | None:
        """Return the entropies of the distributions of the tokens, in nats."""
        if self.moments is None:
            return None
        return [None if pair is None else -pair[0] for pair in self.moments]

    @property
    def tokens_scored(self) -> int:
        """Return the number of tokens that are scored."""
        return len(self.token_logprobs) - self.token_logprobs.count(None)

    @property
    def total_logprob(self) -> float:
        """Return the sum over the scored tokens."""
        return math.fsum(logprob for logprob in self.token_logprobs if logprob is not None)

    @property
    def perplexity(self) -> float | None:
        """Return exp of the mean negative log-likelihood of a token; None if none is scored."""
        return perplexity(self.total_logprob, self.tokens_scored)

    @property
    def bits_per_byte(self) -> float | None:
        """Return the negative log-likelihood in bits per scored byte; None if none is scored."""
        bits = -self.total_logprob / math.log(2)
        return bits / self.bytes_scored if self.tokens_scored and self.bytes_scored else None

    def min_k(self, percent: float) -> float | None:
        """Return Min-K%: the mean log-probability of the least likely tokens.

        Shi et al., arXiv 2310.16789. None if no token is scored.
        """
        return _mean_of_lowest((x for x in self.token_logprobs if x is not None), percent)

    def min_k_plus_plus(self, percent: float) -> float | None:
        """Return Min-K%++: the same of (log p - mean) / standard deviation.

        Zhang et al., arXiv 2404.02936. InputError if the score has no `moments`.
        """
        if self.moments is None:
            raise InputError("Min-K%++ needs a score with its entropies: set entropies=True")
        pairs = zip(self.token_logprobs, self.moments, strict=True)
        scored = ((x, *moments) for x, moments in pairs if x is not None and moments is not None)
        return _mean_of_lowest((_standardized(*values) for values in scored), percent)


def perplexity(total_logprob: float, tokens: int) -> float | None:
    """Return exp of the mean negative log-likelihood of a token; None if there is no token."""
    if not tokens:
        return None
    mean = -total_logprob / tokens
    return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf


def _standardized(logprob: float, mean: float, std: float) -> float:
    if std:
        return (logprob - mean) / std
    return 0.0 if logprob >= mean else -math.inf  # one token is certain


def _mean_of_lowest(values: Iterable[float], percent: float) -> float | None:
    ordered = sorted(values)
    count = max(1, int(len(ordered) * percent / 100))
    return math.fsum(ordered[:count]) / count if ordered else None


def score(
    loaded: LoadedModel,
    texts: Sequence[list[int]],
    stride: int | None = None,
    *,
    start: Sequence[int] = (),
    sizes: Sequence[int] | None = None,
    measures: Mapping[str, Measure] | None = None,
    layers: bool = False,
    edits: Edits = (),
) -> list[Score]:
    """Score texts, as ids, of any length side by side.

    A text longer than the context is scored in windows of the context's length, `stride` tokens
    apart (by default half of the context). A token is scored in the first window that has it, so
    all but the first n_positions tokens have at least n_positions - stride tokens before them.

    `start` are ids before the texts, which are not part of their scores. `sizes` are the bytes of
    the texts, which differ from those of decoded ids if a tokenizer loses or adds characters.
    `measures` compute more fields of the score. `layers` computes log-probabilities after each
    layer, too. `edits` are those of each text; a text with edits must fit the context.
    """
    texts = [[*start, *ids] for ids in texts]
    measures = {"token_logprobs": log_probabilities, **(measures or {})}
    columns = measure_texts(loaded, texts, list(measures.values()), stride, edits)
    names = [name for name in _LAYERS if name in measures] if layers else []
    unscored = [None] * loaded.config.n_layer
    inner_columns: list[Columns] = [[] for _ in texts]
    if layers:
        inner = [measures[name] for name in names]
        inner_columns = measure_texts(loaded, texts, inner, stride, edits, layers=True)
    scores = []
    rows = zip(texts, columns, inner_columns, sizes or repeat(None), strict=False)
    for ids, values, inner_values, size in rows:
        ids = ids[len(start) :]
        fields = dict(zip(measures, values, strict=True))
        for name, column in zip(names, inner_values, strict=True):
            pairs = zip(column, fields[name], strict=True)
            fields[_LAYERS[name]] = [[*(x or unscored), last] for x, last in pairs]
        fields = {name: column[len(start) :] for name, column in fields.items()}
        lengths = [*map(len, loaded.tokenizer.pieces(ids))]
        scored, whole = sum(lengths[0 if start else 1 :]), sum(lengths)
        if size is not None and whole:  # the same share of the text as of the decoded ids
            scored = round(scored * size / whole)
        scores.append(Score(ids, bytes_scored=scored, **fields))
    return scores


def measure_texts(
    loaded: LoadedModel,
    texts: Sequence[list[int]],
    measures: Measures,
    stride: int | None,
    edits: Edits = (),
    *,
    layers: bool = False,
) -> list[Columns]:
    """Return a column per measure for texts of any length; its first value is None.

    With `layers`, the others are lists: see `measure_passes`.
    """
    n_positions = loaded.config.n_positions
    stride = max(1, n_positions // 2) if stride is None else stride
    if not 1 <= stride < n_positions:
        raise OptionError("stride", f"must be from 1 to {n_positions - 1}, less than the context")
    sizes = enumerate(map(len, texts))
    cut = [(text, *window) for text, size in sizes for window in windows(size, n_positions, stride)]
    parts = [texts[text][start:end] for text, start, _, end in cut]
    firsts = [first - start for _, start, first, _ in cut]
    if layers or any(edits):
        edits = [edits[text] for text, *_ in cut if edits]
        measured = measure_passes(loaded.model, parts, firsts, measures, edits, layers=layers)
    else:
        measured = measure_windows(loaded, parts, firsts, measures)
    columns: list[Columns] = [[[None] * len(ids) for _ in measures] for ids in texts]
    for (text, _, first, end), values in zip(cut, measured, strict=True):
        for column, part in zip(columns[text], values, strict=True):
            column[first:end] = part
    return columns


def windows(length: int, n_positions: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, first token to score and end of windows; all tokens but the first are scored."""
    scored = 1
    for start in range(0, length, stride):
        end = min(start + n_positions, length)
        if scored < end:
            yield start, scored, end
            scored = end


def measure_windows(
    loaded: LoadedModel,
    texts: Sequence[list[int]],
    firsts: Sequence[int],
    measures: Measures,
) -> list[Columns]:
    """Return a column per measure for texts that fit the context, from token `first` (>= 1) on.

    All have such a token. The tokens that texts share at their beginning are computed once.
    """
    model, prefixes = loaded.model, loaded.prefixes
    columns: dict[int, Columns] = {}
    inputs = [text[:-1] for text in texts]
    for n, indices in prefixes.groups(inputs):
        prefix = prefixes.prefix(inputs[indices[0]][:n])
        known: Columns = [[] for _ in measures]  # of the tokens in the prefix
        if min(firsts[index] for index in indices) < n:
            (known,) = measure_states(model, [prefix.states[:-1]], [prefix.ids[1:]], measures)
        rests = [inputs[index][n:] for index in indices]
        for numbers, states in states_after(model, prefix, rests):
            group = [indices[number] for number in numbers]
            predicting, targets = [], []  # the state at a token predicts the next one
            for index, x in zip(group, states, strict=True):
                begin = max(n, firsts[index])
                x = model.ops.xp.concatenate([prefix.states[-1:], x])
                predicting.append(x[begin - max(n, 1) :])
                targets.append(texts[index][begin:])
            new = measure_states(model, predicting, targets, measures)
            for index, values in zip(group, new, strict=True):
                before = [column[firsts[index] - 1 :] for column in known]
                columns[index] = [a + b for a, b in zip(before, values, strict=True)]
    return [columns[index] for index in range(len(texts))]


def measure_passes(
    model: GPT2,
    texts: Sequence[list[int]],
    firsts: Sequence[int],
    measures: Measures,
    edits: Edits,
    *,
    layers: bool = False,
) -> list[Columns]:
    """Return columns as `measure_windows` does, of texts with edits that share nothing.

    With `layers`, they are those of the model if it ended after 0, 1, ... layers, but the last: a
    list for each token. This is the "logit lens" of nostalgebraist (2020).
    """
    ops = model.ops
    columns: dict[int, Columns] = {}
    names = select_hooks(model.config, ["*.hook_resid_pre"]) if layers else []
    for indices in passes([len(text) - 1 for text in texts], len(texts), ops.pass_tokens):
        hook = editor([edits[index] for index in indices if edits], ops)
        recorder = Recorder(names, hook)
        ids, lengths = right_pad([texts[index][:-1] for index in indices])
        x = hidden_states(model, ops.xp.asarray(ids), None, lengths, recorder)
        depths = (ops.layer_norm(value, model.ln_f) for value in recorder.values.values())
        targets = [texts[index][firsts[index] :] for index in indices]
        rows = []  # by depth, the columns of the texts
        for value in depths if layers else [x]:
            ends = zip(value, indices, lengths, strict=True)
            states = [x[firsts[index] - 1 : length] for x, index, length in ends]
            rows.append(measure_states(model, states, targets, measures, hook))
        for index, row in zip(indices, zip(*rows, strict=True), strict=True):
            lists = ([*map(list, zip(*column, strict=True))] for column in zip(*row, strict=True))
            columns[index] = [*lists] if layers else row[0]
    return [columns[index] for index in range(len(texts))]


def measure_states(
    model: GPT2,
    states: Sequence[Array],
    targets: Sequence[Sequence[int]],
    measures: Measures,
    hook: Hook = NO_HOOK,
) -> list[Columns]:
    """Return a column per measure for rows: targets (n,), predicted by states (n, C)."""
    ops = model.ops
    x = ops.xp.concatenate(states)  # (N, C): all rows
    ids = ops.xp.asarray(np.concatenate(targets))
    columns: Columns = [[] for _ in measures]
    for begin in range(0, len(x), ops.logits_rows):
        part = slice(begin, begin + ops.logits_rows)
        logits = unembed(model, x[part], hook)
        for column, measure in zip(columns, measures, strict=True):
            column += ops.to_host(measure(ops, logits, ids[part])).tolist()
    values = [iter(column) for column in columns]
    return [[list(islice(column, len(row))) for column in values] for row in targets]
