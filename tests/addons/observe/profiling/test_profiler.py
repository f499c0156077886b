"""The hook `profiler`: traces of the updates that the schedule says, on every way out of a run, and
no bit changed."""

import gzip
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failpoints import Refusing
from harness import SMALL, KillAfter, differences_of_runs, run_until_killed, train
from torch.profiler import ProfilerActivity, profile

from phasetrain.addons.observe.profiling.profiler import Profiler
from phasetrain.app.api import run
from phasetrain.data.loading.worker_stream import prepare_worker
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import MemoryHandler, assert_exact_resume


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the variable that the hook sets taken back."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


@pytest.fixture
def objects() -> Iterator[dict[str, bytes]]:
    MemoryHandler.objects.clear()
    yield MemoryHandler.objects
    MemoryHandler.objects.clear()


def traces(folder: Path) -> list[str]:
    """Return the names of the traces, each of which has a table beside it."""
    names = sorted(path.name for path in (folder / "profile").glob("*"))
    found = [name.removesuffix(".json.gz") for name in names if name.endswith(".json.gz")]
    assert [name.removesuffix(".txt") for name in names if name.endswith(".txt")] == found
    return found


def events(data: bytes) -> list[dict[str, Any]]:
    return [
        event
        for event in json.loads(gzip.decompress(data))["traceEvents"]
        if event.get("ph") == "X"
    ]


def run_and_capture(folder: Path | str, *words: str, hooks: dict[str, Hook] | None = None) -> str:
    """Run a small training to its end and return what it prints."""
    stream = io.StringIO()
    terminal = Terminal(stream, live=False)
    assert (
        run([*SMALL, f"RUN.dir={folder}", *words], hooks=hooks, terminal=terminal).state
        == "finished"
    )
    return stream.getvalue()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train(folder)
    return folder


def test_a_trace_and_a_table_per_cycle_and_one_line_on_the_terminal(
    plain: Path, tmp_path: Path
) -> None:
    schedule = "{wait: 2, warmup: 1, active: 2, repeat: 2, rows: 3, shapes: true, flops: true}"

    lines = run_and_capture(tmp_path, f"HOOKS.profiler={schedule}").splitlines()

    assert differences_of_runs(plain, tmp_path) == []
    assert traces(tmp_path) == ["attempt1-u00000005", "attempt1-u00000010"]
    text = (tmp_path / "profile" / "attempt1-u00000010.txt").read_text()
    assert text.startswith("updates 9 to 10 of attempt 1, rank 0\n---")
    assert all(column in text for column in ("Self CPU", "# of Calls", "Input Shapes", "Total"))
    [line] = [line for line in lines if "profile" in line]
    assert f"2 traces in {tmp_path}/profile/" in line
    assert not any("Self CPU" in line for line in lines)  # the table is in the file only
    assert "| profile/ |" in (tmp_path / "RUN.md").read_text()


def test_trace_contains_the_operators_of_its_updates(tmp_path: Path) -> None:
    run_and_capture(
        tmp_path,
        "HOOKS.profiler={wait: 3, warmup: 1, active: 2}",
        "PHASES.epochs=2",
        "OPTIMIZER.accumulate=2",
    )
    names = [
        event["name"]
        for event in events((tmp_path / "profile" / "attempt1-u00000006.json.gz").read_bytes())
    ]
    found = [name.removeprefix("phasetrain: ") for name in names if name.startswith("phasetrain: ")]
    assert {name: found.count(name) for name in sorted(set(found))} == {
        "backward": 4, "between phases": 2, "data": 3, "forward": 4, "hooks": 2, "test": 1, "update": 4,
    }  # fmt: skip
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2
    assert (
        names.count("aten::conv2d") == 3 * 2 * 2 + 3 * 2
    )  # layers x micro-batches x updates, and those of the test


