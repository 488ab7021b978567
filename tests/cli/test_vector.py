"""`gpt-cli vector`: from two files of texts to a file that steers."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from gpt_cli.errors import InputError
from gpt_cli.texts.text import Text
from support.in_process import records_here, refusal, run_here

HOOK = "blocks.2.hook_resid_pre"
RAIN = ["The rain fell.", "A wet and cold day.", "Clouds came.", "It rained.", "The storm was wet."]
SUN = ["The sun was warm.", "A sunny day.", "The sky was blue.", "The light was warm.", "Warm sun."]
VECTOR = ["vector", "rain.txt", "sun.jsonl", "-m", "tiny", "--hook"]


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rain.txt").write_text("\n\n".join(RAIN))
    (tmp_path / "sun.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in SUN))


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_the_vector_is_the_difference_of_means_or_the_first_component(tiny, pool):
    (record,) = records_here(*VECTOR, HOOK, "-o", "v.safetensors", "--pool", pool, "--json")
    from gpt_cli.scoring.activations import activations

    ids = [tiny.encode(text) for text in RAIN + SUN]
    values = [row[HOOK] for row in activations(tiny.model, map(Text, ids), [HOOK])]
    rows = np.array([x[-1] if pool == "last" else x.mean(0) for x in values], np.float64)
    difference = rows[:5].mean(0) - rows[5:].mean(0)
    (vector,) = load_file("v.safetensors").values()
    assert np.allclose(vector, difference, atol=1e-5)
    assert record["norm"] == pytest.approx(np.linalg.norm(difference), rel=1e-5)
    assert (record["positive"], record["negative"], record["tested"]) == (5, 5, 2)
    fit = rows[:4].mean(0) - rows[5:9].mean(0)  # without every fifth line
    middle = (rows[:4].mean(0) + rows[5:9].mean(0)) / 2
    right = [(rows[4] - middle) @ fit > 0, (rows[9] - middle) @ fit < 0]
    assert record["accuracy"] == np.mean(right)
    pca = tiny.vector(RAIN, SUN, HOOK, pool=pool, pca=True).vector
    centred = rows - rows.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    assert abs(pca @ vectors[:, -1]) == pytest.approx(1, abs=1e-4)
    assert pca @ difference > 0


def test_a_file_steers_and_is_not_overwritten(tiny):
    for hook in (HOOK, "blocks.1.attn.hook_z"):
        out, _ = run_here(*VECTOR, hook, "-o", "v.safetensors", "--force")
        assert out.decode().startswith(f"{hook}: norm ") and b"of 2 left-out lines" in out
        edit = f"{hook}+=4*v.safetensors"
        generate = ["generate", "-m", "tiny", "One day", "-n", 8, "-s", 1]
        (steered,) = records_here(*generate, "--json", "--edit", edit)
        assert steered["text"] != records_here(*generate, "--json")[0]["text"]
        engine = tiny.with_edits([edit])
        assert steered["text"] == engine.generate(["One day"], max_tokens=8, seed=1)[0].text
    assert "v.safetensors exists" in refusal(*VECTOR, HOOK, "-o", "v.safetensors")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*VECTOR, "*.hook_resid_pre", "-o", "v.safetensors"], "--hook must name one hook point"),
        ([*VECTOR, "blocks.0.attn.hook_pattern", "-o", "v.safetensors"], "a vector has no tokens"),
        ([*VECTOR, "x", "-o", "v.safetensors"], "--hook 'x' is not a hook point"),
        ([*VECTOR, HOOK, "-o", "v.npy"], "--output v.npy: the name must end with .safetensors"),
        (["vector", "-", "-", *VECTOR[3:], HOOK, "-o", "v.safetensors"], "cannot both be read"),
        (["vector", "one.txt", "sun.jsonl", *VECTOR[3:], HOOK, "-o", "v.safetensors"],
         "positive and negative need at least 2 texts each"),
        (["vector", "sun.jsonl", "sun.jsonl", *VECTOR[3:], HOOK, "-o", "v.safetensors"],
         "positive and negative have the same mean"),
        (["vector", "bad.jsonl", "sun.jsonl", *VECTOR[3:], HOOK, "-o", "v.safetensors"],
         "bad.jsonl, line 2: a row needs a string"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_vector_is_refused(tmp_path, arguments, problem):
    (tmp_path / "one.txt").write_text("Rain.\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "Rain."}\n{"txt": "Rain."}\n')
    assert problem in refusal(*arguments)
    assert not (tmp_path / "v.safetensors").exists()


def test_few_texts_leave_none_to_test(tiny, tmp_path):
    assert tiny.vector(RAIN[:2], SUN[:2], HOOK).accuracy is None
    (tmp_path / "rain.txt").write_text("\n".join(RAIN[:2]))
    (tmp_path / "sun.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in SUN[:2]))
    out, _ = run_here(*VECTOR, HOOK, "-o", "v.safetensors")
    assert re.fullmatch(rf"{HOOK}: norm [\d.]+ \(2 positive, 2 negative\)\n", out.decode())


def test_edits_change_the_activations(tiny):
    directions = [e.vector(RAIN, SUN, HOOK) for e in (tiny, tiny.with_edits([f"{HOOK}*=2"]))]
    assert np.allclose(directions[1].vector, 2 * directions[0].vector, atol=1e-5)


def test_rows_may_have_edits(tmp_path, tiny):
    edit = f"{HOOK}*=2"
    rows = ({"text": text, "edits": [edit]} for text in SUN)
    (tmp_path / "sun.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_here(*VECTOR, HOOK, "-o", "v.safetensors")
    edited = tiny.with_edits([edit])
    means = [
        np.mean([x[HOOK] for x in engine.activations(texts, [HOOK], pool="mean")], axis=0)
        for engine, texts in ((tiny, RAIN), (edited, SUN))
    ]
    assert np.allclose(load_file("v.safetensors")[HOOK], means[0] - means[1], atol=1e-5)


@pytest.mark.parametrize("pool", ["word", None])
def test_a_vector_is_pooled_by_text(tiny, pool):
    with pytest.raises(InputError, match=r"^pool must be one of last, mean"):
        tiny.vector(RAIN, SUN, HOOK, pool=pool)


def test_a_text_longer_than_the_context_is_refused(tiny):
    with pytest.raises(InputError, match="context"):
        tiny.vector(["a " * 3000, "b"], ["c", "d"], HOOK)
