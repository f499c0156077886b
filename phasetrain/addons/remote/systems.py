"""fsspec's file systems by URL, with retries and errors with advice."""

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from phasetrain.errors import ConfigError, PhasetrainError, did_you_mean
from phasetrain.runtime.storage.elsewhere import RemoteError, RemoteStat
from phasetrain.runtime.storage.urls import redact_url, scheme_of, split_digest

Result = TypeVar("Result")

EXTRAS = {
    "http": "remote",
    "https": "remote",
    "memory": "remote",
    "s3": "s3",
    "s3a": "s3",
}
"""The extra of phasetrain that installs what a scheme needs; others need a package of their own."""

FIRST_DELAY_SECONDS = 0.5
"""Pause before the second try; it doubles with each further one."""

LONGEST_DELAY_SECONDS = 30.0

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of the disk of this machine, which another try does not mend."""

IDENTITIES = (
    *("ETag", "etag", "generation", "md5Hash", "Last-Modified", "LastModified", "last_modified"),
    *("created", "mtime"),
)
"""Entries of fsspec's `info` that change with the content, the most reliable first."""


def stall_seconds() -> float:
    """Return how long a connection may be silent: PHASETRAIN_STALL_SECONDS, or 60."""
    return read_number("PHASETRAIN_STALL_SECONDS", 60.0)


def read_number(name: str, default: float) -> float:
    """Return the value of an environment variable.

    Raises:
        ConfigError: it is not a positive number (code `remote.setting`).
    """
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value > 0:
        return value
    raise ConfigError(f"{name} = {text!r}: expected a positive number", code="remote.setting")


def open_system(url: str) -> Any:
    """Return fsspec's file system for a URL, the same one for all URLs of a host in a process.

    Raises:
        ConfigError: see `find_system`.
    """
    scheme = scheme_of(url)
    # Host and user, of schemes whose systems are of one host.
    options = find_system(scheme)._get_kwargs_from_urls(url)
    # The process is part of the key: connections must not be shared with a forked parent.
    return _open_once(scheme, tuple(sorted(options.items())), os.getpid(), stall_seconds())


def find_system(scheme: str) -> Any:
    """Return fsspec's class for a scheme, without connecting.

    Raises:
        ConfigError: the scheme is unknown (code `remote.unknown_scheme`), or a package is missing
            (code `remote.missing_package`); the message names the package to install.
    """
    # Imported late: `import phasetrain` must stay light, and most runs read local files only.
    import fsspec

    protocols = fsspec.available_protocols()
    if scheme not in protocols:
        raise ConfigError(
            f"{scheme}://: no file system has this scheme{did_you_mean(scheme, protocols) or ';'} "
            "expected http, https, s3, memory, file, or another scheme of fsspec",
            code="remote.unknown_scheme",
        )
    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = str(error)
        if extra is not None:
            remedy = f'install it with pip install "phasetrain[{extra}]"'
        raise ConfigError(
            f"{scheme}://: a package for this scheme is missing ({error}); {remedy}",
            code="remote.missing_package",
        ) from error


@lru_cache(maxsize=32)
def _open_once(
    scheme: str, options: tuple[tuple[str, Any], ...], process: int, stall: float
) -> Any:
    keywords = _list_options(scheme, stall) | dict(options)
    return find_system(scheme)(skip_instance_cache=True, **keywords)


def _list_options(scheme: str, stall: float) -> dict[str, Any]:
    """Return the options of a file system that make a silent connection an error."""
    if scheme in ("http", "https"):
        import aiohttp

        # No limit in total: a large file may take hours as long as bytes arrive.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=stall, sock_read=stall)
        # A compressed answer has another length than the file.
        headers = {"Accept-Encoding": "identity"}
        return {"client_kwargs": {"timeout": timeout, "headers": headers}}
    if scheme in ("s3", "s3a"):
        timeouts = {"connect_timeout": stall, "read_timeout": stall}
        # A listing from a cache would hide objects that another process has written.
        return {"config_kwargs": timeouts, "use_listings_cache": False}
    return {}


def stat_url(url: str) -> RemoteStat:
    """Ask the server about a file.

    Raises:
        ConfigError: it does not exist or must not be read.
        RemoteError: the server cannot be reached.
    """
    info = retry(url, lambda: open_system(url).info(url))
    identity = next((f"{key} {info[key]}" for key in IDENTITIES if info.get(key)), "")
    size = info.get("size")
    # Without an identity, parts of two versions could be put together.
    ranges = size is not None and bool(identity) and info.get("partial", True) is not False
    return RemoteStat(size, identity, ranges)


def list_urls(pattern: str) -> list[str]:
    """Return the URLs that match a pattern with `*`, `?`, `[...]` or `**`, sorted; a URL without
    one is returned as it is.

    Raises:
        ConfigError: files of this scheme cannot be listed (code `remote.no_listing`).
        RemoteError: the server cannot be reached.
    """
    address, digest = split_digest(pattern)
    if scheme_of(pattern) in ("http", "https"):
        # There a `?` begins the query.
        if "*" not in address:
            return [pattern]
        raise ConfigError(
            f"{redact_url(pattern)}: a web server lists no files; name them, as in "
            "{000..099}.tar",
            code="remote.no_listing",
        )
    if digest or not re.search(r"[*?\[]", address):
        return [pattern]
    system = open_system(address)
    names = retry(address, lambda: system.glob(address))
    return sorted(str(system.unstrip_protocol(name)) for name in names)


