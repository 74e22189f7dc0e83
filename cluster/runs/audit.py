"""Audit a checkpoint: train the steps since an earlier one again, and compare the result bit for bit.

A hash shows that a file is what was written. An audit shows that what was written is what the recipe, the data and the
earlier checkpoint give: it finds a bit that flipped in a rank's memory before the save, a wrong product of a faulty
core, and steps that were trained with other settings than the recipe's.
"""

import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from multihop.cluster.console import console
from multihop.cluster.locks import is_locked, lock_folder
from multihop.cluster.runs.audit_rounding import Rounding, judge_rounding
from multihop.cluster.runs.summary import audits_of, read_summary, write_audits
from multihop.cluster.tracking.store import AUDITS_TAG, newest_as_tag
from multihop.common.errors import UserError
from multihop.common.files import make_folder, read_json_object, write_atomically
from multihop.common.json_lines import Row, append_row, parse_rows, read_rows
from multihop.common.storage import open_folder
from multihop.data_prep.dataset.manifest import MANIFEST, read_data_manifest
from multihop.pretrain.checkpoint.difference import TensorDifference, differing_counters, differing_tensors
from multihop.pretrain.checkpoint.manifest import MANIFEST as CHECKPOINT_MANIFEST
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.owner import IDENTITY
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.verify import committed_steps, verify
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.engine.micro_batch import CACHE_FILE
from multihop.pretrain.engine.replicas import CHECKSUM_DIGITS
from multihop.pretrain.environment import LAST_STEP, MICRO_BATCH_SIZES
from multihop.pretrain.run.audits import checkpoint_of, decisive_audits, first_different_step, outcome_of
from multihop.pretrain.run.changes import CHANGES, differences, fill_recorded_part
from multihop.pretrain.run.files import AUDITS, STATE_CHECKSUMS, checkpoints_of, read_config
from multihop.pretrain.run.find_checkpoint import run_dir_of

PARENT = "MULTIHOP_AUDIT_PARENT"
"""Environment variable with the process of which this audit is a part, and with which it ends; not set if a user
started it."""
PLACE = ".audit"
"""Folder in the run's in which steps are trained again; locked by the audit."""
_AUDITED = "audited"
"""Folder in the replay's with the checkpoint that is audited."""
_PARENT_POLL_S = 1.0
_LINKED = ("data", "index")
_COPIED = (CHANGES, CACHE_FILE, IDENTITY)
"""Files that the replay needs: allowed changes, planned micro-batch sizes, and the id of the run that wrote the
checkpoint which it resumes from."""
_SAME_BITS = ("world_size", "device", "threads", "micro_batch_sizes")
"""Fields of launches.jsonl that, beside the versions, must be equal for equal bits; older launches lack some."""


@dataclass(frozen=True)
class ComparedStates:
    """Where two trainings of the same steps part, by the checksums of their states."""

    steps: int
    """Number of steps of which both have a checksum."""
    last_equal: int | None
    """The newest of these steps before `first_different` with equal states; None: none has."""
    first_different: int | None
    """The first of these steps with different states; None: all are equal."""
    parameters: list[str]
    """The parameters whose weights or moments differ in that step, by name."""


@dataclass(frozen=True)
class Audit:
    """The outcome of an audit."""

    first: int
    """Step of the checkpoint that the replay started from; 0 also if it began with the initial weights."""
    last: int
    """Step of the checkpoint that was audited."""
    is_equal: bool
    """Whether all weights, moments and counters are equal bit for bit."""
    counters: list[str]
    """Counters that differ."""
    tensors: list[TensorDifference]
    """Weights and moments that differ, in the order of their names."""
    loss: tuple[int, float, float] | None
    """The first logged step whose loss differs, with its loss in the replay and in the run."""
    states: ComparedStates
    """The replay beside the run, if the recipe has engine.replica_check_interval."""
    conditions: list[str]
    """What was not the same in the replay, so that other bits are expected: device, threads, versions, ranks."""
    replays: ComparedStates | None = None
    """One replay beside another, step by step; None: there was no second one."""
    rounding: Rounding | None = None
    """Whether the differences are rounding's; None: all is equal, or the conditions were the same."""

    @property
    def is_proven(self) -> bool:
        """Whether all is equal bit for bit, or within rounding under other conditions."""
        return self.is_equal or (self.rounding is not None and self.rounding.is_within is True)


