"""A model family is a folder; the rest of the code knows only what it declares."""

import ast
import json
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kinds_of_families import RELATIVE, STACKED, TEXT_OBJECTIVES, model_section
from pydantic import ValidationError
from rank_jobs import run_worker
from rank_pool import RankPool
from worker_runs import STEPS, checkpoint, recipe

from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.checkpoint.verify import load_weights
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.config import OBJECTIVES, ObjectiveConfig

ROOT = Path(__file__).parents[3]
TRAINED_BY = [
    (name, objective)
    for name, family in STACKED.items()
    for objective in family.objectives
    if objective in TEXT_OBJECTIVES
]
TRAINED_WITH_POSITIONS = [(*each, None) for each in TRAINED_BY]
TRAINED_WITH_POSITIONS += [(name, objective, "relative") for name, objective in TRAINED_BY if name in RELATIVE]
PAIR_HEADS = ("pooler.", "next_sentence.", "sentence_order.")

# A copy of another family, trained for a step and exported. Only its folder is given.
NEW_FAMILY = """
import sys
from pathlib import Path

import multihop.pretrain.models

multihop.pretrain.models.__path__.append(sys.argv[1])

import torch

from multihop.pretrain.checkpoint.huggingface_config import config_json
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.huggingface_weights import from_huggingface, to_huggingface
from multihop.pretrain.packed_tokens import cumulative_lengths, pack

config = TrainingConfig.model_validate({"model": {"preset": "mine-medium", "layers": 1}, "phases": [{"steps": 1}]})
assert config.objective.name == "clm"
model = build_model(config.model.model_copy(update={"hidden": 16, "heads": 2}), 50)
init_weights(model, 1)
ids = torch.arange(8)
packed = packed_to_device(pack(ids.numpy(), cumulative_lengths([5, 3])), torch.device("cpu"))
first = model(packed, labels=ids + 1)["clm"]
first.backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter -= 0.01 * parameter.grad
assert model(packed, labels=ids + 1)["clm"] < first
weights = dict(model.named_parameters())
theirs = dict(to_huggingface(model.config, 0, weights))
assert from_huggingface(model.config, 0, theirs).keys() == weights.keys()
assert config_json(config.model, 50, {"end": 0})["model_type"] == "mine"
assert config.model.train_flops(50, packed.cu_seqlens.diff().numpy(), 8) > 0
"""


def run_with(families: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NEW_FAMILY, str(families)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_family_is_added_by_adding_a_folder(tmp_path: Path) -> None:
    for path in (ROOT / "pretrain" / "models" / "gpt2").glob("*.py"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / path.name).write_text(path.read_text().replace("gpt2", "mine"))
    done = run_with(tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_folder_without_a_declaration_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pretrain" / "models" / "gpt2", tmp_path / "mine")
    (tmp_path / "mine" / "config.py").write_text("")
    done = run_with(tmp_path)
    assert "TypeError: pretrain/models/mine/config.py declares no FAMILY = Family(...)" in done.stderr


def test_no_code_outside_of_the_models_names_a_family() -> None:
    """Two places are exempt: data_prep, whose sets of special tokens share some of these names, and `multihop init`,
    which chooses a family for its user. In the objectives, a family's name may be the name of its objective."""
    found = []
    for package in ("common", "pretrain", "eval", "cluster"):
        for path in (ROOT / package).rglob("*.py"):
            if (ROOT / "pretrain" / "models") in path.parents or path.name == "starter_recipe.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{name}" for name in names]
                families = {*FAMILIES} - ({*OBJECTIVES} if path.parent.name == "objectives" else set())
                folders = "|".join(FAMILIES).replace("-", "_")
                imported = any(re.match(rf"multihop\.pretrain\.models\.({folders})\b", name) for name in names)
                if imported or (isinstance(node, ast.Constant) and node.value in families):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_declarations_need_no_torch() -> None:
    code = "import sys, multihop.pretrain.models.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def config_of(family: str, objective: str, positions: str | None = None) -> TrainingConfig:
    sizes = model_section(family, layers=2, hidden=32, heads=2, max_positions=64, dropout=0.0)
    sizes |= {} if positions is None else {"positions": positions}
    return TrainingConfig.model_validate(recipe(model=sizes, objective__name=objective))


@pytest.mark.parametrize(("family", "objective", "positions"), TRAINED_WITH_POSITIONS)
def test_every_declared_objective_trains_every_parameter(
    family: str, objective: str, positions: str | None, bert_data: Path, gpt2_data: Path, tmp_path: Path
) -> None:
    assert objective in typing.get_args(ObjectiveConfig.model_fields["name"].annotation)
    config, folder = config_of(family, objective, positions), gpt2_data if FAMILIES[family].reads_one_way else bert_data
    data = open_dataset(folder)
    build_indexes(tmp_path, data, config)
    batch = BatchBuilder.open(config, folder, tmp_path, 0, 1, [10]).step(0).micro_batches[0]
    model = build_model(config.model, data.manifest.tokenizer.vocab_size)
    init_weights(model, 1)
    sums = model(**to_device(batch.inputs, torch.device("cpu")))
    assert batch.counts.keys() == {name for name in sums if not name.endswith("_hits")} == set(objective.split("+"))
    sum((sums[name] / count for name, count in batch.counts.items()), torch.zeros(())).backward()
    for name, parameter in model.named_parameters():
        # ZeRO's flat buffers hold zeros for a missing gradient: with a gradient of zeros, stage 0 does the same.
        assert parameter.grad is not None, name
        unused = objective == "mlm" and name.startswith(PAIR_HEADS)
        assert bool(parameter.grad.any()) != unused, name


def test_an_objective_that_the_family_does_not_declare_is_refused() -> None:
    for family, objective in (("bert", "mlm+sop"), ("roberta", "mlm+nsp"), ("gpt2", "mlm"), ("albert", "clm")):
        with pytest.raises(ValidationError, match=f"does not train model.family={family}; set objective.name="):
            config_of(family, objective)


@pytest.mark.ranks
@pytest.mark.parametrize("family", ["bert", pytest.param("albert", marks=pytest.mark.long)])
def test_an_unused_pair_head_is_updated_alike_in_every_stage(
    family: str, bert_data: Path, tmp_path: Path, pool: Callable[[int], RankPool]
) -> None:
    found = []
    for ranks, stage in ((1, 0), (2, 1), (2, 3)):
        run_dir = tmp_path / f"stage-{stage}"
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "data").symlink_to(bert_data)
        content = recipe(objective__name="mlm", optimizer__name="lamb", engine__zero_stage=stage)
        content["model"] |= {"family": family, "dropout": 0.0}
        content["engine"]["data_workers"] = 0
        (run_dir / "recipe.json").write_text(json.dumps(content))
        assert pool(ranks).run(run_worker, run_dir) == [0] * ranks
        found.append((load_weights(checkpoint(run_dir, 3)), load_weights(checkpoint(run_dir, STEPS))))
    (_, last), *others = found
    for early, late in others:
        for name, weight in late.items():
            torch.testing.assert_close(weight, last[name], rtol=1e-4, atol=1e-5, msg=name)
        assert not torch.equal(early["pooler.weight"], late["pooler.weight"])  # by weight decay alone
        assert torch.equal(late["pooler.bias"], torch.zeros(32))
