"""The manifest of an output: a resumed job must have the same options, model and input."""

import json
from collections.abc import Mapping
from typing import Any

from gpt_cli.errors import InputError
from gpt_cli.jobs import storage
from gpt_cli.options.request import draw_seed

NAME = "_job.json"  # in a folder of records
ANOTHER = "name another output"


def refusal(complaint: str) -> InputError:
    """Return the error of an output that cannot be used."""
    return InputError(f"{complaint}: {ANOTHER}")


class Manifest:
    """The manifest of one output, at a path or an address.

    The job is everything that the records depend on, as JSON values. A seed of None is drawn, or is
    that of an earlier run.
    """

    def __init__(self, output: str, file: str, job: Mapping[str, Any]):
        self._output = output
        self._file = file
        self._job = json.loads(json.dumps(job))  # tuples become lists, as in the file

    @property
    def seed(self) -> int | None:
        """Return the seed of the job; None if it draws nothing."""
        return self._job.get("seed")

    def exists(self) -> bool:
        """Return whether an earlier run has written it."""
        return storage.exists(self._file) and storage.size(self._file) > 0

    def compare(self) -> None:
        """Raise InputError if the earlier run was another job; a seed of None becomes its seed."""
        try:
            earlier = json.loads(storage.read_bytes(self._file))
            if not isinstance(earlier, dict):
                raise ValueError
        except ValueError:
            raise refusal(f"{self._file} is not a manifest") from None
        if "seed" in self._job and self._job["seed"] is None:
            self._job["seed"] = earlier.get("seed")
        if earlier.get("input") != self._job.get("input"):
            raise refusal(f"{self._output} was made from another input")
        for name, value in self._job.items():
            if name not in earlier:
                raise refusal(f"{self._output} was made by a version without {name}")
            if earlier[name] != value:
                theirs, ours = f"{json.dumps(earlier[name]):.200}", f"{json.dumps(value):.200}"
                # Long ones, such as JSON schemas, may begin alike.
                which = f"another {name}" if theirs == ours else f"{name} {theirs}, not {ours}"
                raise refusal(f"{self._output} was made with {which}")

    def begin(self) -> bytes:
        """Return the content of the file for a first run, with a random seed in place of None."""
        if self._job.get("seed", 0) is None:
            self._job["seed"] = draw_seed()
        return json.dumps(self._job, indent=1).encode()
