"""Print a rank's log from a byte offset on, then a line with the offset that was reached.

Given the id of a job, follow the log while processes of that job are alive on this host, for a limited time: the client
may be gone.
"""

import sys
import time

from .files import read
from .processes import processes_with

OFFSET_PREFIX = "multihop log offset "
_POLL_S = 1.0


def main() -> None:
    """Print the log.

    Arguments: the run's directory or its s3:// URI, the rank, and the byte offset; to follow the log, also the
    environment variable with a job's id, the id, and the most seconds to follow it.
    """
    run, name, offset, job = sys.argv[1], f"logs/rank-{sys.argv[2]}.log", int(sys.argv[3]), sys.argv[4:6]
    deadline = time.monotonic() + float(sys.argv[6]) if job else 0.0
    while True:
        goes_on = bool(job) and time.monotonic() < deadline and any(processes_with(job[0], job[1]))
        content = read(run, name, offset)
        if content is None and not job:
            sys.exit(f"{run}/{name} does not exist")
        whole = content or b""
        if job:
            whole = whole[: whole.rfind(b"\n") + 1]  # an incomplete line is read again
        offset += len(whole)
        text = whole.decode(errors="replace")  # Ray forwards only UTF-8
        sys.stdout.buffer.write((text if text.endswith("\n") or not text else f"{text}\n").encode())
        sys.stdout.flush()
        if not goes_on:
            print(f"{OFFSET_PREFIX}{offset}", flush=True)
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
