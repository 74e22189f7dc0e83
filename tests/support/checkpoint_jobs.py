"""Jobs on checkpoints for a group of ranks, which are sent to them by name."""

import os

from multihop.pretrain.checkpoint.verify_shared import newest_good_shared, verify_shared
from multihop.pretrain.engine.ranks import Ranks


def choose(ranks: Ranks, checkpoints: str) -> tuple[int | None, list[str]]:
    """Return the step of the newest good checkpoint, and why newer ones were rejected."""
    found, rejected = newest_good_shared(checkpoints, ranks)
    return found.step if found else None, rejected


def verify_together(ranks: Ranks, location: str) -> str:
    """Return what is wrong with a checkpoint; empty if nothing is."""
    try:
        verify_shared(location, ranks)
    except ValueError as error:
        return str(error)
    return ""


def choose_where_rank_1_looks_elsewhere(ranks: Ranks, checkpoints: str, elsewhere: str) -> str:
    """Choose as if the hosts had no folder in common; returns the error that all ranks raise, or an empty string."""
    before = os.getcwd()
    os.chdir(elsewhere if ranks.rank == 1 else checkpoints)
    try:
        newest_good_shared(".", ranks)
    except ValueError as error:
        return str(error)
    finally:
        os.chdir(before)
    return ""
