"""The processes of a training run, and the few things they agree on."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among all of them."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Each value summed over all ranks, in float64 and with one message."""
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return dict(zip(values, tensor.tolist(), strict=True))

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
