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
_FORK_DELAY_S = 0.1
"""A forked child of CPython 3.11 hangs in os.fork() if another thread was creating or deleting its Python thread state
at that moment. gloo's threads do that when they release the tensor of a collective that has just ended, so the
processes are forked a moment later."""
_START_TIMEOUT_S = 60.0


def prefetch_batches(builder: BatchBuilder, steps: Iterable[int], data_workers: int) -> Iterator[RankBatch]:
    """Yield this rank's share of each of `steps` that the recipe does not skip, in order.

    Args:
        data_workers: number of processes, which prefetch two batches each; 0: each batch is made in this process when
            it is needed.

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
        sampler=_request_ahead(builder, steps),
        num_workers=data_workers,
        collate_fn=_identity,
        worker_init_fn=partial(_prepare_process, os.getpid(), started),
        multiprocessing_context=context,
        generator=Generator(),  # a separate one: the loader draws a seed, which must not change the model's dropout
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # the worker processes inherit the mask
    try:
        if data_workers:
            time.sleep(_FORK_DELAY_S)
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


def _request_ahead(builder: BatchBuilder, steps: Iterable[int]) -> Iterator[int]:
    """Yield the steps that are not skipped, each after its shards are requested; the loader iterates ahead, in the
    rank's process."""
    for step in steps:
        if not is_skipped(builder.config.phases, step):
            builder.request_shards(step)
            yield step


def _identity(step: Any) -> Any:
    return step


def _kill_workers() -> None:
    """Kill the worker processes; SIGTERM is blocked in one that did not start."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise another error
    for process in multiprocessing.active_children():
        process.kill()


def _prepare_process(parent: int, started: Semaphore, number: int) -> None:
    """Set this worker process up to die with its rank, and to exit on no signal but the rank's.

    A signal to all processes of a job must not end a worker, because the rank finishes its step first. The signals have
    been blocked since before the process started.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    Thread(target=_exit_on_parents_signal, args=(parent,), daemon=True).start()
    started.release()


def _exit_on_parents_signal(parent: int) -> None:
    while signal.sigwaitinfo(_STOP_SIGNALS).si_pid != parent:
        pass
    os._exit(0)
