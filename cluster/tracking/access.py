"""Whether an MLflow server takes the user's credentials."""

from multihop.cluster.tracking.store import connect
from multihop.cluster.tracking.timeout import call_with_timeout
from multihop.common.errors import UserError
from multihop.common.redaction import redacted

_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"


def check_access(uri: str) -> None:
    """Ask a server for its experiments, before anything that takes long.

    Raises:
        UserError: it refuses the user. A server that is unreachable is no error, and databases are not asked.
    """
    if not uri.startswith(("http://", "https://")):
        return
    client = connect(uri)
    try:
        call_with_timeout(lambda: client.search_experiments(max_results=1))
    except Exception as error:  # what else fails is no reason to refuse a run
        if reason := refusal(error):
            raise UserError(f"{redacted(uri)} {reason}") from None


def refusal(error: Exception) -> str:
    """The rest of a sentence about a store that refuses the user; empty if `error` says something else."""
    code = getattr(error, "error_code", "")
    if code == "UNAUTHENTICATED":
        return f"refuses the user name and password; set {_CREDENTIALS} to a user of that server"
    if code == "PERMISSION_DENIED":
        return (
            f"does not let this user write; ask its administrator for the permission EDIT on the experiment, set "
            f"tracking.experiment to one of your own, or set {_CREDENTIALS} to another user"
        )
    if "password authentication failed" in str(error):
        return "refuses the database's password; set PGPASSWORD, ~/.pgpass or MLFLOW_TRACKING_URI"
    return ""
