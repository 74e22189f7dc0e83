"""Real steps of a recipe on the device at hand, in a process of their own.

`python -m multihop.pretrain.plan.probe` reads a request as JSON from its standard input, and writes a line of JSON for
each phase to its standard output.
"""

import gc
import json
import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multihop.common.errors import UserError
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.device_type import DeviceType
from multihop.pretrain.engine.device import matmul_rate, use_deterministic_kernels
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.micro_batch import DTYPES, largest_micro_batch, usable_bytes
from multihop.pretrain.engine.ranks import Ranks, join_process_group
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.plan.fit import RankPlan, Vocabularies, prepared_paths, seconds_of_steps
from multihop.pretrain.run.throughput import peak_rate

STEPS = 20
_WARM_UP = 3
"""Steps that are not timed: kernels are chosen and memory is allocated in them."""
_LR = 1e-4
_QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of each of some steps of one micro-batch, float64 (STEPS,)."""

    micro_batch: NDArray[np.float64]
    """Of the forward and backward pass."""
    update: NDArray[np.float64]

    def of_step(self, passes: float, updated: float) -> list[float]:
        """The quantiles 0.1, 0.5 and 0.9 of the seconds of a step, with as many micro-batches, that updates a share of
        the parameters."""
        return np.quantile(passes * self.micro_batch + updated * self.update, _QUANTILES).tolist()


def main() -> None:
    """Answer the request.

    It has `recipe`, the sections of `TrainingConfig`; `world_size`, of which one rank is probed; `hosts`, the number of
    hosts of these ranks; `vocabularies`; and `prepared`, the directories of prepared data and its indexes, or None.
    """
    request = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed
    logging.disable(logging.WARNING)
    config = TrainingConfig.model_validate(request["recipe"])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ranks_on_host = math.ceil(request["world_size"] / request["hosts"])
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_on_host))
    if config.engine.deterministic:
        use_deterministic_kernels()
    ranks = join_process_group()
    try:
        rate = matmul_rate(ranks.device, DTYPES[config.engine.precision])
        for phase in range(len(config.phases)):
            answer = {"phase": phase, **_probe(config, phase, request, ranks, ranks_on_host, rate)}
            print(json.dumps(answer), file=answers, flush=True)
            gc.collect()  # the engine of this phase
    except (UserError, torch.OutOfMemoryError) as error:
        reason = (
            str(error)
            if isinstance(error, UserError)
            else (
                "one rank holds here what ZeRO spreads over several, and that does not fit; lower --gpus or the model"
            )
        )
        print(json.dumps({"error": reason}), file=answers, flush=True)
    finally:
        ranks.shutdown()


def _probe(
    config: TrainingConfig, phase: int, request: dict[str, Any], ranks: Ranks, ranks_on_host: int, rate: float
) -> dict[str, Any]:
    device: DeviceType = "cuda" if ranks.device.type == "cuda" else "cpu"
    vocabularies = Vocabularies(*request["vocabularies"])
    plan = RankPlan(config, phase, request["world_size"], vocabularies, device, prepared_paths(request["prepared"]))
    limit = usable_bytes(ranks.device, ranks_on_host)
    found = largest_micro_batch(
        {
            "recipe": request["recipe"],
            "phase": phase,
            "world_size": request["world_size"],
            "vocabularies": request["vocabularies"],
            "device": device,
            "prepared": request["prepared"],
            "limit_bytes": limit,
        }
    )
    if not found["samples"]:
        return {"micro_batch_size": 0, "bytes": found["bytes"], "limit_bytes": limit}
    samples = found["samples"]
    batch, mean_tokens = plan.micro_batch(samples)
    seconds = _measure(plan, batch, samples, ranks)
    step_tokens = plan.step_tokens(samples, mean_tokens)
    section = config.phases[phase]

    # A rank updates its own part of the parameters.
    updated = 1 / request["world_size"] if config.engine.zero_stage else 1.0

    def quantile_of(number: int, share: float) -> float:
        return seconds.of_step(share * step_tokens / batch.tokens, updated)[number]

    numbers = range(len(_QUANTILES))
    step_s = [quantile_of(number, 1.0) for number in numbers]
    _, middle, _ = step_s
    tokens, flops = plan.tokens_and_flops(step_tokens, batch)
    peak = peak_rate(ranks.device, config.engine.precision, rate) * request["world_size"]
    return {
        "seq_len": section.seq_len,
        "micro_batch_size": samples,
        "micro_batches": math.ceil(plan.share / samples),
        "bytes": found["bytes"],
        "limit_bytes": limit,
        "step_s": step_s,
        "phase_s": [seconds_of_steps(section, partial(quantile_of, number)) for number in numbers],
        "tokens_per_s": tokens / middle,
        "mfu": flops / middle / peak,
        "steps": section.steps,
    }


@torch.no_grad()
def _init(name: str, parameter: Tensor) -> None:
    """Any weights of usual size: their values do not change the time."""
    parameter.normal_(std=0.02)


def _measure(plan: RankPlan, batch: Batch, samples: int, ranks: Ranks) -> StepSeconds:
    """Take steps of one micro-batch."""
    model = build_model_on_meta(plan.config.model, plan.vocabularies.output, plan.vocabularies.source)
    engine = Engine(plan.config, model, ranks, samples, _init)
    counts = {name: float(count) for name, count in batch.counts.items()}

    def now() -> float:
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        return time.perf_counter()

    taken = []
    for _ in range(_WARM_UP + STEPS):
        began = now()
        engine.forward_backward(batch, counts)
        between = now()
        engine.step(_LR)
        taken.append((between - began, now() - between))
    engine.destroy()
    micro_batch, update = np.array(taken[_WARM_UP:]).T
    return StepSeconds(micro_batch, update)


if __name__ == "__main__":
    main()
