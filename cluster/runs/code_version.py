"""The version of the running code: the commit, and whether files differ from it."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import multihop

COMMIT = "MULTIHOP_COMMIT"
"""Environment variable with the `CodeVersion.label` of code that was sent to a cluster without its git repository."""


@dataclass(frozen=True)
class CodeVersion:
    """The code of a checkout, or of an installation."""

    package: Path
    """The directory of the package `multihop`: site-packages/multihop, or src/multihop in a checkout."""
    commit: str | None
    """None outside a git checkout."""
    is_dirty: bool
    """Whether files differ from the commit, or are new."""

    @property
    def checkout(self) -> Path:
        """The root of the checkout, if it is one."""
        return self.package.parents[1]

    @property
    def label(self) -> str | None:
        """12 digits of the commit, with -dirty if files differ from it, as `git describe` writes it."""
        return None if self.commit is None else self.commit[:12] + ("-dirty" if self.is_dirty else "")


def code_version() -> CodeVersion:
    """Return the version of the running code."""
    package = Path(multihop.__file__).resolve().parent
    root = package.parents[1]
    commit = git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    if commit is None:
        return CodeVersion(package, None, False)
    return CodeVersion(package, commit.strip(), bool(git(root, "status", "--porcelain")))


def commit_label() -> str | None:
    """Return the label of the running code, or of the checkout that it was sent from."""
    return os.environ.get(COMMIT) or code_version().label


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of git, decoded as Python decodes file names; None if git fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return os.fsdecode(done.stdout) if done.returncode == 0 else None
