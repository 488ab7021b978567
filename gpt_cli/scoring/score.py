"""Log-likelihoods of texts."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypedDict

from gpt_cli.errors import InputError, counted
from gpt_cli.folder.base_tokenizer import Tokenizer
from gpt_cli.gpt2.hooks import select_hooks
from gpt_cli.gpt2.model import GPT2
from gpt_cli.options.declare import PERCENT, OptionError, check
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.measures import Columns, Measure, log_probabilities, measure_states
from gpt_cli.texts.prefix_cache import Prefix
from gpt_cli.texts.result import Recorded
from gpt_cli.texts.states import Computed, states
from gpt_cli.texts.text import Text, Word
from gpt_cli.texts.words import find_words, with_layers

_LARGEST_EXPONENT = 709  # math.exp of more than this overflows
# For a field of a score, the field with its values after each layer.
_LAYER_FIELDS = {"token_logprobs": "layers", "initial_logprobs": "initial_layers"}


class ScoreOptions(TypedDict, total=False):
    """The keywords of `Engine.score_many`, as type checkers see those of `Engine.score`."""

    stride: int | None
    bos: bool
    eos: bool
    context: str
    special: bool
    ranks: bool
    entropies: bool
    gaps: bool
    words: bool
    layers: bool
    progress: bool


@dataclass(frozen=True, repr=False)
class Score(Recorded):
    """Log-likelihoods in nats; the first token is scored only if the start token is before it.

    All fields from `ranks` on are None unless they were requested.
    """

    ids: list[int]  # of the text
    token_logprobs: list[float | None]  # of the ids; None if not scored
    bytes_scored: int  # of the text in UTF-8, in the tokens that are scored
    ranks: list[int | None] | None = None  # of the ids by probability; 1 is the likeliest
    moments: list[list[float] | None] | None = None  # mean and deviation of log p, under p
    gaps: list[float | None] | None = None  # to the log-probabilities of the likeliest tokens
    # Of the initial tokens among all such tokens, see `gpt_cli.texts.words`; None for other tokens.
    initial_logprobs: list[float | None] | None = None
    words: list[Word] | None = None
    layers: list[list[float | None]] | None = None  # `token_logprobs` after 0 to n_layer layers
    initial_layers: list[list[float | None]] | None = None  # of `initial_logprobs`

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Return the tokens as `gpt-cli score --tokens --json`, with all that was computed."""
        return self._tokens()

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
        """Return Min-K%: the mean log-probability of the least likely tokens, at least of one.

        Shi et al., arXiv 2310.16789. None if no token is scored. InputError if `percent` is not
        above 0 and at most 100.
        """
        return _mean_of_lowest((x for x in self.token_logprobs if x is not None), percent)

    def min_k_plus_plus(self, percent: float) -> float | None:
        """Return Min-K%++: the same of (log p - mean) / standard deviation.

        Zhang et al., arXiv 2404.02936. InputError if the score has no `moments`.
        """
        if self.moments is None:
            raise InputError("Min-K%++ needs a score with its entropies: set entropies=True")
        standardized = []
        for logprob, moments in zip(self.token_logprobs, self.moments, strict=True):
            if logprob is not None and moments is not None:
                mean, std = moments
                standardized.append(_standardized(logprob, mean, std))
        return _mean_of_lowest(standardized, percent)

    def _facts(self) -> str:
        size = f"{counted(len(self.ids), 'token')}, {self.tokens_scored:,} scored"
        fit = "" if self.perplexity is None else f", perplexity {self.perplexity:.4g}"
        return f"{size}{fit}: {self._quoted(self.ids)}"


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
    check("percent", percent, PERCENT)
    ordered = sorted(values)
    count = max(1, int(len(ordered) * percent / 100))
    return math.fsum(ordered[:count]) / count if ordered else None


def too_short(*, has_start: bool) -> InputError:
    """Return the error of a text without tokens to score; others may be before them."""
    needed = "1 token" if has_start else "2 tokens: the first has nothing before it"
    return InputError(f"a text needs at least {needed}")


