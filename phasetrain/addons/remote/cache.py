"""Files elsewhere as files of this machine: downloaded once, verified, and kept in a cache."""

import fcntl
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from phasetrain.addons.remote.systems import (
    TruncatedError,
    open_system,
    read_number,
    retry,
    stat_url,
)
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage.elsewhere import CachedFile, RemoteStat, cache_folder
from phasetrain.runtime.storage.urls import redact_url, split_digest, strip_secrets

log = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20
"""Bytes that are asked for at once; what has arrived survives a kill in such pieces."""

STORED_AT = 946_684_800
"""Time of change that every verified file gets, so that a later change of it shows."""

RECENT_SECONDS = 60.0
"""A file that was used less than this ago is not deleted: its user may be about to open it."""

POLL_SECONDS = 0.05


def fetch(url: str, digest: str = "") -> CachedFile:
    """Return a verified copy of a file elsewhere, which is downloaded unless the cache has it.

    Several processes of a machine download it once. A download that was killed continues. The
    length is verified always, and the content if a digest is known: from `digest`, or from
    `URL#sha256=...`. With a digest that the cache has, the server is not asked.

    Args:
        url: where the file is.
        digest: expected SHA-256, hexadecimal; empty accepts any content.

    Raises:
        ConfigError: the file does not exist or must not be read, its content differs from the
            digest (code `remote.wrong_digest`), it can be verified in no way (code
            `remote.no_length`), or the cache cannot be written (code `remote.cache`).
        RemoteError: it cannot be downloaded now.
    """
    url, named = split_digest(url)
    wanted = digest.lower() or named
    if named not in ("", wanted):
        raise _wrong_digest(url, named, wanted)
    try:
        cache = _Cache(cache_folder(), strip_secrets(url))
        cached = cache.find(wanted)
        if cached is None:
            with cache.lock():
                # Again, since another process may have downloaded it meanwhile.
                cached = cache.find(wanted) or cache.update(url, wanted)
        return cached
    except OSError as error:
        raise ConfigError(
            f"{redact_url(url)}: the cache {cache_folder()} cannot be written "
            f"({error.strerror or error}); free space, or set PHASETRAIN_CACHE to another folder",
            code="remote.cache",
        ) from error


