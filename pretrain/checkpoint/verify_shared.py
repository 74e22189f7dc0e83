"""The newest good checkpoint, verified by all ranks of a run together, each of which hashes a share of the files."""

import heapq
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import Check, check_headers, file_checks, list_steps
from multihop.pretrain.engine.ranks import SYNC_INTERVAL_S, Ranks

_THREADS = 8


def newest_good_shared(checkpoints: str, ranks: Ranks) -> tuple[CheckpointManifest | None, list[str]]:
    """`newest_good` as a collective call, with the same result on all ranks.

    Raises:
        UserError: Some ranks do not see the same files at `checkpoints` as rank 0.
    """
    steps = list_steps(checkpoints) if ranks.rank == 0 else []
    rejected: list[str] = []
    while (step := ranks.broadcast(steps.pop() if steps else -1)) >= 0:
        manifest, damaged = _verify(folder_of_step(checkpoints, step), ranks)
        if manifest is not None:
            return manifest, rejected
        rejected += damaged
    return None, rejected


def verify_shared(location: str, ranks: Ranks) -> CheckpointManifest:
    """`verify` as a collective call, with the same result on all ranks.

    Raises:
        UserError: A file is missing or damaged; the message names the first one. Raised on all ranks.
    """
    manifest, damaged = _verify(location, ranks)
    if manifest is None:
        raise UserError(damaged[0])
    return manifest


def assign_files(sizes: Sequence[int], world_size: int) -> list[list[int]]:
    """The indexes of the files that each rank hashes, balanced by their sizes."""
    loads = [(0, rank) for rank in range(world_size)]
    files_of_ranks: list[list[int]] = [[] for _ in range(world_size)]
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, rank = heapq.heappop(loads)
        files_of_ranks[rank].append(index)
        heapq.heappush(loads, (load + sizes[index], rank))
    return files_of_ranks


def _verify(location: str, ranks: Ranks) -> tuple[CheckpointManifest | None, list[str]]:
    """The manifest if the checkpoint is good, else sentences about its damage; the same on all ranks."""
    manifest, reason = None, ""
    try:
        manifest = read_checkpoint_manifest(location)
    except ValueError as error:
        reason = str(error)
    texts = ranks.all_gather_text(reason or (manifest.sha256 if manifest else ""))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            # Not a reason to reject the checkpoint: rank 0 would then set a good one aside, or write it again.
            raise UserError(
                f"rank {rank} does not read the same {location} as rank 0; choose a checkpoint.location that all hosts "
                "share"
            )
    if manifest is None:
        return None, [reason]
    checks = file_checks(location, manifest)
    share = assign_files([entry.bytes for entry in manifest.files], ranks.world_size)[ranks.rank]
    damaged = _run_shared([checks[index] for index in share], ranks)
    if not damaged and manifest.stripes is None:
        damaged = _run_shared([lambda: check_headers(location, manifest)] if ranks.rank == 0 else [], ranks)
    return (None, damaged) if damaged else (manifest, [])


def _run_shared(checks: list[Check], ranks: Ranks) -> list[str]:
    """Run this rank's checks while other ranks run theirs; returns the sorted sentences of all ranks."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:
        running = [threads.submit(check) for check in checks]
        while True:
            left = len(wait(running, timeout=SYNC_INTERVAL_S).not_done)
            if not ranks.all_reduce_sum({"left": left})["left"]:
                break
    damaged = [damage for each in running if (damage := each.result()) is not None]
    return sorted(line for text in ranks.all_gather_text("\n".join(damaged)) for line in text.splitlines())