def audit(run_dir: Path, first: int | None, last: int | None, address: str | None, bisect: bool = False) -> Audit:
    """Replay the steps between two committed checkpoints, compare, and record the outcome in audits.jsonl.

    Args:
        first: step of the checkpoint to start from, or 0 for the initial weights; None: the one before `last`.
        last: step of the checkpoint to audit; None: the newest.
        address: the Ray cluster to train on; None: as for `ray_session`.
        bisect: find the first step that differs: compute checksums of the state after each step, and replay twice.

    Raises:
        UserError: there are no such checkpoints, one is damaged, or they were made from other data.
        TrainingFailed: the replay failed.
        KeyboardInterrupt: a signal stopped it.
    """
    _end_with_parent()
    config = read_config(run_dir)
    checkpoints = checkpoints_of(run_dir, config)
    first, last = steps_to_replay(checkpoints, first, last)
    expected = verify(folder_of_step(checkpoints, last))
    if first > 0:  # if it were damaged, the replay would start from the initial weights
        verify(folder_of_step(checkpoints, first))
    _check_data(run_dir, expected)
    with replay_folder(run_dir, first, expected, bisect) as folder:
        _replay(run_dir, folder, first, expected, address)
        outcome, rows = compare_replay(run_dir, folder, first, expected), read_rows(folder / "metrics.jsonl")
    try:
        if bisect and not outcome.is_equal:
            with replay_folder(run_dir, first, expected, bisect) as folder:
                _replay(run_dir, folder, first, expected, address)
                again = read_rows(folder / "metrics.jsonl")
                outcome = replace(outcome, replays=compare_states(again, rows, sorted(expected.parameters)))
    finally:  # what the first replay found is kept if the second one is interrupted
        append_row(run_dir / AUDITS, {**asdict(outcome), "time": time.time(), "of": expected.content_hash()})
        try:
            _publish(run_dir)
        except (UserError, OSError) as error:  # a damaged summary, for example
            console.print(f"report    not written: {error}; the audit is in {run_dir / AUDITS}")
    return outcome


def _check_data(run_dir: Path, expected: CheckpointManifest) -> None:
    """Refuse to replay with other data than that of the audited checkpoint."""
    if not (run_dir / "data" / MANIFEST).exists():
        return  # the ranks say so
    found = read_data_manifest(run_dir / "data").fingerprint
    if found != expected.data_fingerprint:
        raise UserError(
            f"step {expected.step:,} was trained on data {expected.data_fingerprint[:12]}, and {run_dir / 'data'} is "
            f"{found[:12]}; audit a checkpoint that was saved since the data changed, or restore that data"
        )


def _end_with_parent() -> None:
    """Have this process end as by SIGTERM once the process that started it in the background is gone."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _publish(run_dir: Path) -> None:
    """Write the verdict into the run's summary, its report and MLflow; a run in progress does so at its own end."""
    from multihop.eval.report.run_report import write_report

    if is_locked(run_dir) or not read_summary(run_dir):
        return
    write_audits(run_dir)
    write_report(run_dir)
    tag_audits(run_dir)


def tag_audits(run_dir: Path) -> None:
    """Write the run's audits into MLflow."""
    from multihop.cluster.tracking.tracker import tag_run

    uri = read_json_object(run_dir / "recipe.json").get("tracking", {}).get("uri")
    short = [
        {key: value["is_within"] if key == "rounding" else value for key, value in audit.items() if key != "of"}
        for audit in audits_of(run_dir)
    ]
    tag_run(run_dir, uri, AUDITS_TAG, newest_as_tag(short))


