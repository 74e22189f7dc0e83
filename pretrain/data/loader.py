"""Batches prefetched by worker processes."""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Semaphore
from threading import Thread
from typing import Any

from multihop.pretrain.data.batches import BatchBuilder, RankBatch
from multihop.pretrain.data.phases import is_skipped

_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_QUIET_S = 0.1
"""A forked child of CPython 3.11 waits for ever in os.fork() if another thread was creating or deleting its Python
thread state at that moment. gloo's threads do that when they release the tensor of a collective that has just ended,
so the processes are forked a moment later."""
_START_TIMEOUT_S = 60.0


def stream(builder: BatchBuilder, steps: Iterable[int], data_workers: int) -> Iterator[RankBatch]:
    """This rank's share of each of `steps` that the recipe does not skip, in order.

    Args:
        data_workers: processes that prefetch two shares each; 0: each share is made in this process when it is needed.

    Raises:
        Exception: Any that `BatchBuilder.step` raises, of the same type, in whichever process it ran.
        RuntimeError: A worker process was killed, or did not start.
    """
    from torch import Generator
    from torch.utils.data import DataLoader

    context = multiprocessing.get_context("fork") if data_workers else None
    started = multiprocessing.get_context("fork").Semaphore(0)
    loader: DataLoader[RankBatch] = DataLoader(
        _Steps(builder),  # type: ignore[arg-type]
        batch_size=None,
        sampler=_requested(builder, steps),
        num_workers=data_workers,
        collate_fn=_identity,
        worker_init_fn=partial(_prepare_process, os.getpid(), started),
        multiprocessing_context=context,
        generator=Generator(),  # its own: the loader draws a seed, which must not change the model's dropout
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # its processes inherit what is blocked here
    try:
        if data_workers:
            time.sleep(_QUIET_S)
        iterator = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for _ in range(data_workers):
        if not started.acquire(timeout=_START_TIMEOUT_S):
            _kill_workers()
            raise RuntimeError(
                f"a data worker did not start within {_START_TIMEOUT_S:.0f} s; rerun the same command to resume, or "
                "set engine.data_workers=0"
            )
    return iterator


@dataclass(frozen=True)
class _Steps:
    builder: BatchBuilder

    def __getitem__(self, step: int) -> RankBatch:
        return self.builder.step(step)


def _requested(builder: BatchBuilder, steps: Iterable[int]) -> Iterator[int]:
    """Yield the steps that are not skipped, each once its shards are requested; the loader reads ahead, in the rank's
    own process."""
    for step in steps:
        if not is_skipped(builder.config.phases, step):
            builder.request_shards(step)
            yield step


def _identity(step: Any) -> Any:
    return step


def _kill_workers() -> None:
    """SIGTERM is blocked in a process that did not start."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error of its own
    for process in multiprocessing.active_children():
        process.kill()


def _prepare_process(parent: int, started: Semaphore, number: int) -> None:
    """Die with the rank, and exit only when the rank sends a signal: one sent to a whole job must not end a worker,
    because the rank finishes its step first.

    The signals are blocked since before the process started.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    Thread(target=_exit_when_signalled, args=(parent,), daemon=True).start()
    started.release()


def _exit_when_signalled(parent: int) -> None:
    while signal.sigwaitinfo(_STOP_SIGNALS).si_pid != parent:
        pass
    os._exit(0)
