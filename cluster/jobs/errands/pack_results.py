"""Print the results of a run as the lines of a base64 text: a gzip'd tar of what a person reads and compares."""

import base64
import io
import sys
import tarfile

from .files import matching, read

MARK = "multihop archive "
_WANTED = (
    "recipe.json",
    "summary.json",
    "metrics.jsonl",
    "report.html",
    "report.md",
    "*.png",
    "eval/plan.json",
    "eval/*.jsonl",
)
_LINE = 3 * 4096


def main() -> None:
    """Argument: the run's folder, or its location in a bucket."""
    run = sys.argv[1]
    found = matching(run, _WANTED)
    if not found:
        sys.exit(f"{run} has no results yet")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in found:
            content = read(run, name) or b""
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    content = packed.getvalue()
    for start in range(0, len(content), _LINE):
        print(MARK + base64.b64encode(content[start : start + _LINE]).decode())


if __name__ == "__main__":
    main()
