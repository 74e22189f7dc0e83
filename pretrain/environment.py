"""Environment variables from the launcher to the ranks. Imports nothing, because Ray actors read it too."""

SECRET = "MULTIHOP_RENDEZVOUS_SECRET"
"""The secret by which the ranks of a start recognize each other, in hex."""
SUPERVISED = "MULTIHOP_SUPERVISED"
"""Set where ranks that end are restarted, unless they say that a restart is useless."""
MLFLOW_RUN_ID = "MULTIHOP_MLFLOW_RUN_ID"
"""MLflow's id of the run, which checkpoints record."""
TIMES = "MULTIHOP_TIMES"
"""JSON object with times of this start, in seconds since 1970: `last_row`, the last row of metrics before it; `ended`,
when the end of the previous ranks was noticed; `requested`, when these ranks were requested; `placed`, when all of them
were placed."""
HOME = "MULTIHOP_HOME"
"""Location of the run in an object store, where its nodes have no folder in common; not set where they have."""
START = "MULTIHOP_START"
"""Number of this start of the ranks, counted over all starts of a run that has a home in an object store."""
