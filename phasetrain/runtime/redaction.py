"""Removes secrets from texts before they are written to a run folder."""

import re
from collections.abc import Mapping, Sequence

REDACTED = "(redacted)"
"""Replacement for a secret."""

SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""Matches names of environment variables whose values are secret."""

_HINTS = (
    *("://", "token", "secret", "passw", "key", "signature"),
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "sk-", "akia", "xox"),
)
"""Every line in which one of the patterns below matches contains one of these, in any case."""

_SECRET_OVERRIDE = re.compile(
    r"(?P<name>[\w.+]*(?:token|secret|password|passwd|api_?key|access_?key|secret_?key))=.+",
    re.IGNORECASE | re.DOTALL,
)
# The lengths in the patterns are bounded: without bounds, a long line costs quadratic time.
_URL_CREDENTIALS = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@'\"]{1,200}@", re.IGNORECASE
)
_QUERY_PARAMETER = re.compile(
    r"(?P<name>[?&][\w-]*(?:token|key|secret|password|signature)=)[^\s&'\"]+", re.IGNORECASE
)
# A quoted value with a digit: `key = "name_of_a_column"` in a source file is no secret.
_ASSIGNED = re.compile(
    r"(?P<name>(?:token|secret|password|passwd|api_?key|access_?key)[\w-]{0,20}['\"]?\s{0,4}"
    r"[:=]\s{0,4}['\"])(?=[^'\"\s]{0,200}\d)[^'\"\s]{12,200}(?=['\"])",
    re.IGNORECASE,
)
_KNOWN_TOKEN = re.compile(
    r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abp]-[\w-]{10,})"
)


class Redaction:
    """Removes credentials in URLs, tokens of known formats, and values of secret variables.

    Args:
        environment: its variables named TOKEN, KEY, SECRET, PASSWORD or CREDENTIAL contain the
            values to remove.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {
            value
            for name, value in environment.items()
            # A short value, such as `1`, would redact unrelated text.
            if SECRET_NAME.search(name) and len(value) >= 8
        }
        # Longest first, in case one contains another.
        self._values = tuple(sorted(values, key=len, reverse=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Redaction) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    def redact_text(self, text: str) -> str:
        """Return a text without secrets."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return "\n".join(_redact_line(line) for line in text.split("\n"))

    def redact_words(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command line without secrets, such as `HOOKS.x.api_key=...`."""
        redacted = []
        for word in words:
            match = _SECRET_OVERRIDE.fullmatch(word)
            if match:
                redacted.append(f"{match['name']}={REDACTED}")
            else:
                redacted.append(self.redact_text(word))
        return redacted


def _redact_line(line: str) -> str:
    # Most lines have no hint, and the patterns are slow: a diff may have megabytes.
    lower = line.lower()
    if not any(hint in lower for hint in _HINTS):
        return line
    line = _URL_CREDENTIALS.sub(rf"\g<scheme>{REDACTED}@", line)
    line = _QUERY_PARAMETER.sub(rf"\g<name>{REDACTED}", line)
    line = _ASSIGNED.sub(rf"\g<name>{REDACTED}", line)
    return _KNOWN_TOKEN.sub(REDACTED, line)
