"""Downloads survive bad servers and kills, are verified, and happen once."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import fsspec
import pytest
from raising import raises
from web_server import CHUNK, WebServer, quick_transfers, serve_files

from phasetrain.addons.remote import cache
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.runtime.storage import RemoteError, fetch

CONTENT = bytes(range(256)) * 16
DIGEST = sha256(CONTENT).hexdigest()


@pytest.fixture
def server() -> Iterator[WebServer]:
    with serve_files() as found:
        found.files["/a.tar"] = CONTENT
        yield found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_transfers(tmp_path / "cache") as found:
        yield found


def read(url: str, digest: str = "") -> bytes:
    return Path(fetch(url, digest).path).read_bytes()


def test_file_is_downloaded_in_parts_once(server: WebServer) -> None:
    found = fetch(f"{server.url}/a.tar")
    assert (found.size, found.digest) == (4096, DIGEST)
    assert Path(found.path).read_bytes() == CONTENT
    spans = ["bytes=0-999", "bytes=1000-1999", "bytes=2000-2999", "bytes=3000-3999"]
    assert server.gets() == [*spans, "bytes=4000-4095"]
    assert fetch(f"{server.url}/a.tar") == found
    assert len(server.gets()) == 5


def test_known_digest_needs_no_request(server: WebServer) -> None:
    read(f"{server.url}/a.tar#sha256={DIGEST}")
    server.requests.clear()
    assert read(f"{server.url}/a.tar", DIGEST) == CONTENT
    assert server.requests == []


@pytest.mark.parametrize(
    "end", ["#sha256=", "#sha256=xyz", f"#sha256={DIGEST[1:]}", f"#SHA256={DIGEST}", "#sha265=ab"]
)
def test_malformed_digest_is_not_ignored(server: WebServer, end: str) -> None:
    with raises(ConfigError, code="remote.bad_digest"):
        read(f"{server.url}/a.tar{end}")
    assert read(f"{server.url}/a.tar#part") == CONTENT


@pytest.mark.parametrize(
    "faults", [[503, 503, 429], ["truncate"], ["short", "short"], [500, "truncate", "stall"]]
)
def test_errors_that_pass_are_tried_again(server: WebServer, faults: list[int | str]) -> None:
    server.faults["/a.tar"] = deque(faults)
    assert read(f"{server.url}/a.tar") == CONTENT
    assert len(server.gets()) == 5 + len(faults)


@pytest.mark.parametrize(
    ("fault", "code"),
    [(503, "unreachable"), ("truncate", "truncated"), ("short", "truncated"), ("stall", "stalled")],
)
def test_last_error_says_what_was_tried(
    server: WebServer, fault: int | str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASETRAIN_REMOTE_TRIES", "2")
    server.faults["/a.tar"] = deque([fault] * 9)
    with raises(RemoteError, code=f"remote.{code}") as caught:
        fetch(f"{server.url}/a.tar?token=secret-of-mine")
    assert f"{server.url}/a.tar?token=(redacted)" in str(caught.value)
    assert "after 2 tries" in str(caught.value)
    assert "secret-of-mine" not in str(caught.value)


@pytest.mark.parametrize(("status", "code"), [(404, "not_found"), (403, "forbidden")])
def test_errors_that_stay_are_not_tried_again(server: WebServer, status: int, code: str) -> None:
    server.faults["/gone"] = deque([status] * 9)
    with raises(ConfigError, code=f"remote.{code}"):
        fetch(f"{server.url}/gone")
    assert len(server.gets()) == 1


def test_truncated_answer_without_a_length_needs_a_digest(server: WebServer) -> None:
    server.has_length = False
    with raises(ConfigError, code="remote.no_length"):
        fetch(f"{server.url}/a.tar")
    # The first answer is to the question for the length. Half a file is never taken for the file.
    server.faults["/a.tar"] = deque(["none", "truncate"])
    with raises(ConfigError, code="remote.wrong_digest"):
        fetch(f"{server.url}/a.tar#sha256={DIGEST}")
    assert read(f"{server.url}/a.tar#sha256={DIGEST}") == CONTENT


def test_server_without_ranges_and_identity(server: WebServer) -> None:
    server.has_ranges = server.has_identity = False
    server.faults["/a.tar"] = deque(["truncate"])
    assert read(f"{server.url}/a.tar") == CONTENT
    assert server.gets() == ["", ""]
    # Nothing tells whether the file is the same: it is downloaded again.
    server.files["/a.tar"] = CONTENT[::-1]
    assert read(f"{server.url}/a.tar") == CONTENT[::-1]


def test_server_that_ignores_ranges(server: WebServer) -> None:
    server.has_ranges = False
    server.files["/b"] = CONTENT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "stat_url", lambda url: cache.RemoteStat(4096, "ETag", ranges=True))
        assert read(f"{server.url}/b") == CONTENT
    assert len(server.gets()) == 1


def test_changed_content_is_downloaded_again_or_refused(server: WebServer) -> None:
    read(f"{server.url}/a.tar")
    server.files["/a.tar"] = CONTENT[::-1]
    assert read(f"{server.url}/a.tar") == CONTENT[::-1]
    server.files["/a.tar"] = CONTENT[1:] + b"?"
    with raises(ConfigError, code="remote.wrong_digest"):
        fetch(f"{server.url}/a.tar", sha256(b"").hexdigest())


def test_content_that_changes_during_the_download_is_never_mixed(server: WebServer) -> None:
    changed = CONTENT[::-1]
    whole = server.files

    class Changing(dict[str, bytes]):
        def get(self, path: str, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
            if len(server.gets()) == 3:
                self["/a.tar"] = changed
            return super().get(path, default)

    server.files = Changing(whole)
    assert read(f"{server.url}/a.tar") == changed


def test_signed_urls_of_one_file_share_a_copy(server: WebServer, folder: Path) -> None:
    signed = "X-Amz-Credential=abc&X-Amz-Date=1&X-Amz-Signature=0123456789"
    one = fetch(f"{server.url}/a.tar?{signed}")
    server.files["/a.tar"] = CONTENT[::-1]
    assert fetch(f"{server.url}/a.tar?{signed}0", one.digest).digest == DIGEST
    kept = "".join(path.read_text() for path in folder.rglob("*.json"))
    assert "0123456789" not in kept
    assert "abc" not in kept


def test_altered_copy_is_replaced(server: WebServer) -> None:
    path = Path(fetch(f"{server.url}/a.tar").path)
    path.chmod(0o644)
    path.write_bytes(CONTENT[:100])
    assert read(f"{server.url}/a.tar") == CONTENT


def test_size_of_the_cache_is_limited(
    server: WebServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "RECENT_SECONDS", 0.0)
    monkeypatch.setenv("PHASETRAIN_CACHE_GB", "0.000009")
    for number in range(4):
        server.files[f"/{number}"] = bytes([number]) + CONTENT
        fetch(f"{server.url}/{number}")
        time.sleep(0.01)
    names = {path.name for path in (folder / "sha256").iterdir()}
    assert names == {sha256(bytes([number]) + CONTENT).hexdigest() for number in (2, 3)}


def test_full_disk_is_reported_before_the_download(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with raises(ConfigError, code="remote.cache"):
        fetch(f"{server.url}/a.tar")
    assert server.gets() == []


PROGRAM = """
import sys, time
from pathlib import Path
from phasetrain.addons.remote import cache
cache.CHUNK_BYTES = 1000
print("ready", flush=True)
found = cache.fetch(sys.argv[1])
print(found.digest)
"""


def start(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


@pytest.mark.feature("remote")
def test_killed_download_continues(server: WebServer, folder: Path) -> None:
    os.environ["PHASETRAIN_STALL_SECONDS"] = "20"  # restored by quick_transfers
    server.faults["/a.tar"] = deque(["none", "none", "stall"])
    process = start(f"{server.url}/a.tar")
    end = time.monotonic() + 60
    while len(server.gets()) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [path.stat().st_size for path in folder.rglob("*.part")] == [2 * CHUNK]
    server.requests.clear()
    assert read(f"{server.url}/a.tar") == CONTENT
    assert server.gets() == ["bytes=2000-2999", "bytes=3000-3999", "bytes=4000-4095"]


@pytest.mark.feature("remote")
@pytest.mark.slow
def test_processes_download_once(server: WebServer) -> None:
    processes = [start(f"{server.url}/a.tar") for _ in range(3)]
    assert [process.communicate()[0].split() for process in processes] == [["ready", DIGEST]] * 3
    assert len(server.gets()) == 5


class TestMemory:
    def test_object_of_fsspec(self) -> None:
        fsspec.filesystem("memory").pipe_file("/shards/a", CONTENT)
        assert read("memory://shards/a") == CONTENT
        fsspec.filesystem("memory").rm("/shards", recursive=True)
        with raises(ConfigError, code="remote.not_found") as caught:
            fetch("memory://shards/a")
        assert str(caught.value).count("shards/a") == 1  # not again as the text of fsspec's error

    def test_lost_connections_are_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = type(fsspec.filesystem("memory"))
        fsspec.filesystem("memory").pipe_file("/faulty", CONTENT)
        errors = [ConnectionResetError("gone"), TimeoutError(), OSError("unknown")]
        cat_file = memory.cat_file

        def fail(self: object, path: str, **kwargs: int) -> bytes:
            if errors:
                raise errors.pop()
            found: bytes = cat_file(self, path, **kwargs)
            return found

        monkeypatch.setattr(memory, "cat_file", fail)
        assert read("memory://faulty") == CONTENT
        assert errors == []


def test_unknown_scheme_and_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, code="remote.unknown_scheme", suggestion="memory"):
        fetch("memry://a")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with raises(ConfigError, code="remote.missing_package") as caught:
        fetch("s3://bucket/a")
    assert 'pip install "phasetrain[s3]"' in str(caught.value)


def test_setting_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASETRAIN_REMOTE_TRIES", "many")
    with raises(PhasetrainError, code="remote.setting"):
        fetch("http://127.0.0.1:1/a")