class _Cache:
    """The entry of one URL in a cache folder.

    Content is kept under its digest in `sha256/`; `urls/` has a record per URL, its lock, and the
    unfinished download.
    """

    def __init__(self, root: Path, url: str) -> None:
        self.root = root
        self.url = url
        self._contents = root / "sha256"
        self._urls = root / "urls"
        name = sha256(url.encode()).hexdigest()[:32]
        self._record = self._urls / f"{name}.json"
        self._part = self._urls / f"{name}.part"
        self._part_record = self._urls / f"{name}.part.json"
        self._lock = self._urls / f"{name}.lock"
        for folder in (self._contents, self._urls):
            folder.mkdir(parents=True, exist_ok=True)

    def find(self, digest: str) -> CachedFile | None:
        """Return the content with a digest if it is there, without asking the server."""
        if not digest:
            return None
        path = self._contents / digest
        if not _is_intact(path):
            return None
        record = _read_json(self._record)
        identity = record.get("identity", "") if record.get("digest") == digest else ""
        self._touch()
        return CachedFile(str(path), path.stat().st_size, digest, identity)

    def update(self, url: str, digest: str) -> CachedFile:
        """Return the content that the server has now; it is downloaded if the cache lacks it.

        Args:
            url: the URL, with its secrets.
            digest: expected SHA-256; empty accepts any.
        """
        stat = stat_url(url)
        record = _read_json(self._record)
        same = stat.identity and (record.get("identity"), record.get("size")) == (
            stat.identity,
            stat.size,
        )
        if same and not digest and (cached := self.find(str(record["digest"]))):
            return cached
        if stat.size is None and not digest:
            raise ConfigError(
                f"{redact_url(url)}: the server does not say how long the file is, so a truncated "
                "one would not show; append its digest to the URL: ...#sha256=64 hexadecimal "
                "digits",
                code="remote.no_length",
            )
        found_digest = self._download(url, stat)
        if digest and found_digest != digest:
            self._drop_part()
            raise _wrong_digest(url, digest, found_digest)
        return self._store(stat, found_digest)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Let one process of this machine at a time download the file."""
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            said = False
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not said:
                        log.info("%s: another process downloads it", redact_url(self.url))
                        said = True
                    # Polled, so that signals are handled meanwhile.
                    time.sleep(POLL_SECONDS)
            yield
        finally:
            os.close(handle)

    def _download(self, url: str, stat: RemoteStat) -> str:
        """Write the file next to the cache, and return its SHA-256."""
        size = "unknown size" if stat.size is None else f"{stat.size:,} bytes"
        log.info("%s: downloading, %s", redact_url(url), size)
        self._check_space(url, stat)
        if stat.ranges:
            # Again from the start if the content has changed meanwhile.
            retry(url, lambda: self._download_parts(url))
        else:
            self._part_record.unlink(missing_ok=True)
            retry(url, lambda: self._download_whole(url, stat))
        with self._part.open("rb") as file:
            digest = sha256()
            while block := file.read(2**20):
                digest.update(block)
            # Before the rename: after a power failure the name must not stand for half a file.
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _download_parts(self, url: str) -> None:
        stat = stat_url(url)
        size = stat.size or 0
        mark = {"identity": stat.identity, "size": size, "boot": _boot_id()}
        if _read_json(self._part_record) != mark:
            self._part.unlink(missing_ok=True)
            _write_json(self._part_record, mark)
        with self._part.open("ab") as file:
            at = file.tell()
            if at:
                log.info("%s: continued at byte %d", redact_url(url), at)
            while at < size:
                content = self._read_range(url, at, min(at + CHUNK_BYTES, size), size)
                file.write(content)
                file.flush()
                at += len(content)
        # Parts of two versions fit together by chance only, and their lengths do not tell.
        if stat_url(url) != stat or self._part.stat().st_size != size:
            self._drop_part()
            raise TruncatedError("the file was changed while it was downloaded")

    def _read_range(self, url: str, start: int, end: int, size: int) -> bytes:
        def read() -> bytes:
            content: bytes = open_system(url).cat_file(url, start=start, end=end)
            if len(content) == size > end - start:  # a server that ignores ranges sends the file
                return content[start:]
            if len(content) != end - start:
                raise TruncatedError(f"{len(content)} of {end - start} bytes have arrived")
            return content

        return retry(url, read)

    def _download_whole(self, url: str, stat: RemoteStat) -> None:
        self._part.unlink(missing_ok=True)
        open_system(url).get_file(url, str(self._part))
        arrived = self._part.stat().st_size
        if stat.size is not None and arrived != stat.size:
            raise TruncatedError(f"{arrived} of {stat.size} bytes have arrived")

    def _store(self, stat: RemoteStat, digest: str) -> CachedFile:
        path = self._contents / digest
        size = self._part.stat().st_size
        self._part.chmod(0o444)
        os.utime(self._part, (STORED_AT, STORED_AT))
        self._part.replace(path)
        self._part_record.unlink(missing_ok=True)
        stored = CachedFile(str(path), size, digest, stat.identity)
        _write_json(self._record, {"url": redact_url(self.url), **asdict(stored)})
        self._limit_size(digest)
        return stored

    def _limit_size(self, kept: str) -> None:
        """Delete the files that were not used for the longest time, down to PHASETRAIN_CACHE_GB."""
        limit = read_number("PHASETRAIN_CACHE_GB", float("inf")) * 1e9
        used: dict[str, float] = {}
        for record in self._urls.glob("*.json"):
            digest = str(_read_json(record).get("digest", ""))
            # Another process may have deleted it since it was listed.
            with suppress(FileNotFoundError):
                used[digest] = max(used.get(digest, 0.0), record.stat().st_mtime)
        sizes = {path.name: path.stat().st_size for path in self._contents.iterdir()}
        total = sum(sizes.values())
        now = time.time()
        for digest in sorted(sizes, key=lambda name: used.get(name, 0.0)):
            if total <= limit or now - used.get(digest, 0.0) < RECENT_SECONDS:
                return
            if digest != kept:
                (self._contents / digest).unlink(missing_ok=True)
                total -= sizes[digest]

    def _check_space(self, url: str, stat: RemoteStat) -> None:
        there = self._part.stat().st_size if self._part.exists() else 0
        free = shutil.disk_usage(self.root).free
        if stat.size is not None and free < stat.size - there:
            raise ConfigError(
                f"{redact_url(url)}: {stat.size:,} bytes, and the cache {self.root} has {free:,} "
                "free; free space, or set PHASETRAIN_CACHE to another folder",
                code="remote.cache",
            )

    def _touch(self) -> None:
        with suppress(OSError):
            os.utime(self._record)

    def _drop_part(self) -> None:
        self._part.unlink(missing_ok=True)
        self._part_record.unlink(missing_ok=True)


def _is_intact(path: Path) -> bool:
    """Return whether a file is in the cache, and nobody has changed it since it was verified."""
    try:
        if path.stat().st_mtime == STORED_AT:
            return True
    except FileNotFoundError:
        return False
    log.warning("%s was changed in the cache; it is downloaded again", path)
    path.unlink(missing_ok=True)
    return False


def _wrong_digest(url: str, expected: str, found: str) -> ConfigError:
    return ConfigError(
        f"{redact_url(url)}: its sha256 is {found}, expected {expected}; the file has changed, or "
        "the digest is that of another file: restore the file, or correct the digest",
        code="remote.wrong_digest",
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON object; empty if it is missing or torn."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _boot_id() -> str:
    # Bytes of an unfinished download survive a kill, but not a power failure: it is not fsynced.
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