def score(
    loaded: LoadedModel,
    texts: Sequence[Text],
    stride: int | None = None,
    *,
    measures: Mapping[str, Measure] | None = None,
    layers: bool = False,
) -> list[Score]:
    """Score texts of any length side by side.

    A text longer than the context is scored in windows of the context's length, `stride` tokens
    apart (by default half of the context). A token is scored in the first window that has it, so
    all but the first n_positions tokens have at least n_positions - stride tokens before them.

    `measures` compute more fields of the score. `layers` computes log-probabilities after each
    layer, too.
    """
    all_measures = {"token_logprobs": log_probabilities, **(measures or {})}
    of_layers = [name for name in _LAYER_FIELDS if name in all_measures] if layers else []
    measured = measure_texts(loaded, texts, all_measures, stride, of_layers)
    return [
        _score_of(loaded.tokenizer, text, columns)
        for text, columns in zip(texts, measured, strict=True)
    ]


def _score_of(tokenizer: Tokenizer, text: Text, columns: Columns) -> Score:
    """Return the score of a text, from columns of values for all its tokens."""
    fields = {name: column[text.first :] for name, column in columns.items()}
    lengths = [len(piece) for piece in tokenizer.pieces(text.text_ids, text.context_ids)]
    if lengths:
        lengths[0] -= text.skipped
    whole = sum(lengths)
    scored = sum(lengths[0 if text.first else 1 :])
    if text.size is not None and whole:  # scaled to the bytes of the original text
        scored = round(scored * text.size / whole)
    return Score(text.content, bytes_scored=scored, **fields)


def with_words(tokenizer: Tokenizer, text: Text, scored: Score) -> Score:
    """Return the score of a text with its words; it has `initial_logprobs`."""
    find = partial(find_words, tokenizer, text)
    words = find(scored.token_logprobs, scored.initial_logprobs or [])
    if scored.layers and scored.initial_layers:
        logprobs = zip(*scored.layers, strict=True)
        initial_logprobs = zip(*scored.initial_layers, strict=True)
        words = with_layers(words, list(map(find, logprobs, initial_logprobs)))
    return replace(scored, words=words)


