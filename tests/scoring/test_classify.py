"""Labels of texts are those of GPT2ForSequenceClassification in transformers."""

import json

import numpy as np
import pytest

import gpt_cli
from gpt_cli.errors import CheckpointError, ContextError, InputError
from gpt_cli.options.declare import OptionError
from gpt_cli.scoring.classify import classify
from gpt_cli.texts.text import Text
from support.checkpoints import (
    CONFIG,
    Stored,
    noise,
    safetensors_bytes,
    stored_tensors,
    write_checkpoint,
)
from support.classifiers import CLASSIFIERS, ROWS, write_classifier
from support.rounding import nearest

TEXTS = ["the and", "in the ring", "he", "that and the ring in the ring", "a"]


@pytest.fixture(params=CLASSIFIERS)
def case(request) -> str:
    return request.param


def test_outputs_are_those_of_transformers(case, golden, tmp_path):
    reference = golden("classifiers.json")[case]
    loaded = gpt_cli.load(write_classifier(tmp_path, case)).loaded
    results = classify(loaded, loaded.classifier, [Text(row) for row in ROWS])
    for result, expected in zip(results, reference["logits"], strict=True):
        assert list(result.logits) == reference["labels"]
        np.testing.assert_allclose(list(result.logits.values()), expected, rtol=0, atol=2e-5)


def test_several_labels_are_independent_and_others_exclude_each_other(tmp_path):
    (padded,) = gpt_cli.load(write_classifier(tmp_path / "padded", "padded")).classify(["the"])
    assert sum(padded.probabilities.values()) == pytest.approx(1)
    assert padded.label == max(padded.logits, key=padded.logits.__getitem__)
    (several,) = gpt_cli.load(write_classifier(tmp_path / "several", "several")).classify(["the"])
    for name, logit in several.logits.items():
        assert several.probabilities[name] == pytest.approx(1 / (1 + np.exp(-logit)))
    (number,) = gpt_cli.load(write_classifier(tmp_path / "number", "number")).classify(["the"])
    assert (number.label, number.probabilities) == (None, None)
    assert number.value == number.logits["grade"]
    assert padded.value is None


def test_a_result_does_not_depend_on_the_other_texts(case, tmp_path, library):
    engine = gpt_cli.load(write_classifier(tmp_path, case))
    together = engine.classify(TEXTS)
    assert together == [engine.classify([text])[0] for text in TEXTS]
    assert together == engine.classify(TEXTS[::-1])[::-1]


def test_a_long_text_is_an_error_or_its_beginning_counts(tmp_path):
    engine = gpt_cli.load(write_classifier(tmp_path, "padded"))
    text = "the and " * CONFIG["n_positions"]
    good, long, empty = engine.classify(["the", text, ""])
    assert good.label
    assert isinstance(long, ContextError)
    assert "the text is empty" in str(empty)
    ids = engine.encode(text)[: CONFIG["n_positions"]]
    (cut,) = engine.classify([text], overflow="truncate")
    assert cut.ids == ids
    assert cut == classify(engine.loaded, engine.loaded.classifier, [Text(ids)])[0]
    with pytest.raises(OptionError, match="overflow must be one of error, truncate"):
        engine.classify(["the"], overflow="shift")


def test_rows_may_have_edits_and_special_tokens(tmp_path):
    engine = gpt_cli.load(write_classifier(tmp_path, "padded"))
    plain, edited, special = engine.classify(
        [
            "the<|endoftext|>",
            {"text": "the<|endoftext|>", "edits": ["blocks.0.hook_resid_pre=0"]},
            {"text": "the<|endoftext|>", "special": True},
        ]
    )
    assert plain.logits != edited.logits
    assert len(special.ids) < len(plain.ids)
    assert engine.classify(["the<|endoftext|>"], special=True) == [special]


def test_a_model_that_is_no_classifier_is_refused():
    with pytest.raises(InputError, match=r"this model is no classifier: it has no score\.weight"):
        gpt_cli.load("tiny").classify(["the"])


def test_other_commands_note_that_the_model_is_a_classifier(tmp_path, caplog):
    folder = write_classifier(tmp_path, "plain")
    engine = gpt_cli.load(folder)
    used = "classify uses its score.weight, and nothing else does"
    assert caplog.messages == [f"{folder} is a classifier: {used}"]
    assert engine.score("the and").tokens_scored


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"id2label": {"0": "a"}}, "id2label does not have 3 different names"),
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "id2label does not"),
        ({"id2label": {"x": "a", "1": "c", "2": "b"}}, "id2label does not"),
        ({"id2label": ["a", "b", "c"]}, "id2label does not"),
        ({"problem_type": "tagging"}, "problem_type is 'tagging', not one of single_label"),
        ({"pad_token_id": "0"}, "pad_token_id is '0', not a token id"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, fields, says):
    folder = write_classifier(tmp_path, "padded")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields))
    engine = gpt_cli.load(folder)  # which other commands can use
    with pytest.raises(CheckpointError) as caught:
        engine.classify(["the"])
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("shape", [(2, 31), (64,)])
def test_a_head_of_another_shape_is_none(tmp_path, shape):
    folder = write_checkpoint(tmp_path, CONFIG)
    head = Stored("F32", shape, bytes(4 * int(np.prod(shape))))
    tensors = stored_tensors(CONFIG) | {"score.weight": head}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(InputError, match="this model is no classifier"):
        gpt_cli.load(folder).classify(["the"])


def test_a_text_that_is_cut_may_have_edits(tmp_path):
    engine = gpt_cli.load(write_classifier(tmp_path, "padded"))
    row = {"text": "the and " * 200, "edits": ["blocks.0.hook_resid_pre@1=0"]}
    (result,) = engine.classify([row], overflow="truncate")
    assert len(result.ids) == CONFIG["n_positions"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_head_is_rounded_like_other_weights(tmp_path, dtype, library):
    engine = gpt_cli.load(write_classifier(tmp_path, "padded"), dtype=dtype)
    (result,) = engine.classify(["the and"])
    head = noise("score padded", 3, CONFIG["n_embd"]).astype(np.float32)
    (values,) = engine.activations(["the and"], ["ln_final.hook_normalized"], pool="last")
    expected = nearest(head, dtype) @ values["ln_final.hook_normalized"]
    np.testing.assert_allclose(list(result.logits.values()), expected, rtol=0, atol=1e-5)
    assert np.abs(head @ values["ln_final.hook_normalized"] - expected).max() > 1e-5
