"""One rank of a training run as a process, under torchrun or a cluster.

Its command is `python -m multihop.pretrain.run.worker RUN_DIR`.
It needs neither Ray nor MLflow. It reads RUN_DIR/recipe.json and RUN_DIR/data, resumes from the newest checkpoint that
verifies, and writes metrics.jsonl, checkpoints/ and logs/. Its exit codes are those in `multihop.common.errors`.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import IO

from multihop.common.errors import FAILED, USER_ERROR, UserError
from multihop.common.files import DISK_FULL, make_folder, open_append, write_atomically
from multihop.common.machine import disable_malloc_trim
from multihop.pretrain.engine.ranks import join_process_group
from multihop.pretrain.environment import SUPERVISED
from multihop.pretrain.run.files import GAVE_UP
from multihop.pretrain.run.records import LaunchTimes
from multihop.pretrain.run.train_run import train_run

log = logging.getLogger("multihop")


def main() -> int:
    """The command `python -m multihop.pretrain.run.worker RUN_DIR`."""
    if len(sys.argv) != 2:
        print("usage: python -m multihop.pretrain.run.worker RUN_DIR", file=sys.stderr)
        return USER_ERROR
    disable_malloc_trim()
    run_dir = Path(sys.argv[1])
    try:
        console = _log_to(run_dir / "logs" / f"rank-{os.environ.get('RANK', '0')}.log")
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    times = LaunchTimes()
    try:
        ranks = join_process_group(run_dir)
        times.lap("rendezvous_s")
        code = train_run(run_dir, ranks, times, console)
        ranks.shutdown()
        return code
    except Exception as error:
        log.exception("training failed")
        code, final = (USER_ERROR, True) if isinstance(error, UserError) else (FAILED, _would_recur(error))
        print(error if final else f"{type(error).__name__}: {error}", file=console, flush=True)
        if final and SUPERVISED in os.environ:  # else the driver would restart the ranks
            reason = {"code": code, "message": str(error)}
            write_atomically(run_dir / GAVE_UP, json.dumps(reason).encode())
        return code


def _log_to(path: Path) -> IO[str]:
    """Redirect all output of this process, including native code's, to `path`; returns the former standard output."""
    make_folder(path.parent, mode=0o700)  # native code may print secrets
    console = os.fdopen(os.dup(1), "w")
    with open_append(path) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    return console


def _would_recur(error: BaseException) -> bool:
    """Whether a restart would fail in the same way, because of non-finite steps or a full disk."""
    if isinstance(error, FloatingPointError) or (isinstance(error, OSError) and error.errno in DISK_FULL):
        return True
    return error.__cause__ is not None and _would_recur(error.__cause__)


if __name__ == "__main__":
    # Not sys.exit: a thread of a save or of gloo may wait for a rank that has exited, and would keep the process alive.
    code = main()
    logging.shutdown()
    os._exit(code)
