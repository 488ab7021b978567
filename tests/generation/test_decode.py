"""A batch is filled, and then steps; what is in it does not matter to a row."""

import pytest

from gpt_cli.generation.decode import Batch
from gpt_cli.generation.generate import Run
from gpt_cli.generation.row import BatchRow, Request
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text

PROMPTS = [[1, 2, 3], [4], [*range(20), 9], [*range(20), 8]]


def requests(**options):
    return [
        Request(Text(prompt), Options(max_tokens=4, ignore_eos=True, seed=row, **options), row)
        for row, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("share", [True, False])
def test_a_filled_batch_gives_the_tokens_of_generate(make_model, tokenizer, share):
    loaded = LoadedModel(make_model(), tokenizer)
    expected = [(step.row, step.id, step.text) for step in Run(loaded, requests())]
    batch = Batch(loaded)
    batch.fill([BatchRow(n, request, loaded) for n, request in enumerate(requests())], share=share)
    assert batch.cache.lengths.tolist() == [3, 1, 21, 21]
    steps = []
    while batch.rows:
        steps += batch.step()
    assert [(step.row, step.id, step.text) for step in steps] == expected
    assert batch.cache is None


def test_without_a_cache_a_batch_is_filled_for_every_step(make_model, tokenizer):
    loaded, ids = LoadedModel(make_model(), tokenizer), {n: [] for n in range(4)}
    batch = Batch(loaded)
    rows = [BatchRow(n, request, loaded) for n, request in enumerate(requests())]
    while rows:
        batch.fill(rows, use_cache=False)
        assert batch.cache is None
        for step in batch.step():
            ids[step.row].append(step.id)
        rows = batch.rows
    expected = {n: [] for n in range(4)}
    for step in Run(loaded, requests()):
        expected[step.row].append(step.id)
    assert ids == expected


def test_without_a_cache_a_batch_that_is_not_filled_takes_no_step(make_model, tokenizer):
    loaded = LoadedModel(make_model(), tokenizer)
    batch = Batch(loaded)
    batch.fill([BatchRow(0, requests()[0], loaded)], use_cache=False)
    batch.step()
    with pytest.raises(ValueError, match="fill"):
        batch.step()


def test_a_cleared_batch_keeps_no_memory(make_model, tokenizer):
    loaded = LoadedModel(make_model(), tokenizer)
    batch = Batch(loaded)
    batch.fill([BatchRow(0, requests()[0], loaded)])
    batch.clear()
    assert (batch.rows, batch.cache, batch._memory, batch._logits) == ([], None, None, None)
