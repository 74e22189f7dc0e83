"""Environment variables that the driver sets for the ranks. Imports nothing, because Ray actors import it too."""

SECRET = "MULTIHOP_RENDEZVOUS_SECRET"
"""The secret by which the ranks of a launch recognize each other, in hex."""
SUPERVISED = "MULTIHOP_SUPERVISED"
"""Set if ranks that end are restarted, unless they report that a restart would fail too."""
MLFLOW_RUN_ID = "MULTIHOP_MLFLOW_RUN_ID"
"""MLflow's id of the run, which checkpoints record."""
TIMES = "MULTIHOP_TIMES"
"""JSON object with times of this launch, in seconds since 1970: `last_row`, the last row of metrics before it; `ended`,
when the end of the previous ranks was detected; `requested`, when these ranks were requested; `placed`, when all were
placed."""
REMOTE_RUN = "MULTIHOP_REMOTE_RUN"
"""Location of the run in an object store, s3://BUCKET/PREFIX/NAME; not set if the nodes share a folder."""
LAUNCH = "MULTIHOP_LAUNCH"
"""Number of this launch of the ranks, counted over all launches of a run in an object store."""
LAST_STEP = "MULTIHOP_LAST_STEP"
"""Step after which the ranks save and end as after the last one of the recipe; not set if they train to that one."""
