"""Exit codes of the commands and of the worker."""

DONE = 0
FAILED = 1
USER_ERROR = 2
"""A user's mistake: one sentence, no traceback."""
STOPPED = 75
"""Stopped by a signal after saving (EX_TEMPFAIL of sysexits.h): rerun the same command to resume."""
LOST = 76
"""A job was lost with its cluster: submit it again to resume."""
DETACHED = 130
"""Interrupted by Ctrl-C while it followed a job, which runs on."""
