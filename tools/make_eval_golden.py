"""Make tests/golden/lm_eval.json: answers of the model `hf` of lm-evaluation-harness.

It needs PyTorch, transformers and accelerate, which the tests do not. Use a separate environment:

    python -m venv .venv-golden
    .venv-golden/bin/pip install -e ".[train,eval]" accelerate
    .venv-golden/bin/python tools/make_eval_golden.py

Nothing is downloaded. Run it again only if tests/eval_tasks.py, the checkpoint or the bundled model
changes.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from eval_tasks import write_tasks  # noqa: E402

from support.checkpoints import CASES  # noqa: E402 (it is not installed)


def main() -> None:
    """Write the file, with a line per model and task."""
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = {
            "saved": CASES["saved"].write(folder / "saved"),
            "tiny": ROOT / "weights" / "tiny",
        }
        for model, path in models.items():
            n_positions = json.loads((path / "config.json").read_bytes())["n_positions"]
            tasks = folder / f"{model}-tasks"
            names = write_tasks(tasks, n_positions)
            results = simple_evaluate(
                "hf",
                {"pretrained": str(path), "dtype": "float32"},
                names,
                device="cpu",
                bootstrap_iters=0,
                task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            )
            for name in names:
                samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
                golden = {
                    "answers": [sample["resps"] for sample in samples],
                    "metrics": {
                        metric.removesuffix(",none"): float(value)
                        for metric, value in results["results"][name].items()
                        if metric.endswith(",none") and "stderr" not in metric
                    },
                }
                lines.append(f"{json.dumps(f'{model}/{name}')}: {json.dumps(golden)}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (ROOT / "tests" / "golden" / "lm_eval.json").write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
