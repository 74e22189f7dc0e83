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

from multihop.common.errors import UserError
from multihop.data_prep.reading.errors import ChangedError, ReadFailed

_ATTEMPTS = 8
"""The most consecutive requests without a new byte."""
_MAX_WAIT_S = 20.0
_TIMEOUT_S = 60.0
_SLOW_AFTER_S = 900.0
"""Seconds before `_MIN_RATE` applies: longer than `_ATTEMPTS` timeouts of `_TIMEOUT_S`."""
_MIN_RATE = 10_000
"""The lowest average rate in bytes per second, after `_SLOW_AFTER_S`."""
_READ_BYTES = 2**20
_SIZE = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")
_GONE = (404, 410)
_FORBIDDEN = (401, 403)
_KINDS = {"etag": "ETag", "changed": "Last-Modified"}
_NO_HEAD = (403, 405, 501)
"""Statuses of a refused HEAD, where GET may still be allowed."""


@dataclass(frozen=True)
class Description:
    """Describes a file, as its server reports it."""

    size: int
    mtime_ns: int
    """Modification time in nanoseconds since 1970; 0: not reported."""
    version: str
    """The ETag, else the Last-Modified time; "": neither is reported."""
    ranges: bool
    """True if the server supports range requests."""


def is_http(location: str) -> bool:
    """Return whether it is an http:// or https:// URL."""
    return location.startswith(("http://", "https://"))


def describe(url: str) -> Description:
    """Ask for a file's properties.

    Raises:
        FileNotFoundError, PermissionError, ReadFailed: the file cannot be read.
        UserError: the server does not report the size.
    """
    try:
        response = _ask(url, "HEAD", {})
    except _HeadRefusedError:
        try:
            response = _ask(url, "GET", {"Range": "bytes=0-0"})
        except EOFError:
            return Description(0, 0, "", ranges=False)
    with response:
        size, changed, etag = (response.headers.get(name) for name in ("Content-Length", "Last-Modified", "ETag"))
        ranges = response.headers.get("Accept-Ranges", "") == "bytes"
        if response.status == 206:
            (_, size), ranges = _content_range(response), True
    if size is None or not _SIZE.fullmatch(size):
        raise UserError(f"{url}: the server does not report the file's size; download it and give its path")
    mtime_ns = 0
    if changed:
        with suppress(ValueError, OverflowError):
            mtime_ns = int(parsedate_to_datetime(changed).timestamp()) * 10**9
    version = f"etag {etag}" if etag else f"changed {changed}" if changed else ""
    return Description(int(size), mtime_ns, version, ranges)


