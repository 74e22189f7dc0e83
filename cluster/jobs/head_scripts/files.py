"""Files of a run in a folder or in an S3 bucket, where rows and logs are in parts."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SCHEME = "s3://"
_PARTS = {"metrics.jsonl": "journal/*.metrics.jsonl", "launches.jsonl": "journal/*.launches.jsonl"}


def matching(run: str, patterns: Sequence[str]) -> list[str]:
    """Names of the files that match one of the patterns, sorted."""
    if not run.startswith(_SCHEME):
        found = {path for pattern in patterns for path in Path(run).glob(pattern) if path.is_file()}
        return sorted(path.relative_to(run).as_posix() for path in found)
    names = _names(run)
    names += [whole for whole, parts in _PARTS.items() if fnmatch.filter(names, parts)]
    return sorted({name for name in names for pattern in patterns if matches(name, pattern)})


def read(run: str, name: str, offset: int = 0) -> bytes | None:
    """A file from a byte on; None: there is none."""
    if not run.startswith(_SCHEME):
        path = Path(run) / name
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read()
    names = _names(run)
    if name in names:
        return _object(run, name)[offset:]
    parts = [part for part in names if matches(part, _PARTS.get(name) or name.replace(".log", ".start-*.log"))]
    return b"".join(_object(run, part) for part in sorted(parts, key=_start))[offset:] if parts else None


def _start(part: str) -> tuple[int, str]:
    """Logs are numbered without leading zeros."""
    number = part.rpartition(".start-")[2].removesuffix(".log")
    return (int(number) if number.isdigit() else 0), part


def matches(name: str, pattern: str) -> bool:
    """Whether a file's name matches a glob pattern; `*` does not match a slash."""
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def _names(run: str) -> list[str]:
    bucket, _, prefix = run.removeprefix(_SCHEME).partition("/")
    pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    return [entry["Key"].removeprefix(f"{prefix}/") for page in pages for entry in page.get("Contents", [])]


def _object(run: str, name: str) -> bytes:
    bucket, _, prefix = run.removeprefix(_SCHEME).partition("/")
    body: bytes = _client().get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()
    return body


def _client() -> Any:
    try:
        import boto3
    except ImportError:
        raise SystemExit("the cluster's head has no boto3; pip install 'multihop[s3]' there") from None
    return boto3.client("s3")
