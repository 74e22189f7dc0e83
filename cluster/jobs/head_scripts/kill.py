"""Kill the processes of a job."""

import os
import signal
import sys
from contextlib import suppress

from .processes import processes_with


def main() -> None:
    """Kill the job's processes. Arguments: the environment variable that holds a job's id, and the id."""
    ended = 0
    for process in processes_with(*sys.argv[1:3]):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
            ended += 1
    print(f"killed {ended} processes", flush=True)


if __name__ == "__main__":
    main()
