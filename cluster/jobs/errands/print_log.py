"""Print a rank's log; with a third argument, also what is appended to it until this program is stopped."""

import sys
import time

from .files import read

_POLL_S = 1.0


def main() -> None:
    """Arguments: the run's folder or its location in a bucket, the rank, and `-f` to follow it."""
    run, name, following = sys.argv[1], f"logs/rank-{sys.argv[2]}.log", len(sys.argv) > 3
    content = read(run, name)
    if content is None and not following:
        sys.exit(f"{run}/{name} does not exist")
    printed = 0
    while True:
        printed += sys.stdout.buffer.write(content or b"")
        sys.stdout.flush()
        if not following:
            return
        time.sleep(_POLL_S)
        content = read(run, name, printed)


if __name__ == "__main__":
    main()
