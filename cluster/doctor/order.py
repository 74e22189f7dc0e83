"""What is to be examined: written beside the code that is sent to a cluster, and read there."""

from dataclasses import asdict, dataclass, field
from typing import Any

from multihop.cluster.runs.recipe import Recipe


@dataclass(frozen=True)
class CheckRequest:
    """Of `multihop doctor`."""

    gpu: bool | None = False
    """Whether each node should have GPUs, which are examined too; None: where any node has some."""
    places: list[str] = field(default_factory=list)
    """Folders or s3:// locations that all nodes must write and read."""
    tracks: bool = False
    """Whether the head must reach MLflow."""
    tracking: str | None = None
    """MLflow's URI; None: MLFLOW_TRACKING_URI of the head, if set."""
    variables: list[str] = field(default_factory=list)
    """That each node must have in its environment."""
    ranks: int = 1
    """That the cluster must have room for."""
    runs: str | None = None
    """Folder of all runs; None: there is none, or they are in an object store."""
    recipe: dict[str, Any] | None = None
    """Of which a step is tried, if `runs` has its data."""

    def as_json(self) -> dict[str, Any]:
        """For `order_from`."""
        return asdict(self)


def order_of(recipe: Recipe | None, runs: str | None, gpu: bool | None) -> CheckRequest:
    """What a run of this recipe needs of the cluster; without a recipe, what any run does.

    Args:
        runs: folder of all runs on the cluster, or s3://BUCKET/PREFIX.
    """
    places = [runs] if runs else []
    if runs and runs.startswith("s3://"):
        runs = None
    if recipe is None:
        return CheckRequest(gpu=gpu, places=places, runs=runs)
    if recipe.checkpoint.location is not None:
        places.append(recipe.checkpoint.location)
    return CheckRequest(
        gpu=gpu,
        places=places,
        tracks=True,
        tracking=recipe.tracking.uri,
        variables=recipe.cluster.env,
        ranks=recipe.cluster.least_and_most[0],
        runs=runs,
        recipe=recipe.model_dump(mode="json"),
    )
