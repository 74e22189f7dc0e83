"""An MLflow store that the tests of tracking copy, and a server with the services that a team has behind it."""

from tracked_runs import empty_store, run_dir
from tracking_server import tracking, tracking_server

__all__ = ["empty_store", "run_dir", "tracking", "tracking_server"]
