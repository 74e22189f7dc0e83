"""What is hidden of a text before it is shown, and that the rest of it stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.redaction import redacted, safe_text

WORDS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Z", "C"]), max_size=12)
PASSWORDS = st.text("hunter2-._~%:!$", min_size=1, max_size=12).map(lambda text: f"XX{text}XX")


@given(WORDS, PASSWORDS, WORDS, st.sampled_from(["http", "https", "s3", "postgresql+psycopg2", "ray", "ftp"]))
def test_no_password_of_a_url_is_left(before: str, password: str, after: str, scheme: str) -> None:
    url = f"{scheme}://user:{password}@host/{after}"
    for text in (url, f"{before} {url} {after}", f"({url})", f"{before}{url}"):
        assert password not in redacted(text) and "host" in redacted(text)


@pytest.mark.parametrize(
    "name", ["sig", "X-Amz-Signature", "X-Goog-Credential", "access_token", "key", "api_key", "apiKey", "password"]
)
def test_no_secret_parameter_is_left(name: str) -> None:
    url = f"https://host/a?page=2&{name}=hunter2&b=3"
    assert redacted(url) == f"https://host/a?page=2&{name}=***&b=3"


@pytest.mark.parametrize(
    "text",
    [
        "texts/a@b.txt",
        "http://host/a@b",
        "http://host:80/a@b",
        "sftp://me@host/x",
        "https://h/?page=2&design=x",
        "a@b.c",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == safe_text(text) == text


def test_what_steers_a_terminal_is_spelled_out() -> None:
    assert safe_text("a\x1b]0;x\x07\r\u202e\udce9\x9b é\tb\n") == "a\\x1b]0;x\\x07\\r\\u202e\\udce9\\x9b é\tb\n"