def test_table_is_printed_with_verbose_output(tmp_path: Path) -> None:
    words = (
        "HOOKS.profiler={wait: 1, warmup: 1, active: 1, sort_by: count, rows: 2}",
        "PHASES.epochs=1",
    )
    text = run_and_capture(tmp_path, *words, "RUN.verbosity=verbose")
    assert (tmp_path / "profile" / "attempt1-u00000003.txt").read_text() in text


class TestEnds:
    """A run that ends within a cycle writes what it has, or nothing, and says which."""

    def test_end_within_a_cycle_writes_its_updates(self, tmp_path: Path) -> None:
        text = run_and_capture(tmp_path, "HOOKS.profiler={wait: 1, active: 50}", "PHASES.epochs=1")
        assert traces(tmp_path) == ["attempt1-u00000005"]
        assert "1 trace in" in text
        assert "2 of 50 updates" in text

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        ("schedule", "start"),
        [("{wait: 3, warmup: 2}", 5), ("{wait: 50}", 52), ("{skip_first: 4, wait: 1}", 7)],
    )
    def test_end_before_the_first_cycle_writes_nothing(
        self, tmp_path: Path, schedule: str, start: int
    ) -> None:
        text = run_and_capture(tmp_path, f"HOOKS.profiler={schedule}", "PHASES.epochs=1")
        assert f"this attempt made 5 updates, and recording starts after {start}\n" in text
        assert not (tmp_path / "profile").exists()

    def test_killed_run_resumes_exactly_and_traces_again(self, plain: Path, tmp_path: Path) -> None:
        words = "HOOKS.profiler={wait: 4, warmup: 1, active: 3}"
        run_until_killed(
            tmp_path, words, hooks={"kill": KillAfter(9)}
        )  # within update 8; the checkpoint is of update 5
        assert traces(tmp_path) == ["attempt1-u00000007"]
        train(tmp_path, words)
        assert traces(tmp_path) == ["attempt1-u00000007", "attempt2-u00000013"]
        text = (tmp_path / "profile" / "attempt2-u00000013.txt").read_text()
        assert text.startswith("updates 11 to 13 of attempt 2")
        assert differences_of_runs(plain, tmp_path) == []
        assert not torch.autograd._profiler_enabled()

    def test_error_of_the_run_writes_its_updates(self, tmp_path: Path) -> None:
        class Fails(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                if run.state.updates == 4:
                    raise RuntimeError("the roof is on fire")

        with pytest.raises(RuntimeError, match="on fire") as caught:
            train(tmp_path, "HOOKS.profiler={wait: 0, warmup: 1}", hooks={"fails": Fails()})
        assert "__notes__" not in vars(caught.value)
        assert traces(tmp_path) == ["attempt1-u00000003"]
        assert not torch.autograd._profiler_enabled()


@pytest.mark.slow
def test_checkpoint_does_not_contain_the_hook() -> None:
    assert_exact_resume(
        ["HOOKS.profiler={wait: 0, warmup: 1, active: 2, repeat: 0}"], steps=[2], workers=(0, 2)
    )


class TestWhatGoesWrong:
    def test_another_profiler_keeps_its_trace(self, tmp_path: Path) -> None:
        class Sums(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                torch.ones(3).cumsum(0)

        with profile(activities=[ProfilerActivity.CPU]) as other:
            words = ("HOOKS.profiler={wait: 0, warmup: 0}", "PHASES.epochs=1")
            train(tmp_path, *words, hooks={"sums": Sums()})
        assert {event.key: event.count for event in other.key_averages()}["aten::cumsum"] == 7
        text = (tmp_path / "log.txt").read_text()
        assert text.count("HOOKS.profiler failed: RuntimeError: another torch.profiler") == 1

    @pytest.mark.slow
    def test_another_profiler_is_left_alone(self, tmp_path: Path) -> None:
        class Other(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                if run.state.updates == 1:
                    self.other = profile(activities=[ProfilerActivity.CPU])
                    self.other.start()

            def close(self) -> None:
                self.other.stop()

        other = Other()
        train(tmp_path, "HOOKS.profiler={wait: 3}", "PHASES.epochs=1", hooks={"other": other})
        assert "another torch.profiler" in (tmp_path / "log.txt").read_text()
        assert any(event.key == "aten::conv2d" for event in other.other.key_averages())

    def test_full_disk_loses_one_trace_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Full(Hook):
            def on_start(self, run: Any) -> None:
                run.folder.storage._before = Refusing("rename", "u00000003.json.gz")

        text = run_and_capture(
            tmp_path,
            "HOOKS.profiler={wait: 1, warmup: 1, active: 1, repeat: 2}",
            "PHASES.epochs=2",
            hooks={"full": Full()},
        )
        assert text.count("updates 3 to 3 of attempt 1") == 1
        assert "No space left on device" in text
        assert traces(tmp_path) == ["attempt1-u00000006"]

    def test_room_for_checkpoints_is_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "phasetrain.runs.folder.DiskSpace.free_bytes", lambda space: (1 << 20) + 1000
        )
        text = run_and_capture(tmp_path, "HOOKS.profiler={wait: 1, active: 1}", "PHASES.epochs=1")
        assert re.search(r"needs [\d,]+ bytes, and 1,049,576 ", text)
        assert not traces(tmp_path)

    @pytest.mark.addon("remote")
    def test_a_run_folder_that_is_no_folder(self, objects: dict[str, bytes]) -> None:
        words = (
            "RUN.imports=[phasetrain.testing]",
            "HOOKS.profiler={wait: 1, warmup: 1, active: 1}",
            "PHASES.epochs=1",
        )
        run_and_capture("mem://traced", *words)
        assert not open_storage("mem://traced").keeps_files
        names = [
            event["name"]
            for event in events(objects["mem://traced/profile/attempt1-u00000003.json.gz"])
        ]
        assert "phasetrain: forward" in names
        assert objects["mem://traced/profile/attempt1-u00000003.txt"].startswith(
            b"updates 3 to 3 of attempt 1"
        )

    def test_warnings_of_torch_about_its_own_use_do_not_come_up(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            train(
                tmp_path,
                "HOOKS.profiler={wait: 0, warmup: 0, active: 1, repeat: 0}",
                "PHASES.epochs=1",
                "PHASES.limit.train=2",
            )
        assert caplog.messages == []
        assert len(traces(tmp_path)) == 2


def test_forked_worker_does_not_record(tmp_path: Path) -> None:
    """It would record until its memory is full: what the fork has inherited counts every
    operator."""

    def seen(prepare: bool) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as inherited:
            if prepare:
                prepare_worker(0)
            torch.ones(3).cumsum(0)
        return sum(event.key == "aten::cumsum" for event in inherited.key_averages())

    def in_child(prepare: bool) -> int:
        if (pid := os.fork()) == 0:
            os._exit(seen(prepare))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert in_child(prepare=False) == 1
    assert in_child(prepare=True) == 0


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("{active: 0}", "active = 0: "),
        ("{wait: -1}", "wait = -1: "),
        ("{rows: 0}", "rows = 0: "),
        ("{sort_by: self_cpu_time}", "sort_by = 'self_cpu_time': "),
        ("{activ: 3}", "HOOKS.profiler.active"),
    ],
)
def test_settings_are_checked(tmp_path: Path, words: str, given: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(given)) as caught:
        train(tmp_path, f"HOOKS.profiler={words}")
    assert caught.value.key.startswith("HOOKS.profiler")
    assert HOOKS["profiler"] is Profiler


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_of_a_device_are_in_the_trace_and_the_table(tmp_path: Path) -> None:
    run_and_capture(
        tmp_path,
        "MACHINE.device=cuda",
        "HOOKS.profiler={wait: 1, warmup: 1, active: 2}",
        "PHASES.epochs=1",
    )
    [name] = traces(tmp_path)
    assert any(
        event.get("cat") == "kernel"
        for event in events((tmp_path / "profile" / f"{name}.json.gz").read_bytes())
    )
    assert "Self CUDA" in (tmp_path / "profile" / f"{name}.txt").read_text()
