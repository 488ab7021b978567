"""Compute with small models on a GPU, for a program that watches its memory and barriers.

PYTHONPATH=tests compute-sanitizer --tool racecheck python -m support.gpu_model
"""

import numpy as np

from gpt_cli.ops import get_ops
from gpt_cli.options.request import SamplingParams
from support.models import DTYPES, model_of
from support.pairs import decoded, logits_in_chunks, random_ids

SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_inner": 100}


def main() -> None:
    """Run passes of many and of few rows, and steps of decoding, in each dtype."""
    chunks = [np.array(new) for new in ([20, 33], [1, 1], [0, 7], [3, 3])]
    uniforms, nothing = np.full((3, 5), 0.5), np.zeros(0, np.int64)
    for dtype in DTYPES:
        model = model_of(get_ops("cuda", dtype), weights_of=dtype, **SIZES)
        logits = logits_in_chunks(model, random_ids(2, 44), chunks)
        lengths, params = np.array([5, 40, 33, 1, 2]), SamplingParams(top_k=40, top_p=0.9)
        decoded(model, lengths, uniforms, nothing, params)
        print(dtype, sum(len(rows) for rows in logits))


if __name__ == "__main__":
    main()
