"""Which checkpoints are to be audited, which are kept for that, and which audit of several counts."""

import json
from pathlib import Path

from saved_tensors import save
from worker_runs import recipe

from multihop.common.json_lines import append_row
from multihop.pretrain.checkpoint.manifest import folder_of_step, read_checkpoint_manifest
from multihop.pretrain.run.audits import AuditDue, audits_due, decisive_audits, steps_of_audits
from multihop.pretrain.run.files import AUDITS, AUDITS_GIVEN_UP, read_config


def test_an_audit_is_due_until_it_has_an_outcome_and_again_for_other_weights(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(
        json.dumps(recipe(checkpoint__save_interval=2, checkpoint__audit={"every": 4}))
    )
    config, checkpoints = read_config(tmp_path), tmp_path / "checkpoints"
    assert audits_due(tmp_path, config) == []
    for step in (4, 7, 8, 12):
        save(checkpoints, step, 2)
    hashes = {step: read_checkpoint_manifest(folder_of_step(str(checkpoints), step)).content_hash() for step in (4, 8)}
    assert audits_due(tmp_path, config) == [AuditDue(7, 8, 2, hashes[8])], "no checkpoint is two steps before 4 and 12"
    save(checkpoints, 2, 2)
    save(checkpoints, 6, 2)
    assert audits_due(tmp_path, config) == [AuditDue(2, 4, 2, hashes[4]), AuditDue(7, 8, 2, hashes[8])]
    assert steps_of_audits(tmp_path, config) == {2, 4, 7, 8}
    append_row(tmp_path / AUDITS, {"last": 4, "of": hashes[4], "is_equal": False})
    append_row(tmp_path / AUDITS, {"last": 8, "of": "of an abandoned launch", "is_equal": True})
    assert audits_due(tmp_path, config) == [AuditDue(7, 8, 2, hashes[8])]
    (checkpoints / "step-00000007" / "manifest.json").write_text("damaged")
    assert audits_due(tmp_path, config) == [AuditDue(6, 8, 2, hashes[8])]
    append_row(tmp_path / AUDITS_GIVEN_UP, {"last": 8, "of": hashes[8], "reason": "no room"})
    assert audits_due(tmp_path, config) == []
    (tmp_path / AUDITS_GIVEN_UP).unlink()
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"audit": None})})
    assert audits_due(tmp_path, config) == [] and steps_of_audits(tmp_path, config) == set()


def test_the_newest_audit_of_a_checkpoint_counts_unless_only_an_earlier_one_is_about_bits() -> None:
    within = {"is_equal": False, "conditions": ["threads"], "rounding": {"is_within": True}}
    differs, equal = {"is_equal": False, "conditions": []}, {"is_equal": True, "conditions": ["threads"]}
    rows = [each | {"of": of, "first": 1, "last": 2} for of, each in (("a", differs), ("b", within), ("a", within))]
    assert decisive_audits(rows) == rows[:2]
    rows.append(equal | {"of": "a", "first": 0, "last": 2})
    assert decisive_audits(rows) == [rows[1], rows[3]]
    skipped = equal | {"of": "a", "first": 2, "last": 3}  # its steps were skipped: the content is that of step 2
    assert decisive_audits([*rows, skipped]) == [rows[1], rows[3], skipped]
    older = [{"first": 1, "last": 2, "is_equal": False}, {"first": 1, "last": 2, "is_equal": True}]
    assert decisive_audits(older) == older[1:]
