"""A profiler trace of some steps, requested while a run is training: `echo 3 > RUN_DIR/trace`."""

import logging
import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from multihop.common.files import atomic_replace, open_regular

log = logging.getLogger("multihop")

_MAX_BYTES = 64
"""Of a request that are read."""


def requested_steps(request: Path) -> int:
    """Read and remove the file `request`: the number of steps to trace; 0 without a file or a valid number in it."""
    try:
        with open_regular(request) as file:
            text = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return 0
    except IsADirectoryError:
        return 0  # no request, and not ours to remove
    except OSError as error:
        log.warning("%s cannot be read: %s", request, error.strerror)
        text = b""
    request.unlink()
    number = re.fullmatch(rb"\s*([0-9]{1,6})\s*", text)
    if number and int(number[1]) > 0:
        return int(number[1])
    log.warning("%s contained %r, expected the number of steps to trace, such as 3", request, text)
    return 0


class Tracer:
    """Traces one rank's steps into a file that chrome://tracing and Perfetto open."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank, self._left = folder, rank, 0
        self._profile: profile | None = None
        self._steps_seen = 0

    def before_step(self, requested: int) -> None:
        """Start to trace `requested` steps unless it is 0, continue, or write the trace once it is complete."""
        self._steps_seen += 1
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self.finish()
        if requested and self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile, self._left = profile(activities=activities, record_shapes=True), requested
            self._profile.start()

    def finish(self) -> None:
        """Write the trace in progress, if there is one."""
        if self._profile is not None:
            self._profile.stop()
            path = self._folder / f"trace-rank-{self._rank}-{self._steps_seen:08d}.json"
            with atomic_replace(path) as temporary:
                self._profile.export_chrome_trace(str(temporary))
            log.info("wrote %s", path)
            self._profile = None
