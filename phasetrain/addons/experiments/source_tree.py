"""The state of the source code in a git work tree: commit, changes and a diff."""

import os
import re
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from phasetrain.app.train import run_documents
from phasetrain.app.train.run_documents import GIT_DIFF, PACKAGE_DIFF, SourceTree
from phasetrain.runtime.redaction import Redaction

GIT_SECONDS = 5.0
"""How long to wait for git before the run starts without its answer."""

MAX_DIFF_BYTES = 5 << 20
"""Maximum size of a diff that is kept."""

MAX_NEW_FILE_BYTES = 200_000
"""Maximum size of an untracked file that is included in the diff."""

MAX_UNTRACKED = 100
"""Maximum number of untracked files that are listed."""

SOURCE_SUFFIXES = frozenset(
    {".py", ".pyi", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".sh", ".css", ".js"}
)
"""Suffixes of untracked files that are included in the diff."""

_QUERIES = (
    ("rev-parse", "--show-toplevel", "--show-prefix", "HEAD"),
    ("status", "--porcelain=v2", "--branch", "--untracked-files=all", "-z"),
    ("config", "--get", "remote.origin.url"),
)
_DIFF = ("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")

# Fields before the path in an entry of `git status --porcelain=v2`, by kind of entry.
_STATUS_FIELDS = {"1 ": 8, "2 ": 9, "u ": 10}

# A name that needs no quoting in a diff.
_PLAIN_NAME = re.compile(r"[\w./+-]+", re.ASCII)

FileStamp = tuple[str, int, int]
"""Name of a file, time of its last change in nanoseconds, size in bytes."""

_UNKNOWN_FILES: tuple[FileStamp, ...] = (("", 0, 0),)
"""In place of the changed files, if git has not listed them in time."""


def find_sources(run_folder: str) -> dict[str, SourceTree | None]:
    """Return the state of the git tree around the working directory, and of the package if it is in
    another tree."""
    clean = Redaction(os.environ)
    skip = None
    if "://" not in run_folder:
        # a run folder inside the tree would be recorded as a change of the source
        skip = Path(run_folder).absolute()
    here = describe_source(Path.cwd(), clean, diff=GIT_DIFF, skip=skip)
    sources: dict[str, SourceTree | None] = {"git": here}
    package = Path(run_documents.__file__).resolve().parents[2]
    # Only for a checkout: an installed package is identified by its version.
    if (package.parent / ".git").exists() and (
        here is None or not package.is_relative_to(here.facts["folder"])
    ):
        sources["phasetrain_git"] = describe_source(package, clean, diff=PACKAGE_DIFF, skip=skip)
    return sources


def describe_source(
    folder: Path, redaction: Redaction, *, diff: str, skip: Path | None = None
) -> SourceTree | None:
    """Return the state of the work tree around a folder, or None without git or a work tree.

    Args:
        folder: a folder in the tree.
        redaction: removes secrets.
        diff: name of the file for the diff.
        skip: the run folder, whose files are not source.
    """
    # All queries run at once: each takes tens of milliseconds, before every run.
    queries = [_ask_git(folder, *words) for words in _QUERIES]
    about, status, remote = map(_wait_answer, queries)
    lines = os.fsdecode(about or b"").splitlines()
    if len(lines) != 3:
        return None
    top = Path(lines[0])
    branch, changed, untracked = _parse_status(status)
    new = sorted(name for name in untracked if not _is_in_run_folder(top / name, top, skip))
    changed_stamps = tuple(_stamp_file(top, name) for name in changed)
    if status is None:
        changed_stamps = _UNKNOWN_FILES
    new_stamps = tuple(_stamp_file(top, name) for name in new)
    made = _make_diff(top, lines[2], changed_stamps, new_stamps, redaction)
    facts = {
        "folder": str(top),
        "prefix": lines[1],
        "commit": lines[2],
        "branch": branch,
        "remote": redaction.redact_text((remote or b"").decode(errors="replace").strip()) or None,
        "changed": None if status is None else bool(changed),
        "untracked": new[:MAX_UNTRACKED],
        "diff": diff if made.diff else None,
        "diff_bytes": made.full_bytes,
        "redacted": made.is_redacted,
    }
    return SourceTree(facts, made.diff)


