"""Append rows to metrics.jsonl at a steady rate until SIGTERM, in place of training in tests of tracking."""

import json
import signal
import sys
import time


def main() -> None:
    """Run with the arguments of the command line: the file, the first step, rows per second."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    step, pause = int(sys.argv[2]), 1 / float(sys.argv[3])
    with open(sys.argv[1], "a") as metrics:
        while not stopping:
            row = {"step": step, "loss": 1 / (1 + step), "lr": step * 1e-6, "grad_norm": 1.0, "tokens": step * 512}
            metrics.write(json.dumps({**row, "time": time.time()}) + "\n")
            metrics.flush()
            step += 1
            time.sleep(pause)


if __name__ == "__main__":
    main()
