"""Results as JSON objects, and the schema that JSON, Parquet and `gpt_cli.ray` share."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from gpt_cli.errors import InputError

if TYPE_CHECKING:
    from gpt_cli.folder.tokenizer import Tokenizer
    from gpt_cli.generation.generate import Completion
    from gpt_cli.scoring.classify import Classification
    from gpt_cli.scoring.rank import Choice
    from gpt_cli.scoring.score import Score
    from gpt_cli.texts.text import Word

Record: TypeAlias = dict[str, Any]
# From names to types of pyarrow. A list holds the type of its items, and a dict is a struct. Lists
# of one size are a tuple of the type and the number of their items. An object whose names are not
# known before is a tuple of the types of names and values.
Schema: TypeAlias = dict[str, Any]

# Why no token can follow a text, which is an error where a result must be whole.
STUCK = "the constraint has no end there, or is too complex"


class Source(Protocol):
    """The source of a result: an engine, or the parts of it that a result keeps."""

    @property
    def name(self) -> str:
        """Return the name of the model."""

    @property
    def adapter(self) -> str | None:
        """Return the name of its adapter."""

    @property
    def load_seconds(self) -> float:
        """Return the time to load it."""

    @property
    def tokenizer(self) -> "Tokenizer":
        """Return its tokenizer."""


IDENTITY: Schema = {"index": "int64", "id": "string"}
ERROR: Schema = {"error": {"code": "string", "message": "string"}}
TOKEN: Schema = {"id": "int64", "token": "string", "bytes": ["int64"], "logprob": "double"}
_OF_DISTRIBUTION = dict.fromkeys(("entropy", "mean", "std", "gap"), "double")
SCORED_TOKEN: Schema = TOKEN | {"rank": "int64"} | _OF_DISTRIBUTION
WORD: Schema = {
    "word": "string",
    "start": "int64",
    "end": "int64",
    "tokens": "int64",
    "surprisal": "double",
}
LAYERS: Schema = {"layers": ["double"]}  # of tokens and words
COMPLETION: Schema = {
    "text": "string",
    "finish_reason": "string",
    "seed": "uint64",
    "model": "string",
    "adapter": "string",
    "usage": {"prompt_tokens": "int64", "completion_tokens": "int64"},
    "timing": {
        "load_s": "double",
        "ttft_s": "double",
        "decode_tok_s": "double",
        "drafted": "int64",
        "accepted": "int64",
    },
}
SAMPLE: Schema = {"sample": "int64", "samples": "int64"}  # of rows that may have several texts
HYPOTHESIS: Schema = {"score": "double"}  # of completions that a beam search has found
SCORE: Schema = {
    "model": "string",
    "adapter": "string",
    "tokens": "int64",
    "tokens_scored": "int64",
    "total_logprob": "double",
    "perplexity": "double",
    "bits_per_byte": "double",
}
MIN_K: Schema = {"min_k": "double", "min_k_plus_plus": "double"}  # of scores
CHOICE: Schema = {
    "rank": "int64",
    "choice": "string",
    "text": "string",
    "probability": "double",
    "logprob": "double",
    "tokens": "int64",
    "bytes": "int64",
    "model": "string",
    "adapter": "string",
}
NEUTRAL: Schema = {"neutral_logprob": "double"}  # of choices
CLASSIFICATION: Schema = {
    "label": "string",
    "probabilities": ("string", "double"),
    "value": "double",
    "logits": ("string", "double"),
    "tokens": "int64",
    "model": "string",
    "adapter": "string",
}


def json_line(value: Any) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def timing(source: Source, completion: "Completion") -> Record:
    """Return seconds to load and to the first token, tokens per second after it, and drafts."""
    times = completion.seconds
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    return {
        "load_s": round(source.load_seconds, 4),
        "ttft_s": round(times[0], 4) if times else None,
        "decode_tok_s": rate and round(rate, 2),
        "drafted": completion.drafted,
        "accepted": completion.accepted,
    }


def of_completion(source: Source, completion: "Completion", *, logprobs: bool = False) -> Record:
    """Return the record of a completion; `logprobs` adds the log-probabilities of its tokens."""
    record: Record = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "model": source.name,
        "adapter": source.adapter,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.ids),
        },
        "timing": timing(source, completion),
    }
    if completion.score is not None:
        record["score"] = completion.score
    if logprobs:
        tokens = []
        steps = zip(completion.ids, completion.logprobs, completion.top_logprobs, strict=True)
        for id, logprob, top in steps:
            token = of_token(source, id, logprob)
            token["top"] = [of_token(source, *pair) for pair in top]
            tokens.append(token)
        record["logprobs"] = tokens
    return record


def of_score(
    source: Source, score: "Score", *, logprobs: bool = False, min_k: float | None = None
) -> Record:
    """Return the record of a score, with its words, if any.

    `logprobs` adds the log-likelihoods of tokens, with more about their distributions, if it was
    computed; `min_k` adds Min-K% and Min-K%++ of this percentage of tokens.
    """
    record: Record = {
        "model": source.name,
        "adapter": source.adapter,
        "tokens": len(score.ids),
        "tokens_scored": score.tokens_scored,
        "total_logprob": score.total_logprob,
        "perplexity": finite(score.perplexity),
        "bits_per_byte": score.bits_per_byte,
    }
    if min_k is not None:
        record["min_k"] = score.min_k(min_k)
        record["min_k_plus_plus"] = finite(score.min_k_plus_plus(min_k))
    if logprobs:
        record["logprobs"] = _scored_tokens(source, score)
    if score.words is not None:
        record["words"] = [_of_word(word, layers=score.layers is not None) for word in score.words]
    return record


def _scored_tokens(source: Source, score: "Score") -> list[Record]:
    """Return the records of the tokens of a score, with all that was computed for them."""
    pairs = zip(score.ids, score.token_logprobs, strict=True)
    tokens = [of_token(source, id, logprob) for id, logprob in pairs]
    moments = score.moments or []
    columns = {
        "rank": score.ranks,
        "entropy": score.entropies,
        "mean": [moment and moment[0] for moment in moments],
        "std": [moment and moment[1] for moment in moments],
        "gap": score.gaps,
        "layers": score.layers,
    }
    for name, values in columns.items():
        if values:
            for token, value in zip(tokens, values, strict=True):
                token[name] = value
    return tokens


def _of_word(word: "Word", *, layers: bool) -> Record:
    record: Record = {
        "word": word.text,
        "start": word.start,
        "end": word.end,
        "tokens": word.tokens,
        "surprisal": word.surprisal,
    }
    if layers:
        record["layers"] = word.layers
    return record


def finite(value: float | None) -> float | None:
    """Return a number, or None in place of an infinite one: JSON has none."""
    return None if value is None or math.isinf(value) else value


def perplexity_of(record: Record) -> float:
    """Return the perplexity in the record of a score: NaN if no token is scored.

    It is infinity for null, which JSON has in its place.
    """
    perplexity = record["perplexity"]
    if perplexity is not None:
        return float(perplexity)
    return math.inf if record["tokens_scored"] else math.nan


def of_ranking(
    source: Source,
    ranked: "Sequence[Choice]",
    written: Mapping[str, str],
    *,
    logprobs: bool = False,
) -> list[Record]:
    """Return the records of choices, the likeliest first; `written` maps texts to user input.

    `logprobs` adds the log-probabilities of their tokens.
    """
    choices: list[Record] = []
    for rank, choice in enumerate(ranked, 1):
        identity: Record = {"rank": rank, "choice": written[choice.text]}
        choices.append(identity | of_choice(source, choice, logprobs=logprobs))
    return choices


def of_choice(source: Source, choice: "Choice", *, logprobs: bool = False) -> Record:
    """Return the record of a choice; `logprobs` adds the log-probabilities of its tokens."""
    record: Record = {
        "text": choice.text,
        "probability": choice.probability,
        "logprob": choice.logprob,
        "tokens": len(choice.ids),
        "bytes": choice.bytes,
        "model": source.name,
        "adapter": source.adapter,
    }
    if choice.neutral_logprob is not None:
        record["neutral_logprob"] = choice.neutral_logprob
    if logprobs:
        pairs = zip(choice.ids, choice.token_logprobs, strict=True)
        record["logprobs"] = [of_token(source, id, logprob) for id, logprob in pairs]
    return record


def of_classification(source: Source, result: "Classification") -> Record:
    """Return the record of the labels of a text."""
    return {
        "label": result.label,
        "probabilities": result.probabilities,
        "value": result.value,
        "logits": result.logits,
        "tokens": len(result.ids),
        "model": source.name,
        "adapter": source.adapter,
    }


def of_error(error: InputError) -> Record:
    """Return the record of a row that failed."""
    return {"error": {"code": error.code, "message": str(error)}}


def error_of(record: Record) -> Record | None:
    """Return the error of a record of a row that failed; None for a result."""
    return record.get("error")


def of_token(source: Source, id: int, logprob: float | None) -> Record:
    """Return the record of a token; U+FFFD stands for an incomplete character in its text.

    A model may have more ids than its tokenizer; such an id has a name and no bytes. The tokens of
    some tokenizers have no bytes, either.
    """
    try:
        name = source.tokenizer.token_name(id)
        data = source.tokenizer.token_bytes(id)
    except InputError:
        name = f"<{id}>"
        data = None
    return {"id": id, "token": name, "bytes": list(data or b""), "logprob": logprob}
