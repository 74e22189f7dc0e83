"""Finds the largest micro-batch of a phase, in a process of its own, because the plan's process group and device are
not those of the rank that asks.

`python -m multihop.pretrain.plan.micro_batch_worker` reads a `Request` as JSON from its standard input, and writes a
line of JSON to its standard output: `samples`, 0 if not one fits, and `bytes` of their step; or `error`.
"""

import json
import logging
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

from multihop.common.errors import UserError
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.micro_batch import Request
from multihop.pretrain.plan.fit import RankPlan, Vocabularies, prepared_paths


def main() -> None:
    request: Request = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed
    logging.disable(logging.WARNING)
    output, source = request["vocabularies"]
    assert output is not None
    shards = request.get("shard_requests")
    plan = RankPlan(
        TrainingConfig.model_validate(request["recipe"]),
        request["phase"],
        request["world_size"],
        Vocabularies(output, source),
        request["device"],
        prepared_paths(request["prepared"]),
        Path(shards) if shards else None,
    )
    try:
        fit = plan.largest(request["limit_bytes"])
        answer: dict[str, object] = {"samples": fit.micro_batch_size, "bytes": plan.bytes_of(fit.trace)}
    except UserError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
