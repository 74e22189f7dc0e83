"""The commands `submit`, `jobs`, `attach`, `logs`, `stop` and `fetch`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from multihop.cluster.cli.options import Allow, AsJson, Dashboard, JobName, Overrides, RecipePath

job_commands = typer.Typer()
_LOCAL = "http://127.0.0.1:8265"


@job_commands.command()
def submit(
    recipe: RecipePath,
    runs: Annotated[
        str, typer.Option(help="Directory of all runs, at the same path on all nodes, or s3://BUCKET/PREFIX.")
    ],
    overrides: Overrides = None,
    address: Dashboard = _LOCAL,
    stage: Annotated[Literal["prep", "train", "eval"] | None, typer.Option(help="Default: all stages.")] = None,
    allow_change: Allow = None,
    check: Annotated[
        bool, typer.Option("--check", help="Examine the cluster first, and submit nothing if something is wrong.")
    ] = False,
) -> None:
    """Run a recipe on a Ray cluster and follow it. The same again attaches to the job, or resumes the run."""
    from multihop.cluster.cli.doctor import is_fit
    from multihop.cluster.cli.jobs import submit_and_follow
    from multihop.cluster.jobs.paths import load_for_cluster
    from multihop.cluster.jobs.submit import JobRequest
    from multihop.common.errors import FAILED

    loaded = load_for_cluster(recipe, overrides or [], runs)
    order = JobRequest(loaded, stage, runs.rstrip("/"), allow_change or ())
    if check and not is_fit(address, order.recipe, order.runs):
        raise typer.Exit(FAILED)
    raise typer.Exit(submit_and_follow(address, order))


@job_commands.command()
def jobs(address: Dashboard = _LOCAL) -> None:
    """List the jobs of a cluster."""
    from multihop.cluster.cli.jobs import show_jobs

    show_jobs(address)


@job_commands.command()
def attach(name: JobName, address: Dashboard = _LOCAL) -> None:
    """Follow the job of a run from its first line."""
    from multihop.cluster.cli.jobs import attach_to

    raise typer.Exit(attach_to(address, name))


@job_commands.command()
def logs(
    name: JobName,
    address: Dashboard = _LOCAL,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow it until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="The log of this rank.")] = None,
) -> None:
    """Print the output of a run's job."""
    from multihop.cluster.cli.jobs import show_log

    raise typer.Exit(show_log(address, name, follow, rank))


@job_commands.command()
def stop(
    name: JobName,
    address: Dashboard = _LOCAL,
    now: Annotated[bool, typer.Option("--now", help="Kill it without saving a checkpoint.")] = False,
) -> None:
    """Have a run save a checkpoint and stop."""
    from multihop.cluster.cli.jobs import stop_job

    raise typer.Exit(stop_job(address, name, now))


@job_commands.command()
def fetch(
    name: JobName,
    address: Dashboard = _LOCAL,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to put the folder NAME.")] = Path("fetched"),
) -> None:
    """Copy a run's report and results to this machine."""
    from multihop.cluster.cli.jobs import fetch_results

    fetch_results(address, name, out)


@job_commands.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Examine also what this recipe needs.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_API_SERVER_ADDRESS", metavar="URL", help="Dashboard of the head. Default: this machine."
        ),
    ] = None,
    runs: Annotated[str | None, typer.Option(help="Directory of all runs: written and read by all nodes.")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Examine GPUs; a node without one is a finding.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with a cluster before a big job. Exit code 1: something is."""
    from multihop.cluster.cli.doctor import examine_and_show
    from multihop.cluster.jobs.paths import load_for_cluster
    from multihop.cluster.runs.recipe import load_recipe

    if recipe is None:
        loaded = None
    elif address is None:
        loaded = load_recipe(recipe, overrides or [])
    else:
        loaded = load_for_cluster(recipe, overrides or [], runs)
    raise typer.Exit(examine_and_show(address, loaded, runs, gpu, as_json))
