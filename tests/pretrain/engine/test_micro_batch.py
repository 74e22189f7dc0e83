"""engine.micro_batch_size=auto: as many samples as fit, by the plan of a step's memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import found_micro_batches
from rank_pool import RankPool
from worker_runs import recipe

from multihop.common.files import read_json_object
from multihop.pretrain.engine.micro_batch import CACHE_FILE

pytestmark = pytest.mark.ranks
PHASE = {"seq_len": 16, "global_batch_size": 64, "steps": 9}


def found(
    pool: Callable[[int], RankPool], run_dir: Path, ranks: int = 1, **changes: Any
) -> tuple[list[int], list[Any]]:
    """Return the sizes with this recipe, and all that was planned so far; the newest is the last."""
    content = recipe(engine__micro_batch_size="auto", objective__name="mlm", **{"phases": [PHASE], **changes})
    (run_dir / "recipe.json").write_text(json.dumps(content))
    sizes, *others = pool(ranks).run(found_micro_batches, run_dir)
    assert others == [sizes] * (ranks - 1)
    return sizes, list(read_json_object(run_dir / CACHE_FILE).values())


@pytest.fixture
def run_dir(tmp_path: Path, bert_data: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data").symlink_to(bert_data)
    return tmp_path / "run"


def test_the_size_is_planned_once_and_again_when_others_take_the_memory(
    pool: Callable[[int], RankPool], run_dir: Path
) -> None:
    sizes, (entry,) = found(pool, run_dir, ranks=2)
    assert sizes == [32] and entry["samples"] == 32 and entry["world_size"] == 2
    assert {"memory", "torch", "vocabularies", "device"} < set(entry)
    (run_dir / CACHE_FILE).write_text(json.dumps({"another": entry, **read_json_object(run_dir / CACHE_FILE)}))
    assert len(found(pool, run_dir, ranks=2)[1]) == 2
    taken = {key: {**each, "bytes": 10**15} for key, each in read_json_object(run_dir / CACHE_FILE).items()}
    (run_dir / CACHE_FILE).write_text(json.dumps(taken))
    assert found(pool, run_dir, ranks=2)[1] == [{**entry, "bytes": 10**15}, entry]


@pytest.mark.long
def test_a_ramp_changes_nothing_and_the_key_covers_what_does(pool: Callable[[int], RankPool], run_dir: Path) -> None:
    _, (ramped,) = found(pool, run_dir, phases=[{**PHASE, "batch_ramp": [{"steps": 2, "global_batch_size": 8}]}])
    (run_dir / CACHE_FILE).unlink()
    _, (plain,) = found(pool, run_dir)
    assert (plain["samples"], plain["bytes"]) == (ramped["samples"], ramped["bytes"])
    changes: list[dict[str, Any]] = [
        {"phases": [{**PHASE, "seq_len": 48}]},
        {"engine__precision": "bf16"},
        {"engine__zero_stage": 2},
        {"engine__activation_checkpointing": "full"},
        {"model__layers": 3},
        {"objective__mask_rate": 0.5},
    ]
    for number, change in enumerate(changes):
        assert len(found(pool, run_dir, **change)[1]) == 2 + number
        assert len(found(pool, run_dir, **change)[1]) == 2 + number
