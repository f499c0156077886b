"""Disks that are full, broken, read-only or limited: training continues with a warning, and no
checkpoint is lost."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from failing_calls import Fault
from faulty import ONE, Ended, Starter, open_folder, small_disk
from harness import SMALL, differences_of_runs, is_clean, leftovers, newest, records, status, train

from phasetrain.engine.plan import Phase
from phasetrain.hooks import CheckpointHook, Hook, Run
from phasetrain.runtime.storage import Storage

WORDS = (*SMALL, ONE, "CHECKPOINT.every_updates=2", "RUN.imports=[faulty_parts]")
"""Saves in mid-epoch, at epoch ends and at the end: 0.2, 0.4, 1.0, 2.1, 2.3, 2.5, ..., ten in
all."""

ONCE = [
    ("open", "ENOSPC", 1),
    ("open", "EROFS", 3),
    ("write", "ENOSPC", 1),
    ("write", "EDQUOT", 2),
    ("write", "EIO", 3),
    ("fsync", "EIO", 1),
    ("fsync", "EDQUOT", 4),
    ("fsync", "EIO", 5),
    ("rename", "EIO", 1),
    ("mkdir", "EROFS", 2),
]


@pytest.fixture
def faults(starter: Starter) -> Starter:
    if not starter.faults:
        pytest.skip(
            "system calls are made to fail by a library that gcc compiles, and there is no gcc"
        )
    return starter


def says(ended: Ended, folder: Path, error: str) -> bool:
    """Assert that the message of a failed save has path, error, and the bytes needed and free."""
    number = getattr(errno, error)
    message = re.search(
        rf"'{re.escape(str(folder))}/checkpoints': {re.escape(os.strerror(number))} "
        rf"\(errno {number} {error}\).* [\d,]+ bytes .* [\d,]+ bytes",
        ended.output,
    )
    assert message, ended.output
    return True


class TestASystemCallThatFailsOnce:
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(("call", "error", "number"), ONCE)
    def test_training_continues_after_a_failed_save(
        self, faults: Starter, unbroken: Path, tmp_path: Path, call: str, error: str, number: int
    ) -> None:
        folder = tmp_path / "run"
        fault = Fault(call, "/checkpoints/", error, number, number)
        ended = faults.run(folder, *WORDS, faults=(fault,))
        assert ended.code == 0, ended.output
        assert says(ended, folder, error)
        assert "CHECKPOINT.on_save_error = 'continue'" in ended.output
        told = status(folder)
        assert (told["state"], told["exit_code"], told["save_failures"]) == ("finished", 0, 1)
        assert is_clean(ended, folder)
        assert differences_of_runs(unbroken, folder) == []

    def test_run_ends_after_a_failed_save_if_asked_to(
        self, faults: Starter, unbroken: Path, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        stop = "CHECKPOINT.on_save_error=stop"
        ended = faults.run(
            folder, *WORDS, stop, faults=(Fault("fsync", "/checkpoints/", "EIO", 12, 12),)
        )
        assert ended.code == 1
        assert says(ended, folder, "EIO")
        assert "Traceback" not in ended.output
        told = status(folder)
        assert (told["state"], told["exit_code"], told["save_failures"]) == ("failed", 1, 1)
        assert is_clean(ended, folder)
        before = newest(folder).manifest.state["updates"]
        assert before > 0
        assert faults.run(folder, *WORDS, stop).code == 0
        assert differences_of_runs(unbroken, folder) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
    @pytest.mark.parametrize("call", ["open", "write", "fsync", "rename", "mkdir", "unlink"])
    def test_failure_at_every_operation_loses_nothing(
        self, faults: Starter, unbroken: Path, tmp_path: Path, call: str, error: str
    ) -> None:
        """Fails each call of the first two saves, and some calls that delete older checkpoints."""
        for number in [*range(1, 14), 20, 30, 40]:
            folder = tmp_path / f"{number}"
            ended = faults.run(
                folder, *WORDS, faults=(Fault(call, "/checkpoints", error, number, number),)
            )
            assert ended.code in (0, 1, 2), (
                ended.output
            )  # 1: the last save failed; 2: the start was refused
            assert "Traceback" not in ended.output
            if ended.code:
                ended = faults.run(folder, *WORDS)
                assert ended.code == 0, ended.output
            assert is_clean(ended, folder)
            assert differences_of_runs(unbroken, folder) == []


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    ("call", "error", "first"),
    [("write", "ENOSPC", 5), ("fsync", "EIO", 9), ("rename", "EROFS", 3)],
)
def test_disk_that_keeps_failing_loses_no_checkpoint(
    faults: Starter, unbroken: Path, tmp_path: Path, call: str, error: str, first: int
) -> None:
    folder = tmp_path / "run"
    ended = faults.run(folder, *WORDS, faults=(Fault(call, "/checkpoints/", error, first),))
    assert ended.code == 1
    assert says(ended, folder, error)
    assert "Traceback" not in ended.output
    told = status(folder)
    assert (told["state"], told["exit_code"], told["save_failures"] > 5) == ("failed", 1, True)
    assert is_clean(ended, folder)
    last = newest(folder)
    assert 0 < last.manifest.state["updates"] < 15
    again = faults.run(folder, *WORDS)
    assert again.code == 0, again.output
    assert last.path in again.output
    assert differences_of_runs(unbroken, folder) == []


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "path", ["status.json", "metrics.jsonl", "log.txt", "steps.ledger", "owner.json"]
)
@pytest.mark.parametrize(
    "call", ["write", *(pytest.param(call, marks=pytest.mark.slow) for call in ("fsync", "rename"))]
)
def test_files_unwritable_for_a_while_change_no_bit(
    faults: Starter, unbroken: Path, tmp_path: Path, path: str, call: str
) -> None:
    folder = tmp_path / "run"
    ended = faults.run(folder, *WORDS, faults=(Fault(call, f"/run/{path}", "ENOSPC", 3, 6),))
    assert ended.code == 0, ended.output
    assert status(folder)["state"] == "finished"
    assert is_clean(ended, folder)
    assert differences_of_runs(unbroken, folder) == []


@pytest.mark.slow
def test_unwritable_status_is_only_a_warning(
    faults: Starter, unbroken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ended = faults.run(folder, *WORDS, faults=(Fault("rename", "/run/status.json", "EIO", 2),))
    assert ended.code == 0, ended.output
    assert "status.json" in ended.output
    assert (
        status(folder)["state"] == "running"
    )  # the final state could not be written here, but is in the checkpoint
    assert newest(folder).manifest.state["finished"] == "completed"
    assert is_clean(ended, folder)
    assert differences_of_runs(unbroken, folder) == []


@pytest.mark.by_default(1)
@pytest.mark.parametrize("path", ["owner.json", "run.lock"])
def test_lock_that_cannot_be_removed_blocks_nobody(
    faults: Starter, unbroken: Path, tmp_path: Path, path: str
) -> None:
    folder = tmp_path / "run"
    ended = faults.run(folder, *WORDS, faults=(Fault("unlink", f"/run/{path}", "EIO"),))
    assert ended.code == 0, ended.output
    assert path in ended.output
    assert (folder / path).exists()
    assert faults.run(folder, *WORDS, "PHASES.epochs=4", "RUN.allow=[PHASES.epochs]").code == 0
    assert leftovers(folder) == []


def test_unwritable_metrics_hold_checkpoints_back(
    faults: Starter, unbroken: Path, tmp_path: Path
) -> None:
    """A checkpoint that covers unwritten lines would lose them forever."""
    folder = tmp_path / "run"
    ended = faults.run(folder, *WORDS, faults=(Fault("write", "/run/metrics.jsonl", "ENOSPC"),))
    assert ended.code == 1
    assert os.strerror(errno.ENOSPC) in ended.output
    assert is_clean(ended, folder)
    assert faults.run(folder, *WORDS).code == 0
    assert differences_of_runs(unbroken, folder) == []


WIDE = ("MODEL.width=16", "PHASES.limit.test=1")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    assert train(folder, ONE, *WIDE).state == "finished"
    return folder


class TestARealLimit:
    def full(self, do: str, size: int, until: int) -> tuple[str, ...]:
        """Return the overrides of a hook that sets the limit at update 4 and of one that lifts it
        at update `until`, if that is not 0."""
        begin = f"HOOKS.begin={{name: fault_at, do: {do}, updates: 4, size: {size}}}"
        end = f"HOOKS.end={{name: fault_at, do: free, updates: {until}}}"
        return (begin, end) if until else (begin,)

    @pytest.mark.feature(
        "B3", "every fault F01 to F48, with its test", "[reliability.md](reliability.md)"
    )
    def test_run_survives_a_disk_that_is_full_for_a_while(
        self, starter: Starter, wide: Path, tmp_path: Path
    ) -> None:
        try:
            with small_disk(tmp_path / "disk") as disk:
                self.check(starter, wide, disk / "run", self.full("fill", 20_000, 9), "ENOSPC")
        except PermissionError as error:
            pytest.skip(f"this user may not mount a small disk: {error}")

    def test_run_survives_a_file_size_limit_for_a_while(
        self, starter: Starter, wide: Path, tmp_path: Path
    ) -> None:
        self.check(starter, wide, tmp_path / "run", self.full("limit", 12_000, 9), "EFBIG")

    def check(
        self, starter: Starter, wide: Path, folder: Path, words: tuple[str, ...], error: str
    ) -> None:
        ended = starter.run(folder, *WORDS, *WIDE, *words)
        assert ended.code == 0, ended.output
        assert says(ended, folder, error)
        assert status(folder)["save_failures"] >= 2
        assert is_clean(ended, folder)
        assert [r["updates"] for r in records(folder) if r["kind"] == "step"] == list(range(1, 16))
        assert differences_of_runs(wide, folder) == []

    @pytest.mark.slow
    def test_disk_that_stays_full_keeps_the_last_checkpoint(
        self, starter: Starter, wide: Path, tmp_path: Path
    ) -> None:
        try:
            with small_disk(tmp_path / "disk") as disk:
                folder = disk / "run"
                ended = starter.run(folder, *WORDS, *WIDE, *self.full("fill", 20_000, 0))
                assert ended.code == 1, ended.output
                assert says(ended, folder, "ENOSPC")
                last = newest(folder).manifest.state["updates"]
                assert last in (2, 4)  # the save after update 4 may be under way
                assert (ended.alive, leftovers(folder, lambda name: True)) == ([], [])
                again = starter.run(folder, *WORDS, *WIDE)  # the ballast is still there
                assert again.code in (1, 2), again.output
                assert "free" in again.output
                (disk / "ballast").unlink()
                ended = starter.run(folder, *WORDS, *WIDE)
                assert ended.code == 0, ended.output
                assert is_clean(ended, folder)
                assert differences_of_runs(wide, folder) == []
        except PermissionError as error:
            pytest.skip(f"this user may not mount a small disk: {error}")

    def test_too_small_disk_is_rejected_before_training(
        self, starter: Starter, tmp_path: Path
    ) -> None:
        try:
            with small_disk(tmp_path / "disk", "128k") as disk:
                ended = starter.run(disk / "run", *WORDS, "MODEL.width=32")
                assert ended.code == 2, ended.output
                assert re.search(r"RUN.dir = '.*/disk/run': [\d,]+ bytes .* [\d,]+", ended.output)
        except PermissionError as error:
            pytest.skip(f"this user may not mount a small disk: {error}")


class TestAFolderThatMayNotBeWritten:
    def test_folder_of_another_user_is_rejected_before_training(self, starter: Starter) -> None:
        if os.getuid() != 0:
            pytest.skip("only root can run as another user")
        with open_folder() as parent:
            for place in (*parent.parents, *Path(__file__).parents):
                if not place.stat().st_mode & 0o001:
                    pytest.skip(f"other users may not enter {place}")
            folder = parent / "run"
            folder.mkdir(mode=0o555)
            (parent / "run.txt").touch()
            (parent / "run.txt").chmod(0o666)
            ended = starter.run(folder, *WORDS, uid=65534)
            assert ended.code == 2, ended.output
            assert f"RUN.dir = '{folder}' " in ended.output
            assert f"errno {errno.EACCES:d}" in ended.output
            assert list(folder.iterdir()) == []

    def test_read_only_file_system_is_rejected_before_training(
        self, faults: Starter, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        ended = faults.run(folder, *WORDS, faults=(Fault("open", "/run/", "EROFS"),))
        assert ended.code == 2
        assert f"RUN.dir = '{folder}' " in ended.output
        assert f"errno {errno.EROFS:d}" in ended.output
        assert is_clean(ended, folder)

    @pytest.mark.slow
    def test_folder_that_becomes_read_only_keeps_the_last_checkpoint(
        self, faults: Starter, unbroken: Path, tmp_path: Path
    ) -> None:
        """From the second save on, every call fails that changes a name or opens a file for
        writing."""
        folder = tmp_path / "run"
        calls = [("open", 3), ("rename", 2), ("mkdir", 3)]
        ended = faults.run(
            folder,
            *WORDS,
            faults=tuple(Fault(call, "/checkpoints", "EROFS", n) for call, n in calls),
        )
        assert ended.code == 1
        assert says(ended, folder, "EROFS")
        assert faults.run(folder, *WORDS).code == 0
        assert differences_of_runs(unbroken, folder) == []


def test_background_failure_is_reported_at_the_next_step_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, told = Storage.create, {}

    def full(self: Storage, path: str, *args: Any, **options: Any) -> Any:
        if "p0000-s00000002" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return create(self, path, *args, **options)

    class Watch(Hook):
        def on_forward(self, run: Run, phase: Phase, out: Any) -> None:
            hook = run.hooks.by_label["checkpoint"]
            assert isinstance(hook, CheckpointHook)
            if hook._writing.busy:
                hook._writing._job.exception()  # type: ignore[union-attr] # waits until the write has ended
            told[run.state.updates] = hook.failures

    monkeypatch.setattr(Storage, "create", full)
    train(tmp_path, ONE, "CHECKPOINT.every_updates=2", "PHASES.epochs=1", hooks={"watch": Watch()})
    assert told == {
        0: 0,
        1: 0,
        2: 0,
        3: 1,
        4: 1,
        5: 1,
    }  # saved after update 2, written during update 3
