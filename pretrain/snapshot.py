"""Memory that a rank's slices are copied into, laid out as the file that is written from it."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pretrain.tensor_file import header_of


class Snapshot:
    """One buffer in the host's memory, used again by every save.

    Most of a copy's time into new memory goes into the memory's first touch (five sixths of it where it was measured);
    a buffer that has been touched before costs what copying costs.
    """

    def __init__(self) -> None:
        self._lengths: dict[str, int] | None = None
        self._header = b""
        self._flat = torch.empty(0)
        self._views: dict[str, Tensor] = {}

    def prepare(self, live: dict[str, Tensor]) -> None:
        """Lay the buffer out for tensors of these names and sizes, and touch it; pinned where any is on a GPU."""
        lengths = {key: tensor.numel() for key, tensor in live.items()}
        if lengths == self._lengths:
            return
        self._flat, self._views = torch.empty(0), {}  # the old one's memory first
        pinned = any(tensor.is_cuda for tensor in live.values())
        self._flat = torch.empty(sum(lengths.values()), dtype=torch.float32, pin_memory=pinned).zero_()
        self._views = dict(zip(lengths, self._flat.split(list(lengths.values())), strict=True))
        self._header = header_of(lengths)
        self._lengths = lengths

    @torch.no_grad()
    def take(self, live: dict[str, Tensor]) -> None:
        """Copy tensors of any type and device, as float32; on return they may change."""
        self.prepare(live)
        for key, tensor in live.items():
            self._views[key].copy_(tensor.view(-1), non_blocking=True)
        if self._flat.is_pinned():
            torch.cuda.synchronize()

    def chunks(self, length: int) -> Iterator[memoryview]:
        """The file's bytes in order, `length` at a time."""
        for part in (memoryview(self._header), self._flat.numpy().view(np.uint8).data):
            for start in range(0, len(part), length):
                yield part[start : start + length]
