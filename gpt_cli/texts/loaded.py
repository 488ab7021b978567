"""LoadedModel: a model with its tokenizer, which prepares texts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gpt_cli.errors import ContextError, InputError, brief, counted
from gpt_cli.folder.base_tokenizer import NAME_AS_TEXT
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.gpt2.classifier import ClassifierHead
from gpt_cli.gpt2.edits import Bound, FunctionEdit, ModelEdit, bind
from gpt_cli.gpt2.model import GPT2
from gpt_cli.options.declare import OptionError, Token
from gpt_cli.options.edit import AnyEdit
from gpt_cli.options.request import Options
from gpt_cli.texts.prefix_cache import PrefixCache
from gpt_cli.texts.speculator import Speculator
from gpt_cli.texts.text import Text, divided_words

_MOST_PARTS = 8  # of a text that should be one token, in a message

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with its tokenizer, its draft model and its prefix cache; it prepares texts."""

    model: GPT2
    tokenizer: Tokenizer
    speculator: Speculator | None = None  # without one, nothing is drafted
    kept_bytes: float = 0  # limit of the prefixes that are kept; the last one always is
    edits: tuple[ModelEdit | FunctionEdit, ...] = ()  # of all texts
    read_classifier: Callable[[], ClassifierHead] | None = None  # see `Checkpoint.classifier`

    @property
    def config(self) -> GPT2Config:
        """Return the configuration of the model."""
        return self.model.config

    @cached_property
    def prefixes(self) -> PrefixCache:
        """The beginnings of earlier texts."""
        return PrefixCache(self.model, self.kept_bytes)

    @cached_property
    def missing_ids(self) -> list[int]:
        """The ids of the model that have no token. To find them takes milliseconds."""
        return self.tokenizer.missing_ids(self.config.vocab_size)

    def _note_names(self, text: str) -> None:
        """Say once that a text has the name of a special token, which is read as text."""
        name = None if self._noted else self.tokenizer.special_name_in(text)
        if name is not None:
            self._noted.append(name)
            _log.warning(NAME_AS_TEXT, name)

    @cached_property
    def _noted(self) -> list[str]:
        """The names that a note has named: at most one."""
        return []

    @property
    def start(self) -> list[int]:
        """Return the start token if the tokenizer puts it before every text, else []."""
        start = self.config.bos_token_id
        return [start] if self.tokenizer.special_ids.begins_texts and start is not None else []

    def text_ids(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; names such as `<|endoftext|>` are text unless `special`."""
        if not special:
            self._note_names(text)
        return self.config.check_ids(self.tokenizer.encode(text, special=special))

    def token_id(self, name: str, text: str, *, special: bool = False) -> int:
        """Return the id of a text; if it is not one token, OptionError for the option `name`."""
        ids = self.text_ids(text, special=special)
        if len(ids) == 1:
            return ids[0]
        parts = " ".join(f'"{self.tokenizer.decode([id])}"' for id in ids[:_MOST_PARTS])
        hint = "a word usually begins with its space"
        raise OptionError(name, f"must be one token, not {parts or 'empty'}; {hint}")

    def with_token_ids(self, options: Options) -> Options:
        """Return options whose biases have ids; raise OptionError for a token there is not."""
        biases: dict[Token, float] = {}
        size = self.config.vocab_size
        for token, bias in options.logit_bias:
            id = token
            if isinstance(token, str):
                id = self.token_id("logit_bias", token, special=options.special)
                if id in biases:
                    raise OptionError("logit_bias", f"has {token!r} and {id}, the same token")
            elif token >= size:
                complaint = f"has token {token}, and the ids of this model are from 0 to {size - 1}"
                raise OptionError("logit_bias", complaint)
            biases[id] = bias
        return replace(options, logit_bias=[*biases.items()]) if biases else options

    def prompt_ids(self, prompt: str, *, special: bool = False) -> list[int]:
        """Return the ids of a prompt after `start`, or the start token if both are empty."""
        ids = self.start + self.text_ids(prompt, special=special)
        return ids or [self.config.start_token("the prompt is empty")]

    def start_ids(self, *, bos: bool) -> list[int]:
        """Return the ids before each text to measure; InputError if `bos` and there is no token."""
        return [self.config.start_token("bos (--bos) is set")] if bos else self.start

    def end_ids(self, *, eos: bool) -> list[int]:
        """Return the ids after each text to measure; InputError if `eos` and there is no token."""
        if not eos:
            return []
        if not self.config.eos_token_id:
            missing = "this model has no end token: leave it out"
            raise InputError(f"eos (--eos) is set, and {missing}")
        return [self.config.eos_token_id[0]]

    def text(
        self,
        item: str | Mapping[str, Any],
        *,
        start: Sequence[int] = (),
        special: bool = False,
        longest: int | None = None,
    ) -> Text:
        """Return a text after the ids `start`, cut after `longest` tokens in all.

        It may be a mapping with a "text", and perhaps "special", which replaces the argument, and
        "edits". It may be longer than the model's context if it has no edits. Raise InputError if
        a field is not valid.
        """
        fields = item if isinstance(item, Mapping) else {"text": item}
        special = special_of(fields, default=special)
        text = fields.get("text")
        if not isinstance(text, str):
            raise InputError('a row needs a string "text"')
        ids = [*start, *self.text_ids(text, special=special)][:longest]
        edits = self.bound_edits(fields.get("edits"), len(ids), len(ids))
        return Text(ids, len(start), edits=edits, size=len(text.encode()))

    def scored_text(
        self,
        item: str | Mapping[str, Any],
        *,
        start: Sequence[int],
        end: Sequence[int],
        context: str,
        special: bool,
    ) -> Text:
        """Return a text to score between the ids `start` and `end`, after a context.

        The context and the text are joined as they are, and encoded together. A token with
        characters of both belongs to the text.

        It may be a mapping as for `text`, which may also have a "context" (or "prompt"), which
        replaces the argument, and "words", whose join is the text.
        """
        fields = item if isinstance(item, Mapping) else {"text": item}
        special = special_of(fields, default=special)
        words = _words_of(fields)
        text = fields.get("text")
        if words is not None and text is None:
            text = "".join(words)
        if not isinstance(text, str):
            raise InputError('a row needs a string "text"')
        if words is not None and "".join(words) != text:
            raise InputError('the "words" of a row, joined, must be its "text"')
        context = _context_of(fields, default=context)
        skipped = before = 0
        if context or words is not None:
            ids, spans = self._ids_with_spans(context + text, special=special)
            before = sum(end <= len(context) for _, end in spans) if context else 0
            skipped = self._skipped_bytes(ids, spans, before, context, text)
        else:
            ids = self.text_ids(text, special=special)
        if words is not None:
            place = len(context)
            spans = [(begin - place, stop - place) for begin, stop in spans[before:]]
        ids = [*start, *ids, *end]
        return Text(
            ids,
            len(start) + before,
            context=before,
            skipped=skipped,
            after=len(end),
            words=None if words is None else divided_words(words, spans),
            edits=self.bound_edits(fields.get("edits"), len(ids), len(ids)),
            size=len(text.encode()),
        )

    def _skipped_bytes(
        self,
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        before: int,
        context: str,
        text: str,
    ) -> int:
        """Return the bytes of the token `before` that are the end of a context.

        A token may begin within a character: then only the bytes of the tokens tell.
        """
        if before == len(ids) or spans[before][0] >= len(context):
            return 0
        pieces = list(self.tokenizer.pieces(ids))
        if b"".join(pieces) == (context + text).encode():
            return len(context.encode()) - sum(map(len, pieces[:before]))
        return len(context[spans[before][0] :].encode())

    def _ids_with_spans(
        self, text: str, *, special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text as `text_ids`, and their spans in characters."""
        if not special:
            self._note_names(text)
        ids, spans = self.tokenizer.encode_with_spans(text, special=special)
        return self.config.check_ids(ids), spans

    def text_of_ids(
        self,
        ids: Sequence[int],
        edits: AnyEdit | Sequence[AnyEdit] | None = None,
        continuations: Sequence[list[int]] = (),
        final_length: int | None = None,
    ) -> Text:
        """Return a text, as ids, with the edits of all texts and its own.

        `final_length` is the number of tokens that the text may grow to: positions of edits must be
        among them. By default, these are the ids and those of the longest continuation.
        """
        ids = self.config.check_ids(ids)
        if final_length is None:
            final_length = len(ids) + max(map(len, continuations), default=0)
        bounds = self.bound_edits(edits, len(ids), final_length)
        return Text(ids, edits=bounds, continuations=continuations)

    def prompt(
        self, prompt: str, *, special: bool = False, final_length: int | None = None
    ) -> Text:
        """Return a prompt; raise ContextError if it does not fit the context.

        For `final_length`, see `text_of_ids`; by default, it is the length of the prompt.
        """
        ids = self.prompt_ids(prompt, special=special)
        self.check_fits(len(ids), "prompt")
        return self.text_of_ids(ids, final_length=final_length)

    @cached_property
    def classifier(self) -> ClassifierHead:
        """The head of a classifier, which is read at its first use; InputError if there is none."""
        if self.read_classifier is None:
            raise InputError("this model has no head of a classifier: load one")
        return self.read_classifier()

    def check_fits(self, tokens: int, what: str) -> None:
        """Raise ContextError if tokens do not fit the context."""
        n_positions = self.config.n_positions
        if tokens > n_positions:
            raise ContextError(
                f"the {what} has {counted(tokens, 'token')}, and the model's context is "
                f"{n_positions:,}; shorten it"
            )

    def bound_edits(
        self, of_text: AnyEdit | Sequence[AnyEdit] | None, length: int, final_length: int
    ) -> list[Bound]:
        """Return the edits of a text, those of all texts and its own: see `edits.bind`.

        Raise InputError if one is not valid, or if the text has edits and does not fit the context.
        """
        edits = list(self.edits)
        if of_text:
            valid = Options.parse_json({"edits": of_text})["edits"]
            edits += [ModelEdit.of(edit, self.config) for edit in valid]
        if edits:
            self.check_fits(length, "text with edits")
        return bind(edits, length, final_length)

    def refuse_edits(self, complaint: str) -> None:
        """Raise OptionError with this complaint if there are edits or functions of all texts."""
        self.refuse_functions(complaint)
        if self.edits:
            raise OptionError("edits", complaint)

    def refuse_functions(self, complaint: str) -> None:
        """Raise OptionError with this complaint if there are functions of `Engine.with_hooks`."""
        if any(isinstance(edit, FunctionEdit) for edit in self.edits):
            raise OptionError("hooks", complaint)

    def release(self) -> None:
        """Give back the memory of all but the weights."""
        self.prefixes.release()
        if self.speculator:
            self.speculator.release()


def special_of(row: Mapping[str, Any], *, default: bool) -> bool:
    """Return the field "special" of a row; raise InputError if it is neither true nor false."""
    special = row.get("special")
    if special is None:
        return default
    if not isinstance(special, bool):
        raise InputError(f"special must be true or false, not {brief(special)}")
    return special


def _context_of(row: Mapping[str, Any], *, default: str) -> str:
    """Return the field "context" of a row, or else its "prompt"; InputError if it is no string."""
    for name in ("context", "prompt"):
        context = row.get(name)
        if context is None:
            continue
        if not isinstance(context, str):
            raise InputError(f"{name} must be a string, not {brief(context)}")
        return context
    return default


def _words_of(row: Mapping[str, Any]) -> list[str] | None:
    """Return the field "words" of a row; InputError if it is no list of texts."""
    words = row.get("words")
    if words is None:
        return None
    if not isinstance(words, list | tuple) or not all(
        word and isinstance(word, str) for word in words
    ):
        raise InputError('the "words" of a row must be a list of strings that are not empty')
    return list(words)
