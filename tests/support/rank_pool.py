"""Groups of training processes that all tests share: starting one with DeepSpeed takes 10 to 15 seconds."""

import gc
import multiprocessing
import os
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PATIENCE_S = 600.0


class RankPool:
    """`world_size` processes over gloo that run the same job, each as its rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `job(ranks, *arguments)` on every rank; returns the result of each.

        The job is a function of a module of tests/support. An exception on any rank ends the processes, because the
        others may wait for it forever; the next call starts new ones.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, arguments))
        results = self._gather()
        failed = [result for good, result in results if not good]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return [result for _, result in results]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        secret = secrets.token_hex(32)
        for rank in range(self.world_size):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, rank, self.world_size, port, secret)
            process = spawn.Process(target=_serve, args=arguments, daemon=False)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def _gather(self) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(answers) < self.world_size and time.monotonic() < deadline:
            waiting = [pipe for number, pipe in enumerate(self._pipes) if number not in answers]
            for pipe in wait(waiting, timeout=1.0):
                assert isinstance(pipe, Connection)
                number = self._pipes.index(pipe)
                try:
                    answers[number] = pipe.recv()
                except EOFError:
                    answers[number] = (False, f"rank {number}: its process ended")
                if not answers[number][0]:
                    deadline = min(deadline, time.monotonic() + 10.0)
        silent = (False, "a rank did not answer")
        return [answers.get(number, silent) for number in range(self.world_size)]


def _serve(pipe: Connection, rank: int, world_size: int, port: int, secret: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "MULTIHOP_RENDEZVOUS_SECRET": secret,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    import torch

    from multihop.pretrain.engine.ranks import join_process_group

    torch.set_num_threads(1)
    ranks = join_process_group()
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(ranks, *arguments)))
        except Exception:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
        del job, arguments
        gc.collect()
        gc.freeze()  # so that DeepSpeed's many collections skip the libraries
