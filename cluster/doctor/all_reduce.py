"""The rate of all-reduce by size, among ranks on one node or on two. Runs on the nodes, a process a rank."""

import os
import time
from datetime import timedelta
from typing import Any

from multihop.cluster.ray.network import interface_of

SIZES = (2**12, 2**20, 2**26)
"""Bytes: latency, a small bucket of gradients, a large one."""
TIMEOUT_S = 120.0
_PATIENCE_S = 45.0
"""For the ranks to meet, and for each all-reduce; torch may have to be imported from a cold disk before."""
_REPEATS = 5


def all_reduce_rates(rank: int, world_size: int, host: str, own_host: str, port: int, secret: str) -> dict[str, Any]:
    """Sum tensors over all ranks by NCCL where this rank has a GPU, otherwise by gloo.

    Args:
        host: address of rank 0, which listens at `port`.
        own_host: address of this rank's node.
        secret: by which the ranks recognize each other, in hex.

    Returns:
        {bytes: rate}: the bytes per second that each rank sends, 2 (n - 1) / n of the tensor's in each all-reduce; the
        best of five.

    Raises:
        RuntimeError: a sum is wrong, or no answer came in time.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(own_host)
    import torch
    import torch.distributed as dist

    from multihop.pretrain.engine.rendezvous import Endpoint, Listener, Store

    endpoint = Endpoint(host, port, bytes.fromhex(secret))
    listener = Listener(endpoint) if rank == 0 else None
    on_gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    patience = timedelta(seconds=_PATIENCE_S)
    store = Store(endpoint, patience)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=patience
    )
    try:
        return {str(size): _rate(size, rank, world_size, device) for size in SIZES}
    finally:
        dist.destroy_process_group()
        if listener is not None:
            listener.close()


def _rate(size: int, rank: int, world_size: int, device: Any) -> float:
    import torch
    import torch.distributed as dist

    seconds = []
    for _ in range(_REPEATS + 1):  # the first one opens connections
        tensor = torch.full((size // 4,), float(rank + 1), device=device)
        dist.barrier()
        _synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
        if not bool((tensor == world_size * (world_size + 1) / 2).all()):
            raise RuntimeError(f"an all-reduce of {size} bytes gave a wrong sum on rank {rank}")
    return 2 * (world_size - 1) / world_size * size / min(seconds[1:])


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
