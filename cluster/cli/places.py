"""Where the run is that a user names."""

from pathlib import Path


def place_of(name: str, runs: Path) -> str:
    """The folder of the run of this name, or `name` itself, which is then a folder or a location in an object store.

    Raises:
        ValueError: it is neither.
    """
    if (runs / name / "recipe.json").is_file():
        return str(runs / name)
    if "://" not in name and not Path(name).exists():
        there = ", ".join(sorted(path.parent.name for path in runs.glob("*/recipe.json"))) or "none"
        raise ValueError(f"no run {name} in {runs} (existing runs: {there}), and no directory of that name")
    return name
