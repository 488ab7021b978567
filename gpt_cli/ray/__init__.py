"""On the machines of a Ray cluster: callable classes for Ray Data, and a server for Ray Serve.

    rows = ray.data.read_json("rows.jsonl", lines=True)  # {"index": 0, "prompt": "Once upon"}
    rows.map_batches(
        gpt_cli.ray.Generator,
        fn_constructor_kwargs={"model": "tiny", "options": {"max_tokens": 20, "seed": 1}},
        batch_format="pyarrow",
        concurrency=1,  # actors; the reader needs a CPU, too, or both wait forever
        num_cpus=1,
    ).write_json("texts")

    ray.serve.run(gpt_cli.ray.server(model="tiny", replicas=2))

The first argument of a class is a model, a name or a folder, as for `gpt_cli.load`, and
`load_options` are keywords of that function, such as dtype and device. All columns of a table are
kept; "error" is added, which has a "code" and a "message" if the row failed. Then the other added
columns are null.

The result of a row or of a request is that of one machine, wherever it is computed: to the last bit
on nodes with the compiled library or a GPU, within rounding where NumPy computes. If an actor dies,
others compute what it had not finished, with the same results. A node downloads a model from the
Hub once. An actor uses as many threads as it has CPUs: Ray sets OMP_NUM_THREADS, which NumPy and
the library read. Ray must be installed: `pip install 'ray[data]'`, or 'ray[serve]' for the server.

The names below are imported on first use.
"""

from typing import TYPE_CHECKING

from gpt_cli import on_first_use

if TYPE_CHECKING:
    from gpt_cli.ray.data import Activations, Classifier, Generator, Ranker, Scorer
    from gpt_cli.ray.serving import server

__all__ = ["Activations", "Classifier", "Generator", "Ranker", "Scorer", "server"]
__getattr__, __dir__ = on_first_use(__name__, "serving", "data")
