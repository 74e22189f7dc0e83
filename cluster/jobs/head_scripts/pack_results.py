"""Print the results of a run as the lines of a base64 text: a gzip'd tar of what a person reads and compares."""

import base64
import io
import os
import sys
import tarfile
import time
from contextlib import suppress

from .files import matching, read

MARK = "multihop archive "
RESULTS = (
    "recipe.json",
    "summary.json",
    "metrics.jsonl",
    "report.html",
    "report.md",
    "*.png",
    "eval/plan.json",
    "eval/*.jsonl",
)
_LINE = 3 * 4096
_RETENTION_S = 120.0
"""Seconds for which the printed archive is kept in Ray's log file, so that the client can read it and reconnect."""


def main() -> None:
    """Argument: the run's folder, or its location in a bucket."""
    run = sys.argv[1]
    found = matching(run, RESULTS)
    if not found:
        sys.exit(f"{run} has no results yet")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in found:
            content = read(run, name) or b""
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    content = packed.getvalue()
    os.fchmod(sys.stdout.fileno(), 0o600)  # Ray writes what is printed to a file
    for start in range(0, len(content), _LINE):
        print(MARK + base64.b64encode(content[start : start + _LINE]).decode())
    sys.stdout.flush()
    _truncate_later(sys.stdout.fileno())


def _truncate_later(output: int) -> None:
    """Fork a process that truncates the output file after `_RETENTION_S` seconds and exits."""
    if os.fork():
        return
    os.setsid()  # Ray kills this process group when the job ends
    time.sleep(_RETENTION_S)
    with suppress(OSError):  # the output is a pipe
        os.ftruncate(output, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
