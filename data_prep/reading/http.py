"""Positional reads of http:// and https:// files, with retries, also from servers without range requests.

fsspec's file system is not used: it reports every failure as a missing file, does not retry, and cannot resume a file
whose server has no range requests (version 2026.9).

User and password come from the file that NETRC names, else ~/.netrc, by host name; the `default` entry is not used,
since a recipe from somebody else may name any host.
"""

import base64
import netrc
import os
import re
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from data_prep.reading.failures import ReadFailed

_ATTEMPTS = 8
_LONGEST_WAIT_S = 20.0
_SILENCE_S = 60.0
_SKIP = 2**20
_SIZE = re.compile(r"[0-9]{1,18}")
_GONE = (404, 410)
_FORBIDDEN = (401, 403)


@dataclass(frozen=True)
class Description:
    """A file's properties, as reported by its server."""

    size: int
    mtime_ns: int
    """0: not reported."""
    version: str
    """The ETag, else the Last-Modified time; "": neither is reported."""
    ranges: bool
    """Whether the server supports range requests."""


def is_http(location: str) -> bool:
    """Whether it is an http:// or https:// URL."""
    return location.startswith(("http://", "https://"))


def describe(url: str) -> Description:
    """Ask for a file's properties.

    Raises FileNotFoundError, PermissionError, ReadFailed, and ValueError when the server does not report the size.
    """
    with _ask(url, "HEAD", {}) as answer:
        size, changed = answer.headers.get("Content-Length"), answer.headers.get("Last-Modified")
        etag, ranges = answer.headers.get("ETag"), answer.headers.get("Accept-Ranges", "") == "bytes"
    if size is None or not _SIZE.fullmatch(size):
        raise ValueError(f"{url}: the server does not report the file's size; download it and give its path")
    mtime_ns = 0
    if changed:
        with suppress(ValueError, OverflowError):
            mtime_ns = int(parsedate_to_datetime(changed).timestamp()) * 10**9
    version = f"etag {etag}" if etag else f"changed {changed}" if changed else ""
    return Description(int(size), mtime_ns, version, ranges)


class HttpFile:
    """Reads one connection in order; a jump or an interruption opens another at that byte."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        self._answer: HTTPResponse | None = None
        self._connect(0)

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Up to `nbytes` bytes from `offset` on; fewer at the end of the file.

        Raises FileNotFoundError, PermissionError, ReadFailed.
        """
        for attempt in range(_ATTEMPTS):
            try:
                if self._answer is None or offset != self._at:
                    self._connect(offset)
                if self._answer is None:
                    return b""
                data = self._answer.read(nbytes)
                left = self._answer.length
                if len(data) < nbytes and left:  # the connection ended before the file did
                    raise ConnectionError("the connection was cut")
            except (FileNotFoundError, PermissionError, ReadFailed):
                raise
            except (OSError, HTTPException) as error:
                self.close()
                _wait(self._url, attempt, _reason(error))
                continue
            self._at += len(data)
            return data
        raise AssertionError("the last wait raises")

    def close(self) -> None:
        """Close the connection."""
        if self._answer is not None:
            self._answer.close()
        self._answer = None

    def _connect(self, offset: int) -> None:
        self.close()
        try:
            self._answer = _ask(self._url, "GET", {"Range": f"bytes={offset}-"} if offset else {})
        except EOFError:
            return
        self._at = offset
        if offset and self._answer.status != 206:
            # This server has no range requests: receive what comes before and drop it.
            left = offset
            while left and (skipped := len(self._answer.read(min(left, _SKIP)))):
                left -= skipped


def _ask(url: str, method: str, headers: dict[str, str]) -> HTTPResponse:
    """The server's response, with retries while it is busy or away. Raises EOFError for a range beyond the end."""
    request = urllib.request.Request(url, method=method, headers={"Accept-Encoding": "identity", **headers})
    if (credentials := _credentials(url)) is not None:
        request.add_unredirected_header("Authorization", credentials)
    opener = urllib.request.build_opener(_SameHostKeepsCredentials)
    for attempt in range(_ATTEMPTS):
        try:
            answer: HTTPResponse = opener.open(request, timeout=_SILENCE_S)
            return answer
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _GONE:
                raise FileNotFoundError(2, f"HTTP status {error.code}", url) from None
            if error.code in _FORBIDDEN:
                raise PermissionError(13, f"HTTP status {error.code}", url) from None
            if error.code == 416:
                raise EOFError from None
            if error.code < 500 and error.code not in (408, 429):
                raise ReadFailed(f"{url} cannot be read (HTTP status {error.code}); correct the URL") from None
            _wait(url, attempt, f"HTTP status {error.code}")
        except (OSError, HTTPException) as error:
            _wait(url, attempt, _reason(error))
    raise AssertionError("the last wait raises")


class _SameHostKeepsCredentials(urllib.request.HTTPRedirectHandler):
    """Does not send credentials to another host or port, nor from https to http."""

    def redirect_request(self, req: urllib.request.Request, *args: Any) -> urllib.request.Request | None:
        following = super().redirect_request(req, *args)
        credentials = req.unredirected_hdrs.get("Authorization")
        if following is not None and credentials is not None:
            before, after = urlsplit(req.full_url), urlsplit(following.full_url)
            if (before.scheme, before.netloc) == (after.scheme, after.netloc):
                following.add_unredirected_header("Authorization", credentials)
        return following


def _credentials(url: str) -> str | None:
    """The Authorization header for the URL's host; None: there are no credentials for it.

    Raises ValueError, which quotes nothing of the file, when the file cannot be used.
    """
    named = os.environ.get("NETRC") or None
    try:
        entries = netrc.netrc(named).hosts
    except (FileNotFoundError, NotADirectoryError):
        if named is None:
            return None
        raise ValueError(f"NETRC={named} does not exist; correct it") from None
    except netrc.NetrcParseError as error:
        wrong = f"line {error.lineno} is malformed" if error.lineno else "other users may read it"
        raise ValueError(f"{named or '~/.netrc'} cannot be used: {wrong}; correct it (chmod 600)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{named or '~/.netrc'} cannot be read ({type(error).__name__}); correct it") from None
    entries.pop("default", None)
    login, _, password = entries.get(urlsplit(url).hostname or "", ("", "", ""))
    known = login or password
    return "Basic " + base64.b64encode(f"{login}:{password}".encode()).decode() if known else None


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None) or error
    return getattr(inner, "strerror", None) or str(inner) or type(inner).__name__


def _wait(url: str, attempt: int, reason: str) -> None:
    if attempt == _ATTEMPTS - 1:
        raise ReadFailed(f"{url} cannot be read ({reason}); check the network and start again")
    time.sleep(min(_LONGEST_WAIT_S, 0.5 * 2**attempt))
