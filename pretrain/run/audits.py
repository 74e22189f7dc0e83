"""The audits of a run: what each found, which are still due by checkpoint.audit, and the checkpoints kept for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from multihop.common.json_lines import Row, read_rows
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import list_steps
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.run.files import AUDITS, AUDITS_GIVEN_UP, checkpoints_of

Outcome = Literal["equal", "differs", "within rounding", "beyond rounding", "no verdict", "not judged"]
"""What an audit found: equal bits; bits that differ under the same conditions; or under other conditions a difference
that rounding explains, that it does not explain, that cannot be judged, or that an older version did not judge."""


@dataclass(frozen=True)
class AuditDue:
    """An audit that has no outcome yet."""

    first: int
    """Step of the checkpoint to start from; 0: the initial weights."""
    last: int
    """Step of the checkpoint to audit."""
    ranks: int
    """Number of ranks that saved it, on which its steps are trained again."""
    content: str
    """Its content hash."""


def outcome_of(audit: Row) -> Outcome:
    """What a row of audits.jsonl, or of the audits in a summary, says; older versions wrote fewer fields."""
    if audit["is_equal"]:
        return "equal"
    if not audit.get("conditions"):
        return "differs"
    rounding = audit.get("rounding")
    if rounding is None:
        return "not judged"
    if rounding["is_within"] is None:
        return "no verdict"
    return "within rounding" if rounding["is_within"] else "beyond rounding"


def first_different_step(audit: Row) -> int | None:
    """The first step whose state differs by its checksum, in a row of audits.jsonl or of the audits in a summary; None:
    all are equal, or none were compared, as by older versions."""
    states: dict[str, Any] = audit.get("states", {})
    step: int | None = audit.get("first_different_step", states.get("first_different"))
    return step


def checkpoint_of(audit: Row) -> tuple[int, str]:
    """The step and content hash of an audited checkpoint; steps that are skipped leave the content as it is."""
    return audit["last"], audit["of"]


def decisive_audits(audits: list[Row]) -> list[Row]:
    """The newest audit of each checkpoint; but one that compared bits under the same conditions, or found them equal,
    counts until another one does."""
    chosen: dict[Any, Row] = {}
    for audit in audits:
        key = checkpoint_of(audit) if "of" in audit else (audit["first"], audit["last"])  # summaries of older versions
        if key in chosen and _is_about_bits(chosen[key]) and not _is_about_bits(audit):
            continue
        chosen.pop(key, None)
        chosen[key] = audit
    return list(chosen.values())


def _is_about_bits(audit: Row) -> bool:
    return outcome_of(audit) in ("equal", "differs")


def audits_due(run_dir: Path, config: TrainingConfig) -> list[AuditDue]:
    """The audits that checkpoint.audit asks for and that were neither completed nor given up, oldest first: of
    committed checkpoints, each from the one before it, if that is at most `save_interval` steps older.

    A checkpoint that was saved again, after a resume from an earlier one, is audited again.
    """
    if config.checkpoint.audit is None:
        return []
    checkpoints, every = checkpoints_of(run_dir, config), config.checkpoint.audit.every
    over = {checkpoint_of(row) for name in (AUDITS, AUDITS_GIVEN_UP) for row in read_rows(run_dir / name)}
    steps = list_steps(checkpoints)
    due = []
    for number, step in enumerate(steps):
        if step % every or (manifest := _manifest(checkpoints, step)) is None:
            continue
        content = manifest.content_hash()
        if (step, content) in over:
            continue
        first = next((each for each in reversed(steps[:number]) if _manifest(checkpoints, each)), 0)
        if step - first <= config.checkpoint.save_interval:  # else the one before was removed, or never saved
            due.append(AuditDue(first, step, manifest.world_size, content))
    return due


def steps_of_audits(run_dir: Path, config: TrainingConfig) -> set[int]:
    """Steps of the checkpoints that the audits that are due start from and compare with."""
    return {step for due in audits_due(run_dir, config) for step in (due.first, due.last)}


def _manifest(checkpoints: str, step: int) -> CheckpointManifest | None:
    """The manifest of a step; None: it was never committed, or is damaged, which `checkpoints verify` says."""
    try:
        return read_checkpoint_manifest(folder_of_step(checkpoints, step))
    except ValueError:
        return None