class HttpFile:
    """Reads one connection in order; a jump or an interruption opens another at that byte.

    All responses must be of one version of the file, as far as the server reports versions (ETag, Last-Modified, size).
    """

    def __init__(self, url: str, identity: str = "") -> None:
        """Open the file.

        Args:
            identity: the file's identity from `identities.content_identity`; "" if it is unknown.

        Raises:
            FileNotFoundError, PermissionError, ReadFailed, ChangedError: As for `read_at`.
        """
        self._url = url
        self._at = 0
        """Offset of the connection's next byte."""
        self._response: HTTPResponse | None = None
        self._version = _parse_identity(identity)
        """ETag, Last-Modified and size, as far as they are known."""
        self._connect(0)

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Read up to `nbytes` bytes from `offset` on; fewer at the end of the file.

        Raises:
            FileNotFoundError, PermissionError, ReadFailed: the file cannot be read.
            ChangedError: the file has changed.
        """
        parts: list[bytes] = []
        at, end = offset, offset + nbytes
        attempt = received = 0
        began = time.monotonic()
        if offset != self._at:
            self.close()
        while at < end:
            try:
                if self._response is None:
                    self._connect(at)
                if self._response is None:
                    break
                # A single read of the socket: bytes that have arrived are not lost when the connection is cut.
                part = self._response.read1(min(_READ_BYTES, end - self._at))
                if not part and self._response.length:
                    raise ConnectionError("the connection was cut")
            except (FileNotFoundError, PermissionError, ReadFailed, ChangedError):
                raise
            except (OSError, HTTPException) as error:
                self.close()
                _wait(self._url, attempt, _reason(error))
                attempt += 1
                continue
            if not part:
                break
            wanted = part[max(0, at - self._at) :]  # a response may begin before the requested byte
            self._at += len(part)
            received += len(part)
            if wanted:
                parts.append(wanted)
                at, attempt = self._at, 0
            if time.monotonic() - began > _SLOW_AFTER_S + received / _MIN_RATE:
                raise ReadFailed(
                    f"{self._url} sends less than {_MIN_RATE:,} bytes a second; download it and give its path"
                )
        return b"".join(parts)

    def close(self) -> None:
        """Close the connection."""
        if self._response is not None:
            self._response.close()
        self._response = None

    def _connect(self, offset: int) -> None:
        self.close()
        headers = {}
        if offset:
            headers["Range"] = f"bytes={offset}-"
            etag = self._version.get("ETag", "")
            validator = etag if etag.startswith('"') else self._version.get("Last-Modified")  # RFC 9110, 13.1.5
            if validator:
                headers["If-Range"] = validator
        try:
            response = _ask(self._url, "GET", headers)
        except EOFError:
            return
        try:
            length = response.headers["Content-Length"]
            start, size = _content_range(response) if response.status == 206 else (0, length)
            if start is None and length == str(int(self._version.get("size", 0)) - offset):
                start = offset  # no Content-Range, but the length is that of the rest
            if start is None or start > offset:
                raise ReadFailed(
                    f"{self._url}: the server was asked for the bytes from {offset:,} on, and sent "
                    f"{'others' if start is None else f'those from {start:,} on'}; download it and give its path"
                )
            reported = {
                "ETag": response.headers["ETag"],
                "Last-Modified": response.headers["Last-Modified"],
                "size": size if _SIZE.fullmatch(size or "") else None,
            }
            for name, value in reported.items():
                if value is not None and _strong(value) != _strong(self._version.setdefault(name, value)):
                    raise ChangedError(f"{self._url} changed while being read")
        except OSError:
            response.close()
            raise
        self._response, self._at = response, start


def _ask(url: str, method: str, headers: dict[str, str]) -> HTTPResponse:
    """Return the server's response, with retries while it is busy or unreachable.

    Raises:
        EOFError: the range is beyond the end.
        _HeadRefusedError: the server refuses HEAD requests.
    """
    request = urllib.request.Request(url, method=method, headers={"Accept-Encoding": "identity", **headers})
    if (credentials := _credentials(url)) is not None:
        request.add_unredirected_header("Authorization", credentials)
    opener = urllib.request.build_opener(_RedirectHandler)
    for attempt in range(_ATTEMPTS):
        try:
            response: HTTPResponse = opener.open(request, timeout=_TIMEOUT_S)
            return response
        except urllib.error.HTTPError as error:
            error.close()
            if method == "HEAD" and error.code in _NO_HEAD:
                raise _HeadRefusedError from None
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


def _parse_identity(identity: str) -> dict[str, str]:
    """Return the headers and the size in an identity, see `Description.version`; empty for a hash of the content."""
    kind, _, rest = identity.partition(" ")
    value, _, size = rest.rpartition(" ")
    return {_KINDS[kind]: value, "size": size} if kind in _KINDS else {}


def _strong(etag: str) -> str:
    """Return an ETag without its weakness marker, which may differ between responses."""
    return etag.removeprefix("W/")


def _content_range(response: HTTPResponse) -> tuple[int | None, str | None]:
    """Return the offset of the first byte in a response of status 206, and the file's size; None where they are
    missing."""
    match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        return None, None
    return int(match[1]), None if match[2] == "*" else match[2]


class _HeadRefusedError(Exception):
    """Reports that the server refuses HEAD requests."""


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects without sending credentials to another host or port, or from https to http."""

    def redirect_request(self, req: urllib.request.Request, *args: Any) -> urllib.request.Request | None:
        following = super().redirect_request(req, *args)
        credentials = req.unredirected_hdrs.get("Authorization")
        if following is not None and credentials is not None:
            before, after = urlsplit(req.full_url), urlsplit(following.full_url)
            if (before.scheme, before.netloc) == (after.scheme, after.netloc):
                following.add_unredirected_header("Authorization", credentials)
        return following


def _credentials(url: str) -> str | None:
    """Return the Authorization header for the URL's host; None: there are no credentials for it.

    Raises UserError, which quotes nothing of the file, when the file cannot be used.
    """
    named = os.environ.get("NETRC") or None
    try:
        entries = netrc.netrc(named).hosts
    except (FileNotFoundError, NotADirectoryError):
        if named is None:
            return None
        raise UserError(f"NETRC={named} does not exist; correct it") from None
    except netrc.NetrcParseError as error:
        wrong = f"line {error.lineno} is malformed" if error.lineno else "other users may read it"
        raise UserError(f"{named or '~/.netrc'} cannot be used: {wrong}; correct it (chmod 600)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{named or '~/.netrc'} cannot be read ({type(error).__name__}); correct it") from None
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
    time.sleep(min(_MAX_WAIT_S, 0.5 * 2**attempt))
