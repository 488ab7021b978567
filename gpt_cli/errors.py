"""The errors that a user can meet, each with the exit code of the command that meets it.

A message is one line that says what is wrong and what to do about it. Anything else that
escapes is a bug, and leaves with exit code 1.
"""

# What taking apart a damaged file can raise, from its JSON to the use of its values.
MALFORMED = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
    RecursionError,
)


class GPTCLIError(Exception):
    """Base of every error raised on purpose; never raised itself."""

    exit_code = 1


class InputError(GPTCLIError):
    """The prompt, a flag or an argument cannot be used."""

    exit_code = 2
    code = "invalid_input"  # in the JSON of a row


class ContextError(InputError):
    """The text does not fit the model's context."""

    code = "context_overflow"


class ModelNotFoundError(GPTCLIError):
    """No model of that name is here, and the Hub cannot or will not give it."""

    exit_code = 3


class CheckpointError(GPTCLIError):
    """The model's files are here but are damaged, incomplete or not GPT-2's."""

    exit_code = 4


class ResourceError(GPTCLIError):
    """Memory, disk, a device or a package is missing."""

    exit_code = 5


class MismatchError(GPTCLIError):
    """Two ways to compute the same have not given the same."""


class RowsError(GPTCLIError):
    """Some rows of many have failed; the others are done."""

    exit_code = 6
