"""Resolves the run that a user names on the command line."""

from pathlib import Path

from multihop.common.errors import UserError


def locate_run(name: str, runs: Path) -> str:
    """The directory of the run of this name, or `name` itself if it is a directory or a URI such as s3://BUCKET/PREFIX.

    Raises:
        UserError: There is no such run and no such directory.
    """
    if (runs / name / "recipe.json").is_file():
        return str(runs / name)
    if "://" not in name and not Path(name).exists():
        existing = ", ".join(sorted(path.parent.name for path in runs.glob("*/recipe.json"))) or "none"
        raise UserError(
            f"no run {name} in {runs} (existing runs: {existing}), and no directory of that name; give a run, "
            "a directory or s3://BUCKET/PREFIX"
        )
    return name
