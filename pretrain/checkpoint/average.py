"""The mean of several checkpoints' weights (Vaswani et al. 2017, section 6.1)."""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from math import prod

import torch
from torch import Tensor

from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.verify import committed_steps, verify


def newest_committed(checkpoints: str, count: int) -> list[str]:
    """The locations of the newest `count` committed checkpoints, oldest first.

    Raises:
        UserError: There are fewer.
    """
    steps = list(islice(committed_steps(checkpoints), count))
    if len(steps) < count:
        raise UserError(
            f"{checkpoints} has {len(steps)} committed checkpoints, and --last {count} needs more; set checkpoint.keep "
            "to as many as are averaged, and checkpoint.save_interval so that they are saved often enough"
        )
    return [folder_of_step(checkpoints, step) for step in reversed(steps)]


def average(locations: Sequence[str]) -> tuple[CheckpointManifest, dict[str, Tensor]]:
    """The last checkpoint's manifest, and the mean of each weight, computed in float64; every file is verified.

    Only one model is in memory.

    Args:
        locations: The locations of one or more checkpoints of one model.

    Raises:
        UserError: A checkpoint is damaged, or its parameters differ from those of the last one.
    """
    manifests = [verify(location) for location in locations]
    newest = manifests[-1]
    for location, manifest in zip(locations, manifests, strict=True):
        if manifest.parameters != newest.parameters:
            raise UserError(f"{location} has other parameters than {locations[-1]}; average checkpoints of one run")
    with ExitStack() as stack:
        readers = [
            stack.enter_context(CheckpointReader(location, manifest))
            for location, manifest in zip(locations, manifests, strict=True)
        ]
        means = {}
        for name, shape in newest.parameters.items():
            total = torch.zeros(prod(shape), dtype=torch.float64)
            for reader in readers:
                total += reader.read("weight", name, 0, prod(shape))
            means[name] = (total / len(readers)).float().view(shape)
    return newest, means
