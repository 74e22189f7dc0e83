"""What torch.compile leaves alone, without the import of torch's compiler where nothing is compiled: it takes 140 MB on
each rank, and a tenth of the CPU seconds of a rank's start."""

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_disable: list[Callable[[], None]] = []
"""For each decorated function, what disables compilation in it."""


def uncompiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """As `torch.compiler.disable`, once `load_compiler` was called."""
    call = function

    def disable() -> None:
        nonlocal call
        call = torch.compiler.disable(function)

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return call(*args, **kwargs)

    if is_compiler_loaded():
        disable()
    else:
        _disable.append(disable)
    return wrapper


def is_compiler_loaded() -> bool:
    """Whether something has imported torch's compiler."""
    return "torch._dynamo" in sys.modules


def load_compiler() -> None:
    """Import torch's compiler; to be called before `torch.compile`."""
    import torch._dynamo  # noqa: F401

    while _disable:
        _disable.pop()()


class AdamW(torch.optim.AdamW):
    """AdamW of torch (Loshchilov and Hutter 2019)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """torch's, without its decorator, which imports the compiler to end a compiled region before the step."""
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)


def call_directly(owner: Any) -> None:
    """Have functions of a class or a module that are decorated by `torch._disable_dynamo` be called as they are: the
    decorator imports the compiler. None of them may be called in a compiled region."""
    for function in vars(owner).values():
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename == torch._compile.__file__:
            inspect.unwrap(function).__dynamo_disable = inspect.unwrap(function)


call_directly(torch.optim.Optimizer)
