"""The hook `memory`: what it reads of this process and its workers, where it writes it, and that it
changes nothing."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failpoints import Refusing
from harness import SMALL, KillAfter, records, run_until_killed, train

from phasetrain.addons.observe.profiling import device_usage
from phasetrain.addons.observe.profiling.device_usage import (
    GpuReader,
    allocator_bytes,
    peak_resident_bytes,
)
from phasetrain.addons.observe.profiling.memory import Memory
from phasetrain.app.api import run
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook
from phasetrain.runtime.child_processes import resident_bytes
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import MemoryHandler, assert_exact_resume

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train(folder)
    return folder


@pytest.fixture
def objects() -> Iterator[dict[str, bytes]]:
    MemoryHandler.objects.clear()
    yield MemoryHandler.objects
    MemoryHandler.objects.clear()


def memory_lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "memory"]


def places(folder: Path) -> list[tuple[int, str, int, int]]:
    return [
        (line["updates"], line["split"], line["phase"], line["step"])
        for line in memory_lines(folder)
    ]


def run_and_capture(folder: Path | str, *words: str) -> str:
    stream = io.StringIO()
    assert (
        run([*SMALL, f"RUN.dir={folder}", *words], terminal=Terminal(stream, live=False)).state
        == "finished"
    )
    return stream.getvalue()


EXPECTED = [
    (3, "train", 0, 3), (5, "train", 0, 5), (5, "test", 1, 2),
    (6, "train", 2, 1), (9, "train", 2, 4), (10, "train", 2, 5), (10, "test", 3, 2),
    (12, "train", 4, 2), (15, "train", 4, 5), (15, "test", 5, 2),
]  # fmt: skip


def test_lines_every_n_updates_and_after_each_phase(tmp_path: Path) -> None:
    text = run_and_capture(tmp_path, "HOOKS.memory.every_updates=3", "PHASES.epochs=1")
    assert places(tmp_path) == EXPECTED[:3]
    first = memory_lines(tmp_path)[0]
    assert first.keys() == {"kind", "updates", "phase", "split", "epoch", "step", "time"}
    assert first["time"].keys() == {
        "at",
        "rss_bytes",
        "peak_rss_bytes",
        "workers",
        "workers_rss_bytes",
    }
    assert 100 * 2**20 < first["time"]["rss_bytes"] <= first["time"]["peak_rss_bytes"] < 2**36
    assert (first["time"]["workers"], first["time"]["workers_rss_bytes"]) == (0, 0)
    assert text.count("HOOKS.memory: gpu is not recorded: MACHINE.device = 'cpu'") == 1
    found = json.loads((tmp_path / "memory.json").read_text())["attempts"]["1"]
    assert (found["updates"], list(found["splits"])) == (5, ["train", "test"])
    largest = max(
        line["time"]["rss_bytes"] for line in memory_lines(tmp_path) if line["split"] == "train"
    )
    assert found["splits"]["train"]["rss_bytes"] == largest
    assert found["left_out"] == {"gpu": "MACHINE.device = 'cpu' is not a CUDA device"}
    assert "| memory.json" in (tmp_path / "RUN.md").read_text()


def test_workers_are_counted(tmp_path: Path) -> None:
    train(tmp_path, "HOOKS.memory.every_updates=2", "DATA.TRAIN.workers=2", "PHASES.epochs=1")
    found = memory_lines(tmp_path)
    assert [line["time"]["workers"] for line in found] == [2, 2, 2, 2]
    assert all(line["time"]["workers_rss_bytes"] > 2 * 20 * 2**20 for line in found)


def test_killed_run_has_the_same_lines_and_otherwise_those_of_a_run_without_them(
    plain: Path, tmp_path: Path
) -> None:
    run_until_killed(tmp_path, "HOOKS.memory.every_updates=3", hooks={"kill": KillAfter(9)})
    train(tmp_path, "HOOKS.memory.every_updates=3")
    assert places(tmp_path) == EXPECTED
    attempts = json.loads((tmp_path / "memory.json").read_text())["attempts"]
    assert {number: found["updates"] for number, found in attempts.items()} == {"1": 6, "2": 15}
    kept = [record for record in records(tmp_path) if record["kind"] != "memory"]
    assert kept == records(plain)
    assert (plain / "steps.ledger").read_bytes() == (tmp_path / "steps.ledger").read_bytes()


@pytest.mark.slow
def test_checkpoint_does_not_contain_the_hook() -> None:
    assert_exact_resume(["HOOKS.memory.every_updates=1"], steps=[2], workers=(0,))


def test_the_table_at_the_end(tmp_path: Path) -> None:
    text = run_and_capture(tmp_path, "HOOKS.memory={}", "PHASES.epochs=1", "RUN.verbosity=verbose")
    _, _, table = text.partition("peak memory\n")
    head, rule, train_row, test_row = table.splitlines()[:4]
    assert (head.split(), set(rule)) == (["split", "RSS", "peak", "RSS", "workers"], {"-", " "})
    assert (train_row.split()[0], test_row.split()[0]) == ("train", "test")
    # A test process that has run many tests uses more than a GiB.
    units = [unit.replace("GiB", "MiB") for unit in train_row.split()[2::2]]
    assert units == ["MiB", "MiB", "bytes"]


class TestUnsupported:
    def test_full_disk_does_not_stop_the_run(self, tmp_path: Path) -> None:
        class Full(Hook):
            def on_start(self, run: Any) -> None:
                run.folder.storage._before = Refusing("rename", "memory.json")

        stream = io.StringIO()
        words = [*SMALL, f"RUN.dir={tmp_path}", "HOOKS.memory={}", "PHASES.epochs=1"]
        result = run(words, hooks={"full": Full()}, terminal=Terminal(stream, live=False))
        assert result.state == "finished"
        assert (
            f"HOOKS.memory: {tmp_path}/memory.json could not be written: [Errno {errno.ENOSPC}]"
            in stream.getvalue()
        )
        assert len(memory_lines(tmp_path)) == 2

    def test_read_a_file_of_its_own_that_somebody_has_damaged(self, tmp_path: Path) -> None:
        train(tmp_path, "PHASES.epochs=1", "HOOKS.memory={}")
        (tmp_path / "memory.json").write_text('{"attempts": [1')
        train(tmp_path, "PHASES.epochs=2", "HOOKS.memory={}", "RUN.allow=[PHASES]")
        assert list(json.loads((tmp_path / "memory.json").read_text())["attempts"]) == ["2"]

    @pytest.mark.addon("remote")
    def test_memory_is_written_to_object_storage(self, objects: dict[str, bytes]) -> None:
        run_and_capture(
            "mem://weighed",
            "RUN.imports=[phasetrain.testing]",
            "HOOKS.memory={}",
            "PHASES.epochs=1",
        )
        assert json.loads(objects["mem://weighed/memory.json"])["attempts"]["1"]["updates"] == 5

    def test_rss_is_not_recorded_without_proc(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_usage, "PROC", tmp_path / "none")
        text = run_and_capture(tmp_path / "run", "HOOKS.memory={}", "PHASES.epochs=1")
        assert "HOOKS.memory: rss is not recorded" in text
        assert memory_lines(tmp_path / "run")[0]["time"].keys() == {"at"}

    def test_snapshot_is_not_recorded_on_cpu(self, tmp_path: Path) -> None:
        text = run_and_capture(tmp_path, "HOOKS.memory.snapshot=true", "PHASES.epochs=1")
        assert "HOOKS.memory: snapshot is not recorded" in text
        assert not list(tmp_path.glob("*.pickle"))


class TestReadings:
    def test_memory_that_is_taken_and_given_back(self) -> None:
        before = resident_bytes([os.getpid()])
        taken = torch.ones(64 << 20, dtype=torch.uint8)
        during = resident_bytes([os.getpid()])
        assert during - before > 60 << 20
        del taken
        assert during - resident_bytes([os.getpid()]) > 60 << 20
        peak = peak_resident_bytes()
        assert peak is not None
        assert peak > during - (1 << 20)  # Linux rounds each in its own way

    def test_of_several_processes_one_of_which_is_gone(self) -> None:
        wait = "print(flush=True); input()"
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", wait], stdin=pipe, stdout=pipe, stderr=pipe
        ) as other:
            assert other.stdout
            other.stdout.readline()
            assert resident_bytes([other.pid]) > 1 << 20
            both = resident_bytes([os.getpid(), other.pid])
            assert both > resident_bytes([other.pid])
            assert other.stdin
            other.stdin.close()
        assert resident_bytes([other.pid]) == 0

    def test_of_a_cpu_there_are_none_of_a_gpu(self) -> None:
        gpu = GpuReader(CPU)
        assert (gpu.read(), gpu.unavailable, allocator_bytes(CPU)) == (
            {},
            "MACHINE.device = 'cpu' is not a CUDA device",
            {},
        )

    @pytest.mark.skipif(torch.cuda.is_available(), reason="NVML answers here")
    def test_failing_nvml_is_queried_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = GpuReader(torch.device("cuda", 0))
        assert gpu.read() == {}
        assert gpu.unavailable.startswith("NVML does not answer (NVMLError_LibraryNotFound")
        monkeypatch.setattr(torch.cuda, "utilization", pytest.fail)
        assert gpu.read() == {}

    def test_error_names_the_missing_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
        monkeypatch.setattr(torch.cuda, "_PYNVML_ERR", None, raising=False)
        gpu = GpuReader(torch.device("cuda", 0))
        assert gpu.read() == {}
        assert gpu.unavailable == 'NVML is read through nvidia-ml-py: pip install "phasetrain[gpu]"'


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"HOOKS\.memory .*every_updates = 0",
    ):
        train(tmp_path, "HOOKS.memory.every_updates=0")
    assert HOOKS["memory"] is Memory


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    def test_peaks_of_each_phase_and_of_nvml_are_recorded(self, tmp_path: Path) -> None:
        train(tmp_path, "MACHINE.device=cuda", "HOOKS.memory={every_updates: 2, snapshot: true}")
        found = memory_lines(tmp_path)[0]["time"]
        assert 0 < found["cuda_allocated_bytes"] <= found["cuda_peak_allocated_bytes"]
        assert found["cuda_peak_allocated_bytes"] <= found["cuda_peak_reserved_bytes"]
        assert found.keys() >= {"gpu_percent", "gpu_celsius", "gpu_watts", "gpu_used_bytes"}
        assert (tmp_path / "memory-attempt1.pickle").stat().st_size > 1000

    def test_snapshot_is_written_when_memory_runs_out(self, tmp_path: Path) -> None:
        class Greedy(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

        with pytest.raises(torch.OutOfMemoryError):
            train(
                tmp_path,
                "MACHINE.device=cuda",
                "HOOKS.memory.snapshot=true",
                hooks={"greedy": Greedy()},
            )
        assert (tmp_path / "memory-attempt1.pickle").exists()
