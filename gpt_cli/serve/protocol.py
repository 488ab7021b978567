"""OpenAI's completions and embeddings: from the JSON of a request to prompts and options.

The defaults are OpenAI's, not those of the command line: temperature 1, 16 tokens, no top-k.
https://platform.openai.com/docs/api-reference/completions
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from gpt_cli.engine import Engine
from gpt_cli.errors import InputError, ResourceError, counted, did_you_mean
from gpt_cli.gpt2.edits import EditError, FunctionEdit, ModelEdit, bind
from gpt_cli.gpt2.hooks import FINAL, has_key_axis, hook_shapes, select_hooks
from gpt_cli.options.declare import LIMIT, Declared, OptionError, Range, between, option
from gpt_cli.options.request import OF_SEARCH, Options, SamplingParams, check_search
from gpt_cli.serve import trial
from gpt_cli.serve.dialects import NEUTRAL, in_dialect, translated
from gpt_cli.serve.refusals import RequestError
from gpt_cli.serve.structured import CONSTRAINT_FIELDS, constraint_of
from gpt_cli.texts.text import Text

Json: TypeAlias = dict[str, Any]
F = TypeVar("F", "CompletionFields", "EmbeddingFields")

_MOST_TEXTS = 2048  # of a request
_MOST_SEARCHED = 64  # every text is searched for all
_MOST_SEARCHED_CHARACTERS = 4096
_MOST_EDITS = 256
_MOST_EDIT_CHARACTERS = 32_768
MOST_ENTRIES = 500_000  # of a response; an entry takes up to 200 bytes
_ENTRY_NUMBERS = 4  # numbers of a vector that take as much memory as an entry
_CANDIDATES = between(1, 128)
_LENGTHS = Range(lambda tokens: tokens >= 0, "0 or more, or -1 for no limit")


@dataclass(frozen=True, kw_only=True)
class CompletionFields(Declared):
    """The fields of a request for completions that are not options of a text."""

    model: str | None = option(None)
    max_tokens: int = option(16, range=_LENGTHS, kind=LIMIT)
    n: int = option(1, range=_CANDIDATES)
    best_of: int | None = option(None, range=_CANDIDATES)
    logprobs: int | None = option(None, range=between(0, 100))
    use_beam_search: bool = option(False)
    echo: bool = option(False)
    stream: bool = option(False)
    user: str | None = option(None)

    @property
    def candidates(self) -> int:
        """Return the number of texts that are computed for a prompt: for a search, of its beams."""
        return self.best_of or self.n

    @property
    def choices(self) -> int:
        """Return the number of texts for a prompt; the best n of them are returned."""
        return self.n if self.use_beam_search else self.candidates


@dataclass(frozen=True, kw_only=True)
class EmbeddingFields(Declared):
    """The fields of a request for embeddings, except its texts."""

    model: str | None = option(None)
    encoding_format: Literal["float", "base64"] = option("float")
    hook: str = option(FINAL)
    pool: Literal["mean", "last"] = option("mean")
    user: str | None = option(None)


_OPTIONS = {
    *SamplingParams.row_fields(),
    *("min_tokens", "seed", "stop", "include_stop", "bad_words", "stop_token_ids", "ignore_eos"),
    *OF_SEARCH,
}
_KNOWN = _OPTIONS.union(
    CompletionFields.row_fields(), CONSTRAINT_FIELDS, ("prompt", "stream_options", "edits")
)
_DEFAULTS = {"temperature": 1, "top_k": 0, "top_p": 1}
# What to do without a field that other servers have.
_CURES = {
    "repeat_last_n": "a penalty applies to the whole text",
    "dimensions": "a vector has all numbers of its hook point, none of which can be left out",
}


@dataclass(frozen=True)
class Prompt:
    """A prompt of at least one token."""

    text: Text
    written: str  # the text as in the request; ids are decoded only for an echo


@dataclass(frozen=True)
class Completions:
    """A valid request for completions."""

    prompts: Sequence[Prompt]
    fields: CompletionFields
    options: Options
    include_usage: bool
    entries: int  # the most tokens and log-probabilities that the response may have

    @property
    def texts(self) -> list[Text]:
        """Return the texts of the prompts."""
        return [prompt.text for prompt in self.prompts]

    @property
    def prompt_logprobs(self) -> int | None:
        """Return the number of likeliest tokens at each position of a prompt; None for no score."""
        return self.fields.logprobs if self.fields.echo else None


@dataclass(frozen=True)
class Embeddings:
    """A valid request for embeddings."""

    texts: Sequence[Text]
    fields: EmbeddingFields
    entries: int  # the size of the response, as that of completions


def read_completions(
    engine: Engine, body: Json, folder: Path | None = None, seed: int | None = None
) -> Completions:
    """Return the request that a body describes; raise RequestError if a field is not valid.

    Args:
        engine: the model.
        body: the JSON of the request.
        folder: of the files of edits; without one, requests may have no edits.
        seed: of a request that has none; by default, one is drawn.
    """
    try:
        return _completions(engine, translated(body), folder, seed)
    except RequestError as error:
        raise in_dialect(error, body) from None


def _completions(engine: Engine, body: Json, folder: Path | None, seed: int | None) -> Completions:
    values = _changes(body, _KNOWN, NEUTRAL)
    fields = _completion_fields(values)
    options = _options(engine, values, fields).with_seed(seed)
    include_usage = _include_usage(values)
    prompts = _texts("prompt", values.get("prompt", ""), fields.candidates)
    for name, searched in ("stop", options.stop), ("bad_words", options.bad_words):
        if len(searched) > _MOST_SEARCHED or len("".join(searched)) > _MOST_SEARCHED_CHARACTERS:
            most = f"{_MOST_SEARCHED} texts, {_MOST_SEARCHED_CHARACTERS} characters in all"
            raise RequestError(f"{name} must be at most {most}", name)
    edits = (*engine.loaded.edits, *_edits(engine, values.get("edits", []), folder))
    encoded = [_prompt(engine, prompt, fields, edits) for prompt in prompts]
    entries = _entries(encoded, fields, engine.model.config.n_positions)
    return Completions(encoded, fields, options, include_usage, entries)


def read_embeddings(engine: Engine, body: Json) -> Embeddings:
    """Return the request that a body describes; raise RequestError if a field is not valid."""
    values = _changes(body, {*EmbeddingFields.row_fields(), "input"}, {"dimensions": ()})
    fields = _fields(EmbeddingFields, values)
    if values.get("input") in (None, []):
        what = "an empty list" if "input" in values else "missing"
        raise RequestError(f"input is {what}: give a text, or a list of texts", "input")
    texts = _texts("input", values["input"])
    size = _vector_size(engine, fields.hook)
    most = _ENTRY_NUMBERS * MOST_ENTRIES // size
    if len(texts) > most:
        raise RequestError(f"input: up to {most} texts fit an answer at this hook", "input")
    is_list = texts is values["input"]
    prompts = [
        _embedded(engine, text, f"input[{index}]" if is_list else "input")
        for index, text in enumerate(texts)
    ]
    return Embeddings(prompts, fields, len(texts) * size // _ENTRY_NUMBERS)


def _vector_size(engine: Engine, hook: str) -> int:
    """Return the numbers of a vector at a hook point; raise RequestError if it has none."""
    config = engine.model.config
    try:
        names = select_hooks(config, [hook])
    except OptionError as error:
        raise RequestError(str(error), "hook") from None
    if names != [hook]:
        raise RequestError(f"hook {hook!r:.80} must name one hook point, without * and ?", "hook")
    if has_key_axis(hook):
        raise RequestError(f"hook {hook} has no vector for each token", "hook")
    return math.prod(map(int, hook_shapes(config)[hook][1:]))


def tokenize(engine: Engine, body: Json) -> Json:
    """Return the ids of a text, in which `<|endoftext|>` is the special token."""
    text = body.get("prompt")
    if not isinstance(text, str):
        raise RequestError("prompt must be a text", "prompt")
    with _about("prompt"):
        ids = engine.tokenizer.encode(text, special=True)
    return {"tokens": ids, "count": len(ids), "max_model_len": engine.model.config.n_positions}


def detokenize(engine: Engine, body: Json) -> Json:
    """Return the text of ids."""
    if not _is_ids(body.get("tokens")):
        raise RequestError("tokens must be a list of token ids", "tokens")
    with _about("tokens"):
        return {"prompt": engine.decode(body["tokens"])}


def _changes(body: Json, known: Set[str], neutral: Mapping[str, tuple[Any, ...]]) -> Json:
    """Return the fields of a body that change something; refuse those that are not known."""
    values = {
        name: value
        for name, value in body.items()
        if value is not None and value not in neutral.get(name, ())
    }
    unknown = [name for name in values if name not in known]
    for name in unknown:
        if name in neutral:
            cure = _CURES.get(name, "leave it out")
            reason = f"this server does not have this field: {cure}"
        else:
            names = ", ".join(sorted(known))
            nearest = did_you_mean(name, known)
            reason = f"there is no such field{nearest or f'; there are {names}'}"
        raise RequestError(f"{name!r:.40}: {reason}", name)
    return values


def _texts(field: str, value: Any, candidates: int = 1) -> list[str | list[int]]:
    """Return the texts of a field: a text, ids, or a list of these; refuse too many."""
    texts = [value] if not value or _is_text(value) else value
    if not isinstance(texts, list) or not all(map(_is_text, texts)):
        raise RequestError(f"{field} must be a text, token ids, or a list of these", field)
    if len(texts) * candidates > _MOST_TEXTS:  # before they take time
        raise RequestError(f"{field}: a request may have up to {_MOST_TEXTS} texts", field)
    return texts


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or _is_ids(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(id) is int for id in value)


def _include_usage(values: Json) -> bool:
    options = values.get("stream_options", {})
    if isinstance(options, dict) and options.keys() <= {"include_usage", "include_obfuscation"}:
        include = options.get("include_usage", False)
        if isinstance(include, bool) and (values.get("stream") or not options):
            return include
    raise RequestError(
        'stream_options must be {"include_usage": true or false}, with "stream": true',
        "stream_options",
    )


def _fields(kind: type[F], values: Json) -> F:
    try:
        chosen = {name: value for name, value in values.items() if name in kind.row_fields()}
        return kind(**kind.parse_json(chosen))
    except OptionError as error:
        raise RequestError(str(error), error.args[0]) from None


def _completion_fields(values: Json) -> CompletionFields:
    fields = _fields(CompletionFields, values)
    if fields.use_beam_search and fields.n == 1 and fields.best_of is None:
        raise RequestError("best_of is missing: it is the number of beams", "best_of")
    if fields.candidates < fields.n:
        raise RequestError(f"best_of must be at least n, which is {fields.n}", "best_of")
    if fields.stream and fields.choices > fields.n:
        raise RequestError("best_of: the best of several texts cannot be streamed", "best_of")
    return fields


def _options(engine: Engine, values: Json, fields: CompletionFields) -> Options:
    chosen = {name: value for name, value in values.items() if name in _OPTIONS}
    lengths = {"max_tokens": max(1, fields.max_tokens), "top_logprobs": fields.logprobs or 0}
    constraint = constraint_of(values)
    field = constraint.field if constraint else None
    try:
        if constraint:
            trial.check(constraint.option, constraint.value)
            chosen[constraint.option] = constraint.value
        parsed = Options.parse_json(_DEFAULTS | chosen | lengths)
        if fields.use_beam_search:
            parsed["beams"] = fields.candidates
            if parsed["temperature"] == 1:  # the default
                parsed["temperature"] = 0
        check_search(parsed, parsed.get("beams"))  # Options would take its defaults for unset ones
        options = Options(**parsed)
        engine.check_constraint(options)
        with _about("stop_token_ids"):
            engine.model.config.check_ids(options.stop_token_ids)
        return engine.loaded.with_token_ids(options)
    except OptionError as error:
        name, complaint = error.args
        if constraint and name == constraint.option:
            name = constraint.field
        raise RequestError(f"{name} {complaint}", name) from None
    except ResourceError as error:  # llguidance is not installed
        raise RequestError(str(error), field, status=501) from None
    except InputError as error:  # the tokenizer has no bytes
        raise RequestError(str(error), field) from None


def _edits(engine: Engine, value: Any, folder: Path | None) -> list[ModelEdit]:
    """Return the edits of a request; their files are in the folder."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("edits must be a list of texts", "edits")
    if len(texts) > _MOST_EDITS or len("".join(texts)) > _MOST_EDIT_CHARACTERS:
        most = f"{_MOST_EDITS} texts, {_MOST_EDIT_CHARACTERS:,} characters in all"
        raise RequestError(f"edits must be at most {most}", "edits")
    if texts and folder is None:
        raise RequestError("edits need a server that was started with --allow-edits DIR", "edits")
    with _about("edits"):
        return [ModelEdit.of(text, engine.model.config, folder) for text in texts]


