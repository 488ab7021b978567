"""`gpt-cli doctor`: examine this machine."""

from dataclasses import asdict

from gpt_cli.cli import options as flags
from gpt_cli.cli.layout import hanging
from gpt_cli.cli.streams import write
from gpt_cli.errors import ResourceError
from gpt_cli.records import json_line
from gpt_cli.system.startup import prepare


def doctor(as_json: flags.Json = False, verbose: flags.Verbose = False) -> None:
    """Check this machine for problems.

    Each line is ok, a note or a problem, with its cure. The exit code is 5 if there is a problem.

    Examples:
        gpt-cli doctor
    """
    prepare(None)
    from gpt_cli.checks.doctor import examine

    problems = []
    for finding in examine():
        if finding.status == "problem":
            problems.append(finding.name)
        if as_json:
            write(json_line(asdict(finding)))
        else:
            text = finding.found + (f"; cure: {finding.cure}" if finding.cure else "")
            write(hanging(f"{finding.status:7}  {finding.name:8}  ", text))
    if problems:
        raise ResourceError(f"problems with {', '.join(problems)}: see the cures")
