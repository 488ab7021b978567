"""The public Python API: generate text with a model, score texts, compress data."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from itertools import count
from typing import Any, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from gpt_cli.compression.archive import BLOCK, Reader
from gpt_cli.compression.codec import Codec
from gpt_cli.errors import ContextError, InputError
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation import batch, matcher, sampling
from gpt_cli.generation.decode import Step
from gpt_cli.generation.generate import Completion, generate
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.row import Request, fit
from gpt_cli.gpt2.model import GPT2, forward
from gpt_cli.gpt2.prefill import next_logits
from gpt_cli.gpt2.tokens import check_ids, start_token
from gpt_cli.options.declare import takes
from gpt_cli.options.request import OptionFields, Options
from gpt_cli.scoring.rank import Choice, Question, RankBy, common_beginning, rank
from gpt_cli.scoring.score import Score, score
from gpt_cli.scoring.trace import Trace, trace
from gpt_cli.scoring.tree import Node, tree
from gpt_cli.scoring.words import Measure, among, find_words, initial_tokens


class Run(Iterator[Step]):
    """An iterator that generates; `completions` holds the results so far."""

    def __init__(self, steps: Iterator[Step], completions: list[Completion]):
        self.completions = completions
        self._steps = steps

    def __next__(self) -> Step:
        step = next(self._steps)
        self.completions[step.row].add(step)
        return step


def _options(fields: OptionFields) -> Options:
    return Options(**cast("dict[str, Any]", fields))


class Engine:
    """A model with its tokenizer, from `load`.

    Every method that computes raises CheckpointError if the weights are damaged, ResourceError if
    there is not enough memory, and InputError for an option that is out of range or a text that
    cannot be used, such as one longer than the context, or an empty one without a start token.
    """

    def __init__(self, loaded: LoadedModel, name: str, load_seconds: float):
        self.loaded, self.name, self.load_seconds = loaded, name, load_seconds

    @property
    def model(self) -> GPT2:
        """Return the model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.loaded.tokenizer

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; names such as `<|endoftext|>` are text unless `special`."""
        return self.tokenizer.encode(text, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; U+FFFD replaces bytes that are not UTF-8."""
        return self.tokenizer.decode(ids)

    def check_constraint(self, options: Options) -> None:
        """Raise InputError if no text of this model matches the constraint of options."""
        if options.constraint:
            matcher.check(self.tokenizer, self.model.config, options.constraint)

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
        rows = np.array([check_ids(config, row) for row in ids])
        return ops.to_host(forward(self.model, ops.xp.asarray(rows)))

    def trace(self, text: str, *, special: bool = False) -> Trace:
        """Return the residual stream, the attention and the lens of a text."""
        return trace(self.model, self._fitting_ids(text, special))

    def run(self, prompts: Sequence[str], options: Options) -> Run:
        """Return an iterator that continues prompts side by side.

        An empty prompt is replaced by the model's start token.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of texts, not one text")
        options = options.with_seed()
        requests = [self._request(prompt, options, row) for row, prompt in enumerate(prompts)]
        steps = generate(self.loaded, requests)
        return Run(steps, [Completion(len(row.prompt), row.seed) for row in requests])

    @takes(Options)
    def stream(self, prompt: str, **options: Unpack[OptionFields]) -> Iterator[str]:
        """Return an iterator of the pieces of a continuation, as soon as they are certain."""
        run = self.run([prompt], _options(options))
        return (step.text for step in run if step.text)

    @takes(Options)
    def generate(self, prompts: Sequence[str], **options: Unpack[OptionFields]) -> list[Completion]:
        """Continue prompts; a result does not depend on the other prompts."""
        run = self.run(prompts, _options(options))
        for _ in run:
            pass
        return run.completions

    def batch(
        self,
        rows: Iterable[str | Mapping[str, Any] | InputError],
        options: Options | None = None,
        *,
        batch_size: int | None = None,
        indices: Iterable[int] | None = None,
    ) -> Iterator[Completion | InputError]:
        """Continue any number of prompts, a batch at a time.

        Args:
            rows: prompts, or mappings with a "prompt" and options of this row alone, those of
                `Options.row_fields()`. A row with a seed of its own has the text of `generate` with
                this seed; else its index keys the random draws, too. An error is passed on.
            options: the defaults of the rows.
            batch_size: rows to compute side by side; by default as many as memory and speed allow.
            indices: of the rows; by default counted from 0.

        Returns:
            An iterator of a completion or an error for each row, in order.

        Raises:
            InputError: the batch size is below 1.
        """
        if isinstance(rows, str):
            raise TypeError("rows must be texts or mappings, not one text")
        if batch_size is not None and batch_size < 1:
            raise InputError("batch_size must be 1 or more")
        defaults = (options or Options()).with_seed()
        requests = (
            self._row_request(row, defaults, index)
            for index, row in zip(count() if indices is None else indices, rows, strict=False)
        )
        return batch.complete(self.loaded, requests, batch_size)

    def score(
        self,
        text: str,
        *,
        stride: int | None = None,
        bos: bool = False,
        ranks: bool = False,
        entropies: bool = False,
        words: bool = False,
    ) -> Score:
        """Return the log-likelihood of a text, token by token; see `score_many`.

        Raises:
            InputError: no token can be scored, the stride is out of range, or there is no start
                token.
        """
        (scored,) = self.score_many(
            [text], stride=stride, bos=bos, ranks=ranks, entropies=entropies, words=words
        )
        if isinstance(scored, InputError):
            raise scored
        if not scored.tokens_scored:
            raise InputError(
                "a text needs at least 1 token"
                if bos
                else "a text needs at least 2 tokens: the first has nothing before it"
            )
        return scored

    def score_many(
        self,
        texts: Sequence[str | InputError],
        *,
        stride: int | None = None,
        bos: bool = False,
        ranks: bool = False,
        entropies: bool = False,
        words: bool = False,
    ) -> list[Score | InputError]:
        """Return the log-likelihood of each text, token by token, or an error.

        A text of which no token is scored has a score without perplexity. An error is passed on.

        Args:
            texts: any number, of any length.
            stride: windows of a text longer than the context are `stride` tokens apart, by default
                half of it.
            bos: put the start token before each text, so that its first token is scored, too.
            ranks: also return the rank of each token.
            entropies: also return the entropy of the distribution of each token.
            words: also return the words of each text with their surprisal: see `scoring.words`.

        Raises:
            InputError: the stride is out of range, or the model has no start token.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a list of texts, not one text")
        start = [start_token(self.model.config, "bos is set")] if bos else []
        measures: dict[str, Measure] = {}
        if ranks:
            measures["ranks"] = sampling.ranks
        if entropies:
            measures["entropies"] = lambda ops, logits, _: sampling.entropies(ops, logits)
        if words:
            measures["initial_logprobs"] = among(self._initial_tokens)
        rows = [self._text_ids(text) for text in texts]
        ids = [row for row in rows if not isinstance(row, InputError)]
        found = score(self.loaded, ids, stride, start=start, measures=measures)
        if words:
            found = [self._with_words(each) for each in found]
        scores = iter(found)
        return [row if isinstance(row, InputError) else next(scores) for row in rows]

    def compress(self, data: bytes, *, block: int = BLOCK) -> bytes:
        """Return data as a compressed file; see `compression.codec`, which has streams, too.

        Args:
            data: any bytes.
            block: tokens that are decompressed one after another: more cost less, but take longer.

        Raises:
            InputError: `block` is out of range, or the model has no start token.
            ResourceError: results are not the same to the last bit here, such as on a GPU.
        """
        return b"".join(self._codec.compress(BytesIO(data), block))

    def decompress(self, data: bytes) -> bytes:
        """Return the data of a compressed file.

        Raises:
            InputError: the file is damaged, or was written with another model or other bits.
            ResourceError: results are not the same to the last bit here, such as on a GPU.
        """
        return b"".join(self._codec.decompress(Reader(BytesIO(data))))

    @cached_property
    def _codec(self) -> Codec:
        return Codec(self.model, self.tokenizer)

    def rank(self, prompt: str, choices: Sequence[str], *, by: RankBy = "total") -> list[Choice]:
        """Rank continuations of a prompt, the likeliest first.

        Args:
            prompt: the text before each choice.
            choices: distinct texts; a word usually begins with its space.
            by: compare the likelihood of the whole choice ("total"), which favours short ones, or
                its mean per "token" or "byte". The probabilities are normalized over the choices.

        If the end of the prompt and the beginning of a choice form one token, that end is counted
        with each choice.

        Raises:
            InputError: `by` is unknown, or a choice is empty, duplicate or too long.
        """
        (ranked,) = self.rank_many([(prompt, choices)], by=by)
        if isinstance(ranked, InputError):
            raise ranked
        return ranked

    def rank_many(
        self, rows: Sequence[tuple[str, Sequence[str]] | InputError], *, by: RankBy = "total"
    ) -> list[list[Choice] | InputError]:
        """Rank the choices of each prompt, or return an error; see `rank`.

        What prompts have in common at their beginning is computed once. An error is passed on.

        Raises:
            InputError: `by` is unknown.
        """
        asked = [self._question(row) for row in rows]
        questions = [row for row in asked if isinstance(row, Question)]
        ranked = iter(rank(self.loaded, questions, by))
        return [row if isinstance(row, InputError) else next(ranked) for row in asked]

    def _question(self, row: tuple[str, Sequence[str]] | InputError) -> Question | InputError:
        if isinstance(row, InputError):
            return row
        prompt, choices = row
        if isinstance(choices, str):
            raise TypeError("choices must be a list of texts, not one text")
        try:
            if not isinstance(prompt, str):
                raise InputError('a row needs a string "prompt"')
            question = self._tokenized(prompt, choices)
            question.check(self.model.config.n_positions)
        except InputError as error:
            return error
        return question

    def _tokenized(self, prompt: str, choices: Sequence[str]) -> Question:
        wholes = [self._prompt_ids(prompt + choice) for choice in choices]
        shared = common_beginning([self._prompt_ids(prompt), *wholes])
        if not shared:  # the prompt is empty, or part of the first token of a choice
            shared = self._prompt_ids("")
            wholes = [shared + ids for ids in wholes]
        rests = [ids[len(shared) :] for ids in wholes]
        return Question(shared, choices, rests)

    def next_tokens(
        self, prompt: str, count: int = 10, *, special: bool = False
    ) -> list[tuple[int, float]]:
        """Return the ids of the likeliest next tokens, best first, with log-probabilities."""
        if count < 1:
            raise InputError("the number of tokens must be 1 or more")
        ops = self.model.ops
        logits = next_logits(self.model, [self._fitting_ids(prompt, special)])
        best = sampling.likeliest(ops, logits, count)
        return list(zip(*(ops.to_host(row[0]).tolist() for row in best), strict=True))

    def tree(self, prompt: str, count: int = 20, *, special: bool = False) -> list[Node]:
        """Return the likeliest continuations of a prompt, of any length, as a tree."""
        if count < 1:
            raise InputError("the number of continuations must be 1 or more")
        return tree(self.model, self._fitting_ids(prompt, special), count)

    def _request(self, prompt: str, options: Options, index: int) -> Request:
        ids = self._prompt_ids(prompt, options.special)
        check_ids(self.model.config, [id for id, _ in options.logit_bias])
        self.check_constraint(options)
        return Request(fit(ids, self.model.config.n_positions, options), options, index)

    def _row_request(
        self, row: str | Mapping[str, Any] | InputError, defaults: Options, index: int
    ) -> Request | InputError:
        if isinstance(row, InputError):
            return row
        try:
            own = dict(row) if isinstance(row, Mapping) else {"prompt": row}
            prompt = own.pop("prompt", None)
            options = defaults.with_row(own)
            if not isinstance(prompt, str):
                raise InputError('a row needs a string "prompt"')
            # With a seed of its own, a row equals a run of its own.
            return self._request(prompt, options, index if own.get("seed") is None else 0)
        except InputError as error:
            return error

    def _text_ids(self, text: str | InputError) -> list[int] | InputError:
        if isinstance(text, InputError):
            return text
        try:
            if not isinstance(text, str):
                raise InputError('a row needs a string "text"')
            return check_ids(self.model.config, self.encode(text))
        except InputError as error:
            return error

    def _prompt_ids(self, prompt: str, special: bool = False) -> list[int]:
        config = self.model.config
        ids = check_ids(config, self.encode(prompt, special=special))
        return ids or [start_token(config, "the prompt is empty")]

    def _with_words(self, scored: Score) -> Score:
        logprobs = scored.token_logprobs, scored.initial_logprobs or []
        return replace(scored, words=find_words(self.tokenizer, scored.ids, *logprobs))

    @cached_property
    def _initial_tokens(self) -> NDArray[np.bool_]:
        return initial_tokens(self.tokenizer, self.model.config)

    def _fitting_ids(self, text: str, special: bool) -> list[int]:
        ids = self._prompt_ids(text, special)
        if len(ids) > self.model.config.n_positions:
            raise ContextError(
                f"the prompt has {len(ids)} tokens, and the model's context is "
                f"{self.model.config.n_positions}; shorten it"
            )
        return ids
