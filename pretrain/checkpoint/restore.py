"""An engine's weights and optimizer state from a checkpoint, whatever number of ranks or ZeRO stage wrote it."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from torch import Tensor

from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.manifest import CheckpointManifest
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.engine.engine import Engine

_READS_AT_ONCE = 16
"""A bucket answers many requests in the time of one; what is read ahead takes memory."""


def restore(engine: Engine, reader: CheckpointReader, with_state: bool) -> None:
    """Read the slices that this rank needs, and set them; called by all ranks together.

    Args:
        with_state: the optimizer's state too, and not just the weights.
    """
    saved, wanted = reader.manifest, engine.wanted(with_state)
    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="restore") as threads:
        ahead = deque(threads.submit(reader.read, *each) for each in wanted[:_READS_AT_ONCE])
        left = iter(wanted[_READS_AT_ONCE:])

        def values() -> Iterator[Tensor]:
            while ahead:
                yield ahead.popleft().result()
                ahead.extend(threads.submit(reader.read, *each) for each in islice(left, 1))

        engine.restore(values(), saved.updates if with_state else None, saved.counters)


def check_fits(saved: CheckpointManifest, shapes: dict[str, list[int]], tokenizer_sha256: str, location: str) -> None:
    """Check that a checkpoint is of a model with these parameters, and was trained with this tokenizer.

    Args:
        shapes: parameter -> shape.

    Raises:
        UserError: it is not.
    """
    for name in [*shapes, *saved.parameters]:
        there, here = saved.parameters.get(name), shapes.get(name)
        if there != here:
            raise UserError(
                f"{location} has {name} of shape {there}, this model has {here} (None: it has no such parameter); set "
                "model and objective as in that run, and use its tokenizer"
            )
    if saved.tokenizer_sha256 not in (None, tokenizer_sha256):
        raise UserError(
            f"{location} was trained with a different tokenizer ({saved.tokenizer_sha256[:12]}) than the data "
            f"({tokenizer_sha256[:12]}): the same ids would mean other tokens; use data prepared with that tokenizer"
        )
