"""Runs, weights and shards in S3, as moto imitates it on loopback; needs the packages of the extra
`s3`, and `moto[server]`."""

import io
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from harness import REPORT, REPORT_FILES, SMALL, KillAfter, Killed, SaveEachStep, differences, train
from raising import raises
from web_server import quick_transfers

from phasetrain.addons.remote.systems import open_system
from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.data.datasets.shards import find_files
from phasetrain.errors import ConfigError, FolderInUseError
from phasetrain.hooks import Hook
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.storage import fetch, open_storage
from phasetrain.runtime.terminal import Terminal

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def bucket(service: str, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of an empty bucket."""
    with quick_transfers(tmp_path / "cache"), pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": service,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "PHASETRAIN_STALL_SECONDS": "30",
        }.items():
            patch.setenv(name, value)
        name = tmp_path.name.replace("_", "-")
        open_system("s3://").mkdir(f"s3://{name}")
        yield f"s3://{name}"


def run_in(folder: str, hooks: dict[str, Hook] | None = None) -> RunResult:
    words = [*SMALL, *REPORT, f"RUN.dir={folder}", "CHECKPOINT.keep_last=2"]
    return run(words, hooks=hooks, terminal=Terminal(io.StringIO(), live=False))


def newest(folder: str) -> LoadedCheckpoint:
    loaded = Checkpointer(f"{folder}/checkpoints", open_storage(folder)).load_newest()
    assert loaded is not None
    return loaded


@pytest.mark.feature("remote.run_folder")
def test_killed_run_resumes_exactly(bucket: str, tmp_path: Path) -> None:
    train(tmp_path / "local", "CHECKPOINT.keep_last=2")
    with pytest.raises(Killed):
        run_in(f"{bucket}/a", {"save": SaveEachStep(), "kill": KillAfter(6)})
    assert run_in(f"{bucket}/a").updates == 15
    one = newest(str(tmp_path / "local"))
    assert differences(one.state["task"], newest(f"{bucket}/a").state["task"]) == []
    names = [path.rpartition("/")[2] for path in open_system(bucket).find(f"{bucket}/a")]
    assert [name for name in names if ".tmp-" in name or "owner" in name] == []
    assert {"metrics.jsonl", "status.json", "log.txt", *REPORT_FILES} <= set(names)
    train(tmp_path / "next", f"MODEL.weights={bucket}/a", "PHASES.epochs=1")


def test_second_process_is_kept_out(bucket: str) -> None:
    first = RunFolder(f"{bucket}/locked")
    first.open()
    with raises(FolderInUseError):
        RunFolder(f"{bucket}/locked").open()
    first.close()
    second = RunFolder(f"{bucket}/locked")
    second.open()
    second.close()


def test_shards_are_listed_and_cached(bucket: str) -> None:
    for name in ("a-1.tar", "a-0.tar", "b.tar"):
        open_system(bucket).pipe_file(f"{bucket}/{name}", name.encode())
    assert find_files(f"{bucket}/a-*.tar") == [f"{bucket}/a-0.tar", f"{bucket}/a-1.tar"]
    first = fetch(f"{bucket}/b.tar")
    assert first.digest == sha256(b"b.tar").hexdigest()
    assert fetch(f"{bucket}/b.tar") == first
    open_system(bucket).pipe_file(f"{bucket}/b.tar", b"B.tar")
    assert fetch(f"{bucket}/b.tar").digest == sha256(b"B.tar").hexdigest()
    with raises(ConfigError, code="remote.not_found"):
        fetch(f"{bucket}/c.tar")
    with raises(ConfigError, code="remote.not_found"):
        fetch("s3://no-such-bucket/c.tar")


def test_large_object_is_uploaded_as_a_whole(bucket: str) -> None:
    storage = open_storage(bucket)
    content = bytes(range(256)) * 2**19  # above the size from which s3fs uploads in parts
    record = storage.create(f"{bucket}/large", content)
    assert storage.hash_file(f"{bucket}/large") == record
