"""The ranks of a training run, and the collectives that they use besides DeepSpeed's."""

import hmac
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from multihop.pretrain.engine.device import use_expandable_segments
from multihop.pretrain.engine.rendezvous import Listener, Store, on_one_host, publish_endpoint, resolve_endpoint

SYNC_INTERVAL_S = 5.0
"""Seconds between two collectives of a rank that works for longer: the process group times out after minutes."""
GLOO_AT_SCALE = ("GLOO_ENABLE_STORE_V2_API", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
"""Variables with which gloo gets the addresses of all ranks in one request, and publishes one address for each rank
instead of one for each pair: 1,024 ranks would make two million requests, for nine gigabytes."""
_recent: deque[Tensor] = deque(maxlen=64)
"""Tensors of the latest collectives. If gloo held the last reference to one, a thread of gloo would release it and take
locks of the interpreter at any moment, and a process that is forked at that moment would never start."""


@dataclass(frozen=True)
class Ranks:
    """This process's rank, and collectives over all ranks. The hosts exchange numbers without their devices."""

    rank: int
    world_size: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None
    """A gloo group in addition to the NCCL group; None: the default group is a gloo group."""

    def start_all_reduce_sum(self, values: Mapping[str, float]) -> Callable[[], dict[str, float]]:
        """Start to sum each value over all ranks, in one float64 collective; call the result to wait for the sums."""
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        _recent.append(total)
        work = dist.all_reduce(total, group=self.host_group, async_op=True)

        def sums() -> dict[str, float]:
            work.wait()
            return dict(zip(values, total.tolist(), strict=True))

        return sums

    def all_reduce_sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value summed over all ranks, in one float64 collective."""
        return self.start_all_reduce_sum(values)()

    def all_reduce_sum_(self, tensor: Tensor) -> None:
        """Sum `tensor`, on the host or on the device, over all ranks in place."""
        _recent.append(tensor)
        dist.all_reduce(tensor, group=self.host_group if tensor.device.type == "cpu" else None)

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all ranks' values, each below 2**63."""
        tensor = torch.tensor([value], dtype=torch.int64)
        _recent.append(tensor)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.host_group)
        return int(tensor.item())

    def all_equal(self, value: int) -> bool:
        """Whether all ranks have the same value, below 2**63: the smallest is the largest."""
        tensor = torch.tensor([value, -value], dtype=torch.int64)
        _recent.append(tensor)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.host_group)
        smallest, largest = tensor.tolist()
        return bool(smallest == -largest)

    def all_gather_rows(self, rows: Tensor) -> list[Tensor]:
        """Every rank's int64 (n, columns), on the host; n may differ."""
        counts = self.all_reduce_sum(
            {str(rank): float(len(rows) * (rank == self.rank)) for rank in range(self.world_size)}
        )
        longest = int(max(counts.values()))
        padded = rows.new_zeros(longest, rows.shape[1])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        _recent.extend([padded, *gathered])
        dist.all_gather(gathered, padded, group=self.host_group)
        return [each[: int(count)] for each, count in zip(gathered, counts.values(), strict=True)]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank; without pickles, which could execute code."""
        rows = torch.frombuffer(bytearray(text.encode(errors="replace")) or bytearray(1), dtype=torch.uint8)
        gathered = self.all_gather_rows(rows.long()[:, None])
        return [each.to(torch.uint8).numpy().tobytes().rstrip(b"\0").decode() for each in gathered]

    def run_on_rank_zero(self, call: Callable[[], object]) -> None:
        """Run `call` on rank 0 while the other ranks wait, however long it takes.

        They meet in a collective every few seconds, because a process group times out after minutes without one.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="rank 0") as thread:
            running = [thread.submit(call)] if self.rank == 0 else []
            while self.all_reduce_sum({"left": len(wait(running, timeout=SYNC_INTERVAL_S).not_done)})["left"]:
                pass
        for each in running:
            each.result()

    def all_to_all(self, message: Tensor, sizes: list[int], expected: list[int]) -> Tensor:
        """Send runs of a (N,) tensor, of these numbers of elements, to the ranks in order; returns what they sent to
        this rank, of the expected numbers of elements."""
        received = message.new_empty(sum(expected))
        _recent.extend([message, received])
        group = self.host_group if message.device.type == "cpu" else None
        dist.all_to_all_single(received, message, expected, sizes, group=group)
        return received

    def broadcast(self, value: int) -> int:
        """Rank 0's value, below 2**63; no rank returns before rank 0 has called this."""
        tensor = torch.tensor([value], dtype=torch.int64)
        _recent.append(tensor)
        dist.broadcast(tensor, 0, group=self.host_group)
        return int(tensor.item())

    def shutdown(self) -> None:
        """Destroy the process groups."""
        dist.destroy_process_group()


def join_process_group(run_dir: Path | None = None) -> Ranks:
    """Join the process group of this launch: on GPUs NCCL with an additional gloo group, on CPUs gloo.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the environment.

    Args:
        run_dir: The directory in which ranks that torchrun started find rank 0's address; not needed by a single rank
            or under a cluster.

    Raises:
        ConnectionError: A process that does not know the secret of the launch has taken a rank's place.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        use_expandable_segments()
        torch.cuda.set_device(device)
    if on_one_host() and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other host needs to reach it
    for name in GLOO_AT_SCALE:
        os.environ.setdefault(name, "1")
    endpoint, endpoint_file = resolve_endpoint(run_dir, rank), None
    if rank == 0:
        endpoint = Listener(endpoint).endpoint
        if run_dir is not None and world_size > 1:
            endpoint_file = publish_endpoint(run_dir, endpoint)
    store = Store(endpoint, dist.default_pg_timeout)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    host_group = dist.new_group(backend="gloo") if on_gpu else None
    ranks = Ranks(rank, world_size, device, host_group)
    try:
        _authenticate(ranks, store, endpoint.secret)
    except BaseException:
        ranks.shutdown()  # a thread of gloo that outlives the interpreter would abort the process and hide the reason
        raise
    if endpoint_file is not None:
        endpoint_file.unlink(missing_ok=True)
    return ranks


def _authenticate(ranks: Ranks, store: Store, secret: bytes) -> None:
    """Prove to the other ranks that this one knows the secret, and check that they do, in each process group.

    The store rejects other processes, but gloo's and NCCL's connections accept any process that connects first.
    """
    if ranks.rank == 0:
        store.set("nonce", secrets.token_bytes(32))
    nonce = store.get("nonce")
    expected = [hmac.digest(secret, b"rank %d " % rank + nonce, "sha256") for rank in range(ranks.world_size)]
    groups = {ranks.device: None, torch.device("cpu"): ranks.host_group}  # one and the same without a GPU
    for device, group in groups.items():
        proof = torch.frombuffer(bytearray(expected[ranks.rank]), dtype=torch.uint8).to(device)
        proofs = [torch.empty_like(proof) for _ in expected]
        _recent.extend([proof, *proofs])
        dist.all_gather(proofs, proof, group=group)
        for rank, (received, digest) in enumerate(zip(proofs, expected, strict=True)):
            if not hmac.compare_digest(bytes(received.tolist()), digest):
                raise ConnectionError(
                    f"the process that answers as rank {rank} does not know the secret of this launch"
                )
