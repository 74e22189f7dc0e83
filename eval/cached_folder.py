"""Folders that are made once on a machine and mapped by all its trials. They are in its cache."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from common.cache import cache_folder
from common.files import sha256_json, sync


def cached_folder(identity: object, make: Callable[[Path], None]) -> Path:
    """The folder of an identity, made if it is not there.

    It is made under another name, synced and renamed: a folder that is there is whole.

    Args:
        identity: everything that decides the content, as JSON values.
        make: writes the files into an empty folder.
    """
    folder = cache_folder("inputs", sha256_json(identity))
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex}")
    temporary.mkdir(parents=True, mode=0o700)
    try:
        make(temporary)
        for path in temporary.rglob("*"):
            sync(path)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not folder.is_dir():  # else another trial was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
