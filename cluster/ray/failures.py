"""Errors of work on Ray whose message is for the user. They import nothing: a command knows them from its start."""


class TrainingFailed(Exception):
    """The ranks failed repeatedly without progress, or reported an error that a restart cannot fix."""


class WorkerDiedError(Exception):
    """The worker of a task died at each attempt."""
