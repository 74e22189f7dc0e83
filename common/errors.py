"""Errors that commands report in one sentence, and the exit codes of the commands and of the worker."""

DONE = 0
FAILED = 1
USER_ERROR = 2
"""The user made a mistake, which one sentence describes, without a traceback."""
STOPPED = 75
"""A signal stopped the command after it saved (EX_TEMPFAIL of sysexits.h): rerun the same command to resume."""
LOST = 76
"""The job was lost with its cluster: submit it again to resume."""
DETACHED = 130
"""Ctrl-C interrupted a command that followed a job; the job keeps running."""


class PlanningFailed(RuntimeError):
    """The process that plans a run failed, for example for lack of memory."""


class UserError(ValueError):
    """Reports a mistake in a recipe, an option or a file of the user's. Its message is a sentence for the user.

    Commands print the message and exit with code 2. Any other exception is a traceback and exit code 1.
    """
