"""Asks `multihop.pretrain.plan`, in a process of its own, what a recipe takes on given GPUs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multihop.cluster.runs.recipe import Recipe
from multihop.common.errors import PlanningFailed, UserError
from multihop.common.gpus import USABLE, Gpu
from multihop.pretrain.config import TrainingConfig

Prepared = tuple[str, str]
"""Directories of prepared data and of its indexes."""


STORE_BYTES_PER_S = 1e9
"""Rate at which all ranks together write a checkpoint, as `multihop plan` assumes it without --store."""


def plans_of(
    recipe: Recipe, gpu: Gpu, settings: list[dict[str, Any]], prepared: Prepared | None, store: float
) -> Iterator[dict[str, Any]]:
    """Yield a plan for each phase of each setting, as `multihop.pretrain.plan.worker` describes them.

    Args:
        prepared: None: every sample is assumed to have all tokens of its phase.
        store: Bytes per second at which all ranks together write a checkpoint.

    Raises:
        UserError: the recipe cannot be planned.
        PlanningFailed: the planning process failed.
    """
    request = {
        "recipe": _sections(recipe),
        "settings": settings,
        "vocabularies": _vocabularies(recipe, prepared),
        "prepared": prepared,
        "gpu": asdict(gpu),
        "limit_bytes": USABLE * gpu.memory,
        "store": store,
    }
    yield from _answers("multihop.pretrain.plan.worker", request)


def probe_phases(recipe: Recipe, ranks: int, hosts: int, prepared: Prepared | None) -> Iterator[dict[str, Any]]:
    """Yield what real steps of each phase took here, as `multihop.pretrain.plan.probe` describes them.

    Raises:
        UserError, PlanningFailed: as `plans_of`.
    """
    request = {
        "recipe": _sections(recipe),
        "world_size": ranks,
        "hosts": hosts,
        "vocabularies": _vocabularies(recipe, prepared),
        "prepared": prepared,
    }
    yield from _answers("multihop.pretrain.plan.probe", request)


def check_precision(recipe: Recipe, gpu: Gpu) -> None:
    """Raise UserError if the GPU cannot compute in the recipe's precision."""
    if recipe.engine.precision == "bf16" and gpu.name.startswith("V100"):
        raise UserError(f"engine.precision=bf16: a {gpu.name} has none; set fp16")


def caveats(recipe: Recipe) -> list[str]:
    """Return a sentence for each setting of the recipe that a plan leaves out, or knows little of."""
    sentences = []
    if recipe.engine.offload != "none":
        sentences.append(
            "The time of offloading is an estimate: the bandwidth of the host's memory is assumed, and no copy hides "
            "behind computing."
        )
    if recipe.engine.compile:
        sentences.append("engine.compile is not planned: compiled layers take less memory and time.")
    return sentences


def engine_setting(recipe: Recipe) -> dict[str, Any]:
    """The keys of the `engine` section that a plan may change, as the recipe has them; `compile` is never planned."""
    engine = recipe.engine
    return {
        "zero_stage": engine.zero_stage,
        "activation_checkpointing": engine.activation_checkpointing,
        "offload": engine.offload,
        "compile": False,
    }


def _sections(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", include=set(TrainingConfig.model_fields))


def _answers(module: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a module in a process of its own and yield the JSON objects that it prints; kill it if the caller stops
    early."""
    command = [sys.executable, "-P", "-m", module]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended, and its exit code says so
                json.dump(request, worker.stdin)
                worker.stdin.close()
            for line in worker.stdout:
                try:
                    answer = json.loads(line)
                except ValueError:
                    raise PlanningFailed(f"the planning process printed {line[:200]!r}, which is not JSON") from None
                if "error" in answer:
                    raise UserError(answer["error"])
                yield answer
        except BaseException:
            worker.kill()
            raise
    if worker.returncode:
        raise PlanningFailed(f"the planning process ended with exit code {worker.returncode}; see its messages above")


def _vocabularies(recipe: Recipe, prepared: Prepared | None) -> tuple[int, int | None]:
    """Sizes of the vocabularies of what is predicted and, if it is another, of the sources of pairs."""
    from multihop.data_prep.dataset.manifest import read_data_manifest
    from multihop.data_prep.tokenizers.existing import import_tokenizer
    from multihop.data_prep.tokenizers.tokenizer import describe

    if prepared is not None:
        manifest = read_data_manifest(Path(prepared[0]))
        return manifest.output_tokenizer.vocab_size, manifest.source_vocab_size
    tokenizer, pairs = recipe.tokenizer, recipe.data.holds_pairs
    if tokenizer.path is None:
        return tokenizer.vocab_size, tokenizer.vocab_size if tokenizer.separate_vocabularies else None
    content = import_tokenizer(tokenizer.path, tokenizer.lowercase, pairs)
    added = tokenizer.add_words + len(tokenizer.added_tokens)
    return describe(content, "", pairs).vocab_size + added, None
