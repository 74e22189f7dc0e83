"""Tables that depend on sizes alone, such as sinusoids: computed once in a process.

They are not stored in buffers, because a model on the meta device has no values.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor

_P = ParamSpec("_P")
_clear: list[Callable[[], None]] = []
"""For each decorated function, what empties its cache."""


def cached_table(table: Callable[_P, Tensor]) -> Callable[_P, Tensor]:
    """Cache the last 8 results of a function."""

    @wraps(table)
    def compute(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        with torch.inference_mode(False):  # the cached result may be used in training
            return table(*args, **kwargs)

    cached: Any = lru_cache(maxsize=8)(compute)
    _clear.append(cached.cache_clear)
    result: Callable[_P, Tensor] = cached
    return result


def clear_cached_tables() -> None:
    """Forget all tables, so that the next forward pass computes those that it needs."""
    for clear in _clear:
        clear()
