"""Edits give what forward hooks of transformers give: alone, side by side, and in long texts."""

from dataclasses import replace

import numpy as np
import pytest

from gpt_cli.generation.generate import Run
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.edits import Editor, ModelEdit, bind
from gpt_cli.gpt2.model import unembed
from gpt_cli.gpt2.prefill import row_states
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text
from support.edits import EDITS, GENERATED, GENERATING, ODD, PROMPTS, edits_of, write_files

TOLERANCE = 1e-4  # of the standard deviation of the logits


@pytest.fixture
def bound(load_case, tmp_path):
    """Return a function that returns the prompts of a table, and their edits."""

    def texts(case, table, most=None):
        config = load_case(case).config
        write_files(case, tmp_path)
        rows = []
        for prompt, edits in table:
            ids = PROMPTS[prompt]
            parsed = [ModelEdit.of(text, config, tmp_path) for text in edits_of(case, edits)]
            rows.append((ids, bind(parsed, len(ids), most or len(ids))))
        return rows

    return texts


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("together", [False, True])
def test_logits_with_edits_are_those_of_transformers(case, together, load_case, bound, golden):
    reference, model = golden("edits.npz"), load_case(case)
    ids, edits = zip(*bound(case, EDITS), strict=True)
    if together:
        states = row_states(model, ids, None, Editor(edits, model.ops))
    else:
        states = [
            row_states(model, [row], None, Editor([bounds], model.ops))[0]
            for row, bounds in zip(ids, edits, strict=True)
        ]
    ends = np.cumsum([len(row) for row in ids])[:-1]
    expected = np.split(reference[f"{case}/logits"], ends)
    for number, x in enumerate(states):
        error = abs(unembed(model, x)[:, :: reference["every"]] - expected[number]).max()
        assert error <= TOLERANCE * reference[f"{case}/std"][number], EDITS[number]


@pytest.mark.parametrize("case", GENERATING)
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_with_edits_is_that_of_transformers(
    case, use_cache, load_case, tokenizer, bound, golden
):
    reference, model = golden("edits.npz"), load_case(case)
    model = replace(model, config=replace(model.config, eos_token_id=()))
    options = Options(temperature=0, max_tokens=50, use_cache=use_cache)
    rows = bound(case, GENERATED, model.config.n_positions)
    requests = [Request(Text(ids, edits=edits), options) for ids, edits in rows]
    run = Run(LoadedModel(model, tokenizer), requests)
    list(run)
    for number, done in enumerate(run.completions):
        assert done.ids == reference[f"{case}/greedy"][number].tolist()
        error = np.abs(done.logprobs - reference[f"{case}/logprobs"][number]).max()
        assert error <= 2 * TOLERANCE * reference[f"{case}/std"].mean()
