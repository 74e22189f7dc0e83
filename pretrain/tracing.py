"""A profiler's trace of some steps, asked for while a run goes on: `echo 3 > RUN_DIR/trace`."""

import logging
import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from data_prep.files import open_regular, replacing

log = logging.getLogger("multihop")

_LONGEST = 64
"""Bytes of a request that are looked at."""


def asked_steps(request: Path) -> int:
    """The number of steps in the file `request`, which is removed; 0 where there is none, or it is no such number."""
    try:
        with open_regular(request) as file:
            text = file.read(_LONGEST)
    except FileNotFoundError:
        return 0
    except IsADirectoryError:
        return 0  # nobody's request, and not ours to remove
    except OSError as error:
        log.warning("%s cannot be read: %s", request, error.strerror)
        text = b""
    request.unlink()
    number = re.fullmatch(rb"\s*([0-9]{1,6})\s*", text)
    if number and int(number[1]) > 0:
        return int(number[1])
    log.warning("%s held %r, expected how many steps to trace, for instance 3", request, text)
    return 0


class Tracer:
    """Traces one rank's steps into a file that chrome://tracing and Perfetto open."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._left = folder, rank, 0
        self._profile: profile | None = None
        self._steps_seen = 0

    def before_step(self, asked: int) -> None:
        """Begin where somebody asked for `asked` steps, go on, or write what was traced."""
        self._steps_seen += 1
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self.finish()
        if asked and self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile, self._left = profile(activities=activities, record_shapes=True), asked
            self._profile.start()

    def finish(self) -> None:
        """Write the trace under way, if there is one."""
        if self._profile is not None:
            self._profile.stop()
            path = self._folder / f"trace-rank-{self._rank}-{self._steps_seen:08d}.json"
            with replacing(path) as temporary:
                self._profile.export_chrome_trace(str(temporary))
            log.info("wrote %s", path)
            self._profile = None
