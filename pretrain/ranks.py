"""The processes of a training run, and the few things they agree on."""

import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.rendezvous import Listener, Store, invite, meeting_of, on_one_host


@dataclass(frozen=True)
class Ranks:
    """This process among all of them."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each value (a number or a tensor of one) summed over all ranks, in float64 and with one message."""
        parts = [torch.as_tensor(value, dtype=torch.float64, device=self.device) for value in values.values()]
        total = torch.stack(parts)
        dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def sum_in_place(self, tensor: Tensor) -> None:
        """`tensor` summed over all ranks; it may live on another device than the ranks talk through."""
        there = tensor.to(self.device)
        dist.all_reduce(there)
        if there is not tensor:
            tensor.copy_(there)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, each below 2**63."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return int(tensor.item())

    def from_first(self, value: int) -> int:
        """Rank 0's value, below 2**63; also a point that nobody passes before rank 0 is there."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, 0)
        return int(tensor.item())

    def leave(self) -> None:
        """Part from the others."""
        dist.destroy_process_group()


def join(run_dir: Path | None = None) -> Ranks:
    """Meet the other ranks of this start, and none but them.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT stand in the environment.

    Args:
        run_dir: where ranks that torchrun started find rank 0; not needed by a single rank or under a cluster.

    Raises:
        ConnectionError: whoever took a rank's place does not know the secret of the start.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    elif on_one_host() and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside needs to reach it
    meeting, invitation = meeting_of(run_dir, rank), None
    if rank == 0:
        meeting = Listener(meeting).meeting
        if run_dir is not None and world_size > 1:
            invitation = invite(run_dir, meeting)
    store = Store(meeting, dist.default_pg_timeout)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size)
    ranks = Ranks(rank, world_size, device)
    _prove(ranks, store, meeting.secret)
    if invitation is not None:
        invitation.unlink(missing_ok=True)
    return ranks


def _prove(ranks: Ranks, store: Store, secret: bytes) -> None:
    """Show the others that this rank knows the secret, and see that they do.

    The store lets nobody else in, but gloo's and NCCL's own connections are made with whoever is quick enough.
    """
    if ranks.rank == 0:
        store.set("nonce", secrets.token_bytes(32))
    nonce = store.get("nonce")
    expected = [hmac.digest(secret, b"rank %d " % rank + nonce, "sha256") for rank in range(ranks.world_size)]
    mine = torch.frombuffer(bytearray(expected[ranks.rank]), dtype=torch.uint8).to(ranks.device)
    theirs = [torch.empty_like(mine) for _ in expected]
    dist.all_gather(theirs, mine)
    for rank, (found, wanted) in enumerate(zip(theirs, expected, strict=True)):
        if not hmac.compare_digest(bytes(found.tolist()), wanted):
            raise ConnectionError(f"whoever answers as rank {rank} does not know the secret of this start")
