"""Paths that are URLs, as texts: scheme, digest and secrets."""

import os
import re

from phasetrain.errors import ConfigError
from phasetrain.runtime.redaction import Redaction, is_secret_parameter

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_DIGEST = re.compile(r"#sha256=(?P<digest>[0-9a-fA-F]{64})$")
_DIGEST_LIKE = re.compile(r"#(?:sha\w*|md5)\b", re.IGNORECASE)
_SIGNATURE = re.compile(r"(?:sig|signature|x-amz-signature|x-goog-signature)=", re.IGNORECASE)
_SIGNING = re.compile(
    r"(?:x-amz-|x-goog-)[\w-]*=|(?:expires|policy|key-pair-id|s[vtepr]|spr|sk\w{1,3})=",
    re.IGNORECASE,
)
"""Parameters that differ from one signature to the next (S3, Google, CloudFront, Azure)."""
_BRACES = re.compile(r"\{(?:(?P<first>\d+)\.\.(?P<last>\d+)|(?P<words>[^{},]*(?:,[^{},]*)+))\}")
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return _URL.match(path) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case, such as `s3`; empty for a path of this machine."""
    match = _URL.match(url)
    if match is None:
        return ""
    return match["scheme"].lower()


def strip_file_scheme(path: str) -> str:
    """Return `/data/a` for `file:///data/a`, and any other path as it is."""
    if scheme_of(path) != "file":
        return path
    return path.partition("://")[2].removeprefix("localhost")


def split_digest(url: str) -> tuple[str, str]:
    """Return a URL without `#sha256=...` at its end, and that digest in lower case or an empty
    text.

    Raises:
        ConfigError: it ends in something like a digest that is none (code `remote.bad_digest`).
    """
    match = _DIGEST.search(url)
    if match is not None:
        return url[: match.start()], match["digest"].lower()
    # Ignored, it would leave the content unverified without a word.
    if wrong := _DIGEST_LIKE.search(url):
        raise ConfigError(
            f"{redact_url(url[: wrong.start()])}: its digest is {url[wrong.start() :]!r}; expected "
            "#sha256= and 64 hexadecimal digits, as printed by sha256sum",
            code="remote.bad_digest",
        )
    return url, ""


def strip_secrets(url: str) -> str:
    """Return a URL without credentials, secret parameters and digest: the same one for each
    signature of a signed URL."""
    url, _, query = _CREDENTIALS.sub("", _DIGEST.sub("", url)).partition("?")
    # Elsewhere a `?` belongs to the name of the object.
    if scheme_of(url) not in ("http", "https"):
        return f"{url}?{query}" if query else url
    words = query.split("&") if query else []
    is_signed = any(_SIGNATURE.match(word) for word in words)
    kept = [
        word
        for word in words
        if not (is_secret_parameter(word) or (is_signed and _SIGNING.match(word)))
    ]
    return "?".join([url, "&".join(kept)] if kept else [url])


def redact_url(text: str) -> str:
    """Return a URL, or a text that contains one, without secrets."""
    return Redaction(os.environ).redact_text(text)


def expand_braces(pattern: str) -> list[str]:
    """Return the texts to which `{a,b}` and `{000..099}` in a pattern expand, as in a shell."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    if match["first"] is not None:
        first, last = int(match["first"]), int(match["last"])
        width = len(match["first"]) if match["first"].startswith("0") else 0
        step = 1 if last >= first else -1
        words = [f"{number:0{width}d}" for number in range(first, last + step, step)]
    else:
        words = match["words"].split(",")
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [text for word in words for text in expand_braces(f"{head}{word}{tail}")]