def _prompt(
    engine: Engine,
    prompt: str | list[int],
    fields: CompletionFields,
    edits: Sequence[ModelEdit | FunctionEdit],
) -> Prompt:
    with _about("prompt"):
        ids = engine.encode(prompt) if isinstance(prompt, str) else prompt
        config = engine.model.config
        ids = config.check_ids(ids) or [config.start_token("the prompt is empty")]
        _check_length(ids, config.n_positions - (1 if fields.max_tokens else 0))
    with _about("edits"):
        bound = bind(edits, len(ids), min(len(ids) + fields.max_tokens, config.n_positions))
    # The first id may be a start token that the prompt does not have.
    start = int(not prompt or (isinstance(prompt, str) and bool(engine.loaded.start)))
    text = Text(ids, start, edits=bound)
    if isinstance(prompt, str):
        return Prompt(text, prompt)
    with _about("prompt"):
        return Prompt(text, engine.decode(prompt) if fields.echo else "")


def _embedded(engine: Engine, text: str | list[int], label: str) -> Text:
    config = engine.model.config
    with _about("input", label):
        start = int(isinstance(text, str) and bool(engine.loaded.start))
        ids = config.check_ids(engine.encode(text) if isinstance(text, str) else text)
        if len(ids) == start:
            raise InputError("the text is empty: it has no tokens")
        _check_length(ids, config.n_positions)
        edits = engine.loaded.bound_edits(None, len(ids), len(ids))  # of `serve --edit`
    return Text(ids, start, edits=edits)


