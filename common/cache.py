"""This node's cache: `$XDG_CACHE_HOME/multihop` or `~/.cache/multihop`. What lies there may be deleted at any time that
nothing runs."""

import os
from pathlib import Path


def cache_folder(*parts: str) -> Path:
    """A folder of the cache, which may not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("multihop", *parts)
