"""A run's examples, made as a Ray task where trials run, and shown."""

import json

from multihop.cluster.console import console
from multihop.cluster.ray.map import map_on_ray
from multihop.cluster.runs.evaluated import planned_examples
from multihop.cluster.runs.resolved import ResolvedRun
from multihop.cluster.runs.trials import trial_resources
from multihop.common.files import write_atomically
from multihop.common.redaction import shown
from multihop.eval.inference.examples import FILE, make_examples, read_examples
from multihop.eval.report.run_report import examples_facts
from multihop.eval.trials.evaluation_plan import read_plan


def make_left_examples(run: ResolvedRun) -> None:
    """Make and write the examples of the run that are left, on the Ray that the caller has started.

    Raises:
        UserError: as `make_examples`.
        WorkerDiedError: as `map_on_ray`.
    """
    examples, config = planned_examples(run), run.recipe.eval
    if examples is None or read_examples(run.results.parent, examples.key) is not None:
        return
    resources = trial_resources(config, here=run.home is not None)
    (made,) = map_on_ray(make_examples, [examples], lambda _: "the examples", resources)
    content = json.dumps(made, ensure_ascii=False, indent=1).encode() + b"\n"
    write_atomically(run.results.parent / FILE, content)


def print_examples(run: ResolvedRun) -> None:
    """Print what the model makes of each text before and after pretraining."""
    plan = read_plan(run.folder)
    made = read_examples(run.results.parent, plan.examples) if plan else None
    for text, before, after in examples_facts(made)["examples"]:
        console.print(shown(f"example   {text}\n  before  {before}\n  after   {after}"))
