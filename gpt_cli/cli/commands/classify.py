"""`gpt-cli classify`: the labels of texts, with a model that is a classifier."""

from collections.abc import Sequence
from typing import Literal

from gpt_cli import jobs
from gpt_cli.cli import flags, inputs
from gpt_cli.cli.jobs import AnswerLines, run
from gpt_cli.options.declare import option
from gpt_cli.records import Record


def classify(
    files: list[str] | None = flags.argument("[IN]...", "Rows, as for batch, with a text each"),
    *,
    from_files: Sequence[str] | None = flags.ROWS_FILES,
    template: str | None = flags.TEMPLATE,
    special: bool = flags.SPECIAL,
    overflow: Literal["error", "truncate"] = option(
        "error", "For a text longer than the context: an error, or classify its beginning."
    ),
    rows: flags.RowFiles,
    loading: flags.Loading,
    placement: flags.Placement,
    as_json: bool = flags.JSON,
) -> None:
    """Find the label of each row of IN.

    The model was trained as a classifier: transformers' GPT2ForSequenceClassification, with
    score.weight beside its weights and the names of the labels in its config.json.

    The output is a line for each row: the likeliest label, its probability and the text, with tabs
    between them; with --json or --output, a record with all probabilities. A model for a number has
    this number in place of the probability, and no label.

    Examples:
        echo 'A fine film.' | gpt-cli classify -m ./my-classifier
        gpt-cli classify -m ./my-classifier reviews.jsonl -o labels.jsonl
    """
    files = inputs.files_or_pipe(files, from_files, "no text: give a FILE", quiet=loading.quiet)
    filled = inputs.read_template(template)
    task = jobs.Classifying(overflow, filled, special)
    sink = None if as_json else LabelLines(task.layout.texts)
    run(task, files, rows, loading, placement, sink)


class LabelLines(AnswerLines):
    """A line per row: the likeliest label, its probability, and the fields of the row."""

    def answer(self, record: Record) -> tuple[str, str]:
        """Return the label and its probability; "" and the numbers of a regression."""
        label, probabilities = record["label"], record["probabilities"]
        if probabilities is not None:
            return label, f"{probabilities[label]:.4f}"
        return label or "", " ".join(f"{value:.4f}" for value in record["logits"].values())
