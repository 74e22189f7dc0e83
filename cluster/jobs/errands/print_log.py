"""Print a rank's log from a byte on, then a line with the byte that it was read to.

With the id of a job, also what is appended to the log while processes of that job live on this host, and for some
seconds at most: nobody may be left who reads it.
"""

import sys
import time

from .files import read
from .processes import processes_with

READ_TO = "multihop read to "
_POLL_S = 1.0


def main() -> None:
    """Arguments: the run's folder or its location in a bucket, the rank, and the byte; and to follow the log, the
    environment variable with a job's id, the id, and the seconds."""
    run, name, offset, job = sys.argv[1], f"logs/rank-{sys.argv[2]}.log", int(sys.argv[3]), sys.argv[4:6]
    deadline = time.monotonic() + float(sys.argv[6]) if job else 0.0
    while True:
        goes_on = bool(job) and time.monotonic() < deadline and any(processes_with(job[0], job[1]))
        content = read(run, name, offset)
        if content is None and not job:
            sys.exit(f"{run}/{name} does not exist")
        whole = content or b""
        if job:
            whole = whole[: whole.rfind(b"\n") + 1]  # a line that is not whole yet is read again
        offset += len(whole)
        text = whole.decode(errors="replace")  # Ray passes nothing on but UTF-8
        sys.stdout.buffer.write((text if text.endswith("\n") or not text else f"{text}\n").encode())
        sys.stdout.flush()
        if not goes_on:
            print(f"{READ_TO}{offset}", flush=True)
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
