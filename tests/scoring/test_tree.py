"""The tree of likely continuations: compared with all continuations, computed one by one."""

import itertools

import numpy as np
import pytest

from gpt_cli.errors import InputError
from gpt_cli.scoring.tree import tree
from gpt_cli.texts.text import Text
from support.models import exact_logprobs

IDS = [1, 0, 2, 1]


def paths(nodes, before=()):
    """Yield every continuation of a tree, with its log-likelihood."""
    for node in nodes:
        path = (*before, node.id)
        yield path, node.total_logprob
        yield from paths(node.children, path)


def total_logprob(model, ids, path):
    logprobs = exact_logprobs(model, [*ids, *path])[len(ids) - 1 : -1]
    return logprobs[np.arange(len(path)), list(path)].sum()


@pytest.mark.parametrize("sharpness", [1, 4])
@pytest.mark.parametrize("count", [1, 5, 17, 60])
def test_the_tree_has_the_likeliest_continuations_of_all_lengths(make_model, count, sharpness):
    model = make_model(vocab_size=5, eos_token_id=None)
    model.ln_f.weight[:] *= sharpness  # sharper distributions have longer likeliest continuations
    likeliest = list(paths(tree(model, Text(IDS), count)))
    assert len(likeliest) == count
    assert count < 17 or max(len(path) for path, _ in likeliest) > 2
    for path, logprob in likeliest:
        assert logprob == pytest.approx(total_logprob(model, IDS, path), abs=1e-4)
    every = {
        path: total_logprob(model, IDS, path)
        for length in range(1, 4)
        for path in itertools.product(range(5), repeat=length)
    }
    worst = min(logprob for _, logprob in likeliest)
    missing = [path for path, logprob in every.items() if logprob > worst + 1e-4]
    assert set(missing) <= {path for path, _ in likeliest}


def test_children_follow_their_parents_and_the_likeliest_comes_first(engine):
    def check(nodes, before):
        logprobs = [node.logprob for node in nodes]
        assert logprobs == sorted(logprobs, reverse=True)
        for node in nodes:
            assert node.total_logprob == pytest.approx(before + node.logprob)
            check(node.children, node.total_logprob)

    check(engine.tree("the sand", 40), 0.0)
    (first,) = engine.tree("the sand", 1)
    assert [(first.id, first.logprob)] == engine.next_tokens("the sand", 1)


def test_nothing_follows_the_end_token(make_model):
    model = make_model(vocab_size=5, eos_token_id=2)
    continuations = [path for path, _ in paths(tree(model, Text(IDS), 60))]
    assert any(path[-1] == 2 for path in continuations)
    assert not any(2 in path[:-1] for path in continuations)


def test_a_tree_ends_with_the_context(make_model):
    model = make_model(vocab_size=3, n_positions=5, eos_token_id=None)
    continuations = [path for path, _ in paths(tree(model, Text(IDS), 100))]
    assert sorted(continuations) == sorted(
        path for length in (1, 2) for path in itertools.product(range(3), repeat=length)
    )


def test_a_tree_of_no_tokens_is_rejected(engine):
    with pytest.raises(InputError, match="1 or more"):
        engine.tree("the", 0)


def test_edits_may_name_positions_after_the_prompt(engine):
    edited = engine.with_edits(["blocks.0.hook_resid_pre@2:9=0"])
    assert len(edited.encode("the")) == 2
    assert edited.tree("the", 1) == engine.tree("the", 1)
    assert edited.tree("the", 300) != engine.tree("the", 300)
    last = engine.model.config.n_positions
    with pytest.raises(InputError, match="is not in a text of"):
        engine.with_edits([f"blocks.0.hook_mlp_out@{last}=0"]).tree("the", 9)