def retry(url: str, call: Callable[[], Result]) -> Result:
    """Call until it succeeds, with growing pauses after errors that may pass: 429, 5xx, timeouts,
    lost connections and truncated answers.

    Args:
        url: for the error.
        call: repeatable.

    Raises:
        ConfigError: the file does not exist (code `remote.not_found`), or must not be read or
            written (code `remote.forbidden`).
        RemoteError: the last of PHASETRAIN_REMOTE_TRIES tries has failed (code
            `remote.unreachable`, `remote.truncated` or `remote.stalled`).
    """
    tries = round(read_number("PHASETRAIN_REMOTE_TRIES", 6))
    began = time.monotonic()
    number = 0
    while True:
        number += 1
        try:
            return call()
        except (PhasetrainError, MemoryError):
            raise
        except Exception as error:  # the clients of fsspec raise errors of their own libraries
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            failure = classify(error)
            if not failure.passes or number >= tries:
                seconds = time.monotonic() - began
                raise failure.describe(url, number, seconds, error) from error
            pause = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** (number - 1))
            # Not from the global generators: a retry must not change what a run draws.
            pause *= random.Random().uniform(0.5, 1.0)
            time.sleep(max(pause, failure.wait))


class TruncatedError(Exception):
    """An answer has fewer bytes than were asked for."""


@dataclass(frozen=True)
class Failure:
    """The meaning of an error of a transfer.

    Attributes:
        code: stable code of the error.
        reason: in a few words.
        passes: whether another try may succeed.
        wait: seconds that the server asks to wait.
    """

    code: str
    reason: str
    passes: bool
    wait: float = 0.0

    def describe(self, url: str, tries: int, seconds: float, error: Exception) -> PhasetrainError:
        """Return the error for the user."""
        address = redact_url(url)
        text = str(error)
        details = ""
        # fsspec raises FileNotFoundError with nothing but the URL or its path.
        if not text or not url.endswith(text):
            details = redact_url(f" ({type(error).__name__}: {text}".rstrip(": ") + ")")
        if self.code == "remote.not_found":
            return ConfigError(
                f"{address}: there is no such file{details}; check the address", code=self.code
            )
        if self.code == "remote.forbidden":
            return ConfigError(
                f"{address}: access is denied{details}; check the credentials of this machine, or "
                "sign the URL again",
                code=self.code,
            )
        count = "1 try" if tries == 1 else f"{tries} tries in {seconds:.1f} s"
        return RemoteError(
            f"{address}: {self.reason}{details} after {count}; check the network and the server, "
            "then run the same command again, which keeps what has arrived; "
            "PHASETRAIN_REMOTE_TRIES and PHASETRAIN_STALL_SECONDS set the limits",
            code=self.code,
        )


def classify(error: BaseException) -> Failure:
    """Return the meaning of an error of fsspec or of its clients."""
    chain = list(_list_causes(error))
    for cause in chain:
        status = _status_of(cause)
        if status is not None:
            return _classify_status(status, cause)
    names = {name for cause in chain for name in _class_names(cause)}
    if any(isinstance(cause, TruncatedError) for cause in chain) or "ClientPayloadError" in names:
        return Failure("remote.truncated", "the answer was cut off", passes=True)
    if any(isinstance(cause, TimeoutError) for cause in chain) or "ReadTimeoutError" in names:
        return Failure("remote.stalled", "no byte has arrived for too long", passes=True)
    if any(isinstance(cause, PermissionError) for cause in chain) or "NoCredentialsError" in names:
        return Failure("remote.forbidden", "access is denied", passes=False)
    # Last, since fsspec turns every failed question about a file into this error.
    lost = "ClientError" in names or any(isinstance(cause, ConnectionError) for cause in chain)
    if isinstance(error, FileNotFoundError | IsADirectoryError) and not lost:
        return Failure("remote.not_found", "there is no such file", passes=False)
    return Failure(
        "remote.unreachable", "cannot be reached", passes=lost or isinstance(error, OSError)
    )


def _classify_status(status: int, error: BaseException) -> Failure:
    if status in (404, 410):
        return Failure("remote.not_found", "there is no such file", passes=False)
    if status in (401, 403):
        return Failure("remote.forbidden", "access is denied", passes=False)
    passes = status in (408, 425, 429) or status >= 500
    headers = vars(error).get("headers") or {}
    wait = str(headers.get("Retry-After", ""))
    seconds = min(float(wait), LONGEST_DELAY_SECONDS) if wait.isdigit() else 0.0
    return Failure(
        "remote.unreachable", f"the server answers {status}", passes=passes, wait=seconds
    )


def _list_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _status_of(error: BaseException) -> int | None:
    status = vars(error).get("status")  # of aiohttp
    if status is None:  # of botocore
        response = vars(error).get("response")
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(status, int) and status >= 400:
        return status
    return None


def _class_names(error: BaseException) -> list[str]:
    # By name: neither aiohttp nor botocore need be installed.
    return [error_class.__name__ for error_class in type(error).__mro__]
