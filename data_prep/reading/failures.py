"""The two ways in which a file is not read.

What is wrong with its bytes (a broken gzip) is a fault of the file: it is set aside, the same way every time. What is
wrong with getting at them is not: a file that is gone or has changed is set aside for this time, and a server that does
not answer stops the task, because a file that was left out for a bad network would be missed by nobody.
"""


class UnreadableFileError(Exception):
    """A file of which nothing is used; the message is the reason."""

    def __init__(self, reason: str, for_now: bool = False) -> None:
        super().__init__(reason)
        self.for_now = for_now
        """Not a matter of what stands in the file: another time it may be readable."""


class ReadFailed(OSError):
    """The place of a file did not answer, however often it was asked. Trying again later may help."""
