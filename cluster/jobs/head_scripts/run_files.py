"""Files of a run in a folder or in an S3 bucket, where rows and logs are in parts; the program that packs results."""

import base64
import fnmatch
import io
import os
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

RESULT_PREFIX = "multihop archive "
RESULTS = (
    "recipe.json",
    "summary.json",
    "metrics.jsonl",
    "report.html",
    "report.md",
    "*.png",
    "eval/plan.json",
    "eval/*.jsonl",
)
_LINE = 3 * 4096
_RETENTION_S = 120.0
"""Seconds for which the printed archive is kept in Ray's log file, so that the client can read it and reconnect."""
_SCHEME = "s3://"
_PARTS = {"metrics.jsonl": "journal/*.metrics.jsonl", "launches.jsonl": "journal/*.launches.jsonl"}


def match_files(run: str, patterns: Sequence[str]) -> list[str]:
    """Return the names of the files that match one of the patterns, sorted."""
    if not run.startswith(_SCHEME):
        paths = {path for pattern in patterns for path in Path(run).glob(pattern) if path.is_file()}
        return sorted(path.relative_to(run).as_posix() for path in paths)
    names = list(_sizes(run))
    names += [whole for whole, parts in _PARTS.items() if fnmatch.filter(names, parts)]
    return sorted({name for name in names for pattern in patterns if matches(name, pattern)})


def read(run: str, name: str, offset: int = 0) -> bytes | None:
    """Return the bytes of a file from `offset` on; None if it does not exist."""
    if not run.startswith(_SCHEME):
        path = Path(run) / name
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read()
    sizes = _sizes(run)
    pattern = _PARTS.get(name) or name.replace(".log", ".launch-*.log")
    parts = [name] if name in sizes else sorted((part for part in sizes if matches(part, pattern)), key=_launch)
    if not parts:
        return None
    content, start = [], offset
    for part in parts:
        if start < sizes[part]:
            content.append(_object(run, part)[start:])
        start = max(0, start - sizes[part])
    return b"".join(content)


def pack_results(run: str) -> None:
    """Print the results of a run, a gzipped tar of what a person reads and compares, as lines of base64.

    Args:
        run: the run's folder, or its s3:// URI.
    """
    names = match_files(run, RESULTS)
    if not names:
        sys.exit(f"{run} has no results yet")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            content = read(run, name) or b""
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    content = packed.getvalue()
    os.fchmod(sys.stdout.fileno(), 0o600)  # Ray writes what is printed to a file
    for start in range(0, len(content), _LINE):
        print(RESULT_PREFIX + base64.b64encode(content[start : start + _LINE]).decode())
    sys.stdout.flush()
    _truncate_later(sys.stdout.fileno())


def _truncate_later(output: int) -> None:
    """Fork a process that truncates the output file after `_RETENTION_S` seconds and exits."""
    if os.fork():
        return
    os.setsid()  # Ray kills this process group when the job ends
    time.sleep(_RETENTION_S)
    with suppress(OSError):  # the output is a pipe
        os.ftruncate(output, 0)
    os._exit(0)


def _launch(part: str) -> tuple[int, str]:
    """Return the sorting key of a part: logs are numbered without leading zeros."""
    number = part.rpartition(".launch-")[2].removesuffix(".log")
    return (int(number) if number.isdigit() else 0), part


def matches(name: str, pattern: str) -> bool:
    """Return whether a file's name matches a glob pattern; `*` does not match a slash."""
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def _sizes(run: str) -> dict[str, int]:
    """Return the number of bytes of each object of a run."""
    bucket, _, prefix = run.removeprefix(_SCHEME).partition("/")
    pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    entries = [entry for page in pages for entry in page.get("Contents", [])]
    return {entry["Key"].removeprefix(f"{prefix}/"): entry["Size"] for entry in entries}


def _object(run: str, name: str) -> bytes:
    bucket, _, prefix = run.removeprefix(_SCHEME).partition("/")
    body: bytes = _client().get_object(Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()
    return body


@cache
def _client() -> Any:
    try:
        import boto3
    except ImportError:
        raise SystemExit("the cluster's head has no boto3; pip install 'multihop[s3]' there") from None
    return boto3.client("s3")
