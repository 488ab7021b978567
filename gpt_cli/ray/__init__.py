"""Many machines, by Ray Data: each of its actors holds a model, and rows go through it.

`Generate` and `Score` are callable classes for the tables of anybody's own pipeline:

    rows = ray.data.read_json("rows.jsonl", lines=True)  # {"index": 0, "prompt": "Once upon"}
    rows.map_batches(
        gpt_cli.ray.Generate,
        fn_constructor_kwargs={"model": "tiny", "options": {"max_tokens": 20, "seed": 1}},
        batch_format="pyarrow",
        concurrency=1,  # actors; the reader needs a CPU, too, or both wait for ever
        num_cpus=1,
    ).write_json("texts")

A row's result is that of `Engine` on one machine, wherever and beside whatever it is computed: to
the last bit on nodes with the compiled library, to within rounding on those where NumPy or a GPU
computes. An actor that dies takes no row with it: Ray computes its batches again, with the same
results. Models from the Hub are fetched into the cache of a node once. An actor takes as many
threads as it has been given CPUs: Ray sets OMP_NUM_THREADS, which NumPy and the library both read.
Install the extra `ray`.
"""

from gpt_cli.ray.tables import Generate, Score

__all__ = ["Generate", "Score"]
