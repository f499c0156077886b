"""Revisions of a project: what is in their folders, and what happens to these in the end."""

import subprocess
import sys
from pathlib import Path

import pytest
from fake_runs import FakeRuns
from raising import raises

from phasetrain.addons.experiments.judge import revisions
from phasetrain.addons.experiments.judge.judge import JudgeOptions, judge
from phasetrain.addons.experiments.judge.revisions import open_revision
from phasetrain.errors import ConfigError


def git(*words: str) -> str:
    flags = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *flags, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with a committed file that has changed since."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    git("init", "-q", "-b", "main")
    for path, text in ((".gitignore", "data/\n"), ("net.py", "old = 1\n"), ("src/part.py", "")):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text)
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    Path("net.py").write_text("new = 1\n")
    Path("untracked.py").write_text("")
    Path("data").mkdir()
    Path("data", "rows.csv").write_text("1\n")
    return folder


@pytest.mark.feature("judge")
def test_folder_has_the_revision_and_links_to_ignored_files(project: Path) -> None:
    with open_revision("main", str(project)) as revision:
        folder = Path(revision.working_folder.path)
        assert revision.commit == git("rev-parse", "HEAD")
        assert (folder / "net.py").read_text() == "old = 1\n"
        assert (folder / "data" / "rows.csv").read_text() == "1\n"
        assert not (folder / "untracked.py").exists()
        assert folder.name == "project"
    assert not folder.exists()
    assert (project / "data" / "rows.csv").exists()
    assert len(git("worktree", "list").splitlines()) == 1


def test_working_directory_below_the_top(project: Path) -> None:
    with open_revision("main", str(project / "src")) as revision:
        assert revision.working_folder.path.endswith("/project/src")


def test_search_path_is_that_of_the_revision(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = project / ".venv" / "site-packages"
    monkeypatch.setattr(sys, "path", [str(project / "src"), str(installed), "/elsewhere"])
    monkeypatch.setenv("PYTHONPATH", f"{project}:/other")
    with open_revision("HEAD", str(project)) as revision:
        assert revision.working_folder.search_path == (
            f"{revision.working_folder.path}/src",
            "/other",
        )


def test_folder_of_a_killed_process_is_removed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f"{revisions.PREFIX}999999-x" / "project"
    git("worktree", "add", "-q", "--detach", str(left))
    monkeypatch.setattr(revisions, "process_exists", lambda pid: pid != 999999)
    with open_revision("HEAD", str(project)):
        assert not left.parent.exists()
        assert len(git("worktree", "list").splitlines()) == 2


def test_variables_of_a_git_hook_lead_to_no_other_repository(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    with open_revision("HEAD", str(project)) as revision:
        assert Path(revision.working_folder.path, "net.py").exists()


def test_unknown_revision(project: Path) -> None:
    with (
        raises(ConfigError, code="judge.unknown_revision"),
        open_revision("mian", str(project)),
    ):
        raise AssertionError("there is no such revision")


def test_folder_that_the_revision_does_not_have(project: Path) -> None:
    (project / "later").mkdir()
    with (
        raises(ConfigError, code="judge.unknown_revision"),
        open_revision("HEAD", str(project / "later")),
    ):
        raise AssertionError("there is no such folder")
    assert len(git("worktree", "list").splitlines()) == 1


def test_folder_without_a_repository(tmp_path: Path) -> None:
    with raises(ConfigError, code="judge.no_repository"), open_revision("HEAD", str(tmp_path)):
        raise AssertionError("there is no repository")


def test_revision_and_working_tree_are_judged(runs: FakeRuns, project: Path) -> None:
    found = judge(
        ["experiment=digits"],
        JudgeOptions(revisions=("HEAD",), short=4),
        launch=runs,
        say=lambda line: None,
    )
    (trial,) = found.trials
    assert found.baseline.commit == git("rev-parse", "HEAD")
    assert (trial.contender.label, trial.contender.commit) == ("working tree", "")
    assert trial.contender.working_folder.path == str(project)
    assert trial.is_identical
    assert [folder.endswith("project") for folder in runs.folders] == [True, True]
    assert runs.folders[0] != runs.folders[1]
    # The run folders stay, although the folder of the revision is gone.
    assert len(list(project.glob("runs/judge-*/short4-seed0/status.json"))) == 2
