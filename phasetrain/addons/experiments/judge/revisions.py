"""Revisions of the user's project, each in a temporary `git worktree`."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phasetrain.addons.experiments.judge.processes import WorkingFolder, delay_signals
from phasetrain.errors import ConfigError
from phasetrain.runs.records import process_exists

PREFIX = "phasetrain-judge-tree-"
"""Start of the names of the temporary folders, followed by the pid of the process."""

PACKAGES = ("site-packages", "dist-packages")
"""Folders of installed packages, which belong to no revision."""


@dataclass(frozen=True)
class Revision:
    """A revision in a folder.

    Attributes:
        commit: its full name.
        working_folder: the folder in it that corresponds to the working directory, and the search
            path of Python's modules, with folders of the project mapped into it.
    """

    commit: str
    working_folder: WorkingFolder


def run_git(words: Sequence[str], folder: str) -> str:
    """Return the output of a git command.

    Raises:
        ConfigError: it has failed (code `judge.git`).
        StoppedError: a signal came, and git has ended.
    """
    # Variables such as GIT_DIR, set inside of a git hook, would lead to another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        # A git that is killed while it makes a worktree leaves it locked, and no prune removes it.
        with delay_signals():
            done = subprocess.run(
                ["git", "-C", folder, *words],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )
    except OSError as error:
        raise ConfigError(f"--rev needs git: {error.strerror}", code="judge.git") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"git {words[0]}: {lines[-1]}", code="judge.git")
    return done.stdout.rstrip("\n")


def find_repository(folder: str) -> str:
    """Return the top folder of the repository around a folder.

    Raises:
        ConfigError: there is none (code `judge.no_repository`).
    """
    try:
        return run_git(["rev-parse", "--show-toplevel"], folder)
    except ConfigError as error:
        raise ConfigError(
            f"--rev and the folder {folder!r}: it is in no git repository; change to the folder of "
            "your project, or judge two configs or run folders",
            code="judge.no_repository",
        ) from error


def find_commit(name: str, folder: str) -> str:
    """Return the full name of a commit.

    Raises:
        ConfigError: there is no such revision (code `judge.unknown_revision`).
    """
    try:
        # ^{commit} follows a tag to its commit; a name that begins with a dash is no option.
        return run_git(["rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}"], folder)
    except ConfigError as error:
        raise ConfigError(
            f"--rev {name}: the repository of {folder!r} has no such revision; expected a commit, "
            "a branch or a tag (`git log --oneline` lists commits)",
            code="judge.unknown_revision",
        ) from error


@contextmanager
def open_revision(name: str, folder: str) -> Iterator[Revision]:
    """Check a revision out into a temporary folder, and remove it in the end.

    Files and folders that git ignores, such as data, are linked into it.

    Args:
        name: commit, branch or tag.
        folder: the working directory, in the repository.

    Raises:
        ConfigError: there is no repository, no such revision, or git fails.
    """
    top = find_repository(folder)
    commit = find_commit(name, folder)
    _remove_leftovers(top)
    # In a new folder, because git wants to make the worktree itself; named like the project, since
    # a package may be imported by the name of its folder.
    tree = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"), Path(top).name)
    try:
        run_git(["worktree", "add", "--quiet", "--detach", str(tree), commit], top)
        _link_ignored(top, tree)
        # resolve: git names the repository without symbolic links, the shell with them.
        here = tree / Path(folder).resolve().relative_to(Path(top).resolve())
        if not here.is_dir():
            raise ConfigError(
                f"--rev {name}: the folder {folder!r} does not exist in this revision; start the "
                "command in a folder that all revisions have",
                code="judge.unknown_revision",
            )
        yield Revision(commit, WorkingFolder(str(here), tuple(_map_search_path(top, tree))))
    finally:
        _remove(top, tree)


def _remove(top: str, tree: Path) -> None:
    with delay_signals():
        # Links before anything else: what they point to is the user's.
        shutil.rmtree(tree.parent, ignore_errors=True)
        with suppress(ConfigError):
            run_git(["worktree", "prune"], top)


def _remove_leftovers(top: str) -> None:
    """Remove the folders of processes that were killed."""
    for line in run_git(["worktree", "list", "--porcelain"], top).splitlines():
        parent = Path(line.removeprefix("worktree ")).parent
        if line.startswith("worktree ") and parent.name.startswith(PREFIX):
            # A living process with this pid may be another one; its folder is left for later.
            pid = parent.name.removeprefix(PREFIX).partition("-")[0]
            if pid.isdigit() and not process_exists(int(pid)):
                _remove(top, parent / "tree")


def _link_ignored(top: str, tree: Path) -> None:
    # -z: names end with a zero byte, since git would quote unusual characters in lines.
    words = ["ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z"]
    for entry in run_git(words, top).split("\0"):
        path = entry.rstrip("/")
        # Bytecode is made from a source, which may be another one in this revision.
        if not path or "__pycache__" in Path(path).parts or path.endswith(".pyc"):
            continue
        target = tree / path
        if target.parent.is_dir() and not target.exists():
            target.symlink_to(Path(top, path))


def _map_search_path(top: str, tree: Path) -> Iterator[str]:
    """Yield the counterparts in the revision of folders of the module search path, and the folders
    of PYTHONPATH that are not in the repository."""
    root = Path(top).resolve()
    for entry in sys.path:
        path = Path(entry).resolve()
        if path.is_relative_to(root) and not set(PACKAGES) & set(path.parts):
            yield str(tree / path.relative_to(root))
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry and not Path(entry).resolve().is_relative_to(root):
            yield entry