def _replay(run_dir: Path, folder: Path, first: int, expected: CheckpointManifest, address: str | None) -> None:
    from multihop.cluster.ray.session import ray_session
    from multihop.cluster.ray.train_driver import train_on_ray

    ranks, last, replayed = expected.world_size, expected.step, str(folder / "checkpoints")
    environment, variables = {LAST_STEP: str(last)}, _variables_of(run_dir)
    launches = _launches_of(read_rows(run_dir / "launches.jsonl"), first)
    if launches and "micro_batch_sizes" in launches[0]:  # else `auto` may find less memory free than the run did
        environment[MICRO_BATCH_SIZES] = json.dumps(launches[0]["micro_batch_sizes"])
    with ray_session(address, ranks):
        is_stopped = train_on_ray(folder, replayed, last, (ranks, ranks), environment, variables, _ignore)
    if is_stopped:
        raise KeyboardInterrupt
    started = read_rows(folder / "launches.jsonl")[0]["step"]
    if started != first:
        raise UserError(
            f"the replay started from step {started:,} instead of {first:,}, because the copy of that checkpoint is "
            "damaged; test this machine's disk, and audit again"
        )


@contextmanager
def replay_folder(run_dir: Path, first: int, expected: CheckpointManifest, every_step: bool = False) -> Iterator[Path]:
    """A folder in the run's, in which the ranks train the same steps again from the checkpoint of `first`; removed at
    the end. It has links to both checkpoints, because the run itself may remove them meanwhile.

    Args:
        expected: the checkpoint that is audited; its recipe, stage and number of ranks apply.
        every_step: log each step, with a checksum of the state after it.

    Raises:
        InUseError: another process audits the run.
        UserError: the run has removed one of the checkpoints.
    """
    checkpoints = checkpoints_of(run_dir, read_config(run_dir))
    place = run_dir.absolute() / PLACE
    make_folder(place)
    folder = place / "replay"
    with lock_folder(place):
        shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
        folder.mkdir()
        try:
            for name in _LINKED:
                if (run_dir / name).exists():
                    (folder / name).symlink_to((run_dir / name).resolve(), target_is_directory=True)
            for name in _COPIED:
                if (run_dir / name).exists():
                    shutil.copyfile(run_dir / name, folder / name)
            make_folder(folder / "logs", mode=0o700)
            content = json.dumps(_recipe_of_replay(run_dir, expected, every_step)).encode()
            write_atomically(folder / "recipe.json", content, mode=0o600)
            if first > 0:
                _link_checkpoint(folder_of_step(checkpoints, first), folder_of_step(str(folder / "checkpoints"), first))
            last = expected.step
            _link_checkpoint(folder_of_step(checkpoints, last), folder_of_step(str(folder / _AUDITED), last))
            yield folder
        finally:
            # A file that NFS keeps for another process is removed by the next audit, and loses no outcome.
            shutil.rmtree(folder, ignore_errors=True)


def _link_checkpoint(location: str, place: str) -> None:
    """Link or copy a checkpoint's files into a new folder."""
    source, copy = open_folder(location), open_folder(place)
    try:
        names = source.names()
        if CHECKPOINT_MANIFEST not in names:  # is removed first
            raise FileNotFoundError(location)
        for name in names:
            if "://" not in location and _try_to_link(Path(location) / name, Path(place) / name):
                continue
            with source.open(name) as file:
                copy.write(name, file.chunks())
    except FileNotFoundError:
        raise UserError(
            f"{location} was removed meanwhile; audit a newer checkpoint, or raise checkpoint.keep"
        ) from None


