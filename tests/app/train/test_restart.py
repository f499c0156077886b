"""A run that starts over, and a finished run whose code has changed."""

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import (
    REPORT,
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    leftovers,
    newest,
    run_until_killed,
    status,
    train,
)
from raising import raises

from phasetrain.app.api import run
from phasetrain.app.setup import resolve_config
from phasetrain.app.train.source_code import hash_sources, list_source_changes
from phasetrain.cli import main
from phasetrain.errors import ChangedError, ConfigError, FolderInUseError
from phasetrain.hooks import Hook
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.lock import FolderLock
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import Killed

RESTART = "RUN.resume=restart"
SHORT = ("PHASES.epochs=1", "PHASES.limit.train=3", "PHASES.limit.test=1")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder, *SHORT)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with another seed, to be copied."""
    folder = tmp_path_factory.mktemp("other")
    train(folder, *SHORT, "RUN.seed=1")
    return folder


@pytest.fixture
def base(unbroken: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, which a restart may set aside."""
    shutil.copytree(unbroken, tmp_path / "base")
    return tmp_path / "base"


class Interrupt(Hook):
    """Presses Ctrl-C after the first step."""

    def on_step(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class TestRestart:
    def test_old_folders_are_kept_under_numbers(
        self, unbroken: Path, base: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "base.7").mkdir()
        (tmp_path / "base.old").mkdir()
        (base / "owner.json.tmp-0123abcd").touch()  # of a restart that was killed
        train(base, *SHORT, "RUN.seed=1", RESTART)
        digest = status(base)["digest"]
        train(base, *SHORT, RESTART)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "base",
            "base.7",
            "base.8",
            "base.9",
            "base.old",
        ]
        assert (status(base)["attempt"], status(tmp_path / "base.9")["digest"]) == (1, digest)
        assert differences_of_runs(unbroken, base) == []
        assert leftovers(tmp_path) == []

    @pytest.mark.feature(
        "restart",
        "runs start over, and the old folder is kept; finished runs notice changed code",
        "`--restart`, `RUN.resume=restart`",
    )
    def test_killed_restart_is_resumed_by_the_same_command(
        self, unbroken: Path, other: Path, tmp_path: Path
    ) -> None:
        base = tmp_path / "base"
        shutil.copytree(other, base)
        for step in (1, 2):
            hooks = {"save": SaveEachStep(), "kill": KillAfter(step)}
            run_until_killed(base, *SHORT, RESTART, hooks=hooks)
        assert train(base, *SHORT, RESTART).state == "finished"
        assert status(base)["attempt"] == 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "base.1"]
        assert differences_of_runs(unbroken, base) == []

    @pytest.mark.parametrize("reason", ["interrupted", "config", "requeued"])
    def test_person_starts_over_again_and_a_scheduler_does_not(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        assert train(base, *SHORT, RESTART, hooks={"stop": Interrupt()}).state == "interrupted"
        words = []
        if reason == "requeued":
            monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        if reason == "config":
            facts = {**status(base), "state": "preempted"}
            (base / "status.json").write_text(json.dumps(facts))
            words = ["OPTIMIZER.lr=0.3"]
        assert train(base, *SHORT, RESTART, *words).state == "finished"
        is_resumed = reason == "requeued"
        assert status(base)["attempt"] == 1 + is_resumed
        assert (tmp_path / "base.2").exists() is not is_resumed

    def test_job_that_ended_before_it_was_requeued_is_not_started_over(
        self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        train(base, *SHORT, RESTART)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert train(base, *SHORT, RESTART).updates == 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "base.1"]

    @pytest.mark.parametrize("state", ["running", "finished"])
    def test_run_killed_after_its_last_checkpoint_is_completed(
        self, base: Path, tmp_path: Path, state: str
    ) -> None:
        train(base, *SHORT, RESTART, *REPORT)
        facts = {key: value for key, value in status(base).items() if key != "digest"}
        (base / "status.json").write_text(json.dumps({**facts, "state": state}))
        (base / "report.html").unlink(missing_ok=True)
        (base / "run.lock").touch()
        for folders in (["base", "base.1"], ["base", "base.1", "base.2"]):
            assert train(base, *SHORT, RESTART, *REPORT).state == "finished"
            assert sorted(path.name for path in tmp_path.iterdir()) == folders
            assert (base / "report.html").exists() is bool(REPORT)
            assert status(base)["state"] == "finished"
            assert leftovers(base) == []

    @pytest.mark.feature("restart")
    @pytest.mark.parametrize("moment", ["rename_folder", "release_at", "open"])
    def test_kill_at_any_moment_leaves_the_old_or_the_new_state(
        self,
        unbroken: Path,
        other: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        moment: str,
    ) -> None:
        base = tmp_path / "base"
        shutil.copytree(other, base)
        digest = status(base)["digest"]
        owner = {"rename_folder": Storage, "release_at": FolderLock, "open": RunFolder}[moment]

        def kill(*_: Any) -> None:
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(owner, moment, kill)
            with pytest.raises(Killed):
                train(base, *SHORT, RESTART)
        is_old = moment == "rename_folder"
        assert status(base if is_old else tmp_path / "base.1")["digest"] == digest
        assert base.exists() is is_old
        for folder in (base, tmp_path / "base.1"):
            _lose_owner(folder)
        assert train(base, *SHORT, RESTART).state == "finished"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "base.1"]
        assert leftovers(tmp_path) == []
        assert differences_of_runs(unbroken, base) == []

    def test_folder_behind_a_link_is_kept_next_to_it(self, base: Path, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        base.rename(tmp_path / "disk" / "run")
        base.symlink_to(tmp_path / "disk" / "run")
        assert train(base, *SHORT, RESTART).state == "finished"
        assert base.is_symlink()
        assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["run", "run.1"]

    def test_folder_in_use_stays(self, base: Path, tmp_path: Path) -> None:
        folder = RunFolder(str(base))
        folder.open()
        with pytest.raises(FolderInUseError):
            train(base, *SHORT, RESTART)
        folder.close()
        assert [path.name for path in tmp_path.iterdir()] == ["base"]

    def test_folder_that_cannot_be_renamed_is_rejected(
        self, base: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(base)
        with raises(ConfigError, code="folder.not_renamed"):
            train(Path(), *SHORT, RESTART)

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = [*SMALL, *SHORT, f"RUN.dir={tmp_path}/base"]
        assert main(words) == 0
        assert main(["--restart", *words]) == 0
        assert (tmp_path / "base.1").exists()
        command = (tmp_path / "base" / "RUN.md").read_text()
        assert "RUN.resume" not in command.partition("The same command")[0]
        capsys.readouterr()
        for more in (["RUN.resume=never"], ["-m"], ["--from", "x"]):
            assert main(["--restart", *words, *more, "--json"]) == 2
            (error,) = json.loads(capsys.readouterr().out)["errors"]
            assert error["code"] == "cli.conflict"


class TestChangedCode:
    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Return a folder with a module of parts and the modules that it imports."""
        folder = tmp_path / "code"
        (folder / "own_parts").mkdir(parents=True)
        (folder / "own_parts" / "__init__.py").write_text("from . import deep\n")
        (folder / "own_parts" / "deep.py").write_text("import own_scale\n")
        (folder / "own_scale.py").write_text("SCALE = 1.0\n")
        (folder / "own_net.py").write_text(
            "from phasetrain.models import small_cnn\n"
            "def Net(classes: int, channels: int):\n"
            "    from own_parts import deep\n"
            "    return small_cnn(classes, channels)\n"
        )
        for name in ("own_parts", "own_parts.deep", "own_scale", "own_net"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.chdir(folder)
        return folder

    WORDS = ("experiment=null", "DATA.TRAIN.dataset=digits", "PHASES.updates=2")

    def test_files_of_parts_and_of_their_imports_are_compared(self, package: Path) -> None:
        setup = resolve_config([*self.WORDS, "MODEL={name: own_net.Net}"])
        found = hash_sources(setup)
        assert list(found) == ["own_net", "own_parts", "own_parts.deep", "own_scale"]
        promised = {"code": found, "config": {"RUN": {"imports": []}}}
        assert list_source_changes(setup, promised) == []
        (package / "own_scale.py").write_text('recomputed = ("SCALE",)\n\nSCALE = 1.0\n')
        assert list_source_changes(setup, promised) == []  # a declaration changes no bit
        # checkpoints of earlier versions have the digest of the whole file
        before = {"own_scale": hash_sources(setup, is_whole=True)["own_scale"]}
        assert list_source_changes(setup, promised | {"code": before}) == []
        assert before["own_scale"] != found["own_scale"]
        (package / "own_scale.py").write_text("SCALE = 2.0\n")
        assert list_source_changes(setup, promised) == ["own_scale.py has changed"]

    def test_another_import_is_a_change(self, package: Path) -> None:
        setup = resolve_config([*self.WORDS, "RUN.imports=[own_scale]"])
        promised: dict[str, Any] = {"code": {}, "config": {"RUN": {"imports": ["other"]}}}
        assert list_source_changes(setup, promised) == ["RUN.imports was [other]"]

    @pytest.mark.feature("restart")
    def test_finished_run_names_the_file_and_the_flag(self, package: Path) -> None:
        words = [*SMALL, *SHORT, "RUN.imports=[own_parts]", "RUN.dir=run"]
        run(words, terminal=Terminal(io.StringIO(), live=False))
        texts = []
        for _ in range(2):
            stream = io.StringIO()
            result = run(words, terminal=Terminal(stream, live=False))
            assert (result.state, result.updates) == ("finished", 3)
            texts.append(stream.getvalue())
            (package / "own_scale.py").write_text("SCALE = 3.0\n")
        assert "nothing is left to do" in texts[0]
        assert "own_scale.py has changed" in texts[1]
        assert "--restart" in texts[1]


class TestRefusal:
    @pytest.mark.feature("refused", "refused commands leave no attempt", "")
    def test_refused_command_leaves_a_run_as_it_was(self, tmp_path: Path) -> None:
        hooks = {"save": SaveEachStep(), "kill": KillAfter(1)}
        for _ in range(2):
            run_until_killed(tmp_path, *SHORT, hooks=hooks)
        names = ("status.json", "attempts.jsonl", "config.yaml", "RUN.md")
        before = {name: (tmp_path / name).read_bytes() for name in names}
        for words in (
            ["OPTIMIZER.lr=0.3"],
            ["RUN.give_up_after=1"],
            ["HOOKS.console={minuts: 3}"],
        ):
            with pytest.raises((ChangedError, ConfigError, Exception)):
                train(tmp_path, *SHORT, *words)
            assert {name: (tmp_path / name).read_bytes() for name in names} == before
        assert leftovers(tmp_path) == []
        train(tmp_path, *SHORT)
        assert status(tmp_path)["attempt"] == 3
        assert newest(tmp_path).manifest.state["updates"] == 3

    def test_refused_first_command_leaves_its_log_alone(self, tmp_path: Path) -> None:
        class Refuse(Hook):
            def on_start(self, *_: Any) -> None:
                raise ConfigError("no")

        with pytest.raises(ConfigError):
            train(tmp_path, *SHORT, hooks={"refuse": Refuse()})
        names = [path.name for path in tmp_path.iterdir()]
        assert names == ["log.txt"]
        assert "ConfigError: no" in (tmp_path / "log.txt").read_text()
        assert train(tmp_path, *SHORT).state == "finished"
        assert status(tmp_path)["attempt"] == 1


def _lose_owner(folder: Path) -> None:
    """Let the owner of a lock be a process that is gone; here the one that was killed goes on."""
    path = folder / "owner.json"
    if path.exists():
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid": 0}))
