"""Interrupts a map over short Ray tasks again and again: `python -m support.interrupt_tasks ROUNDS`."""

import os
import random
import signal
import sys
import threading
import time

from multihop.cluster.ray.map import map_on_ray
from multihop.cluster.ray.session import ray_session


def work(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def main() -> None:
    """Print the number of rounds that ended with KeyboardInterrupt."""
    rng, interrupted = random.Random(0), 0
    with ray_session(None, 1):
        list(map_on_ray(work, [0.0] * 4))  # their processes have started
        for _ in range(int(sys.argv[1])):
            timer = threading.Timer(rng.uniform(0.05, 0.7), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                list(map_on_ray(work, [rng.uniform(0.1, 0.4) for _ in range(20)]))
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
    print(interrupted)


if __name__ == "__main__":
    main()
