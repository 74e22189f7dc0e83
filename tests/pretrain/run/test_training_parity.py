"""Fifty steps of training here and in a plain loop over transformers' model give the same loss curve."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface import CLASSES, save
from kinds_of_families import AT_HUGGING_FACE
from rank_jobs import train_on_batches
from rank_pool import RankPool
from tables_of_tests import Table
from torch import Tensor

from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.checkpoint.huggingface_export import export_model
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import Model, build_model, init_weights
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.optim.optimizers import build_optimizer
from multihop.pretrain.optim.schedule import learning_rate

os.environ["HF_HUB_OFFLINE"] = "1"

STEPS = 50
SEQ_LEN = 48
WIDER = 4.0
BOUND = 2e-6
"""Largest relative deviation of a step's loss. Rounding gives a few 1e-7; the wrong loops below are above it."""
CPU = torch.device("cpu")
Data = Callable[[str], Path]


def settings_of(family: str) -> dict[str, Any]:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "max_positions": SEQ_LEN + 1, "dropout": 0.0}
    return {
        "seed": 3,
        "model": {"family": family, **sizes, **({"embedding": 32} if family == "albert" else {})},
        "phases": [{"seq_len": SEQ_LEN, "global_batch_size": 8, "steps": STEPS, "lr": 2e-3, "warmup_ratio": 0.1}],
        "engine": {"deepspeed": {}, "zero_stage": 1, "micro_batch_size": 8},
    }


@pytest.fixture(scope="module")
def data(bert_data: Path, gpt2_data: Path) -> Data:
    return lambda family: gpt2_data if AT_HUGGING_FACE[family].causal else bert_data


def batches_of(config: TrainingConfig, folder: Path, indexes: Path) -> list[Batch]:
    build_indexes(indexes, open_dataset(folder), config)
    builder = BatchBuilder.open(config, folder, indexes, 0, 1, [config.phases[0].global_batch_size])
    steps = [builder.step(step).micro_batches for step in range(STEPS)]
    assert all(len(each) == 1 for each in steps)
    return [each[0] for each in steps]


def ours(config: TrainingConfig, vocab_size: int, batches: list[Batch]) -> list[float]:
    model = first_model(config, vocab_size)
    optimizer = build_optimizer(model, config.optimizer)

    def loss_of(batch: Batch) -> Tensor:
        sums = model(**to_device(batch.inputs, CPU))
        return sum((sums[name] / count for name, count in batch.counts.items()), torch.zeros(()))

    return curve(config, model, optimizer, loss_of, batches)


def first_model(config: TrainingConfig, vocab_size: int) -> Model:
    """Return a model with larger weights than usual, with which activations leave the range where all GELUs agree."""
    model = build_model(config.model, vocab_size)
    init_weights(model, config.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(WIDER)
    return model.train()


def curve(
    config: TrainingConfig,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Batch], Tensor],
    batches: list[Batch],
) -> list[float]:
    losses = []
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.phases, step)
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def theirs(
    config: TrainingConfig,
    vocab_size: int,
    specials: dict[str, int],
    batches: list[Batch],
    folder: Path,
    eps: float = 1e-6,
    is_decayed: Callable[[str], bool] | None = None,
    **changes: Any,
) -> list[float]:
    """Train with torch's own AdamW and return the losses.

    Biases and norms are recognized by their names, as in the Trainer of transformers.

    Args:
        eps: epsilon of AdamW.
        is_decayed: which parameters have weight decay.
        changes: keys of config.json that are set to wrong values.
    """
    transformers = pytest.importorskip("transformers")
    first = first_model(config, vocab_size)
    export_model(save(first, folder / "checkpoints"), config.model, vocab_size, specials, folder / "out")
    known = transformers.AutoConfig.from_pretrained(folder / "out")
    for key, value in changes.items():
        assert getattr(known, key) != value
        setattr(known, key, value)
    model = getattr(transformers, CLASSES[config.model.family]).from_pretrained(folder / "out", config=known).train()

    if config.model.family == "roberta":  # as published it has no segments, and nothing to train in their place
        model.roberta.embeddings.token_type_embeddings.weight.requires_grad_(False)

    def is_matrix(name: str) -> bool:
        return not (name.endswith("bias") or "norm" in name.lower() or ".ln_" in name)

    is_decayed = is_decayed or is_matrix
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for n, p in named if is_decayed(n)], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for n, p in named if not is_decayed(n)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=eps)
    pad = specials.get("pad", 0)
    return curve(config, model, optimizer, lambda batch: model(**padded(batch, pad)).loss, batches)


