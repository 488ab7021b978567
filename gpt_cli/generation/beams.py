"""Beam search: the likeliest texts of a request, as far as a search of limited width finds them.

A search of width N continues up to N texts, its beams, side by side:

    pass     1        2                     3
    beams    the      the cat               the cat sat
             a        a dog                 the cat ran
    ended                                   a dog<|endoftext|>

The likeliest of all continuations of all beams are the next beams. Those that end are kept if they
are among the N best. The scores, and when a search ends, are those of transformers.
"""

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from gpt_cli.generation.row import BatchRow, NextToken, Position, Request, Sampler, Step
from gpt_cli.generation.sampling import adjust, likely_columns
from gpt_cli.ops import Array, Ops
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.measures import top_logprobs


class Beam(BatchRow):
    """A text of a search: a row of a batch."""

    def __init__(self, number: int, request: Request, loaded: LoadedModel):
        super().__init__(number, request, loaded)
        self.search = BeamSearch(self, request, loaded)
        self.total = 0.0  # log-probability of the new tokens, after bias and penalties
        self.score = 0.0  # total / number of new tokens ** length_penalty
        self.steps: list[Step] = []


def new_row(number: int, request: Request, loaded: LoadedModel) -> BatchRow:
    """Return the row with which a request begins."""
    kind = Beam if request.options.beams else BatchRow
    return kind(number, request, loaded)


class Continuation(NamedTuple):
    """A beam and a token that may follow it."""

    parent: int  # the index of the beam
    total: float  # that of the beam with the token
    token: NextToken


class BeamSearch:
    """The search for the likeliest texts of one request.

    Attributes:
        beams: the texts that go on, the likeliest first; none once the search has ended. At first
            it is the prompt.
        hypotheses: the best texts that have ended, the best first.
    """

    def __init__(self, prompt: Beam, request: Request, loaded: LoadedModel):
        self._options = request.options
        ends = loaded.config.eos_token_id
        self._width = request.rows
        # Continuations per pass. If all beams go on with all end tokens, others are left.
        self._count = max(2, 1 + len(ends)) * self._width
        self._longest = prompt.tokens_left
        self.beams = [prompt]
        self.hypotheses = list[Beam]()

    def advance(
        self, ops: Ops, sampler: Sampler, logits: Array, seconds: float, model_seconds: float
    ) -> list[int]:
        """Replace the beams by their likeliest continuations: logits (beams, V) -> their parents.

        A parent is the index of an earlier beam. For both times, see `Step`.
        """
        beams = list[Beam]()
        parents = list[int]()
        for rank, best in enumerate(self._likeliest(ops, sampler, logits)):
            if rank >= self._width and len(beams) == self._width:
                break
            beam = self.beams[best.parent].fork()
            text, finish_reason = beam.push(best.token.id)
            beam.total = best.total
            beam.score = best.total / len(beam.generated) ** self._options.length_penalty
            step = Step(
                beam.request_number,
                *best.token,
                text,
                finish_reason,
                seconds,
                model_seconds,
                score=beam.score,
                stop_reason=beam.stop_reason,
            )
            beam.steps = [*beam.steps, step]  # a new list: the parent may have other continuations
            if finish_reason is None:
                beams.append(beam)
                parents.append(best.parent)
            elif rank < self._width:
                self.hypotheses.append(beam)
        self.hypotheses.sort(key=attrgetter("score"), reverse=True)
        del self.hypotheses[self._width :]
        for beam in self.beams:
            beam.ended = True
        self.beams = [] if self._ends(beams) else beams
        return parents if self.beams else []

    def _likeliest(self, ops: Ops, sampler: Sampler, logits: Array) -> Iterator[Continuation]:
        """Yield continuations, the likeliest first; of equal ones, that with the lower id."""
        xp = ops.xp
        beams = self.beams
        normalizer = ops.log_normalizer(logits)  # includes tokens that may not be chosen
        top = top_logprobs(ops, logits, [self._options.top_logprobs] * len(beams))
        totals = logits - normalizer[:, None]
        sampler.ban(totals, [Position(beam) for beam in beams])
        seen = [beam.ids for beam in beams]
        generated = [beam.generated for beam in beams]
        totals = adjust(xp, totals, beams[0].sampling, seen, generated)
        totals += xp.asarray([[beam.total] for beam in beams])
        likely = likely_columns(xp, totals, self._count)
        by_id = totals[:, likely].T.ravel()
        best = xp.argsort(-by_id, kind="stable")[: self._count]
        ids = likely[best // len(beams)]
        parents = best % len(beams)
        logprobs = logits[parents, ids] - normalizer[parents]
        columns = [ops.to_host(x).tolist() for x in (parents, by_id[best], ids, logprobs)]
        for parent, total, id, logprob in zip(*columns, strict=True):
            if total > -math.inf:
                yield Continuation(parent, total, NextToken(id, logprob, top[parent]))

    def _ends(self, beams: Sequence[Beam]) -> bool:
        """Return whether no text can go on, or no better one is expected."""
        options = self._options
        if not beams or len(self.hypotheses) < self._width:
            return not beams
        if options.early_stopping is True:
            return True
        longest = options.early_stopping == "never" and options.length_penalty > 0
        tokens = self._longest if longest else len(beams[0].generated)
        return beams[0].total / tokens**options.length_penalty <= self.hypotheses[-1].score

    def steps(self) -> list[Step]:
        """Return the steps of the hypotheses of a search that has ended, those of the best last."""
        ranked = reversed(list(enumerate(self.hypotheses)))
        return [step._replace(hypothesis=rank) for rank, beam in ranked for step in beam.steps]