def _check_length(ids: Sequence[int], most: int) -> None:
    if len(ids) > most:
        raise InputError(f"it has {counted(len(ids), 'token')}; shorten it to at most {most:,}")


@contextmanager
def _about(field: str, label: str | None = None) -> Iterator[None]:
    """Say that an InputError is about a field, or about an item of it with a label."""
    try:
        yield
    except InputError as error:
        reason = error.args[-1] if isinstance(error, EditError) else error
        raise RequestError(f"{label or field}: {reason}", field) from None


def _entries(prompts: Sequence[Prompt], fields: CompletionFields, n_positions: int) -> int:
    """Return the most tokens and log-probabilities of a response; refuse too many."""
    echoed = sum(len(prompt.text.ids) for prompt in prompts) if fields.echo else 0
    new = len(prompts) * min(fields.max_tokens, n_positions)
    tokens = fields.candidates * (echoed + new)
    entries = tokens * (1 + (fields.logprobs or 0))
    if entries > MOST_ENTRIES:
        if tokens <= MOST_ENTRIES:
            field = "logprobs"
        else:
            field = "max_tokens" if fields.max_tokens else "prompt"
        raise RequestError(
            f"{field}: an answer may have {MOST_ENTRIES} tokens and log-probabilities in all: "
            "ask for fewer texts, tokens or logprobs at a time",
            field,
        )
    return entries
