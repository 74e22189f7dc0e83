"""Which checkpoints stay: what a start clears away, and what a commit makes superfluous."""

from contextlib import suppress

from pretrain.checkpoint import MANIFEST, folder_of_step, list_steps, read_manifest
from pretrain.storage import open_folder


def sweep(checkpoints: str, resume_from: int | None, attempt: str) -> list[str]:
    """Clear the way before a run starts (rank 0): returns a sentence for each thing done.

    What was never committed is removed. Committed folders newer than `resume_from` did not verify: they are renamed
    for a person to look at, because their steps will be saved again.
    """
    done = []
    for step in list_steps(checkpoints):
        folder = open_folder(folder_of_step(checkpoints, step))
        name = folder.location.rsplit("/", 1)[-1]
        if folder.size(MANIFEST) is None:
            folder.remove_tree()
            done.append(f"removed {name}, which was never committed")
        elif resume_from is None or step > resume_from:
            folder.move_to(open_folder(checkpoints).child(f"{name}.damaged-{attempt}"))
            done.append(f"renamed {name}, which does not verify, to {name}.damaged-{attempt}")
    return done


def remove_old(checkpoints: str, keep: int, keep_every: int | None) -> None:
    """Remove what is older than the newest `keep` committed checkpoints, but for multiples of `keep_every`.

    The manifest goes first: what is half removed is gone.
    """
    kept = 0
    for step in reversed(list_steps(checkpoints)):
        location = folder_of_step(checkpoints, step)
        if kept < keep:
            with suppress(ValueError):
                read_manifest(location)
                kept += 1
        elif keep_every is None or step % keep_every:
            folder = open_folder(location)
            folder.remove(MANIFEST)
            folder.remove_tree()