def _try_to_link(file: Path, place: Path) -> bool:
    """Make a hard link; False: file systems differ, or have none."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def compare_replay(run_dir: Path, folder: Path, first: int, expected: CheckpointManifest) -> Audit:
    """Compare the checkpoint that a replay has saved with the one that is audited."""
    last = expected.step
    replayed = folder_of_step(str(folder / "checkpoints"), last)
    audited = folder_of_step(str(folder / _AUDITED), last)
    found = read_checkpoint_manifest(replayed)
    counters = differing_counters(found, expected)
    changed = _changed_conditions(
        read_rows(folder / "launches.jsonl")[-1], read_rows(run_dir / "launches.jsonl"), first, last
    )
    tensors, rounding = [], None
    if found.content_hash() != expected.content_hash() or counters:
        with CheckpointReader(replayed, found) as one, CheckpointReader(audited, expected) as other:
            tensors = list(differing_tensors(one, other))
            if changed and (tensors or counters):
                names = {name for name, _ in changed}
                rounding = judge_rounding(one, other, read_config(folder), first, names, counters)
    metrics = read_rows(folder / "metrics.jsonl"), read_rows(run_dir / "metrics.jsonl")
    is_equal = not counters and not tensors
    loss, states = _first_differing_loss(*metrics), compare_states(*metrics, sorted(expected.parameters))
    conditions = [sentence for _, sentence in changed]
    return Audit(first, last, is_equal, counters, tensors, loss, states, conditions, rounding=rounding)


def compare_states(one: list[Row], other: list[Row], parameters: list[str]) -> ComparedStates:
    """Compare the checksums of these parameters, in this order, in two files of metrics."""
    sums, others = (_values(rows, STATE_CHECKSUMS) for rows in (one, other))
    steps = sorted(sums.keys() & others.keys())
    first = next((step for step in steps if sums[step] != others[step]), None)
    equal = [step for step in steps if first is None or step < first]
    differing = [] if first is None else _differing_parameters(sums[first], others[first], parameters)
    return ComparedStates(len(steps), equal[-1] if equal else None, first, differing)


def _differing_parameters(one: str, other: str, parameters: list[str]) -> list[str]:
    sums = [
        [checksums[at : at + CHECKSUM_DIGITS] for at in range(0, len(checksums), CHECKSUM_DIGITS)]
        for checksums in (one, other)
    ]
    return [name for name, *both in zip(parameters, *sums, strict=True) if both[0] != both[1]]


def state_of(outcome: Audit) -> str:
    """Return what the checksums of the steps show; empty if those that are recorded are equal, or none are."""
    first = outcome.states.first_different
    if first is None:
        return ""
    before = "" if outcome.states.last_equal is None else f"equal up to step {outcome.states.last_equal:,}, "
    where = _named(outcome.states.parameters)
    if not outcome.is_equal:
        return f"{before}differs from step {first:,} on, of those that are recorded: in {where}"
    advice = "as may be expected" if outcome.conditions else "test the devices of the run"
    return f"{before}differs in step {first:,} in {where}, although the checkpoint is equal: {advice}"


def _named(parameters: list[str]) -> str:
    """The first of some parameters, and how many more there are."""
    more = f" and {len(parameters) - 1:,} more" if len(parameters) > 1 else ""
    return f"{parameters[0]}{more}"


def audited_checkpoints(location: str) -> dict[tuple[int, str], str]:
    """What the decisive audit of each checkpoint found, by the checkpoint's step and content hash: "audited" if all was
    equal, and "audited within rounding" if it was so under other conditions.

    Args:
        location: A run's directory or that of its checkpoints, or a run's place in an object store.
    """
    if "://" in location:
        folder = open_folder(location)
        has_audits = folder.size(AUDITS) is not None
        rows = parse_rows(folder.read_bytes(AUDITS, 2**30), f"{location}/{AUDITS}") if has_audits else []
    else:
        rows = read_rows(run_dir_of(location) / AUDITS)
    return {checkpoint_of(row): _verdict(row) for row in decisive_audits(rows)}


def _verdict(row: Row) -> str:
    outcome = outcome_of(row)
    if outcome == "equal":
        return "audited" if first_different_step(row) is None else "audited, but a step's state differs"
    return {
        "differs": "differs from its replay",
        "within rounding": "audited within rounding",
        "beyond rounding": "differs from its replay beyond rounding",
        "no verdict": "differs from its replay, no verdict",
        "not judged": "differs from its replay, as expected",
    }[outcome]


def _variables_of(run_dir: Path) -> list[str]:
    """The environment variables that every node must have."""
    names: list[str] = read_json_object(run_dir / "recipe.json").get("cluster", {}).get("env", [])
    return names


def _recipe_of_replay(run_dir: Path, expected: CheckpointManifest, every_step: bool) -> dict[str, Any]:
    """The recipe with what the audited checkpoint was made with, that saves and evaluates at the last step alone."""
    never = total_steps(read_config(run_dir).phases) + 1
    content: dict[str, Any] = _merged(read_json_object(run_dir / "recipe.json"), expected.recipe or {})
    content.setdefault("engine", {}).update(zero_stage=expected.zero_stage, eval_interval=never)
    if every_step:
        content["engine"].update(replica_check_interval=1, log_interval=1)
    content.setdefault("checkpoint", {}).update(location=None, save_interval=never, keep=2, audit=None)
    return content


def _merged(tree: Any, changes: Any) -> Any:
    """A recipe with the keys of a part of it, as a checkpoint records it."""
    if isinstance(tree, dict) and isinstance(changes, dict):
        return tree | {key: _merged(tree.get(key), value) for key, value in changes.items()}
    if isinstance(tree, list) and isinstance(changes, list) and len(tree) == len(changes):
        return [_merged(one, other) for one, other in zip(tree, changes, strict=True)]
    return changes


def steps_to_replay(checkpoints: str, first: int | None, last: int | None) -> tuple[int, int]:
    """The steps to replay from and to; raises UserError if there are no such checkpoints."""
    steps = sorted(committed_steps(checkpoints))
    shown = ", ".join(map(str, steps)) or "none"
    if last is None:
        last = steps[-1] if steps else None
    if last is None:
        raise UserError(f"{checkpoints} has no good checkpoint; there is nothing to audit before the first save")
    if last not in steps:
        raise UserError(f"{checkpoints} has no good checkpoint of step {last}; it has: {shown}")
    earlier = [step for step in steps if step < last]
    if first is None:
        first = earlier[-1] if earlier else 0
    if first != 0 and first not in earlier:
        raise UserError(f"{checkpoints} has no good checkpoint of step {first} before {last}; it has: {shown}")
    return first, last


def _first_differing_loss(found: list[Row], expected: list[Row]) -> tuple[int, float, float] | None:
    losses = [_values(rows, "loss") for rows in (found, expected)]
    common = sorted(losses[0].keys() & losses[1].keys())
    return next(
        ((step, losses[0][step], losses[1][step]) for step in common if losses[0][step] != losses[1][step]), None
    )


def _values(rows: list[Row], key: str) -> dict[int, Any]:
    """The value of a key by step: of the launch that trained the step last, from which the checkpoint came."""
    return {row["step"]: row[key] for row in rows if key in row}


def _changed_conditions(replay: Row, launches: list[Row], first: int, last: int) -> list[tuple[str, str]]:
    """What was not the same for the launches of the run that trained these steps: its name, and a sentence."""
    now = _conditions_of(replay)
    trained = [row for row in _launches_of(launches, first) if row["step"] < last]
    changed = [
        (
            name,
            f"versions were not recorded from step {row['step']} on"
            if name == "versions"
            else f"{name} was {value} from step {row['step']} on, is {now.get(name)}",
        )
        for row in trained
        for name, value in _conditions_of(row).items()
        if value != now.get(name)
    ]
    changed += [
        ("recipe", f"{key} was {then} from step {row['step']} on, is {value}")
        for row in trained
        if "recipe" in row
        for key, then, value in differences(fill_recorded_part(row["recipe"]), replay["recipe"])
    ]
    if not all(row.get("deterministic", True) for row in (replay, *trained)):
        changed.append(("kernels", "kernels are not deterministic, because engine.deterministic is not set"))
    return changed


def _launches_of(launches: list[Row], first: int) -> list[Row]:
    """The rows of the launch that trained the step after `first`, and of all later ones; without launches of which
    nothing is left, because a later one resumed from the same step or before it."""
    resumed = [row["step"] for row in launches]
    launches = [
        row for number, row in enumerate(launches) if row["step"] < min(resumed[number + 1 :], default=math.inf)
    ]
    before = [number for number, row in enumerate(launches) if row["step"] <= first]
    return launches[before[-1] if before else 0 :]


def _conditions_of(launch: Row) -> Row:
    """What decides a launch's bits, by name; launches of older versions of multihop did not record all of it."""
    return (
        {name: launch[name] for name in _SAME_BITS if name in launch}
        | {f"engine.{key}": value for key, value in launch.get("engine", {}).items()}
        | launch.get("versions", {"versions": "not recorded"})
    )


def _ignore(row: Row) -> None:
    """Rows of a replay are not shown."""
