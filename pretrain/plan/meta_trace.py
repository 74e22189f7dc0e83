"""Runs a training step without data and counts the memory that it takes: what a GPU would do, on the meta device.

Tensors of floats are on the meta device, which has shapes and no data, and stand for tensors on a GPU. Tensors of
integers are computed on the CPU, because the lengths and positions in them decide the shapes of others.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten  # noqa: PLC2701

from multihop.pretrain.device_type import DeviceType

GPU_BLOCK = 512
"""Bytes to which torch's allocator for GPUs rounds up (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
OnOperation = Callable[[Any, Sequence[Any], dict[str, Any], Any], None]
"""See `MetaTrace`."""
CategoryOf = Callable[[Any, Tensor], str]
"""See `MetaTrace`."""
_META, _CPU = torch.device("meta"), torch.device("cpu")
_COPY = torch.ops.aten._to_copy.default


@dataclass(slots=True)
class _Block:
    """Memory that one or several storages share."""

    place: str
    size: int
    category: str
    made_at: int
    """Number of allocations before."""
    freed_at: float = math.inf
    """Number of allocations before it was freed."""
    storages: int = 0


class MetaTrace(TorchDispatchMode):
    """Within this mode, floats are on the meta device, and the bytes of tensors that are alive are counted.

    A tensor that is made with `device="meta"` is on the GPU, one with `device="cpu"` in the host's memory, and any
    other one where the tensors are that it is computed from. Only what is made within the mode is counted.
    """

    def __init__(
        self,
        device: DeviceType,
        block: int = GPU_BLOCK,
        on_operation: "OnOperation | None" = None,
        category_of: "CategoryOf | None" = None,
        on_host_operation: "OnOperation | None" = None,
    ) -> None:
        """Trace.

        Args:
            device: The type of the device that is planned for. On a CPU its memory is the host's.
            block: Bytes to which the size of each tensor is rounded up.
            on_operation: Is called with each operation on the GPU, its arguments, in which integers have their values,
                its keyword arguments, and its result.
            category_of: Returns the category of a tensor that an operation has just allocated; None: memory is not
                divided by category.
            on_host_operation: Is called, as `on_operation`, with each operation on floats in the host's memory
                other than scalars, copies between host and GPU included.
        """
        super().__init__()
        self._on_operation, self._category_of = on_operation, category_of
        self._on_host_operation = on_host_operation
        self._block, self._host = block, "host" if device == "cuda" else "device"
        self.bytes = {"device": 0, "host": 0}
        """Bytes of tensors that are alive."""
        self.peak = {"device": 0, "host": 0}
        """The largest values of `bytes` since `reset_peak`."""
        self._alive: dict[int, tuple[_Block, weakref.ref[Any]]] = {}
        """By the address of a storage on the meta device: the memory that it stands for, and the storage itself."""
        self._allocations = 0
        self._peak_at = {"device": 0, "host": 0}
        """Number of allocations at each peak."""
        self._reset_at = 0
        """Number of allocations at the last `reset_peak`."""
        self._blocks: list[_Block] = []
        """Those that were alive at the last `reset_peak`, or were made later."""

    def reset_peak(self) -> None:
        """Forget the peaks so far."""
        self.peak = dict(self.bytes)
        self._reset_at = self._allocations
        self._peak_at = dict.fromkeys(self._peak_at, self._allocations)
        self._blocks = self._alive_blocks()

    def peak_by_category(self, place: str) -> Counter[str]:
        """The bytes of each category at a peak; their sum is the peak.

        A block counts for the category that it has now: what it is for may only be known later than it is made.
        """
        at, found = self._peak_at[place], Counter[str]()
        for block in self._blocks:
            if block.place == place and block.made_at < at <= block.freed_at:
                found[block.category] += block.size
        return found

    def set_category(self, tensor: Tensor, category: str, instead_of: Sequence[str] | None = None) -> None:
        """Say what the memory of a tensor is for; nothing changes if it is not counted.

        Args:
            instead_of: Change it only if it has one of these categories so far.
        """
        block, _ = self._alive.get(_address(tensor), (None, None))
        if block is not None and (instead_of is None or block.category in instead_of):
            block.category = category

    def set_category_of_new(self, category: str, instead_of: str) -> None:
        """Change the category from `instead_of` for all live memory that was allocated since `reset_peak`."""
        for block in self._alive_blocks():
            if block.category == instead_of and block.made_at >= self._reset_at:
                block.category = category

    def _alive_blocks(self) -> list[_Block]:
        return list({id(block): block for block, _ in self._alive.values()}.values())

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting tensors that are on the meta device in a real run too."""
        for tensor in tensors:
            block, _ = self._alive[_address(tensor)]
            self.bytes[block.place] -= block.size
            block.size = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if operation is torch.ops.aten._local_scalar_dense.default and tensors[0].is_meta:
            return False if tensors[0].dtype == torch.bool else 1.0  # no step is skipped, nothing is not finite
        place = self._place_of(operation, tensors, leaves, kwargs or {})
        if place is not None:
            leaves = [self._to_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            leaves = [_META if isinstance(leaf, torch.device) else leaf for leaf in leaves]
        elif any(leaf.type == "meta" for leaf in leaves if isinstance(leaf, torch.device)):  # integers
            leaves = [_CPU if isinstance(leaf, torch.device) else leaf for leaf in leaves]
        on_device, keywords = tree_unflatten(leaves, structure)
        result = operation(*on_device, **keywords)
        moves_nothing = operation is _COPY and place == "device" and self._is_there(tensors[0], result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(operation, tensor, place or "device", tensors[0] if moves_nothing else None)
        if self._on_operation is not None and place == "device" and not moves_nothing:
            self._on_operation(operation, args, kwargs or {}, result)
        if self._on_host_operation is not None and self._host == "host":
            touched = [*tensors, *(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))]
            if any(tensor.dim() and self.is_on_host(tensor) for tensor in touched):
                self._on_host_operation(operation, args, kwargs or {}, result)
        return result

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor of floats is in the host's memory, and not on the GPU."""
        return tensor.is_meta and self._place(tensor) == "host"

    def _place_of(self, operation: Any, tensors: list[Tensor], leaves: list[Any], kwargs: dict[str, Any]) -> str | None:
        """Where the result is of an operation on the meta device; None: it is computed on the CPU."""
        device = kwargs.get("device")
        if device is not None and _makes_floats(operation, tensors, leaves, kwargs):
            return self._host if torch.device(device).type == "cpu" else "device"
        places = [self._place(tensor) for tensor in tensors if tensor.is_meta]
        if not places:
            return None
        return "host" if all(place == "host" for place in places) else "device"

    def _to_meta(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to("meta")

    def _is_there(self, source: Tensor, result: Tensor) -> bool:
        """Whether a copy would be none on a GPU: a tensor is already there, with the same dtype."""
        return source.is_meta and source.dtype == result.dtype and self._place(source) == "device"

    def _place(self, tensor: Tensor) -> str:
        address = _address(tensor)
        return self._alive[address][0].place if address in self._alive else "device"

    def _count(self, operation: Any, tensor: Tensor, place: str, same_as: Tensor | None) -> None:
        """Count the storage of a tensor that an operation has made, until it is freed.

        Args:
            same_as: the tensor whose memory it would share on a GPU; None: it has memory of its own.
        """
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address in self._alive:
            return
        shared = None if same_as is None else self._alive.get(_address(same_as))
        if shared is None:
            category = "" if self._category_of is None else self._category_of(operation, tensor)
            block = _Block(place, self._rounded(storage.nbytes()), category, self._allocations)
        else:
            block = shared[0]
        if block.storages == 0:
            self._allocations += 1
            self._blocks.append(block)
            self.bytes[place] += block.size
            if self.bytes[place] > self.peak[place]:
                self.peak[place], self._peak_at[place] = self.bytes[place], self._allocations
        block.storages += 1
        self._alive[address] = block, weakref.ref(storage, lambda _: self._free(address))

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block

    def _free(self, address: int) -> None:
        block, _ = self._alive.pop(address)
        block.storages -= 1
        if block.storages == 0:
            self.bytes[block.place] -= block.size
            block.freed_at = self._allocations


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _makes_floats(operation: Any, tensors: list[Tensor], leaves: list[Any], kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return bool(dtype.is_floating_point)
    if tensors:
        return tensors[0].is_floating_point()
    if operation.overloadpacket in (torch.ops.aten.arange, torch.ops.aten.full, torch.ops.aten.scalar_tensor):
        return any(isinstance(leaf, float) for leaf in leaves)
    return True
