"""A job of the ranks of a `RankPool`: the memory that steps of the real engine take, by torch's own accounting."""

import gc
from typing import Any

from live_bytes import LiveBytes
from torch.nn import functional

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import build_model_on_meta, make_param_init
from multihop.pretrain.plan.assumed_batch import assumed_batch


def bytes_of_steps(
    ranks: Ranks, settings: dict[str, Any], vocab_size: int, samples: int, micro_batches: int
) -> dict[str, int]:
    """Return bytes between steps, and the peaks of the backward pass and of the update, as `trace_rank` does."""
    config = TrainingConfig.model_validate(settings)
    batches = [assumed_batch(config, 0, samples, vocab_size) for _ in range(micro_batches)]
    counts = {name: float(sum(batch.counts[name] for batch in batches)) for name in batches[0].counts}
    model = build_model_on_meta(config.model, vocab_size)
    found, linear = {}, functional.linear
    gc.collect()
    with LiveBytes("cpu", 1) as live:
        engine = Engine(config, model, ranks, samples, make_param_init(model, 1))
        for _ in range(2):
            gc.collect()
            found["between"] = live.peak = live.bytes
            for batch in batches:
                engine.forward_backward(batch, counts)
            found["backward"] = live.peak
            gc.collect()
            live.peak = live.bytes
            engine.step(1e-3)
            found["update"] = live.peak
    engine.destroy()
    functional.linear = linear  # DeepSpeed replaces it in ZeRO stage 3
    return found
