"""Triton, and how its kernels are launched.

Tensors on the meta device have shapes and no data. Planning computes a step of such tensors, for which no kernel is
launched and Triton need not be installed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from torch import Tensor


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


_HAS_TRITON = find_spec("triton") is not None
triton: Any = import_module("triton") if _HAS_TRITON else SimpleNamespace(jit=_as_it_is)
tl: Any = import_module("triton.language") if _HAS_TRITON else SimpleNamespace(constexpr=float)

__all__ = ["launch", "next_power_of_2", "observe_launches", "tl", "triton"]

_observers: list[Callable[[Any, tuple[Any, ...]], None]] = []


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *arguments: Any, **options: Any) -> None:
    """Launch a kernel with x and the other arguments, unless x has no data or the grid no programs."""
    if x.is_meta:
        for observe in _observers:
            observe(kernel, (x, *arguments))
    elif all(grid):
        kernel[grid](x, *arguments, **options)


@contextmanager
def observe_launches(observe: Callable[[Any, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `observe` with each kernel that would be launched with tensors on the meta device, and its arguments."""
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()
