"""The public Python API: generate text with a model, score texts, compress data; look inside."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from io import BytesIO
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from gpt_cli.compression.archive import SEGMENT_TOKENS, ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.display.results import ResultDisplay
from gpt_cli.errors import InputError, about, brief, checked, compute_valid, counted, single
from gpt_cli.folder.tokenizer import check_bytes
from gpt_cli.generation.generate import Completion, Run, complete
from gpt_cli.generation.row import Request, check_limits
from gpt_cli.gpt2 import assembly
from gpt_cli.gpt2.edits import FunctionEdit, HookFunction, ModelEdit
from gpt_cli.gpt2.hooks import has_key_axis, select_hooks
from gpt_cli.gpt2.weights import Weights
from gpt_cli.options.arguments import check_type, checks_arguments
from gpt_cli.options.declare import AT_LEAST_1, OptionError, check, check_keywords
from gpt_cli.options.edit import AnyEdit
from gpt_cli.options.request import OptionFields, Options
from gpt_cli.scoring.activations import Pool, TextActivations, check_pool, text_activations
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
from gpt_cli.scoring.classify import Classification, LongTexts, classify
from gpt_cli.scoring.rank import Choice, Question, RankBy, rank
from gpt_cli.scoring.score import Score, ScoreOptions, score, too_short, with_words
from gpt_cli.scoring.trace import Trace, trace
from gpt_cli.scoring.tree import Tree, tree
from gpt_cli.scoring.vectors import Direction, VectorPool, direction
from gpt_cli.texts import measures
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.measures import Measure
from gpt_cli.texts.progress import counted_rows, counted_texts, new_bar
from gpt_cli.texts.result import Arrays, Result, shown_by
from gpt_cli.texts.speculator import Speculator
from gpt_cli.texts.text import Text
from gpt_cli.texts.words import among, initial_tokens, split_words

if TYPE_CHECKING:
    from gpt_cli.display.page import Page

Data: TypeAlias = bytes | bytearray | memoryview
R = TypeVar("R", bound=Result | InputError)


class Engine:
    """A model with its tokenizer, from `load`.

    Every method that computes raises CheckpointError if the weights are damaged, ResourceError if
    there is not enough memory, and InputError for an option that is out of range or a text that
    cannot be used, such as one longer than the context, or an empty one without a start token.
    """

    def __init__(
        self, loaded: LoadedModel, name: str, load_seconds: float, adapter: str | None = None
    ):
        self.loaded = loaded
        self.name: str = name  # of the model, in records
        self.load_seconds: float = load_seconds  # to read and prepare the weights
        self.adapter: str | None = adapter  # its name, if one is merged into the weights
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer

    def __repr__(self) -> str:
        """Return the name, the dtype, the operations, the size and the edits of the model."""
        config = self.model.config
        ops = self.model.ops
        size = f"{counted(config.n_layer, 'layer')} x {config.n_embd}"
        facts = [str(ops.dtype), ops.name, size]
        functions = [edit for edit in self.loaded.edits if isinstance(edit, FunctionEdit)]
        if edits := len(self.loaded.edits) - len(functions):
            facts.append(counted(edits, "edit"))
        if points := {point for function in functions for point in function.hooks}:
            facts.append(f"hooks at {counted(len(points), 'point')}")
        return f"<Engine {self.name}: {', '.join(facts)}>"

    @checks_arguments()
    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text, after the start token if the tokenizer puts it before texts.

        Names such as `<|endoftext|>` are text unless `special`.
        """
        return self.loaded.start + self.tokenizer.encode(text, special=special)

    @checks_arguments()
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; U+FFFD replaces bytes that are not UTF-8."""
        return self.tokenizer.decode(ids)

    def check_constraint(self, options: Options) -> None:
        """Raise InputError if no text of this model fits the constraint and the bad words."""
        check_limits(self.loaded, options)

    def with_weights(self, arrays: Mapping[str, Any]) -> "Engine":
        """Return an engine with other weights, by their names in `weights`; the rest is shared.

        They are kept in float32, or rounded to int8 if the model is in int8. A tied head follows
        `wte.weight`, unless there is a "lm_head.weight". InputError if a name or a shape is not the
        model's.
        """
        if not isinstance(arrays, Mapping):
            raise TypeError("arrays must be a mapping of names to arrays")
        model = assembly.with_weights(self.model, arrays)
        speculator = self.loaded.speculator and Speculator(model)
        return self._with(model=model, speculator=speculator)

    @checks_arguments()
    def with_edits(self, edits: Sequence[AnyEdit]) -> "Engine":
        """Return an engine that changes values of the forward pass, as `--edit`.

        The edits apply to all texts, after those of this engine. InputError if one does not fit
        the model, or its file cannot be read.

        Args:
            edits: texts as of `--edit`, an `Edit` for each change, or a `Direction` to add.
        """
        new = [ModelEdit.of(edit, self.model.config) for edit in edits]
        return self._with(edits=(*self.loaded.edits, *new))

    def with_hooks(self, hooks: Mapping[str, HookFunction]) -> "Engine":
        """Return an engine that calls functions with values of the forward pass.

        The values are of all texts, after the edits of this engine. Nothing is drafted, so that a
        function gets no token that the text will not have. It may get a text in parts. What it
        raises passes through. For a value of another shape or type, or with numbers that are not
        finite, the method that computes raises InputError.

        Args:
            hooks: functions by a name of a hook point or a glob, which apply in this order. A
                function gets the values (t, ...) of one text at t tokens, float32, tokens first,
                such as (t, H, D) of heads, or (t, H, S) with S keys; and the positions (t,) of the
                tokens. It returns the new values of the same shape, or None for these, which it may
                have changed in place.
        """
        if not isinstance(hooks, Mapping):
            raise TypeError("hooks must be a mapping of names to functions")
        for name, function in hooks.items():
            if not callable(function):
                raise TypeError(
                    f"hooks[{brief(name, 80)}] must be a function, not {brief(function)}"
                )
        config = self.model.config
        new = [FunctionEdit(select_hooks(config, [name]), hooks[name]) for name in hooks]
        return self._with(edits=(*self.loaded.edits, *new), speculator=None)

    def _with(self, **changes: Any) -> "Engine":
        """Return a copy with changes of its `LoadedModel`."""
        loaded = replace(self.loaded, **changes)
        return Engine(loaded, self.name, self.load_seconds, self.adapter)

    def _shown(self, result: R) -> R:
        """Return a result itself, which now knows how it is shown; or an error."""
        return result if isinstance(result, InputError) else shown_by(self._display, result)

    @cached_property
    def _display(self) -> ResultDisplay:
        return ResultDisplay(self.name, self.adapter, self.load_seconds, self.tokenizer)

    @checks_arguments()
    def run(self, prompts: Sequence[str], options: Options) -> Run:
        """Return an iterator that continues prompts side by side.

        An empty prompt is replaced by the model's start token.
        """
        options = options.with_seed()
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(Request.of_prompt(self.loaded, prompt, options, index))
            except InputError as error:
                several = len(set(prompts)) > 1
                raise (about(f"prompts[{index}]", error) if several else error) from None
        run = Run(self.loaded, requests)
        for completion in run.completions:
            self._shown(completion)
        return run

    @checks_arguments(Options)
    def stream(self, prompt: str, **options: Unpack[OptionFields]) -> Iterator[str]:
        """Return an iterator over the pieces of a continuation, each as soon as it is certain.

        With `beams`, these are the pieces of the best text, all at the end.
        """
        run = self.run([prompt], Options(**options))  # type: ignore[arg-type]
        return (step.text for step in run if step.text and not step.hypothesis)

    @checks_arguments(Options)
    def generate(
        self, prompts: Sequence[str], *, progress: bool = False, **options: Unpack[OptionFields]
    ) -> list[Completion]:
        """Continue prompts; a result does not depend on the other prompts.

        `progress` shows a bar of the tokens; it is a widget in a notebook.
        """
        run = self.run(prompts, Options(**options))  # type: ignore[arg-type]
        if progress:
            with new_bar("token") as bar:
                for _ in run:
                    bar.update()
        else:
            for _ in run:
                pass
        return run.completions

    @checks_arguments()
    def batch(
        self,
        rows: Iterable[str | Mapping[str, Any]],
        options: Options | None = None,
        *,
        batch_size: int | None = None,
        indices: Iterable[int] | None = None,
        progress: bool = False,
    ) -> Iterator[Completion | InputError]:
        """Continue any number of prompts, a batch at a time.

        Args:
            rows: prompts, or mappings with a "prompt" and options of this row alone, the fields of
                a row for `gpt-cli batch`. A row with a seed has the text of `generate` with this
                seed; without one, its index keys the random draws, too.
            options: the defaults of the rows.
            batch_size: rows to compute side by side; by default as many as memory and speed allow.
            indices: of the rows; by default 0, 1, 2, ...
            progress: show a bar of the rows.

        Returns:
            An iterator over the completions, in order; a row that cannot be continued has an error.
        """
        if batch_size is not None:
            check("batch_size", batch_size, AT_LEAST_1)
        defaults = (options or Options()).with_seed()

        def request_of(numbered: tuple[int, str | Mapping[str, Any]]) -> Request:
            index, row = numbered
            return Request.of_row(self.loaded, row, defaults, index)

        numbered = zip(count() if indices is None else indices, rows, strict=False)
        run = partial(complete, self.loaded, batch_size=batch_size)
        results = map(self._shown, compute_valid(numbered, request_of, run))
        return counted_rows(results, rows) if progress else results

    @checks_arguments()
    def score(self, text: str, **options: Unpack[ScoreOptions]) -> Score:
        """Return the log-likelihood of a text, token by token; see `score_many`."""
        scored = single(self.score_many([text], **options))
        if not scored.tokens_scored:
            start = self.loaded.start_ids(bos=options.get("bos", False))
            before = bool(start or options.get("context"))
            raise too_short(has_start=before and not scored.ids)
        return scored

    @checks_arguments()
    def score_many(
        self,
        texts: Iterable[str | Mapping[str, Any]],
        *,
        stride: int | None = None,
        bos: bool = False,
        eos: bool = False,
        context: str = "",
        special: bool = False,
        ranks: bool = False,
        entropies: bool = False,
        gaps: bool = False,
        words: bool = False,
        layers: bool = False,
        progress: bool = False,
    ) -> list[Score | InputError]:
        """Return the log-likelihoods of texts, token by token, or errors.

        Without scored tokens, the score of a text has no perplexity.

        Args:
            texts: any number, of any length; or mappings with a "text", and perhaps "context" (or
                "prompt"), "special", "edits", and "words", a list of strings whose join is the
                text.
            stride: windows of a text longer than the context are `stride` tokens apart, by default
                half of it.
            bos: put the start token before texts, so that their first tokens are also scored. Some
                tokenizers always do that.
            eos: also score the end token after each text, so that a text ends where it ends.
            context: a text before each text. It is joined as it is, and is not scored; a token with
                characters of both belongs to the text.
            special: read names such as `<|endoftext|>` in texts as special tokens.
            ranks: also return the ranks of tokens.
            entropies: also return the entropies of the distributions of tokens, and their
                `moments`, which `Score.min_k_plus_plus` needs.
            gaps: also return how far tokens are below the likeliest ones, in nats.
            words: also return the words of texts with their surprisal, as `gpt-cli score --words`:
                those of a mapping, or what white space divides.
            layers: also return the log-probabilities of tokens, and the surprisal of words, if the
                model ended after 0 (the embedding), 1, ... layers. The last are its own.
            progress: show a bar of the texts, or of the windows of long ones.
        """
        fields: dict[str, Measure] = {}
        if ranks:
            fields["ranks"] = measures.ranks
        if entropies:
            fields["moments"] = measures.moments
        if gaps:
            fields["gaps"] = measures.gaps
        if words:
            fields["initial_logprobs"] = among(self._initial_tokens)

        def scores(valid: Iterator[Text]) -> list[Score]:
            items = list(valid)
            scored = score(self.loaded, items, stride, measures=fields, layers=layers)
            if not words:
                return scored
            return [
                with_words(self.tokenizer, text, of_text)
                for text, of_text in zip(items, scored, strict=True)
            ]

        start = self.loaded.start_ids(bos=bos)
        end = self.loaded.end_ids(eos=eos)

        def text_of(item: str | Mapping[str, Any]) -> Text:
            text = self.loaded.scored_text(
                item, start=start, end=end, context=context, special=special
            )
            if words and text.words is None:
                instead = "score tokens (--tokens), or "
                check_bytes(self.tokenizer, "the surprisal of words", instead=instead)
            return text

        with counted_texts(progress=progress):
            return list(map(self._shown, compute_valid(texts, text_of, scores)))

    @checks_arguments()
    def compress(self, data: Data, *, segment: int = SEGMENT_TOKENS) -> bytes:
        """Return data as a compressed file; `gpt-cli compress` reads streams.

        Raise ResourceError if results are not the same to the last bit here, such as on a GPU.

        Args:
            data: any bytes.
            segment: its tokens; larger segments take fewer bytes, but more time to decompress.
        """
        return b"".join(self._codec.compress(BytesIO(data), segment))

    @checks_arguments()
    def decompress(self, data: Data) -> bytes:
        """Return the data of a compressed file; it needs the same model, with the same bits."""
        return b"".join(self._codec.decompress(ArchiveReader(BytesIO(data))))

    @cached_property
    def _codec(self) -> Codec:
        self.loaded.refuse_edits("cannot change how data is compressed")
        return Codec(self.model, self.tokenizer)

    @checks_arguments()
    def rank(
        self,
        prompt: str,
        choices: Sequence[str],
        *,
        by: RankBy = "total",
        calibrate: str | None = None,
        special: bool = False,
    ) -> list[Choice]:
        """Rank continuations of a prompt, the likeliest first.

        Args:
            prompt: the text before the choices.
            choices: distinct texts; a word usually begins with its space.
            by: compare the likelihood of the whole choice ("total"), which favours short ones, or
                its mean per "token" or "byte". The probabilities are normalized over the choices.
            calibrate: a neutral text; "" for the start token. Then the probabilities are of how
                much likelier the prompt makes a choice than this text does: the difference of both
                log-likelihoods, or its mean.
            special: read names such as `<|endoftext|>` in texts as special tokens.

        If the end of the prompt forms one token with the beginning of a choice, all choices are
        ranked with that end.
        """
        row = (prompt, choices)
        return single(self.rank_many([row], by=by, calibrate=calibrate, special=special))

    @checks_arguments()
    def rank_many(
        self,
        rows: Iterable[tuple[str, Sequence[str]] | Mapping[str, Any]],
        *,
        by: RankBy = "total",
        calibrate: str | None = None,
        special: bool = False,
        progress: bool = False,
    ) -> list[list[Choice] | InputError]:
        """Rank the choices of prompts, or return errors; see `rank`.

        A row is a prompt and its choices, or a mapping with a "prompt", "choices" and perhaps
        "edits" and "special". The tokens that prompts share at their beginning are computed once.
        `progress` shows a bar of the prompts and the choices.
        """

        def ranked(questions: Iterator[Question]) -> list[list[Choice]]:
            results = rank(self.loaded, list(questions), by)
            return [list(map(self._shown, choices)) for choices in results]

        question_of = partial(self._question, special=special, neutral=calibrate)
        with counted_texts(progress=progress):
            return list(compute_valid(rows, question_of, ranked))

    def _question(
        self, row: Sequence[Any] | Mapping[str, Any], *, special: bool, neutral: str | None
    ) -> Question:
        if not isinstance(row, Mapping):
            check_type("row", row, Sequence[Any])
            if len(row) != 2:
                raise InputError(f"a row must be a prompt and its choices, not {brief(row)}")
            row = {"prompt": row[0], "choices": row[1]}
        return Question.of_row(self.loaded, row, special=special, neutral=neutral)

    @checks_arguments()
    def classify(
        self,
        texts: Iterable[str | Mapping[str, Any]],
        *,
        overflow: LongTexts = "error",
        special: bool = False,
        progress: bool = False,
    ) -> list[Classification | InputError]:
        """Return the labels of texts, or errors, with a model that is a classifier.

        The result of a text is that of GPT2ForSequenceClassification in transformers.

        Args:
            texts: any number, or mappings with a "text", and perhaps "edits" and "special".
            overflow: a text longer than the context is an error ("error"), or its beginning is
                classified ("truncate").
            special: read names such as `<|endoftext|>` in texts as special tokens; a mapping may
                have its own "special".
            progress: show a bar of the texts.
        """
        classifier = self.loaded.classifier
        if overflow not in get_args(LongTexts):
            raise OptionError("overflow", f"must be one of {', '.join(get_args(LongTexts))}")

        def text_of(item: str | Mapping[str, Any]) -> Text:
            longest = self.model.config.n_positions if overflow == "truncate" else None
            text = self.loaded.text(item, start=self.loaded.start, special=special, longest=longest)
            if not text.ids:
                raise InputError("the text is empty: it has no tokens")
            self.loaded.check_fits(len(text.ids), "text")
            return text

        def classified(valid: Iterator[Text]) -> list[Classification]:
            return classify(self.loaded, classifier, list(valid))

        with counted_texts(progress=progress):
            return list(map(self._shown, compute_valid(texts, text_of, classified)))

    # --- inside the model -------------------------------------------------------------------------

    @cached_property
    def weights(self) -> Weights:
        """The weights by their names in the checkpoint: float32 copies in its layout."""
        return Weights(self.model)

    @checks_arguments()
    def logits(self, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Return the logits of the next token at all positions.

        Args:
            ids: (B, T) token ids, T from 1 to n_positions.

        Returns:
            (B, T, V) float32, on the host.
        """
        config = self.model.config
        if len({len(row) for row in ids}) != 1 or not 1 <= len(ids[0]) <= config.n_positions:
            raise InputError(f"all rows must have the same length, from 1 to {config.n_positions}")
        texts = [self.loaded.text_of_ids(row) for row in ids]
        return self.model.ops.to_host(measures.all_logits(self.model, texts))

    @checks_arguments()
    def trace(self, text: str, *, special: bool = False) -> Trace:
        """Return the residual stream, the attention and the lens of a text."""
        return self._shown(trace(self.model, self.loaded.prompt(text, special=special)))

    @checks_arguments()
    def activations(
        self,
        texts: Iterable[str | Mapping[str, Any]],
        hooks: Sequence[str],
        *,
        pool: Pool | None = None,
        bos: bool = False,
        special: bool = False,
        progress: bool = False,
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Return an iterator over the values at hook points of texts, float32 by name, in order.

        `gpt-cli activations --hooks` lists the shapes, such as (T, C) for T tokens. A value for one
        token, or a mean, has no axis of tokens, such as (C,); means over words are (words, C).

        A text that is empty or longer than the context is an InputError when it is its turn; it
        begins with the index, such as `texts[1]:`.

        Args:
            texts: any number, or mappings with a "text" and its "edits", a list.
            hooks: names or globs; `gpt-cli activations --hooks` lists the names.
            pool: the values of the "last" token, the "mean" over the tokens of the text, or the
                mean over the tokens of each "word", with the arrays "word", "start" and "end".
            bos: put the start token before texts; it is no part of a mean.
            special: read names such as `<|endoftext|>` in texts as special tokens; a mapping may
                have its own "special".
            progress: show a bar of the texts.
        """
        results = self.activation_rows(texts, hooks, pool, bos=bos, special=special)
        numbered = enumerate(counted_rows(results, texts) if progress else results)
        rows = (checked(row, f"texts[{index}]") for index, row in numbered)
        if pool in ("last", "mean"):
            return (Arrays((name, value[0]) for name, value in row.values.items()) for row in rows)
        return (Arrays(row.word_columns | row.values) for row in rows)

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
        names = select_hooks(self.model.config, hooks)
        check_pool(pool, names)
        if pool == "word":
            check_bytes(self.tokenizer, "pool word")

        start = self.loaded.start_ids(bos=bos)

        def text_of(item: str | Mapping[str, Any]) -> Text:
            text = self.loaded.text(item, start=start, special=special)
            if not text.content:
                raise InputError("the text is empty: it has no tokens")
            if pool == "word" and not split_words(self.tokenizer, text):
                raise InputError("the text has no words, only white space")
            self.loaded.check_fits(len(text.ids), "text")
            return text

        return compute_valid(
            texts, text_of, lambda valid: text_activations(self.loaded, valid, names, pool)
        )

    @checks_arguments()
    def next_tokens(
        self, prompt: str, count: int = 10, *, special: bool = False
    ) -> list[tuple[int, float]]:
        """Return the ids of the likeliest next tokens, best first, with log-probabilities."""
        check("count", count, AT_LEAST_1)
        text = self.loaded.prompt(prompt, special=special)
        return measures.next_tokens(self.model, text, count)

    @checks_arguments()
    def vector(
        self,
        positive: Sequence[str | Mapping[str, Any]],
        negative: Sequence[str | Mapping[str, Any]],
        hook: str,
        *,
        pool: VectorPool = "mean",
        pca: bool = False,
        special: bool = False,
        progress: bool = False,
    ) -> Direction:
        """Return the vector from the activations of some texts to those of others, at a hook point.

        Args:
            positive: texts that it points to, at least two; they may have edits: see `activations`.
            negative: the other texts, at least two.
            hook: the name of a hook point without keys: no scores and no pattern.
            pool: the activations of the last token of a text ("last"), or their mean.
            pca: return the first principal component of all texts, not the difference of the means.
            special: read names such as `<|endoftext|>` in texts as special tokens.
            progress: show a bar of the texts.
        """
        name, *others = select_hooks(self.model.config, [hook])
        if others:
            raise OptionError("hook", f"must name one hook point: {hook} names {len(others) + 1}")
        if has_key_axis(name):
            raise OptionError("hook", f"cannot be {name}: a vector has no tokens")
        if pool not in get_args(VectorPool):
            raise OptionError("pool", f"must be one of {', '.join(get_args(VectorPool))}")
        sets = []
        with counted_texts(progress=progress):
            for argument, texts in {"positive": positive, "negative": negative}.items():
                numbered = enumerate(self.activation_rows(texts, [name], pool, special=special))
                rows = (checked(row, f"{argument}[{index}]") for index, row in numbered)
                sets.append(np.array([row.values[name][0] for row in rows]))
        return direction(name, *sets, pca=pca)

    @checks_arguments()
    def tree(self, prompt: str, count: int = 20, *, special: bool = False) -> Tree:
        """Return the likeliest continuations of a prompt, of any length, as a tree."""
        check("count", count, AT_LEAST_1)
        n_positions = self.model.config.n_positions
        text = self.loaded.prompt(prompt, special=special, final_length=n_positions)
        return self._shown(Tree(tree(self.model, text, count), prompt))

    def show(self, view: str, *texts: str, **options: Any) -> "Page":
        """Return a view of a text as a page, which notebooks display, and `save` writes.

        Args:
            view: "attention" (with `layer` and `head` for one of them), "lens" (`count` tokens),
                "surprise", "tree", "attribution", "patch" or "ablate": see `gpt-cli show`.
            texts: the text; for "patch", the clean and the corrupt one.
            options: those of the method that computes the view: of `trace` for attention and lens,
                of `score` for surprise, and else of the method of the same name. An unknown one is
                a TypeError.
        """
        from inspect import signature

        from gpt_cli.display.page import Page
        from gpt_cli.display.views import VIEWS

        if view not in VIEWS:
            raise OptionError("view", f"must be one of {', '.join(VIEWS)}, not {brief(view)}")
        method, draw = VIEWS[view]
        compute = getattr(self, method)
        _source, _result, *of_view = signature(draw).parameters
        if of_view:  # the method does not know them
            check_keywords(options, [*of_view, *signature(compute).parameters])
        drawn = {name: options.pop(name) for name in of_view if name in options}
        result = compute(*texts, **options)
        return Page(draw(self._display, result, **drawn))

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
        text = self.loaded.prompt(prompt, special=special)
        result = attribute(self.model, text, self._answers(answer, wrong))
        return self._shown(replace(result, prompts=[prompt]))

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
        progress: bool = False,
    ) -> Patching:
        """Return the logit after a corrupt text with activations of a clean one, one at a time.

        The texts have equally many tokens. `what` names the activations: those of each layer and
        position, or "z" of each head. `progress` shows a bar of the passes, one for each of them.
        For the other arguments, see `attribution`.
        """
        clean_text = self.loaded.prompt(clean, special=special)
        corrupt_text = self.loaded.prompt(corrupt, special=special)
        answers = self._answers(answer, wrong)
        with counted_texts(progress=progress):
            result = patch(self.model, clean_text, corrupt_text, answers, what)
        return self._shown(replace(result, prompts=[clean, corrupt]))

    @checks_arguments()
    def ablate(
        self,
        prompt: str,
        answer: str,
        wrong: str | None = None,
        *,
        special: bool = False,
        progress: bool = False,
    ) -> Ablation:
        """Return the logit after a prompt without each head, and each MLP: see `attribution`.

        `progress` shows a bar of the passes, one for each of them.
        """
        text = self.loaded.prompt(prompt, special=special)
        answers = self._answers(answer, wrong)
        with counted_texts(progress=progress):
            result = ablate(self.model, text, answers)
        return self._shown(replace(result, prompts=[prompt]))

    def _answers(self, answer: str, wrong: str | None) -> Answers:
        """Return the ids of answers; OptionError if one is not a token, or both are the same."""
        texts = {"answer": answer} if wrong is None else {"answer": answer, "wrong": wrong}
        ids = [self.loaded.token_id(name, text) for name, text in texts.items()]
        if len(set(ids)) < len(ids):
            raise OptionError("wrong", "must be another token than the answer")
        return ids

    @cached_property
    def _initial_tokens(self) -> NDArray[np.bool_]:
        return initial_tokens(self.tokenizer, self.model.config)