def measure_texts(
    loaded: LoadedModel,
    texts: Sequence[Text],
    measures: Mapping[str, Measure],
    stride: int | None = None,
    of_layers: Sequence[str] = (),
) -> list[Columns]:
    """Return a column per measure for texts of any length; its first value is None.

    See `measure_windows` for `of_layers`.
    """
    n_positions = loaded.config.n_positions
    stride = max(1, n_positions // 2) if stride is None else stride
    if not 1 <= stride < n_positions:
        raise OptionError("stride", f"must be from 1 to {n_positions - 1}, less than the context")
    parts = []  # of all texts
    origins = []  # of each part: the index of its text, and the window in it
    for index, text in enumerate(texts):
        for window in windows(len(text.ids), n_positions, stride):
            ids = text.ids[window.start : window.end]
            parts.append(replace(text, ids=ids, first=window.first - window.start))
            origins.append((index, window))
    unscored: dict[str, Any] = dict.fromkeys(measures)
    for name in of_layers:
        unscored[_LAYER_FIELDS[name]] = [None] * (loaded.config.n_layer + 1)
    columns: list[Columns] = [
        {name: [value] * len(text.ids) for name, value in unscored.items()} for text in texts
    ]
    measured = measure_windows(loaded, parts, measures, of_layers)
    for (index, window), values in zip(origins, measured, strict=True):
        for name, column in values.items():
            columns[index][name][window.first : window.end] = column
    return columns


class Window(NamedTuple):
    """A part of a text that fits the context."""

    start: int
    first: int  # the first token that is scored
    end: int


def windows(length: int, n_positions: int, stride: int) -> Iterator[Window]:
    """Yield the windows of a text of `length` tokens; all tokens but the first are scored once."""
    scored = 1
    for start in range(0, length, stride):
        end = min(start + n_positions, length)
        if scored < end:
            yield Window(start, scored, end)
            scored = end


def measure_windows(
    loaded: LoadedModel,
    texts: Sequence[Text],
    measures: Mapping[str, Measure],
    of_layers: Sequence[str] = (),
) -> list[Columns]:
    """Return a column per measure for texts that fit the context, from token `first` (>= 1) on.

    Every text has such a token. Tokens that texts share at their beginning are computed once.

    The measures `of_layers` are also computed as if the model ended after 0, 1, ... layers. These
    columns have the names in _LAYER_FIELDS, and a list for each token, which ends with the model's
    own value. This is the "logit lens" of nostalgebraist (2020).
    """
    model = loaded.model
    names = select_hooks(model.config, ["*.hook_resid_pre"]) if of_layers else []
    inputs = [replace(text, ids=text.ids[:-1]) for text in texts]
    columns: list[Columns] = [{} for _ in texts]
    prefix: Prefix | None = None
    prefix_columns: Columns = {}  # from its second token on, once a text needs them
    for computed in states(model, inputs, names, prefixes=loaded.prefixes):
        group = [texts[row.text_index] for row in computed.rows]
        if computed.prefix is not prefix:
            prefix = computed.prefix
            prefix_columns = {}
        if not prefix_columns and any(text.first < len(prefix.ids) for text in group):
            targets = [prefix.ids[1:]]
            (prefix_columns,) = measure_states(model, prefix.states[:-1], targets, measures)
        after_prefix = _columns_after_prefix(model, computed, group, measures)
        for row, text, values in zip(computed.rows, group, after_prefix, strict=True):
            for name in measures:
                column = prefix_columns.get(name, [])[text.first - 1 :]
                columns[row.text_index][name] = column + values[name]
        if of_layers:
            inner = {name: measures[name] for name in of_layers}
            of_texts = _columns_after_layers(model, computed, group, inner)
            for row, layers in zip(computed.rows, of_texts, strict=True):
                columns[row.text_index].update(_lens_columns(layers, columns[row.text_index]))
        del computed, row  # the values of a pass take as much memory as the next one
    return columns


def _columns_after_prefix(
    model: GPT2, computed: Computed, texts: Sequence[Text], measures: Mapping[str, Measure]
) -> list[Columns]:
    """Return the columns of texts, from the first scored token after their prefix on."""
    n = len(computed.prefix.ids)
    predicting = []
    targets = []
    for row, text in zip(computed.rows, texts, strict=True):
        # The state at a token predicts the next one: x[0] is that at token max(n, 1) - 1.
        x = model.ops.xp.concatenate([computed.prefix.states[-1:], row.states])
        begin = max(n, text.first)
        predicting.append(x[begin - max(n, 1) :])
        targets.append(text.ids[begin:])
    x = model.ops.xp.concatenate(predicting)
    return measure_states(model, x, targets, measures, computed.hook)


def _columns_after_layers(
    model: GPT2, computed: Computed, texts: Sequence[Text], measures: Mapping[str, Measure]
) -> list[list[Columns]]:
    """Return, for each text, its columns after each layer except the last."""
    ops = model.ops
    targets = [text.ids[text.first :] for text in texts]
    layers: list[list[Columns]] = [[] for _ in texts]
    for name in computed.rows[0].values:
        values = [row.values[name] for row in computed.rows]
        parts = [value[text.first - 1 :] for value, text in zip(values, texts, strict=True)]
        x = ops.layer_norm(ops.xp.concatenate(parts), model.ln_f)
        measured = measure_states(model, x, targets, measures, computed.hook)
        for of_text, of_layer in zip(layers, measured, strict=True):
            of_text.append(of_layer)
    return layers


def _lens_columns(layers: Sequence[Columns], last: Columns) -> Columns:
    """Return the columns of layers: a list for each token, whose last value is the model's own."""
    columns: Columns = {}
    for name in layers[0]:
        by_layer = [layer[name] for layer in layers]
        by_layer.append(last[name])
        columns[_LAYER_FIELDS[name]] = [list(values) for values in zip(*by_layer, strict=True)]
    return columns
