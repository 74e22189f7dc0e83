"""The bag of word vectors."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_texts import packed
from pydantic import ValidationError
from torch.nn import functional as F
from worker_runs import recipe

from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import parse_model_config

SIZES = {"family": "bag", "hidden": 12, "max_positions": 40, "dropout": 0.0}


def bag(**changes: object):  # type: ignore[no-untyped-def]
    model = build_model(parse_model_config({**SIZES, **changes}), 60)
    init_weights(model, 1)
    return model.eval()


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), window=st.integers(1, 6))
def test_a_masked_token_is_predicted_from_the_mean_around_it(lengths: list[int], window: int) -> None:
    model, total = bag(window=window), sum(lengths)
    ids = torch.randint(0, 60, (total,), generator=torch.Generator().manual_seed(total))
    states = model.encode_masked(packed(ids, lengths), torch.arange(total), torch.arange(total)).split(lengths)
    for text, found in zip(ids.split(lengths), states, strict=True):
        vectors = model.word.weight[text]
        for at in range(len(text)):
            around = [i for i in range(max(0, at - window), min(len(text), at + window + 1)) if i != at]
            expected = vectors[around].mean(0) if around else torch.zeros(12)
            torch.testing.assert_close(found[at], expected)


def test_the_loss_is_that_of_all_logits_and_the_states_are_embeddings() -> None:
    model, ids = bag(), torch.arange(20)
    text, at, labels = packed(ids, [12, 8]), torch.tensor([0, 5, 19]), torch.tensor([3, 7, 9])
    loss = model(text, masked_positions=at, labels=labels)["mlm"]
    logits = model.lm_head(model.encode_masked(text, at, at))
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum"))
    (states,) = model.hidden_states(text)
    assert torch.equal(states, model.word.weight[ids])


def test_every_parameter_is_trained(bert_data: Path, tmp_path: Path) -> None:
    sizes = {**SIZES, "max_positions": 64}
    config = TrainingConfig.model_validate(recipe(model=sizes, objective__name="mlm"))
    data = open_dataset(bert_data)
    build_indexes(tmp_path, data, config)
    batch = BatchBuilder.open(config, bert_data, tmp_path, 0, 1, [10]).step(0).micro_batches[0]
    model = build_model(config.model, data.manifest.tokenizer.vocab_size)
    init_weights(model, 1)
    sums = model(**to_device(batch.inputs, torch.device("cpu")))
    (sums["mlm"] / batch.counts["mlm"]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
    assert config.model.train_flops(100, batch.inputs["packed"].cu_seqlens, 7) > 0  # type: ignore[union-attr]


def test_a_bag_has_no_layers() -> None:
    with pytest.raises(ValidationError, match="layers"):
        parse_model_config({**SIZES, "layers": 1})
