"""Errors of the two ways in which reading a file fails.

Bad bytes (a broken gzip) are a property of the file: it is set aside, every time. Failing access is not: a file that is
gone or has changed is set aside this time only, and a server that does not answer stops the task, since nobody would
notice a file that was left out because of a bad network.
"""


class UnreadableFileError(Exception):
    """Sets a file aside, of which nothing is used; the message is the reason."""

    def __init__(self, reason: str, transient: bool = False) -> None:
        super().__init__(reason)
        self.transient = transient
        """True if the cause is not the file's content: it may be readable another time."""


class ChangedError(OSError):
    """Reports that a file changed after it was listed, or while it was being read."""


class ReadFailed(OSError):
    """Reports that the server of a file did not answer after all retries; trying again later may help."""
