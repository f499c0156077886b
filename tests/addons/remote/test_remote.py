"""Data, weights and runs elsewhere: bits are those of files of this machine, also after kills."""

import io
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import fsspec
import pytest
import torch
from harness import (
    REPORT,
    REPORT_FILES,
    SMALL,
    KillAfter,
    Killed,
    SaveEachStep,
    differences,
    differences_of_runs,
    run_until_killed,
    train,
)
from raising import raises
from safetensors.torch import save
from web_server import WebServer, quick_transfers, serve_files

from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.app.train.train import train as train_setup
from phasetrain.checkpoint import Checkpointer, LoadedCheckpoint
from phasetrain.data import DATASETS
from phasetrain.distributed import World
from phasetrain.errors import ChangedError, ConfigError, PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.models import SmallCNN
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing.build import resolve_overrides

SHARDS = 3


@pytest.fixture
def server() -> Iterator[WebServer]:
    with serve_files() as found:
        yield found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with quick_transfers(tmp_path / "cache") as found:
        yield found


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def shard(number: int) -> bytes:
    """Return 50 lines with an image of 6 x 6 pixels and a class; a digit per pixel, so that a shard
    is a few requests."""
    generator = torch.Generator().manual_seed(number)
    lines = [
        {
            "input": [torch.randint(10, (6, 6), generator=generator).tolist()],
            "target": index % 10,
        }
        for index in range(50)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def lines_of(files: str) -> tuple[str, ...]:
    data = [
        f"DATA.TRAIN={{dataset: lines, files: '{files}', classes: 10, sampler: lanes}}",
        "DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}]",
        f"DATA.TEST={{dataset: lines, files: '{files}', classes: 10}}",
        "DATA.TRAIN.batch_size=8",
        "PHASES.epochs=2",
    ]
    return tuple(data)


@pytest.mark.feature(
    "remote",
    "shards and text from HTTP, S3 and memory, through a verified cache; changed shards are "
    "refused on resume",
    "`files: https://...`, `URL#sha256=...`, [remote.md](addons/remote.md)",
)
def test_run_on_shards_of_a_failing_server_equals_one_on_local_files(
    tmp_path: Path, server: WebServer
) -> None:
    for number in range(SHARDS):
        (tmp_path / f"{number}.jsonl").write_bytes(shard(number))
        server.files[f"/{number}.jsonl"] = shard(number)
        server.faults[f"/{number}.jsonl"] = deque([503, "truncate"])
    train(tmp_path / "local", *lines_of(f"{tmp_path}/[0-2].jsonl"))
    remote = lines_of(f"{server.url}/{{0..2}}.jsonl?token=a-secret-token")
    run_until_killed(
        tmp_path / "remote", *remote, hooks={"save": SaveEachStep(), "kill": KillAfter(7)}
    )
    # Signed again: the secret is no part of the run, and of the name of a shard.
    train(tmp_path / "remote", *(word.replace("a-secret", "another-secret") for word in remote))
    assert differences_of_runs(tmp_path / "local", tmp_path / "remote") == []
    # config.yaml alone keeps secrets, and only its owner may read it.
    kept = [
        path.name
        for path in (tmp_path / "remote").rglob("*")
        # Not git.diff, which may have the source of this test.
        if path.is_file() and path.suffix != ".diff" and b"-secret-token" in path.read_bytes()
    ]
    assert set(kept) <= {"config.yaml", "overrides.yaml"}


@pytest.mark.feature("remote")
def test_changed_shard_is_refused_on_resume(tmp_path: Path, server: WebServer) -> None:
    for number in range(SHARDS):
        server.files[f"/{number}.jsonl"] = shard(number)
    words = lines_of(f"{server.url}/{{0..2}}.jsonl")
    run_until_killed(tmp_path, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
    content = server.files["/1.jsonl"]
    # The same length and number of lines, as a shard that was written again may have.
    server.files["/1.jsonl"] = content.replace(b'"target": 1}', b'"target": 2}')
    with raises(ChangedError, code="resume.data_changed"):
        train(tmp_path, *words)
    server.files["/1.jsonl"] = content
    assert train(tmp_path, *words).state == "finished"


def test_index_spares_the_download_and_keeps_the_digest(
    tmp_path: Path, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/a.jsonl"] = shard(0)
    params = {"files": f"{server.url}/a.jsonl?token=abcdefgh", "index": str(tmp_path / "index")}
    first = DATASETS.build("lines", params)
    assert "abcdefgh" not in (tmp_path / "index").read_text()
    monkeypatch.setenv("PHASETRAIN_CACHE", str(tmp_path / "other"))
    server.requests.clear()
    again = DATASETS.build("lines", params)
    assert server.gets() == []
    assert again.fingerprint() == first.fingerprint()
    assert torch.equal(again[3][0], first[3][0])
    assert len(server.gets()) > 0
    # Downloaded late, after the index was made of other content: refused, not read.
    late = DATASETS.build("lines", params)
    server.files["/a.jsonl"] = shard(1)
    monkeypatch.setenv("PHASETRAIN_CACHE", str(tmp_path / "third"))
    with raises(ConfigError, code="remote.wrong_digest"):
        late[3]


def test_lost_server_is_no_bad_sample(tmp_path: Path, server: WebServer) -> None:
    server.files["/a.jsonl"] = shard(0)
    index = f"index: {tmp_path / 'index'}, on_bad_sample: drop, bad_sample_budget: 1000"
    words = [
        word.replace("classes: 10", f"classes: 10, {index}")
        for word in lines_of(f"{server.url}/a.jsonl")
    ]
    train(tmp_path / "first", *words)
    for path in (tmp_path / "cache" / "sha256").iterdir():
        path.unlink()
    server.faults["/a.jsonl"] = deque([503] * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASETRAIN_REMOTE_TRIES", "2")
        with pytest.raises(PhasetrainError, match="503"):
            train(tmp_path / "second", *words)


class TestWeights:
    WORDS = ("OPTIMIZER.lr=0", "PHASES.epochs=1")

    @pytest.fixture
    def content(self) -> bytes:
        torch.manual_seed(7)
        return save(SmallCNN(10, width=4).state_dict())

    @pytest.mark.feature(
        "remote.weights",
        "weights from a URL, with their digest",
        "`MODEL.weights: {path: https://..., sha256: ...}`",
    )
    def test_weights_from_a_url_are_verified(
        self, tmp_path: Path, server: WebServer, content: bytes
    ) -> None:
        server.files["/w.safetensors"] = content
        server.faults["/w.safetensors"] = deque(["truncate", 500])
        (tmp_path / "w.safetensors").write_bytes(content)
        url = f"{server.url}/w.safetensors"
        digest = sha256(content).hexdigest()
        weights = f"MODEL.weights={{path: '{url}', sha256: {digest}}}"
        train(tmp_path / "remote", weights, *self.WORDS)
        train(tmp_path / "local", f"MODEL.weights={tmp_path}/w.safetensors", *self.WORDS)
        assert differences_of_runs(tmp_path / "local", tmp_path / "remote") == []
        plans = [
            json.loads((tmp_path / name / "plan.json").read_text())["weights"]["sources"][0]
            for name in ("local", "remote")
        ]
        assert plans[0]["digest"] == plans[1]["digest"]
        assert plans[1]["path"] == url

    @pytest.mark.feature("remote.weights")
    @pytest.mark.parametrize("place", ["url", "file"])
    def test_changed_weights_are_refused(
        self, tmp_path: Path, server: WebServer, content: bytes, place: str
    ) -> None:
        server.files["/w"] = content[:-1] + b"?"
        (tmp_path / "w").write_bytes(server.files["/w"])
        path = {"url": f"{server.url}/w", "file": str(tmp_path / "w")}[place]
        digest = sha256(content).hexdigest()
        code = {"url": "remote.wrong_digest", "file": "weights.wrong_digest"}[place]
        with raises(ConfigError, code=code):
            train(tmp_path / "run", f"MODEL.weights={{path: '{path}', sha256: {digest}}}")

    def test_missing_weights_are_named_without_secrets(
        self, tmp_path: Path, server: WebServer
    ) -> None:
        with raises(ConfigError, code="weights.unusable") as caught:
            train(tmp_path / "run", f"MODEL.weights='{server.url}/w?signature=abcdefgh'")
        assert "abcdefgh" not in str(caught.value)


def run_in(folder: str, hooks: dict[str, Hook] | None = None) -> RunResult:
    words = [*SMALL, *REPORT, f"RUN.dir={folder}", "CHECKPOINT.keep_last=2"]
    return run(words, hooks=hooks, terminal=Terminal(io.StringIO(), live=False))


def newest(folder: str) -> LoadedCheckpoint:
    loaded = Checkpointer(f"{folder}/checkpoints", open_storage(folder)).load_newest()
    assert loaded is not None
    return loaded


class FailingUploads:
    """Lets the n-th upload of a file system be the last: it stores nothing, and the run is killed."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type, left: int) -> None:
        self.left = left
        pipe_file = kind.pipe_file

        def upload(system: object, path: str, value: bytes, **kwargs: str) -> None:
            self.left -= 1
            if self.left == 0:
                raise Killed
            # Of a killed process, no thread writes either.
            if self.left > 0:
                pipe_file(system, path, value, **kwargs)

        patch.setattr(kind, "pipe_file", upload)


class TestRunFolder:
    def test_killed_run_in_memory_resumes_exactly(
        self, tmp_path: Path, memory: fsspec.AbstractFileSystem
    ) -> None:
        train(tmp_path, "CHECKPOINT.keep_last=2")
        with pytest.raises(Killed):
            run_in("memory://runs/a", {"save": SaveEachStep(), "kill": KillAfter(6)})
        assert run_in("memory://runs/a").updates == 15
        assert b"is gone when it ends" in memory.cat_file("/runs/a/log.txt")
        one = Checkpointer(f"{tmp_path}/checkpoints", open_storage(str(tmp_path))).load_newest()
        assert one is not None
        assert differences(one.state["task"], newest("memory://runs/a").state["task"]) == []
        names = [name.rpartition("/")[2] for name in memory.find("/runs/a")]
        assert {"status.json", "metrics.jsonl", "plan.json", *REPORT_FILES} <= set(names)
        assert [name for name in names if ".tmp-" in name or "owner" in name] == []

    @pytest.mark.feature(
        "remote.run_folder", "run folders in S3 and other stores of fsspec", "`RUN.dir=s3://...`"
    )
    @pytest.mark.by_default("40")
    @pytest.mark.parametrize("uploads", [25, 30, 35, 40, 45])
    def test_run_killed_during_an_upload_resumes_exactly(
        self, memory: fsspec.AbstractFileSystem, uploads: int
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            FailingUploads(patch, type(memory), uploads)
            with pytest.raises(Killed):
                run_in("memory://killed", {"save": SaveEachStep()})
        run_in("memory://killed")
        run_in("memory://whole")
        one, other = newest("memory://whole"), newest("memory://killed")
        assert differences(one.state["task"], other.state["task"]) == []

    def test_lost_connections_do_not_end_a_run(
        self, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kind = type(memory)
        calls = {"pipe_file": 0, "cat_file": 0, "info": 0}

        def fail_sometimes(name: str) -> None:
            call = getattr(kind, name)

            def attempt(*args: object, **kwargs: object) -> object:
                calls[name] += 1
                if calls[name] % 3 == 0:
                    raise ConnectionResetError("lost")
                return call(*args, **kwargs)

            monkeypatch.setattr(kind, name, attempt)

        for name in calls:
            fail_sometimes(name)
        folder = RunFolder("memory://lost")
        folder.open()
        for _ in range(5):
            folder.write_status("running")
        assert folder.read_status().content["state"] == "running"
        folder.close()
        assert min(calls.values()) >= 2

    @pytest.mark.parametrize("place", ["http://127.0.0.1:9/run", "ftp://host/run"])
    def test_store_that_cannot_keep_a_run_is_refused(self, place: str) -> None:
        with raises(ConfigError, key="RUN.dir", code="storage.unsuitable"):
            RunFolder(place)

    def test_memory_of_one_process_cannot_keep_a_run_of_several(self) -> None:
        setup = resolve_overrides([*SMALL, "RUN.dir=memory://run"])
        with raises(ConfigError, key="RUN.dir", code="storage.unsuitable"):
            train_setup(replace(setup, world=World(rank=1, size=2)))

    def test_file_url_is_a_path(self, tmp_path: Path) -> None:
        train(Path("x"), f"RUN.dir=file://{tmp_path}/run", "PHASES.epochs=1")
        assert (tmp_path / "run" / "status.json").is_file()
