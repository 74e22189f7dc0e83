"""Arguments and options that several commands have, and the run that a name on the command line means."""

from pathlib import Path
from typing import Annotated

import typer

from multihop.common.errors import UserError

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file, for example recipes/demo.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE…", help="Recipe overrides, for example model.layers=3 name=other."),
]


def _folder(text: Path | str) -> Path:
    if str(text).startswith("s3://"):
        raise typer.BadParameter(
            f"{text} is an object store, but this command reads runs from a directory; only run, prep, train, eval and "
            "submit take an object store. `multihop fetch` copies a run's results to this machine"
        )
    return Path(_folder_or_store(str(text)))


def _folder_or_store(text: str) -> str:
    if not text.startswith("s3://") and ("://" in text or text.startswith("s3:")):
        raise typer.BadParameter(f"{text} is neither a directory nor s3://BUCKET/PREFIX; give one of them")
    return text


Runs = Annotated[Path, typer.Option(help="Directory of all runs.", parser=_folder, metavar="PATH")]
RunsOrStore = Annotated[
    str,
    typer.Option(
        "--runs", metavar="PATH", parser=_folder_or_store, help="Directory of all runs, or s3://BUCKET/PREFIX."
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-change", metavar="KEY", help="Allow this recipe key to change in an existing run. Repeatable."
    ),
]
Address = Annotated[str | None, typer.Option(help="Ray cluster, HOST:PORT. Default: start Ray on this machine.")]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Hash all files of the prepared data, also unchanged ones."),
]
CheckpointsPath = Annotated[
    str, typer.Argument(metavar="RUN", help="Run name, run or checkpoint directory, or s3://BUCKET/PREFIX.")
]
DataPath = Annotated[
    str, typer.Argument(metavar="RUN", help="Run name, run directory, or directory of a prepared data set.")
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory of the report.")]
ModelPath = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run name, run or checkpoint directory, or exported model."),
]
Step = Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint. Default: the newest good one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dashboard = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="RAY_API_SERVER_ADDRESS",
        metavar="URL",
        help="Dashboard of the cluster's head, for example http://10.0.0.1:8265.",
    ),
]
JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a run.")]


def locate_run(name: str, runs: Path) -> str:
    """Return the directory of the run of this name, or `name` itself if it is a directory or s3://BUCKET/PREFIX.

    Raises:
        UserError: there is no such run and no such directory.
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
