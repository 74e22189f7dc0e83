"""End a job at once: its command and all processes that it started, which have its id in their environment."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Arguments: the environment variable, and the id."""
    wanted, ended = "=".join(sys.argv[1:3]).encode(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it has ended
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                ended += 1
    print(f"killed {ended} processes", flush=True)


if __name__ == "__main__":
    main()
