"""The public Python API: load a model, generate text with it, score texts."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from io import BytesIO
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt_cli import hub
from gpt_cli.compression.archive import SEGMENT_TOKENS, ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.errors import ContextError, InputError, compute_valid
from gpt_cli.folder.tensors import unchanged
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation import batch, matcher, sampling
from gpt_cli.generation.decode import Step
from gpt_cli.generation.drafts import Speculator
from gpt_cli.generation.generate import Completion, generate
from gpt_cli.generation.prefix_cache import PrefixCache
from gpt_cli.generation.row import Request, fit
from gpt_cli.gpt2 import checkpoint
from gpt_cli.gpt2.model import GPT2, forward, hidden_states, unembed
from gpt_cli.ops import SHORT, check_available, get_ops, held_dtype
from gpt_cli.options.declare import takes
from gpt_cli.options.request import Options
from gpt_cli.scoring.rank import Choice, Question, RankBy, common_beginning, rank
from gpt_cli.scoring.score import Score, score
from gpt_cli.scoring.trace import Trace, trace
from gpt_cli.scoring.tree import Node, tree
from gpt_cli.scoring.words import Measure, among, find_words, initial_tokens
from gpt_cli.system.machine import check_room


class Run(Iterator[Step]):
    """An iterator that generates; `completions` holds the results so far."""

    def __init__(self, steps: Iterator[Step], completions: list[Completion]):
        self.completions = completions
        self._steps = steps

    def __next__(self) -> Step:
        step = next(self._steps)
        self.completions[step.row].add(step)
        return step


class Engine:
    """A model with its tokenizer, from `load`.

    Every method that computes raises CheckpointError if the weights are damaged, and ResourceError
    if there is not enough memory.
    """

    def __init__(
        self,
        model: GPT2,
        tokenizer: Tokenizer,
        name: str,
        load_seconds: float,
        speculator: Speculator | None = None,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.name, self.load_seconds = name, load_seconds
        self.speculator = speculator
        self._prefixes = PrefixCache(model)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; names such as `<|endoftext|>` are text unless `special`.

        Raises:
            InputError: the text is not valid Unicode.
        """
        return self.tokenizer.encode(text, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; U+FFFD replaces bytes that are not UTF-8."""
        return self.tokenizer.decode(ids)

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return token ids.

        Raises:
            InputError: the model has no such token.
        """
        size = self.model.config.vocab_size
        if bad := [id for id in ids if not 0 <= id < size]:
            raise InputError(f"the model has no token {bad[0]}; its ids are from 0 to {size - 1}")
        return list(ids)

    def start_ids(self, reason: str) -> list[int]:
        """Return the start token, for a text that needs one for this reason.

        Raises:
            InputError: the model has none.
        """
        config = self.model.config
        if config.bos_token_id is None or config.bos_token_id >= config.vocab_size:
            raise InputError(f"{reason}, and this model has no start token (bos_token_id)")
        return [config.bos_token_id]

    def check_constraint(self, options: Options) -> None:
        """Raise InputError if no text of this model matches the constraint of options."""
        if options.constraint:
            matcher.check(self.tokenizer, self.model.config, options.constraint)

    def logits(self, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the logits of the next token at each position.

        Args:
            ids: (B, T) token ids, T from 1 to n_positions.

        Returns:
            (B, T, V) float32, on the host.

        Raises:
            InputError: the rows differ in length, or an id or a length is out of range.
        """
        ops, n_positions = self.model.ops, self.model.config.n_positions
        if len({len(row) for row in ids}) != 1 or not 1 <= len(ids[0]) <= n_positions:
            raise InputError(f"all rows must have the same length, from 1 to {n_positions}")
        rows = np.array([self.check_ids(row) for row in ids])
        return ops.to_host(forward(self.model, ops.xp.asarray(rows)))

    def trace(self, text: str, *, special: bool = False) -> Trace:
        """Return the residual stream, the attention and the lens of a text.

        Raises:
            InputError: the text is longer than the context, or is empty and has no start token.
        """
        return trace(self.model, self._fitting_ids(text, special))

    def run(self, prompts: Sequence[str], options: Options) -> Run:
        """Return an iterator that continues prompts side by side.

        An empty prompt is replaced by the model's start token.

        Raises:
            InputError: a prompt does not fit the context, or is empty and has no start token.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of texts, not one text")
        options = options.with_seed()
        requests = [self._request(prompt, options, row) for row, prompt in enumerate(prompts)]
        steps = generate(self.model, self.tokenizer, requests, self.speculator, self._prefixes)
        return Run(steps, [Completion(len(row.prompt), row.seed) for row in requests])

    @takes(Options)
    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Return an iterator of the pieces of a continuation, each as soon as it is certain.

        Raises:
            InputError: an option is out of range, or the prompt does not fit the context.
        """
        run = self.run([prompt], Options(**options))
        return (step.text for step in run if step.text)

    @takes(Options)
    def generate(self, prompts: Sequence[str], **options: Any) -> list[Completion]:
        """Continue each prompt; a result does not depend on the other prompts.

        Raises:
            InputError: an option is out of range, or a prompt does not fit the context.
        """
        run = self.run(prompts, Options(**options))
        for _ in run:
            pass
        return run.completions

    def batch(
        self,
        rows: Iterable[str | Mapping[str, Any]],
        options: Options | None = None,
        *,
        batch_size: int | None = None,
        indices: Iterable[int] | None = None,
    ) -> Iterator[Completion | InputError]:
        """Continue any number of prompts, a batch at a time.

        Args:
            rows: prompts, or mappings with a "prompt" and options of this row alone, those of
                `Options.row_fields()`. A row that has a seed has the text of `generate` with this
                seed; else its index keys the random draws, too.
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
        helpers = self.speculator, self._prefixes
        return compute_valid(
            zip(count() if indices is None else indices, rows, strict=False),
            lambda pair: self._row_request(pair[1], defaults, pair[0]),
            lambda requests: batch.complete(
                self.model, self.tokenizer, requests, batch_size, *helpers
            ),
        )

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
        texts: Sequence[str],
        *,
        stride: int | None = None,
        bos: bool = False,
        ranks: bool = False,
        entropies: bool = False,
        words: bool = False,
    ) -> list[Score | InputError]:
        """Return the log-likelihood of each text, token by token, or an error.

        The score of a text without scored tokens has no perplexity.

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
        start = self.start_ids("bos is set") if bos else []
        measures: dict[str, Measure] = {}
        if ranks:
            measures["ranks"] = sampling.ranks
        if entropies:
            measures["entropies"] = lambda ops, logits, _: sampling.entropies(ops, logits)
        if words:
            measures["initial_logprobs"] = among(self._initial_tokens)

        def scores(ids: Iterator[list[int]]) -> Iterator[Score]:
            arguments = self.model, self.tokenizer, list(ids), stride, self._prefixes
            scored = score(*arguments, start=start, measures=measures)
            return map(self._with_words, scored) if words else iter(scored)

        return list(compute_valid(texts, self._text_ids, scores))

    def compress(self, data: bytes, *, block: int = SEGMENT_TOKENS) -> bytes:
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
        return b"".join(self._codec.decompress(ArchiveReader(BytesIO(data))))

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
        self, rows: Sequence[tuple[str, Sequence[str]]], *, by: RankBy = "total"
    ) -> list[list[Choice] | InputError]:
        """Rank the choices of each prompt, or return an error; see `rank`.

        The tokens that prompts share at their beginning are computed once.

        Raises:
            InputError: `by` is unknown.
        """
        return list(
            compute_valid(
                rows,
                self._question,
                lambda questions: rank(
                    self.model, self.tokenizer, list(questions), by, self._prefixes
                ),
            )
        )

    def _question(self, row: tuple[str, Sequence[str]]) -> Question:
        prompt, choices = row
        if isinstance(choices, str):
            raise TypeError("choices must be a list of texts, not one text")
        if not isinstance(prompt, str):
            raise InputError('a row needs a string "prompt"')
        question = self._tokenized(prompt, choices)
        question.check(self.model.config.n_positions)
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
        """Return the ids of the likeliest next tokens, best first, with log-probabilities.

        Raises:
            InputError: the prompt is longer than the context, or `count` is below 1.
        """
        if count < 1:
            raise InputError("the number of tokens must be 1 or more")
        ids = self._fitting_ids(prompt, special)
        ops = self.model.ops
        x = hidden_states(self.model, ops.xp.asarray([ids]))
        best = sampling.likeliest(ops, unembed(self.model, x[:, -1]), count)
        return list(zip(*(ops.to_host(row[0]).tolist() for row in best), strict=True))

    def tree(self, prompt: str, count: int = 20, *, special: bool = False) -> list[Node]:
        """Return the likeliest continuations of a prompt, of any length, as a tree.

        Raises:
            InputError: the prompt is longer than the context, or `count` is below 1.
        """
        if count < 1:
            raise InputError("the number of continuations must be 1 or more")
        return tree(self.model, self._fitting_ids(prompt, special), count)

    def _request(self, prompt: str, options: Options, index: int) -> Request:
        ids = self._prompt_ids(prompt, options.special)
        self.check_ids([id for id, _ in options.logit_bias])
        self.check_constraint(options)
        return Request(fit(ids, self.model.config.n_positions, options), options, index)

    def _row_request(self, row: str | Mapping[str, Any], defaults: Options, index: int) -> Request:
        fields = dict(row) if isinstance(row, Mapping) else {"prompt": row}
        prompt = fields.pop("prompt", None)
        options = defaults.with_row(fields)
        if not isinstance(prompt, str):
            raise InputError('a row needs a string "prompt"')
        # A row that has a seed equals a run of this row alone.
        return self._request(prompt, options, index if fields.get("seed") is None else 0)

    def _text_ids(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise InputError('a row needs a string "text"')
        return self.check_ids(self.encode(text))

    def _prompt_ids(self, prompt: str, special: bool = False) -> list[int]:
        ids = self.check_ids(self.encode(prompt, special=special))
        return ids or self.start_ids("the prompt is empty")

    def _with_words(self, found: Score) -> Score:
        given = found.ids, found.token_logprobs, found.initial_logprobs or []
        return replace(found, words=find_words(self.tokenizer, *given))

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


def load(
    name: str = "gpt2",
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    quiet: bool = True,
    threads: int | None = None,
    speculate: bool = True,
) -> Engine:
    """Load a model.

    Args:
        name: "tiny" (bundled), a short name such as "gpt2", a Hub id "owner/name", or a folder.
        device: "cpu", "cuda" for an NVIDIA GPU, or "auto" for a GPU if one can be used.
        dtype: of the weights: "float32"; "float16" on a GPU; "int8" on a CPU, a quarter of the
            bytes with a small error; or "auto": as stored. Stored 16-bit weights on a CPU give the
            results of float32 from half of the bytes.
        revision: a branch, tag or commit on the Hub.
        offline: do not ask the Hub.
        quiet: show no progress of a download.
        threads: to compute with; by default GPT_CLI_THREADS, or the number of cores that this
            process may use. NumPy reads its own number from OMP_NUM_THREADS.
        speculate: generate faster where that pays, with equal results: see `generation.speculate`.
            It may take a quarter of the memory of float32 weights.

    Raises:
        GPTCLIError: one of its subclasses, whose message says what to do.
    """
    check_available(device, "float32" if dtype == "auto" else dtype)  # before any download
    folder = hub.resolve(name, revision=revision, offline=offline, quiet=quiet)
    with unchanged(folder):
        config, tensors = checkpoint.read(folder)
        stored = checkpoint.stored_dtype(tensors)
        ops = get_ops(device, held_dtype(stored, device) if dtype == "auto" else dtype, threads)
        if ops.name == "native" and ops.dtype in SHORT and ops.dtype != stored:
            cure = "on a CPU, choose auto, float32 or int8"
            raise InputError(f"--dtype {dtype}: {name} is stored in {stored}; {cure}")
        check_room(
            f"the weights of {name} in {ops.dtype} take",
            checkpoint.memory(config, ops.dtype)["weights_bytes"],
            ops.free_memory(),
            "choose a smaller model or dtype, or another device",
        )
        start = time.perf_counter()
        tokenizer = Tokenizer.from_folder(folder)  # side by side with the next, both take longer
        model = checkpoint.assemble(config, ops, tensors)
    seconds = time.perf_counter() - start
    speculator = Speculator(model)
    used = speculator if speculate and speculator.pays else None
    return Engine(model, tokenizer, name, seconds, used)
