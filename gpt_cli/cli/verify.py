"""`gpt-cli verify`: does this model compute here what it should?"""

from gpt_cli.cli import options as flags
from gpt_cli.cli.text import hanging, write
from gpt_cli.errors import CheckpointError

_WORDS = {True: "ok", False: "FAILED", None: "not checked"}


def verify(
    name: flags.ModelName,
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Check that a model computes what it should.

    Checked are its files, what it writes, and that all ways to compute it agree.

    The exit code is 4 where something fails. What cannot be checked on this machine says why.
    """
    flags.prepare(threads)
    from dataclasses import asdict

    from gpt_cli import hub, records
    from gpt_cli.verify import cure, verify

    folder = hub.resolve(name, revision=revision, offline=offline, quiet=quiet)
    checks = []
    for check in verify(name, folder):
        checks.append(check)
        if not as_json:
            write(hanging(f"{_WORDS[check.passed]:11}  {check.name:25}  ", check.detail))
    failed = [check.name for check in checks if check.passed is False]
    if as_json:
        told = {"model": name, "folder": str(folder), "passed": not failed}
        write(records.json_line(told | {"checks": [asdict(check) for check in checks]}))
    if failed:
        raise CheckpointError(
            f"{name} has failed {len(failed)} of {len(checks)} checks ({', '.join(failed)}): "
            f"{cure(failed)}"
        )
