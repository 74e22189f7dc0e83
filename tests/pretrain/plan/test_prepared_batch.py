"""What prepared data changes of a plan: samples have the lengths that training will see."""

from pathlib import Path

import pytest

from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.fit import RankPlan, Vocabularies


def test_samples_are_as_long_as_those_of_training(bert_data: Path, tmp_path: Path) -> None:
    config = TrainingConfig.model_validate(
        {
            "seed": 1,
            "model": {"preset": "bert-tiny", "max_positions": 512},
            "objective": {"name": "mlm+nsp"},
            "phases": [
                {
                    "seq_len": 64,
                    "global_batch_size": 64,
                    "steps": 3,
                    "batch_ramp": [{"steps": 1, "global_batch_size": 8}],
                },
                {"seq_len": 512, "global_batch_size": 64, "steps": 3},
            ],
            "engine": {"micro_batch_size": "auto", "precision": "bf16"},
        }
    )
    vocabulary = read_data_manifest(bert_data).output_tokenizer.vocab_size
    for phase in range(2):
        plan = RankPlan(config, phase, 2, Vocabularies(vocabulary), prepared=(bert_data, tmp_path / "index"))
        batch, mean = plan.micro_batch(8)
        assert 0 < mean <= batch.tokens <= assumed_batch(config, phase, 8, vocabulary).tokens
    assert mean < 0.7 * assumed_batch(config, 1, 8, vocabulary).tokens  # a sample has one document
    fit = plan.largest(80e9)
    assert fit.micro_batch_size == 32 and fit.step_tokens == pytest.approx(4 * mean, rel=0.2)
