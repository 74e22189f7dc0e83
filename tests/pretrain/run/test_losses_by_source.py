"""The held-out loss of each source."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import evaluate_rough_model
from rank_pool import RankPool

from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "model": {"family": "albert", "layers": 2, "hidden": 16, "heads": 2, "max_positions": 48, "dropout": 0.1},
    "objective": {"name": "mlm+sop"},  # both segments of a sample are of one document
    "phases": [{"seq_len": 48, "global_batch_size": 4, "steps": 4}],
    "engine": {"deepspeed": {}, "micro_batch_size": 2, "zero_stage": 3},
}


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_losses_by_source_average_to_the_held_out_loss(
    texts: Path, tmp_path: Path, pool: Callable[[int], RankPool]
) -> None:
    sources = [Source(path=f"{texts}/{names}.txt") for names in ("00[0-4]*", "00[5-9]*", "01*")]
    data = tmp_path / "data"
    settings = {"vocab_size": 90, "special_tokens": "bert"}
    prepare(DataConfig(sources=sources, heldout_fraction=0.2), TokenizerConfig.model_validate(settings), data)
    config = TrainingConfig.model_validate(SETTINGS)
    build_indexes(tmp_path / "index", open_dataset(data), config)
    (alone,) = pool(1).run(evaluate_rough_model, tmp_path, SETTINGS)
    row = alone["row"]
    found = {int(key[6]): loss for key, loss in row.items() if key.startswith("source")}
    assert [key for key in row if key.startswith("source")] == [f"source{n}/heldout_mlm_loss" for n in range(3)]
    shares = BatchBuilder.open(config, data, tmp_path / "index", 0, 1, [2]).heldout_by_source()
    counts = {source: share.counts["mlm"] for source, share in shares.items()}
    mean = sum(found[source] * count for source, count in counts.items()) / sum(counts.values())
    assert mean == pytest.approx(row["heldout_mlm_loss"], rel=1e-6) and len(set(found.values())) == 3
    for result in pool(2).run(evaluate_rough_model, tmp_path, SETTINGS):
        assert result["unchanged"] and result["row"] == pytest.approx(row, rel=2e-5)
