"""`gpt-cli verify`: check the results of a model on this machine."""

from dataclasses import asdict

from gpt_cli.cli import options as flags
from gpt_cli.cli.layout import hanging
from gpt_cli.cli.streams import write
from gpt_cli.errors import CheckpointError
from gpt_cli.records import json_line
from gpt_cli.system.startup import prepare

_WORDS = {True: "ok", False: "FAILED", None: "not checked"}


def verify(
    name: flags.ModelName = None,
    *,
    model: flags.Model,
    threads: flags.Threads = None,
    as_json: flags.Json = False,
) -> None:
    """Check that a model gives the expected results.

    Check its files and known texts, and that all implementations agree. The exit code is 4 if a
    check fails. A check that cannot run on this machine reports the reason.

    Examples:
        gpt-cli verify tiny
    """
    model = model.named(name)
    prepare(threads)
    from gpt_cli import hub
    from gpt_cli.checks.verify import cure, verify

    folder = hub.resolve(model.model, **model.lookup, quiet=model.quiet)
    checks = []
    for check in verify(model.model, folder):
        checks.append(check)
        if not as_json:
            write(hanging(f"{_WORDS[check.passed]:11}  {check.name:25}  ", check.detail))
    failed = [check.name for check in checks if check.passed is False]
    if as_json:
        result = {"model": model.model, "folder": str(folder), "passed": not failed}
        write(json_line(result | {"checks": [asdict(check) for check in checks]}))
    if failed:
        raise CheckpointError(
            f"{model.model} failed {len(failed)} of {len(checks)} checks ({', '.join(failed)}): "
            f"{cure(failed)}"
        )
