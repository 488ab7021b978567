"""Compute with small models on a GPU, for a program that watches its memory and barriers.

PYTHONPATH=tests compute-sanitizer --tool racecheck python -m support.gpu_model
"""

import numpy as np

from gpt_cli.ops import Ops, get_ops
from gpt_cli.ops.cuda import compiler
from gpt_cli.options.request import SamplingParams
from support.models import DTYPES, model_of
from support.pairs import decoded, logits_in_chunks, random_ids

SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_inner": 100}
CHUNKS = [np.array(new) for new in ([20, 33], [1, 1], [0, 7], [3, 3])]


def compute(ops: Ops) -> None:
    """Run passes of many and of few rows, and steps of decoding."""
    model = model_of(ops, weights_of=ops.dtype, **SIZES)
    logits_in_chunks(model, random_ids(2, 44), CHUNKS)
    lengths, params = np.array([5, 40, 33, 1, 2]), SamplingParams(top_k=40, top_p=0.9)
    decoded(model, lengths, np.full((3, 5), 0.5), np.zeros(0, np.int64), params)


def main() -> None:
    """Compute in each dtype."""
    compiler.OPTIONS += ("-DRELEASING_LANES=32",)  # see pass_weights.cu
    for dtype in DTYPES:
        compute(get_ops("cuda", dtype))
        print(dtype)


if __name__ == "__main__":
    main()
