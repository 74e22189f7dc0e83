"""The effects of a recipe, without a run: its batches, its model's outputs, its optimizer, its trials."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multihop.cluster.ray.map import Resources
from multihop.cluster.runs.recipe import Recipe
from multihop.cluster.runs.trials import trial_resources
from multihop.common.files import sha256_json
from multihop.data_prep.dataset.manifest import read_token_counts
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.identity import dataset_settings
from multihop.eval.model.model_under_test import of_run
from multihop.eval.tasks.known_tasks import open_tasks
from multihop.eval.trials.list_trials import plan_trials
from multihop.eval.trials.trial import trial_key
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.data.phases import is_skipped, model_after, total_steps
from multihop.pretrain.data.word_vectors import build_word_vectors, open_word_vectors
from multihop.pretrain.engine.activation_checkpointing import checkpoint_activations
from multihop.pretrain.engine.capture import capture_activations
from multihop.pretrain.engine.deepspeed_config import fill_deepspeed_config
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights, make_param_init
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.optim.optimizers import build_optimizer
from multihop.pretrain.optim.schedule import learning_rate
from multihop.pretrain.packed_tokens import PackedTokens
from multihop.pretrain.run.files import checkpoints_of
from multihop.pretrain.run.heldout import unigram_log_probabilities


@dataclass(frozen=True)
class RecipeEffects:
    """The effects of a recipe, each computed when it is first read."""

    recipe: Recipe
    data: Path
    index: Path

    @cached_property
    def prepared_data(self) -> str:
        """Hash of the settings in the key of the prepared data."""
        return sha256_json(dataset_settings(self.recipe.data, self.recipe.tokenizer))

    @cached_property
    def batches(self) -> str:
        """Hash of all steps of a run, as the second of two ranks sees them."""
        made = self._builder(1, 2)
        return _hash(
            batch for step in range(total_steps(self.recipe.phases)) for batch in made.step(step).micro_batches
        )

    @cached_property
    def heldout(self) -> str:
        return _hash(self._builder(0, 1).heldout().micro_batches)

    @cached_property
    def schedule(self) -> list[Any]:
        phases = self.recipe.phases
        return [(learning_rate(phases, step), is_skipped(phases, step)) for step in range(total_steps(phases))]

    @cached_property
    def model(self) -> tuple[dict[str, list[int]], list[float], list[str]]:
        """Names and shapes of the parameters, and the model's outputs for a batch in training: its sums, and digests of
        its last hidden states, in which no difference is lost to rounding."""
        model = self._model()
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        torch.manual_seed(1)
        states: list[torch.Tensor] = []
        with capture_activations(model, states.append, lambda *_: None):
            sums = model(**to_device(self._builder(0, 1).step(0).micro_batches[0].inputs, torch.device("cpu")))
        return shapes, [float(value.detach()) for value in sums.values()], [_digest(each.detach()) for each in states]

    @cached_property
    def initial_weights(self) -> dict[str, str]:
        fill = self._fill()
        return {name: _digest(_filled(fill, name, each)) for name, each in self._model().named_parameters()}

    @cached_property
    def kept_activations(self) -> int:
        """Number of bytes that autograd keeps for the backward pass."""
        model, kept = self._model(), dict[int, int]()
        if self.recipe.engine.activation_checkpointing != "none":
            checkpoint_activations(model, self.recipe.engine.activation_checkpointing)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = to_device(self._builder(0, 1).step(0).micro_batches[0].inputs, torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sums = model(**inputs)
        assert sums
        return sum(kept.values())

    @cached_property
    def optimizer(self) -> tuple[str, dict[str, float], list[dict[str, Any]]]:
        made = build_optimizer(self._model(), self.recipe.optimizer)
        numbers = {name: value for name, value in vars(made).items() if isinstance(value, float)}
        return type(made).__name__, numbers, [{**group, "params": len(group["params"])} for group in made.param_groups]

    @cached_property
    def deepspeed(self) -> dict[str, Any]:
        assert isinstance(self.recipe.engine.deepspeed, dict)
        return fill_deepspeed_config(self.recipe.engine.deepspeed, self.recipe, self.recipe.engine.micro_batch_size)

    @cached_property
    def trials(self) -> list[Any]:
        """Key of each trial, and its arguments that are not part of the key."""
        manifest = open_dataset(self.data).manifest
        evaluated = of_run(self.recipe.model, "/somewhere", "c" * 64, 7, self.data, manifest)
        planned = plan_trials(self.recipe.eval, open_tasks(self.recipe.eval), evaluated, Path("/weights"))
        return [
            (None if each.start_from else trial_key(each), each.start_from, each.task_dir, each.threads)
            for each in planned
        ]

    @cached_property
    def trial_resources(self) -> Resources:
        return trial_resources(self.recipe.eval, on_this_node=False)

    @cached_property
    def checkpoints(self) -> str:
        return checkpoints_of(Path("/runs/run"), self.recipe)

    def _builder(self, rank: int, ranks: int) -> BatchBuilder:
        build_indexes(self.index, open_dataset(self.data), self.recipe)
        micro_batch = self.recipe.engine.micro_batch_size
        assert isinstance(micro_batch, int)
        sizes = [micro_batch] * len(self.recipe.phases)
        return BatchBuilder.open(self.recipe, self.data, self.index, rank, ranks, sizes)

    def _model(self) -> Any:
        manifest = open_dataset(self.data).manifest
        config = model_after(self.recipe.model, self.recipe.phases, 1)
        model = build_model(config, manifest.output_tokenizer.vocab_size, manifest.source_vocab_size)
        init_weights(model, 1)
        return model

    def _fill(self) -> Callable[[str, torch.Tensor], None]:
        """Return the function that sets the initial weights of a new run."""
        data, config = open_dataset(self.data), self.recipe.model
        unigram = unigram_log_probabilities(read_token_counts(self.data, data.manifest))
        vectors = None
        if config.needs_word_vectors:
            build_word_vectors(self.index, data, config)
            vectors = open_word_vectors(self.index, data.manifest.fingerprint, config.embedding_width)
        return make_param_init(self._model(), self.recipe.seed, unigram, vectors)


def _filled(fill: Callable[[str, torch.Tensor], None], name: str, parameter: torch.Tensor) -> torch.Tensor:
    fill(name, parameter)
    return parameter.detach()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def _hash(batches: Any) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        assert isinstance(batch, Batch)
        for name, value in sorted(batch.inputs.items()):
            arrays = vars(value) if isinstance(value, PackedTokens) else {"": value}
            for part, array in arrays.items():
                if name != "label_smoothing" and array is not None:
                    digest.update(f"{name}.{part}".encode() + np.asarray(array).tobytes())
        digest.update(json.dumps(batch.counts).encode())
    return digest.hexdigest()
