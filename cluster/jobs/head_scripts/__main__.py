"""Run one of the programs on a cluster's head: `python -m head_scripts PROGRAM ARGUMENT…`."""

import sys
from collections.abc import Callable

from . import inspect_head, processes, run_files

PROGRAMS: dict[str, Callable[..., None]] = {
    "inspect": inspect_head.main,
    "kill": processes.kill,
    "print-log": processes.print_log,
    "pack-results": run_files.pack_results,
}

PROGRAMS[sys.argv[1]](*sys.argv[2:])
