"""`gpt-cli classify` as a user meets it."""

import json

import pytest

import gpt_cli
from support.classifiers import write_classifier
from support.in_process import records_here, refusal, run_here

TEXTS = ["the and", "in the ring", "he"]
INPUT = "\n".join(TEXTS).encode()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = ("padded", "several", "number")
    return {name: write_classifier(tmp_path_factory.mktemp(name), name) for name in names}


def test_a_line_has_the_likeliest_label_its_probability_and_the_text(folders):
    out, _ = run_here("classify", "-q", "-m", folders["padded"], input=INPUT)
    expected = gpt_cli.load(folders["padded"]).classify(TEXTS)
    for line, text, result in zip(out.decode().splitlines(), TEXTS, expected, strict=True):
        probability = result.probabilities[result.label]
        assert line == f"{result.label}\t{probability:.4f}\t{text}"


def test_a_record_has_all_probabilities_by_name(folders):
    row = b'{"id": "a", "text": "the and"}'
    (record,) = records_here("classify", "-q", "-m", folders["several"], "--json", input=row)
    (result,) = gpt_cli.load(folders["several"]).classify(["the and"])
    assert record["probabilities"] == result.probabilities
    assert (record["id"], record["label"]) == ("a", result.label)
    assert record["value"] is None


def test_a_model_for_a_number_has_it_in_place_of_the_probability(folders):
    out, _ = run_here("classify", "-q", "-m", folders["number"], input=b"the and\n")
    (result,) = gpt_cli.load(folders["number"]).classify(["the and"])
    assert out.decode() == f"\t{result.value:.4f}\tthe and\n"
    (record,) = records_here(
        "classify", "-q", "-m", folders["number"], "--json", input=b"the and\n"
    )
    assert (record["value"], record["label"]) == (result.value, None)


def test_labels_are_written_and_resumed(folders, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "a " * 200]))
    output = tmp_path / "labels.jsonl"
    command = ["classify", "-q", "-m", folders["padded"], rows, "-o", output]
    run_here(*command, code=6)
    whole = output.read_bytes()
    assert [json.loads(line).get("label") for line in whole.splitlines()][3] is None
    output.write_bytes(whole[: whole.index(b"\n") + 1])
    run_here(*command, "--resume", code=6)
    assert output.read_bytes() == whole
    (_, _, _, last) = records_here(
        "classify", "-q", "-m", folders["padded"], rows, "--overflow", "truncate", "--json"
    )
    assert last["tokens"] == 80


def test_a_table_has_a_column_of_names_and_probabilities(folders, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "labels.parquet"
    run_here("classify", "-q", "-m", folders["padded"], "-o", output, input=INPUT)
    table = parquet.read_table(output)
    expected = gpt_cli.load(folders["padded"]).classify(TEXTS)
    assert table["label"].to_pylist() == [result.label for result in expected]
    rows = [dict(pairs) for pairs in table["probabilities"].to_pylist()]
    assert rows == [result.probabilities for result in expected]


def test_a_copy_in_int8_keeps_the_head(folders, tmp_path):
    run_here("quantize", "-q", folders["padded"], "-o", tmp_path / "copy")
    command = ["classify", "-q", "--json"]
    copied = records_here(*command, "-m", tmp_path / "copy", input=INPUT)
    rounded = records_here(*command, "-m", folders["padded"], "--dtype", "int8", input=INPUT)
    assert [row["logits"] for row in copied] == [row["logits"] for row in rounded]


def test_a_model_that_is_no_classifier_is_refused():
    error = refusal("classify", "-m", "tiny", input=b"the and\n")
    assert "this model is no classifier: it has no score.weight: use a model that was" in error