def padded(batch: Batch, pad: int) -> dict[str, Tensor]:
    """Return a batch as transformers takes it, with labels, so that it computes its own loss."""
    inputs = to_device(batch.inputs, CPU)
    packed = inputs["packed"]
    real = torch.arange(packed.max_seqlen) < packed.cu_seqlens.diff()[:, None]

    def rows(flat: Tensor, filling: int) -> Tensor:
        return torch.full(real.shape, filling).masked_scatter(real, flat)

    if "masked_positions" not in inputs:  # labels are the tokens themselves, and each predicts the one behind it
        tokens = torch.cat([rows(packed.input_ids, 0), rows(inputs["labels"], 0)[:, -1:]], 1)
        assert bool(real.all())
        return {"input_ids": tokens, "labels": tokens}
    labels = torch.full_like(packed.input_ids, -100)
    labels[inputs["masked_positions"]] = inputs["labels"]
    out = {"input_ids": rows(packed.input_ids, pad), "attention_mask": real.long(), "labels": rows(labels, -100)}
    if packed.token_type_ids is not None:
        out["token_type_ids"] = rows(packed.token_type_ids, 0)
    if "factorization_order" in inputs:
        order = torch.full(real.shape, -1).masked_scatter(real, inputs["factorization_order"])
        sees = (order[:, None] < order[:, :, None]) | (order[:, None] < 0)
        out |= {"perm_mask": 1.0 - sees.float(), "target_mapping": torch.eye(real.shape[1]).expand(len(real), -1, -1)}
    if "is_random_next" in inputs:
        out["next_sentence_label"] = inputs["is_random_next"]
    if "is_swapped" in inputs:
        out["sentence_order_label"] = inputs["is_swapped"]
    return out


def deviation(one: list[float], other: list[float]) -> float:
    return float(np.max(np.abs(np.array(one) / np.array(other) - 1)))


def compared(family: str, here: list[float], there: list[float]) -> str:
    return (
        f"{family}: loss {here[0]:.4f} to {here[-1]:.4f}, at most {deviation(here, there):.1e} from theirs (relative)"
    )


@pytest.mark.parametrize("family", AT_HUGGING_FACE)
def test_the_loss_curve_is_theirs(family: str, data: Data, tmp_path: Path, table: Table) -> None:
    config = TrainingConfig.model_validate(settings_of(family))
    tokenizer = open_dataset(data(family)).manifest.tokenizer
    batches = batches_of(config, data(family), tmp_path / "indexes")
    here = ours(config, tokenizer.vocab_size, batches)
    there = theirs(config, tokenizer.vocab_size, tokenizer.special_ids, batches, tmp_path)
    table(compared(family, here, there))
    assert here[-1] < 0.95 * here[0]  # it learned: more was compared than first losses
    assert deviation(here, there) < BOUND


@pytest.mark.ranks
def test_the_engines_loss_curve_is_theirs(
    data: Data, tmp_path: Path, table: Table, pool: Callable[[int], RankPool]
) -> None:
    config = TrainingConfig.model_validate(settings_of("bert"))
    tokenizer = open_dataset(data("bert")).manifest.tokenizer
    batches = batches_of(config, data("bert"), tmp_path / "indexes")
    first = first_model(config, tokenizer.vocab_size)
    weights = {name: parameter.detach().numpy() for name, parameter in first.named_parameters()}
    (here,) = pool(1).run(train_on_batches, settings_of("bert"), tokenizer.vocab_size, weights, batches)
    there = theirs(config, tokenizer.vocab_size, tokenizer.special_ids, batches, tmp_path)
    table(compared("bert", here, there))
    assert deviation(here, there) < BOUND


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("bert", {"eps": 1e-8}),
        ("bert", {"is_decayed": lambda name: True}),
        ("bert", {"is_decayed": lambda name: False}),
        ("bert", {"hidden_act": "gelu_new"}),
        ("bert", {"layer_norm_eps": 1e-5}),
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"layer_norm_epsilon": 1e-6}),
    ],
)
def test_a_loop_that_is_a_little_wrong_would_be_noticed(
    family: str, wrong: dict[str, Any], data: Data, tmp_path: Path, table: Table
) -> None:
    config = TrainingConfig.model_validate(settings_of(family))
    tokenizer = open_dataset(data(family)).manifest.tokenizer
    batches = batches_of(config, data(family), tmp_path / "indexes")
    here = ours(config, tokenizer.vocab_size, batches)
    there = theirs(config, tokenizer.vocab_size, tokenizer.special_ids, batches, tmp_path, **wrong)
    table(f"{compared(family, here, there)} with another {next(iter(wrong))}")
    assert deviation(here, there) > BOUND
