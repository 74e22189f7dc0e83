"""Counts the bytes of tensors that are alive, from operation to operation, on the meta device too."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701
from torch.utils._pytree import tree_leaves  # noqa: PLC2701


class LiveBytes(TorchDispatchMode):
    """Within this mode, `bytes` is the sum over the storages on a device that operations have made and that are alive.

    Each storage counts once, rounded up to blocks, as torch's allocator for GPUs does.
    """

    def __init__(self, device: str, block: int = 512) -> None:
        super().__init__()
        self._device = device
        self.bytes = 0
        self.peak = 0
        """The largest value of `bytes` so far; may be set to begin anew."""
        self._block = block
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                    self.count(part)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, if it is not counted yet, until it is freed."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        size = -(-storage.nbytes() // self._block) * self._block
        self._alive[address] = weakref.ref(storage, lambda _: self._free(address, size))
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def _free(self, address: int, size: int) -> None:
        del self._alive[address]
        self.bytes -= size
