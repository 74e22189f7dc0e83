"""Plans in a process of its own, because DeepSpeed keeps the process group and the device that it finds first.

`python -m multihop.pretrain.plan.worker` reads a request as JSON from its standard input, and writes a line of JSON
for each phase of each setting to its standard output.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

from multihop.common.errors import UserError
from multihop.common.gpus import Gpu
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.plan.collectives import Links
from multihop.pretrain.plan.fit import RankPlan, Vocabularies, global_samples
from multihop.pretrain.plan.step_time import efficiency_of, step_time
from multihop.pretrain.run.throughput import step_flops


def main() -> None:
    """Answer the request.

    It has `recipe`, the sections of `TrainingConfig`; `settings`, each with `links` (the fields of `Links`) and
    `engine`, which are changes of that section; `prepared`, the directories of prepared data and its indexes, or None;
    and `vocabularies`, `gpu` (the fields of `Gpu`) and `limit_bytes`. A setting may have `micro_batch_divisors`: it is
    planned again with the micro-batch that fits all phases divided by each of them.
    """
    request = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed
    logging.disable(logging.WARNING)
    for settings in request["settings"]:
        sizes = []
        for answer in _plans(request, settings):
            print(json.dumps(answer), file=answers, flush=True)
            sizes.append(answer.get("micro_batch_size", 0))
        for divisor in settings.get("micro_batch_divisors", []):
            if smaller := min(sizes) // divisor:
                engine = settings["engine"] | {"micro_batch_size": smaller}
                for answer in _plans(request, settings | {"engine": engine}):
                    print(json.dumps(answer), file=answers, flush=True)


def _plans(request: dict[str, Any], settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan of each phase, or an `error`; `micro_batch` is `engine.micro_batch_size`, which may be "auto"."""
    engine, links = settings["engine"], Links(**settings["links"])
    recipe = {**request["recipe"], "engine": {**request["recipe"]["engine"], **engine}}
    config, prepared = TrainingConfig.model_validate(recipe), None
    if request["prepared"] is not None:
        data, index = map(Path, request["prepared"])
        prepared = data, index
    for phase in range(len(config.phases)):
        plan = RankPlan(config, phase, links.ranks, Vocabularies(*request["vocabularies"]), prepared=prepared)
        answer = {"gpus": links.ranks, "phase": phase, **engine, "micro_batch": config.engine.micro_batch_size}
        try:
            yield answer | _answer(plan, request, links)
        except UserError as error:
            yield {"error": str(error)}


def _answer(plan: RankPlan, request: dict[str, Any], links: Links) -> dict[str, Any]:
    fit, gpu, phase = plan.largest(request["limit_bytes"]), Gpu(**request["gpu"]), plan.config.phases[plan.phase]
    efficiency = efficiency_of(plan.config.engine)
    model = build_model_on_meta(plan.config.model, *request["vocabularies"])

    def time_of_step(share: float) -> tuple[float, str]:
        count = math.ceil(share * plan.share / fit.samples)
        passes = share * fit.step_tokens / fit.batch.tokens
        return step_time(fit.trace, count, passes, gpu, links, efficiency)

    seconds, limited_by = time_of_step(1.0)
    size = global_samples(phase)
    ramp = sum(each.steps * time_of_step(each.global_batch_size / size)[0] for each in phase.batch_ramp)
    full_steps = phase.steps - sum(each.steps for each in phase.batch_ramp)
    tokens = fit.step_tokens / plan.share * size
    flops = step_flops(plan.config.model, plan.vocabularies.output, fit.batch) / fit.batch.tokens * tokens
    speed = {
        "step_s": seconds,
        "limited_by": limited_by,
        "phase_s": ramp + full_steps * seconds,
        "tokens_per_s": tokens / seconds,
        "mfu": flops / seconds / (gpu.flops * plan.world_size),
    }
    return {
        "seq_len": phase.seq_len,
        "micro_batch_size": fit.micro_batch_size,
        "micro_batches": fit.micro_batches,
        "between_steps": fit.trace.between_steps,
        "peaks": fit.trace.peaks,
        "peak_bytes": fit.trace.peak,
        "peak_by_category": fit.trace.peak_by_category,
        "traced_samples": fit.samples,
        "steps": phase.steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **(speed if fit.micro_batch_size else dict.fromkeys(speed)),
    }


if __name__ == "__main__":
    main()
