"""The only package that imports Ray, and its exceptions, whose messages are for the user.

This file imports nothing, so that commands start fast.
"""


class TrainingFailed(Exception):
    """The ranks failed repeatedly without progress, or reported an error that a restart cannot fix."""


class WorkerDiedError(Exception):
    """The worker of a task died at each attempt."""
