"""The processes of a training run, and the few things they agree on."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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


def join() -> Ranks:
    """Meet the other ranks: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT stand in the environment."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), device)
