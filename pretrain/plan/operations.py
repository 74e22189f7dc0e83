"""What an operation on a GPU computes and moves: its floating-point operations and bytes, from the shapes alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves  # noqa: PLC2701

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.addmm_: 1, _aten.baddbmm: 1, _aten.baddbmm_: 1}
"""Matrix products, and the position of their first factor."""
_ATTENTION = {_aten._flash_attention_forward: 2, _aten._flash_attention_backward: 5}
"""The number of products of queries and keys: the backward pass computes the scores again (Dao 2023, section 2.3)."""
_KERNELS_OF_ATTENTION = {"short_attention._forward": 2, "short_attention._backward": 5}
_c10d = torch.ops.c10d
_SENT = {
    _c10d.allreduce_: (0, 2.0),
    _c10d._allgather_base_: (0, 1.0),
    _c10d._reduce_scatter_base_: (1, 1.0),
    _c10d.allgather_: (0, 1.0),
    _c10d.alltoall_base_: (1, 1.0),
    _c10d.broadcast_: (0, 1.0),
    _c10d.reduce_: (0, 1.0),
}
"""Collectives: the position of the tensors that all ranks have together, and how often a ring sends each of their
bytes, but for the share of the rank itself (Rajbhandari et al. 2020, section 7.1)."""


@dataclass(frozen=True)
class Operation:
    """An operation, or a kernel."""

    kind: Literal["product", "attention", "memory", "communication"]
    name: str
    flops: float
    bytes: int
    """Bytes that it reads and writes; of a collective, that each rank sends."""
    dtype: torch.dtype
    shape: tuple[int, int, int] = (0, 0, 0)
    """Of a product: rows, columns, and the length of the sums; of all of a batch of products together the rows."""


def describe(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, world_size: int
) -> Operation | None:
    """The operation that a call of torch's dispatcher is; None: it does nothing on a device, such as a view.

    Args:
        args, kwargs: its arguments, in which tensors of integers have their values.
        result: what it returned.
    """
    packet, name = operation.overloadpacket, str(operation)
    if packet in _SENT:
        at, times = _SENT[packet]
        whole = [leaf for leaf in tree_leaves(args[at]) if isinstance(leaf, Tensor)]
        sent = times * _bytes(whole) * (1 - 1 / world_size)
        return Operation("communication", name, 0.0, round(sent), whole[0].dtype)
    if packet.__name__ in ("barrier", "wait_tensor"):
        return None
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if _moves_nothing(operation, inputs, outputs):
        return None
    moved = _bytes(inputs) + (_bytes(outputs) if outputs else _written_bytes(operation, args, kwargs))
    floats = [tensor.dtype for tensor in (*inputs, *outputs) if tensor.is_floating_point()]
    dtype = floats[0] if floats else torch.int64
    if packet in _PRODUCTS:
        first, second = args[_PRODUCTS[packet] : _PRODUCTS[packet] + 2]
        rows, length, columns = prod(first.shape[:-1]), first.shape[-1], second.shape[-1]
        flops = 2.0 * rows * length * columns
        return Operation("product", name, flops, moved, first.dtype, (rows, columns, length))
    if packet in _ATTENTION:
        named = _named(operation, args, kwargs)
        query, window = named["query"], named.get("window_size_left")
        pairs = _attended(named["cum_seq_q"], named["is_causal"], window)
        flops = 2.0 * _ATTENTION[packet] * pairs * query.shape[1] * query.shape[2]
        return Operation("attention", name, flops, moved, query.dtype)
    return Operation("memory", name, 0.0, moved, dtype)


def describe_kernel(kernel: Any, args: Sequence[Any]) -> Operation:
    """The operation that a kernel of `pretrain/models/gpu` is."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
    products = _KERNELS_OF_ATTENTION.get(name)
    if products is None:
        return Operation("memory", name, 0.0, _bytes(tensors), tensors[0].dtype)
    query, bounds = tensors[0], next(tensor for tensor in tensors if tensor.dtype == torch.int32)
    flops = 2.0 * products * _attended(bounds, False, None) * query.shape[1] * query.shape[2]
    return Operation("attention", name, flops, _bytes(tensors), query.dtype)


def _attended(cu_seqlens: Tensor, causal: bool, window: int | None) -> float:
    """Pairs of a query and a key of the same sequence, without those that a causal mask or a window hides."""
    lengths = cu_seqlens.diff().double()
    keys = lengths if window is None else lengths.clamp(max=2 * window + 1)
    return float((lengths * keys).sum()) * (0.5 if causal else 1.0)


def _named(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names."""
    names = (argument.name for argument in operation._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def _moves_nothing(operation: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    if operation._schema.is_mutable:
        return False
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    if outputs and all(tensor.untyped_storage()._cdata in storages for tensor in outputs):
        return True
    return operation.overloadpacket in (_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _written_bytes(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Bytes of the arguments that an operation without a result changes."""
    named = _named(operation, args, kwargs)
    changed = [
        named.get(argument.name)
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return _bytes([leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)])
