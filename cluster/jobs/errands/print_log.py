"""Print a file; with a second argument, also what is appended to it until this program is stopped."""

import sys
import time
from pathlib import Path


def main() -> None:
    """Arguments: the file, and `-f` to follow it."""
    path, following = Path(sys.argv[1]), len(sys.argv) > 2
    while not path.exists():
        if not following:
            sys.exit(f"{path} does not exist")
        time.sleep(1)
    with open(path, errors="replace") as file:
        while True:
            text = file.read(65536)
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()
            elif not following:
                return
            else:
                time.sleep(1)


if __name__ == "__main__":
    main()
