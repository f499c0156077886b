"""Removes secrets from texts before they are written to a run folder."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "(redacted)"
"""Replacement for a secret."""

SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_)(?:AUTH|PASS)(?:_|$)", re.IGNORECASE
)
"""Matches names of environment variables whose values are secret."""

_SECRET_KEY = re.compile(
    r"secret|passw(?:or)?d|passphrase|credential|(?:api|access|private|auth)_?key"
    r"|(?:^|_)(?:auth|pass|pwd)$|token$"
)
"""Matches names of config keys whose values are secret, in lower case."""

# Tokens of a vocabulary, which many configs of language models name.
_VOCABULARY = re.compile(r"(?:pad|mask|bos|eos|unk|cls|sep|end|start|class|max|num)_?token")

_HINTS = (
    *("://", "token", "secret", "passw", "key", "signature"),
    *("credential=", "accessid=", "sig=", "auth=", "pass=", "pwd="),
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "sk-", "akia", "xox"),
)
"""Every line in which one of the patterns below matches contains one of these, in any case."""

# An entry of a mapping in an override, `{name: wandb, api_key: 'abc'}`.
_ENTRY = re.compile(
    r"(?P<head>['\"]?(?P<key>[A-Za-z_][\w.-]*)['\"]?\s*:\s*)"
    r"(?P<value>'[^']*'|\"[^\"]*\"|[^\s,{}\[\]'\"][^,{}\[\]]*)"
)
# The lengths in the patterns are bounded: without bounds, a long line costs quadratic time.
_URL_CREDENTIALS = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@'\"]{1,200}@", re.IGNORECASE
)
# Also of signed URLs: `X-Amz-Credential`, `AWSAccessKeyId`, `GoogleAccessId`, Azure's `sig`. Their
# times as well: a URL that was signed again must not count as a changed config.
_SECRET_PARAMETER = (
    r"(?:[\w-]*(?:token|key|secret|password|signature|credential|accesskeyid|accessid)"
    r"|(?:x-amz|x-goog)-[\w-]*|sig|se|st|expires|policy|auth|pass|pwd)="
)
_QUERY_PARAMETER = re.compile(rf"(?P<name>[?&]{_SECRET_PARAMETER})[^\s&'\"]+", re.IGNORECASE)
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
        """Return the words of a command line without secrets, such as `HOOKS.x.api_key=...` and
        `HOOKS.x={api_key: ...}`; they can still be parsed."""
        return [self._redact_word(word) for word in words]

    def _redact_word(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if equals and value and is_secret_key(name.lstrip("+~")):
            return f"{name}='{REDACTED}'"
        if "{" in value:
            word = f"{name}={_ENTRY.sub(_redact_entry, value)}"
        return self.redact_text(word)

    def redact_config(self, value: Any, key: str = "") -> Any:
        """Return a config, or a value in it, without secrets; mappings and lists keep their form.

        Args:
            value: nested mappings and lists.
            key: the key of the value; its last name tells whether it is secret.
        """
        if isinstance(value, Mapping):
            return {name: self.redact_config(item, str(name)) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.redact_config(item, key) for item in value]
        if value is None or isinstance(value, bool) or value == "":
            return value
        if is_secret_key(key):
            return REDACTED
        if isinstance(value, str):
            return self.redact_text(value)
        return value


def has_secrets(config: Mapping[str, Any]) -> bool:
    """Return whether a config has a value that is redacted."""
    return REDACTED in str(Redaction({}).redact_config(config))


def restore_secrets(redacted: Any, original: Any) -> Any:
    """Return a redacted config with the values of another one in the place of those removed; values
    that the other one lacks stay redacted."""
    if isinstance(redacted, Mapping) and isinstance(original, Mapping):
        return {key: restore_secrets(item, original.get(key)) for key, item in redacted.items()}
    if isinstance(redacted, list) and isinstance(original, list) and len(redacted) == len(original):
        return [restore_secrets(*pair) for pair in zip(redacted, original, strict=True)]
    if isinstance(redacted, str) and REDACTED in redacted and original is not None:
        return original
    return redacted


def is_secret_key(path: str) -> bool:
    """Return whether the value of a config key is secret, by its last name."""
    last = path.rpartition(".")[2].lower()
    return _SECRET_KEY.search(last) is not None and _VOCABULARY.fullmatch(last) is None


def is_secret_parameter(word: str) -> bool:
    """Return whether a parameter of a URL, such as `token=abc`, is secret, by its name."""
    return re.match(_SECRET_PARAMETER, word, re.IGNORECASE) is not None


def _redact_entry(found: re.Match[str]) -> str:
    if is_secret_key(found["key"]) and found["value"].strip().lower() not in ("null", "''"):
        return f"{found['head']}'{REDACTED}'"
    return found[0]


def _redact_line(line: str) -> str:
    # Most lines have no hint, and the patterns are slow: a diff may have megabytes.
    lower = line.lower()
    if not any(hint in lower for hint in _HINTS):
        return line
    line = _URL_CREDENTIALS.sub(rf"\g<scheme>{REDACTED}@", line)
    line = _QUERY_PARAMETER.sub(rf"\g<name>{REDACTED}", line)
    line = _ASSIGNED.sub(rf"\g<name>{REDACTED}", line)
    return _KNOWN_TOKEN.sub(REDACTED, line)