class _Diff(NamedTuple):
    """A diff without secrets, its size before redaction, and whether it had any."""

    diff: bytes
    full_bytes: int
    is_redacted: bool


# The stamps are the key of the cache: runs of one process with unchanged files ask git once.
@lru_cache(maxsize=4)
def _make_diff(
    top: Path,
    commit: str,
    changed: tuple[FileStamp, ...],
    new: tuple[FileStamp, ...],
    redaction: Redaction,
) -> _Diff:
    full = b""
    if changed:
        full = _wait_answer(_ask_git(top, *_DIFF)) or b""
    for name, _, _ in new:
        if _is_source(top, name):
            full += _creating_patch(top, name)
    if len(full) > MAX_DIFF_BYTES:
        return _Diff(b"", len(full), is_redacted=False)
    # surrogateescape: a diff may contain bytes in any encoding, which must survive.
    text = full.decode(errors="surrogateescape")
    safe = redaction.redact_text(text).encode(errors="surrogateescape")
    return _Diff(safe, len(full), is_redacted=safe != full)


def _parse_status(status: bytes | None) -> tuple[str | None, list[str], list[str]]:
    """Return the branch, the changed files and the untracked ones from `git status`."""
    branch = None
    changed = []
    untracked = []
    for entry in os.fsdecode(status or b"").split("\0"):
        if entry.startswith("# branch.head ") and not entry.endswith("(detached)"):
            branch = entry.removeprefix("# branch.head ")
        elif entry[:2] in _STATUS_FIELDS:
            changed.append(entry.split(" ", _STATUS_FIELDS[entry[:2]])[-1])
        elif entry.startswith("? "):
            untracked.append(entry[2:])
    return branch, changed, untracked


def _stamp_file(top: Path, name: str) -> FileStamp:
    try:
        stat = (top / name).stat()
    except OSError:  # deleted
        return name, 0, 0
    return name, stat.st_mtime_ns, stat.st_size


def _wait_answer(query: "subprocess.Popen[bytes] | None") -> bytes | None:
    """Return the output of git, or None if there is no git, it fails, or it takes too long."""
    if query is None:
        return None
    try:
        output, _ = query.communicate(timeout=GIT_SECONDS)
    except subprocess.TimeoutExpired:
        # Killed and waited for, or it would stay as a zombie.
        query.kill()
        query.communicate()
        return None
    if query.returncode == 0:
        return output
    return None


def _ask_git(folder: Path, *words: str) -> "subprocess.Popen[bytes] | None":
    """Start a git command; None without git."""
    # Variables such as GIT_DIR, set inside of a git hook, would lead to another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # Take no lock that could disturb the user's own git commands, and never ask for a password.
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        return subprocess.Popen(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the run
        )
    except OSError:
        return None


def _is_in_run_folder(path: Path, top: Path, skip: Path | None) -> bool:
    """Tell whether a file is in the folder of this run or of another one."""
    for parent in path.parents:
        if parent == skip or (parent / "status.json").is_file():
            return True
        if parent == top:
            return False
    return False


def _is_source(top: Path, name: str) -> bool:
    path = top / name
    if _PLAIN_NAME.fullmatch(name) is None or path.suffix not in SOURCE_SUFFIXES:
        return False
    try:
        return path.is_file() and path.stat().st_size <= MAX_NEW_FILE_BYTES
    except OSError:
        return False


def _creating_patch(top: Path, name: str) -> bytes:
    """Return the patch that creates an untracked file; empty for a binary one."""
    # git would need the file in its index, which is the user's.
    try:
        content = (top / name).read_bytes()
    except OSError:
        return b""
    if b"\0" in content:
        return b""
    lines = re.findall(rb"[^\n]*\n|[^\n]+", content)
    label = os.fsencode(name)
    head = b"diff --git a/%b b/%b\nnew file mode 100644\n" % (label, label)
    if not lines:
        return head
    head += b"--- /dev/null\n+++ b/%b\n@@ -0,0 +1,%d @@\n" % (label, len(lines))
    body = b"".join(b"+" + line for line in lines)
    if not content.endswith(b"\n"):
        body += b"\n\\ No newline at end of file\n"
    return head + body
