"""Makes text from elsewhere (a recipe, a file name, an error, the environment) safe to display and store."""

import re
from urllib.parse import unquote

_URL = re.compile(r"[A-Za-z][\w+.-]{0,30}:/{1,2}\S*")  # of two slashes, pathlib leaves one
# Up to the last @ of the authority; or, for a password with a slash in it, up to the last @ nearby.
_USER = re.compile(r"([A-Za-z][\w+.-]{0,30})(:/{1,2})([^/?#\s]*|[^:/\s]*:(?!\d*/)\S{0,200})@")
_PARAMETER = re.compile(r"([?&;#])([\w.~%$+-]{1,80})=([^&;#\s\"']*)")
_SECRET = re.compile(
    r"x-(amz|goog|ms)-.*|awsaccesskeyid|googleaccessid|odbc_connect"
    r"|.*(token|secret|passw(or)?d|signature|api_?key|access_?key|credentials?)"
    r"|(.*[-_.])?(sig|key|pass|pwd|auth|authorization|sas|jwt)",
    re.IGNORECASE,
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_HIDDEN = "***"


def redacted(text: str) -> str:
    """Return `text` with the passwords, keys and tokens of its URLs replaced by ***.

    Replaces what precedes an @ (except a user name alone, unless the URL is of HTTP or a bucket), and the values of
    parameters with names of secrets, signatures included.
    """
    return _URL.sub(lambda url: _PARAMETER.sub(_without_value, _USER.sub(_without_user, url[0])), text)


def safe_text(text: str) -> str:
    """Return `text` redacted, with Python's escapes for characters that control a terminal or the text direction."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), redacted(text))


def _without_user(match: re.Match[str]) -> str:
    scheme, slashes, user = match.groups()
    if ":" not in user and scheme.lower() not in ("http", "https", "s3", "gs", "gcs"):
        return match[0]
    return f"{scheme}{slashes}{_HIDDEN}@"


def _without_value(match: re.Match[str]) -> str:
    is_secret = match[3] and _SECRET.fullmatch(unquote(match[2]))
    return f"{match[1]}{match[2]}={_HIDDEN}" if is_secret else match[0]
