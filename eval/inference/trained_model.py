"""A trained model with its tokenizer, loaded for inference."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.tokenizer import Tokenizer, load
from multihop.eval.inference.packed_weights import PackedWeights
from multihop.eval.model.model_under_test import of_huggingface, open_tokenizer
from multihop.pretrain.checkpoint.huggingface_import import import_model, is_huggingface
from multihop.pretrain.checkpoint.verify import load_weights
from multihop.pretrain.models.build import build_model
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.family import Family
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.run.find_checkpoint import find_checkpoint


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, on a GPU where torch finds one."""

    path: str
    """The path or URL of the model, for messages."""
    model: Model
    tokenizer: Tokenizer
    special_ids: dict[str, int]
    target_tokenizer: Tokenizer | None = None
    """The target's tokenizer of an encoder-decoder model with two vocabularies."""
    lacking: frozenset[str] = frozenset()
    """Parameters that are missing from the model's files, and are zero."""

    completes: bool = False
    """Whether it is a causal model that was trained to complete sources (`multihop.pretrain.objectives.completion`)."""

    @property
    def family(self) -> Family:
        """The declaration of the model's family."""
        return FAMILIES[self.model.config.family]

    @property
    def output_tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens that the model predicts."""
        return self.target_tokenizer or self.tokenizer

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.word.weight.device

    @property
    def command(self) -> str:
        """The subcommand of multihop for models of this family."""
        if self.family.translates or self.completes:
            return "translate"
        if self.family.causal:
            return "generate"
        return "fill-mask" if self.family.predicts_masks else "embed"

    def add_special_tokens(self, ids: list[int]) -> list[int]:
        """Return a text's tokens as the model was trained to read them, and as an exported tokenizer gives them."""
        if self.family.reads_one_way:
            return ids
        cls, sep = self.special_ids["cls"], self.special_ids["sep"]
        return [*ids, sep, cls] if self.family.cls_last else [cls, *ids, sep]

    @cached_property
    def packed_weights(self) -> PackedWeights:
        """The weights, packed for matrix products. Packing takes as long as four tokens of a text do."""
        return PackedWeights(self.model)

    def needs(self, head: Callable[[Tensor], Tensor], what: str) -> None:
        """Refuse a head whose weights the model's files lack.

        Raises:
            UserError: the files lack them.
        """
        if uses_any(self.model, head, self.lacking):
            raise UserError(f"{self.path} has no weights for {what}; use the model with its pretraining heads")


def uses_any(model: Model, head: Callable[[Tensor], Tensor], parameters: Collection[str]) -> bool:
    """Whether a head of a model, which may be on the meta device, computes with one of these parameters."""
    if not parameters:
        return False
    with torch.inference_mode(False), torch.enable_grad():
        states = torch.zeros(1, model.config.state_width, device=model.word.weight.device)
        weights = [model.get_parameter(name) for name in parameters]
        used = torch.autograd.grad(head(states).sum(), weights, allow_unused=True)
    return any(gradient is not None for gradient in used)


def load_model(path: str, step: int | None = None) -> TrainedModel:
    """Return the model at `path` with its tokenizer.

    Args:
        path: a run's directory, its checkpoints' directory or s3://BUCKET/PREFIX, the directory of one step, or one in
            Hugging Face's layout.
        step: step of the checkpoint; None: the newest good one.

    Raises:
        UserError: the model is missing, it is damaged, or its tokenizer is missing.
    """
    if is_huggingface(Path(path)):
        if step is not None:
            raise UserError(f"{path} is a single model, but --step {step} chooses among checkpoints; omit --step")
        evaluated = of_huggingface(Path(path))
        tokenizer, info = open_tokenizer(evaluated.tokenizer_path)
        weights = import_model(Path(path))[2]
        return with_weights(path, evaluated.model, evaluated.vocab_size, weights, tokenizer, info.special_ids)
    checkpoint = find_checkpoint(path, step)
    weights, data, target = load_weights(checkpoint.location), checkpoint.data, checkpoint.data.target_tokenizer
    trained = with_weights(
        path,
        checkpoint.model,
        data.output_tokenizer.vocab_size,
        weights,
        load(checkpoint.data_folder / data.tokenizer.file),
        data.output_tokenizer.special_ids,
        data.source_vocab_size,
        None if target is None else load(checkpoint.data_folder / target.file),
    )
    return replace(trained, completes=trained.family.causal and data.pairs)


def with_weights(
    path: str,
    config: ModelConfig,
    vocab_size: int,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    special_ids: dict[str, int],
    source_vocab_size: int | None = None,
    target_tokenizer: Tokenizer | None = None,
) -> TrainedModel:
    """Return a model with these weights, by our names. Those that are missing are zero."""
    model = build_model(config, vocab_size, source_vocab_size)
    lacking = {name: torch.zeros(each.shape) for name, each in model.named_parameters() if name not in weights}
    model.load_state_dict({**weights, **lacking})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).eval()
    return TrainedModel(path, model, tokenizer, special_ids, target_tokenizer, frozenset(lacking))
