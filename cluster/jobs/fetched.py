"""Unpacks the fetched results of a run into a local directory."""

import io
import tarfile
from pathlib import Path

from multihop.cluster.jobs.head_scripts.files import matches, matching
from multihop.cluster.jobs.head_scripts.pack_results import RESULTS
from multihop.common.errors import UserError
from multihop.common.files import make_folder, write_atomically


def unpack_results(archive: bytes, folder: Path) -> int:
    """Replace the results of an earlier fetch in `folder` with those in a gzipped tar archive.

    Other files stay. Nothing is written through a symbolic link in the directory.

    Returns:
        Number of files that were written.

    Raises:
        UserError: A directory of the results is a file or a link here, or a file of the results is a directory here.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
        # The head may be malicious: take only the expected names, and no links.
        entries = [each for each in packed if each.isfile() and any(matches(each.name, wanted) for wanted in RESULTS)]
        files = {entry.name: packed.extractfile(entry).read() for entry in entries}  # type: ignore[union-attr]
    for place in {(folder / name).parent for name in RESULTS}:
        if (place.exists() and not place.is_dir()) or (place != folder and place.is_symlink()):
            raise UserError(f"{place} is not a directory; move it away, or choose another --out")
    if blocked := next((name for name in files if (folder / name).is_dir()), None):
        raise UserError(f"{folder / blocked} is a directory; move it away, or choose another --out")
    for name in matching(str(folder), RESULTS):
        (folder / name).unlink()
    for name, content in files.items():
        make_folder((folder / name).parent)
        write_atomically(folder / name, content, mode=0o600 if name == "recipe.json" else 0o666)
    return len(files)
