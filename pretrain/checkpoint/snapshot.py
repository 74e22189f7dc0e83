"""Host memory that a rank's slices are copied to, laid out as the file that is written from it."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from multihop.pretrain.checkpoint.layout import file_order
from multihop.pretrain.checkpoint.tensor_file import header_of


class Snapshot:
    """One buffer in host memory, reused by every save.

    Copying into new memory spends most of its time on the first touch of each page (five sixths where it was measured).
    """

    def __init__(self) -> None:
        self.tensors: dict[str, int] = {}
        """Name -> number of elements, in the order in which they are written; without empty ones."""
        self._header = header_of({})
        self._flat = torch.empty(0)
        self._views: dict[str, Tensor] = {}

    def prepare(self, live: dict[str, Tensor]) -> None:
        """Allocate the buffer for tensors of these names and sizes, and touch it; pinned if any is on a GPU.

        Raises:
            UserError: a name is not KIND/NAME@START.
        """
        lengths = {key: live[key].numel() for key in sorted(live, key=file_order) if live[key].numel()}
        if lengths == self.tensors:
            return
        self._flat, self._views = torch.empty(0), {}  # the old one's memory first
        pinned = any(tensor.is_cuda for tensor in live.values())
        self._flat = torch.empty(sum(lengths.values()), dtype=torch.float32, pin_memory=pinned).zero_()
        self._views = dict(zip(lengths, self._flat.split(list(lengths.values())), strict=True))
        self._header = header_of(lengths)
        self.tensors = lengths

    @torch.no_grad()
    def take(self, live: dict[str, Tensor]) -> None:
        """Copy tensors of any dtype and device, as float32; they may change after the return."""
        self.prepare(live)
        for key, view in self._views.items():
            view.copy_(live[key].view(-1), non_blocking=True)
        if self._flat.is_pinned():
            torch.cuda.synchronize()

    def chunks(self, length: int) -> Iterator[memoryview]:
        """The file's bytes in order, `length` at a time."""
        for part in (memoryview(self._header), self._flat.numpy().view(np.uint8).data):
            for start in range(0, len(part), length):
                yield part[start : start + length]
