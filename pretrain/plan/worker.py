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
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

from multihop.common.errors import UserError
from multihop.common.gpus import Gpu
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.objectives.read_rates import read_tokens_per_s
from multihop.pretrain.plan.collectives import Links
from multihop.pretrain.plan.fit import Fit, RankPlan, Vocabularies, prepared_paths, seconds_of_steps
from multihop.pretrain.plan.outside_steps import (
    Saves,
    checkpoint_bytes,
    count_evaluations,
    evaluated_samples,
    host_rate,
    host_s,
    offload_s,
    seconds_of_saves,
    whole_step,
)
from multihop.pretrain.plan.step_time import efficiency_of, evaluation_time, step_parts


def main() -> None:
    """Answer the request.

    It has `recipe`, the sections of `TrainingConfig`; `settings`, each with `links` (the fields of `Links`) and
    `engine`, which are changes of that section; `prepared`, the directories of prepared data and its indexes, or None;
    `vocabularies`, `gpu` (the fields of `Gpu`) and `limit_bytes`; and `store`, the bytes per second at which all ranks
    together write a checkpoint. A setting may have `micro_batch_divisors`: it is planned again with the micro-batch
    that fits all phases divided by each of them.
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
    config, prepared = TrainingConfig.model_validate(recipe), prepared_paths(request["prepared"])
    run = _Run(config, Gpu(**request["gpu"]), links, Vocabularies(*request["vocabularies"]), request["store"])
    for phase in range(len(config.phases)):
        plan = RankPlan(config, phase, links.ranks, run.vocabularies, prepared=prepared)
        answer = {"gpus": links.ranks, "phase": phase, **engine, "micro_batch": config.engine.micro_batch_size}
        try:
            yield answer | run.add_phase(plan, request["limit_bytes"])
        except UserError as error:
            yield {"error": str(error)}


class _Run:
    """The phases of a run in a setting, one after another: a save of a phase may still be written in the next one."""

    def __init__(
        self, config: TrainingConfig, gpu: Gpu, links: Links, vocabularies: Vocabularies, store: float
    ) -> None:
        """Start before the first phase.

        Args:
            store: Bytes per second at which all ranks together write a checkpoint.
        """
        self.vocabularies = vocabularies
        self._config, self._gpu, self._links = config, gpu, links
        self._efficiency = efficiency_of(config.engine)
        self._read_tokens_per_s = read_tokens_per_s(config.objective)
        model = build_model_on_meta(config.model, vocabularies.output, vocabularies.source)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        size = checkpoint_bytes(config.optimizer, shapes)
        pause_s = size / links.ranks / host_rate(gpu, links, self._efficiency.link)
        self._saves = Saves(config.checkpoint.save_interval, pause_s, size / store)
        self._of_model = {
            "parameters": sum(map(math.prod, shapes.values())),
            "checkpoint_bytes": size,
            "save_pause_s": pause_s,
        }
        self._phases: list[tuple[int, float]] = []
        """Steps and seconds of the phases so far, without saves."""
        self._evaluation_s = 0.0
        """Seconds of a held-out evaluation, which has the samples and micro-batches of the first phase."""

    def add_phase(self, plan: RankPlan, limit_bytes: float) -> dict[str, Any]:
        """The plan of the next phase."""
        fit, config, phase = plan.largest(limit_bytes), self._config, self._config.phases[plan.phase]
        if plan.phase == 0:
            self._evaluation_s = self._seconds_of_evaluation(plan, fit)
        first = sum(steps for steps, _ in self._phases)
        seconds, limited_by = self._time_of_step(plan, fit, 1.0)
        phase_s = seconds_of_steps(phase, lambda share: self._time_of_step(plan, fit, share)[0])
        total = total_steps(config.phases)
        eval_s = count_evaluations(first, phase.steps, config.engine.eval_interval, total) * self._evaluation_s
        self._phases.append((phase.steps, phase_s + eval_s))
        tokens, flops = plan.tokens_and_flops(fit.step_tokens, fit.batch)
        peak = self._gpu.fp32_flops if config.engine.precision == "fp32" else self._gpu.flops
        speed = {
            "step_s": seconds,
            "limited_by": limited_by,
            "phase_s": phase_s,
            "eval_s": eval_s,
            "save_s": seconds_of_saves(self._saves, self._phases, total)[-1],
            "tokens_per_s": tokens / seconds,
            "mfu": flops / seconds / (peak * plan.world_size),
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
            **self._of_model,
            **(speed if fit.micro_batch_size else dict.fromkeys(speed)),
        }

    def _time_of_step(self, plan: RankPlan, fit: Fit, share: float) -> tuple[float, str]:
        """Seconds of a step with a share of the samples, and what limits it."""
        count = math.ceil(share * plan.share / fit.samples)
        passes = share * fit.step_tokens / fit.batch.tokens
        gpu, links, efficiency = self._gpu, self._links, self._efficiency
        computed, update = step_parts(fit.trace, count, passes, gpu, links, efficiency)
        is_offloaded = self._config.engine.offload != "none"
        offloading_s = offload_s(fit.trace, count, gpu, links, efficiency) if is_offloaded else 0.0
        reading_s = share * fit.step_tokens / self._read_tokens_per_s
        return whole_step(computed, update, offloading_s, reading_s, self._config.engine.data_workers)

    def _seconds_of_evaluation(self, plan: RankPlan, fit: Fit) -> float:
        """Seconds of forward passes over the held-out samples; their batches are made in the rank's own process."""
        sample_tokens, seconds = fit.step_tokens / plan.share, 0.0
        sources = 1 if self._config.data is None else len(self._config.data.sources)
        for samples in evaluated_samples(plan.heldout_samples, plan.world_size, sources):
            count, passes = math.ceil(samples / fit.samples), samples * sample_tokens / fit.batch.tokens
            seconds += samples * sample_tokens / self._read_tokens_per_s
            seconds += evaluation_time(fit.trace, count, passes, self._gpu, self._links, self._efficiency)
            seconds += count * host_s(fit.trace.host_evaluation, self._gpu, self._links, self._efficiency)
        return seconds


if __name__ == "__main__":
    main()
