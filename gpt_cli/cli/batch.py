"""`gpt-cli batch`: continue many prompts, a line each."""

from typing import Annotated

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.text import input_file
from gpt_cli.errors import InputError


def batch(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[IN]",
            path_type=str,
            help="Prompts, one a line, JSON Lines or Parquet: a file, a folder, a pattern in "
            "quotes, or an address of such; without it, what comes through a pipe.",
        ),
    ] = None,
    output: flags.Output = None,
    resume: flags.Resume = False,
    form: flags.RowsFormat = "auto",
    batch_size: Annotated[
        str, typer.Option(metavar="N|auto", help="How many rows are computed side by side.")
    ] = "auto",
    model: flags.Model = "gpt2",
    max_tokens: flags.MaxTokens = 128,
    temperature: flags.Temperature = 0.8,
    top_k: flags.TopK = 40,
    top_p: flags.TopP = 0.95,
    min_p: flags.MinP = 0.0,
    repeat_penalty: flags.RepeatPenalty = 1.0,
    stop: flags.Stop = None,
    seed: flags.Seed = None,
    cache: flags.Cache = True,
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    overflow: flags.Overflow = "error",
    ignore_eos: flags.IgnoreEos = False,
    special: flags.Special = False,
    logprobs: flags.LogProbs = None,
    engine: flags.EngineName = "local",
    address: flags.Address = None,
    workers: flags.Workers = None,
    gpus_per_worker: flags.GPUsPerWorker = None,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Continue each line of IN.

    A line of JSON is written for each, in the same order.

    A line of JSON Lines is an object with a "prompt", an "id" if wanted, and options of its own,
    such as "max_tokens", "temperature", "seed" and "stop".
    """
    file = input_file(file, "no prompts: give a file IN, or a pipe on standard input")
    size = _batch_size(batch_size)
    if engine == "local":  # elsewhere, it is Ray that tells workers how many threads they have
        flags.prepare(threads)
    from gpt_cli.cli import jobs
    from gpt_cli.records import Generation

    options = flags.generation_options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        stop=stop,
        seed=seed,
        use_cache=cache,
        ignore_eos=ignore_eos,
        special=special,
        overflow=overflow,
        top_logprobs=logprobs,
    )
    cluster = flags.cluster(
        engine, address=address, workers=workers, gpus=gpus_per_worker, threads=threads
    )
    load_options = {"device": device, "dtype": dtype, "revision": revision, "offline": offline}
    job = jobs.Job(file, output, form, resume, seed, model, load_options, cluster, quiet)
    jobs.run(job, Generation(options, size, logprobs is not None))


def _batch_size(given: str) -> int | None:
    if given == "auto":
        return None
    try:
        size = int(given) if given.isdecimal() else 0
    except ValueError:  # of thousands of digits
        size = 0
    if size == 0:
        raise InputError(f"--batch-size must be auto, or 1 or more, not {given:.40}")
    return size
