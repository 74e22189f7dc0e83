"""Print the results of a run as the lines of a base64 text: a gzip'd tar of what a person reads and compares."""

import base64
import io
import sys
import tarfile
from pathlib import Path

MARK = "multihop archive "
_WANTED = ("recipe.json", "summary.json", "metrics.jsonl", "report.html", "report.md", "*.png", "eval/*.jsonl")
_LINE = 3 * 4096


def main() -> None:
    """Argument: the run's folder."""
    run_dir = Path(sys.argv[1])
    found = sorted(path for pattern in _WANTED for path in run_dir.glob(pattern) if path.is_file())
    if not found:
        sys.exit(f"{run_dir} has no results yet")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in found:
            archive.add(path, path.relative_to(run_dir).as_posix(), recursive=False)
    content = packed.getvalue()
    for start in range(0, len(content), _LINE):
        print(MARK + base64.b64encode(content[start : start + _LINE]).decode())


if __name__ == "__main__":
    main()
