"""An MLflow store that the scenario of tracking copies."""

from tracked_runs import empty_store

__all__ = ["empty_store"]
