"""Matrix products with weights that are rearranged once for oneDNN, not in each call.

Where a large matrix is multiplied by few rows, torch's own product takes two to five times as long on a CPU: it
rearranges the matrix each time. Texts are generated and translated by nothing but such products.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class PackedWeights(TorchFunctionMode):
    """While entered, `linear` of a model's layers and of its output matrix takes packed weights.

    They cost the memory of the weights once more, and serve any number of rows. On a GPU, in other types than fp32 or
    without oneDNN, every product is torch's own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._packed = {
            id(weight): torch.ops.mkldnn._reorder_linear_weight(weight.detach())
            for weight in _matrices(model)
            if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        packed = self._packed.get(id(args[1])) if func is F.linear else None
        if packed is None:
            return func(*args, **(kwargs or {}))
        bias = args[2] if len(args) > 2 else None
        return torch.ops.mkldnn._linear_pointwise(args[0], packed, bias, "none", [], "")


def _matrices(model: nn.Module) -> list[Tensor]:
    """Return the weights of the layers, and the word embedding, by which hidden states are multiplied at the end."""
    layers = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return [*layers, *(module.weight for name, module in model.named_modules() if name == "word")]
