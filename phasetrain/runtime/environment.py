"""Where a run takes place: machine, devices, packages, switches and the state of the source,
without secrets."""

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

REDACTED = "(redacted)"
"""Stands for a secret."""

GIT_SECONDS = 5.0
"""How long to wait for an answer of git's before the run starts without it."""

DIFF_BYTES = 5 << 20
"""A longer diff of the source is not kept."""

NEW_BYTES = 200_000
"""A longer file that git does not track is not kept with the diff."""

UNTRACKED = 100
"""At most so many files that git does not track are named."""

SOURCES = frozenset({".py", ".pyi", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".sh", ".css", ".js"})
"""Endings of files that are kept with the diff though git does not track them."""

MARKS = (
    *("://", "token", "secret", "passw", "key", "signature"),
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "sk-", "akia", "xox"),
)
"""One of these stands, in any case, in each line that the patterns below find something in."""

QUESTIONS = (
    ("rev-parse", "--show-toplevel", "--show-prefix", "HEAD"),
    ("status", "--porcelain=v2", "--branch", "--untracked-files=all", "-z"),
    ("config", "--get", "remote.origin.url"),
)
"""What git is asked about a tree, at once."""

FIELDS = {"1 ": 8, "2 ": 9, "u ": 10}
"""How many words stand before the path of a changed file in the answer to `git status`, by kind of
entry."""

DIFF = ("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
"""How git is asked for changes."""

VARIABLES = re.compile(
    r"(CUDA|CUBLAS|CUDNN|NCCL|GLOO|TORCH|TORCHELASTIC|TORCHINDUCTOR|PYTORCH|OMP|MKL|OPENBLAS|NUMEXPR|KMP|MALLOC|SLURM|"
    r"HF|WANDB|MLFLOW|TOKENIZERS|PHASETRAIN)_|(PYTHON|LD_|LANG|LC_|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_)"
)
"""Beginnings of names of environment variables that may matter for what is computed."""

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SECRET_WORD = re.compile(
    r"(?P<name>[\w.+]*(?:token|secret|password|passwd|api_?key|access_?key|secret_?key))=.+",
    re.IGNORECASE | re.DOTALL,
)
_IN_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@'\"]{1,200}@", re.IGNORECASE)
_IN_QUERY = re.compile(
    r"(?P<name>[?&][\w-]*(?:token|key|secret|password|signature)=)[^\s&'\"]+", re.IGNORECASE
)
_ASSIGNED = re.compile(
    r"(?P<name>(?:token|secret|password|passwd|api_?key|access_?key)[\w-]{0,20}['\"]?\s{0,4}[:=]\s{0,4}['\"])"
    r"(?=[^'\"\s]{0,200}\d)[^'\"\s]{12,200}(?=['\"])",
    re.IGNORECASE,
)
_KNOWN = re.compile(
    r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_\w{20,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,})"
)
_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
_DISTRIBUTION = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")


@dataclass(frozen=True)
class Source:
    """The state of a work tree.

    Attributes:
        facts: folder, commit, branch, remote, whether it is changed, files that are not tracked;
            JSON data.
        diff: what `git apply` makes of the commit the tree that the run had, new source files
            included; empty where there is nothing to change, or where it was too long.
    """

    facts: dict[str, Any]
    diff: bytes


def host() -> dict[str, Any]:
    """Return the name, system, processors and memory of this machine."""
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if sys.platform == "linux"
        else None,
    }


def devices(kind: str) -> list[dict[str, Any]]:
    """Return the accelerators of a kind that this process sees; none for `cpu`."""
    if kind != "cuda":
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {
            "name": one.name,
            "memory_bytes": one.total_memory,
            "capability": f"{one.major}.{one.minor}",
        }
        for one in found
    ]


def switches(*, deterministic: bool) -> dict[str, Any]:
    """Return what decides in which order sums are made.

    Args:
        deterministic: MACHINE.deterministic, which holds while the run lasts.
    """
    return {
        "deterministic": deterministic,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.version": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "cuda": torch.version.cuda,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may matter, secrets redacted."""
    clean = Redaction(environment)
    return {
        name: REDACTED if _SECRET_NAME.search(name) else clean.text(value)
        for name, value in sorted(environment.items())
        if VARIABLES.match(name)
    }


def installed(path: Iterable[str]) -> dict[str, str]:
    """Return the version of each distribution in the folders of a module search path, by name."""
    found: dict[str, str] = {}
    for folder in path:
        for name in _entries(folder):
            if match := _DISTRIBUTION.fullmatch(name):
                found.setdefault(match["name"], match["version"])
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _clean(line: str) -> str:
    """Return a line without what has the form of a secret."""
    low = line.lower()
    if not any(mark in low for mark in MARKS):  # most lines, and patterns are slow
        return line
    line = _IN_URL.sub(rf"\g<scheme>{REDACTED}@", line)
    line = _IN_QUERY.sub(rf"\g<name>{REDACTED}", line)
    return _KNOWN.sub(REDACTED, _ASSIGNED.sub(rf"\g<name>{REDACTED}", line))


class Redaction:
    """Takes secrets out of texts: credentials in URLs, tokens of known forms, and values of secret
    variables.

    Args:
        environment: whose variables named TOKEN, KEY, SECRET, PASSWORD or CREDENTIAL hold what may
            appear nowhere.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {
            value
            for name, value in environment.items()
            if _SECRET_NAME.search(name) and len(value) >= 8
        }
        self._values = tuple(sorted(values, key=len, reverse=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Redaction) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return "\n".join(_clean(line) for line in text.split("\n"))

    def words(self, words: Sequence[str]) -> list[str]:
        """Return words of a command line without secrets: `HOOKS.x.api_key=...` loses its value."""
        named = [_SECRET_WORD.fullmatch(word) for word in words]
        return [
            f"{match['name']}={REDACTED}" if match else self.text(word)
            for word, match in zip(words, named, strict=True)
        ]


def source(folder: Path, clean: Redaction, *, diff: str, skip: Path | None = None) -> Source | None:
    """Return the state of the work tree around a folder, None where there is none, or no git to
    ask.

    Args:
        folder: in the tree.
        clean: takes secrets out of what is kept.
        diff: name of the file that will hold the diff.
        skip: the run folder, whose files are no source.
    """
    asked = [_git(folder, *words) for words in QUESTIONS]
    about, status, remote = (one.answer() if one else None for one in asked)
    lines = os.fsdecode(about or b"").splitlines()
    if len(lines) != 3:
        return None
    top = Path(lines[0])
    prefix = lines[1]
    commit = lines[2]
    branch, changed, others = _told(status)
    new = sorted(name for name in others if not _of_a_run(top / name, top, skip))
    stamps = [tuple(_stamp(top, name) for name in names) for names in (changed, new)]
    kept = _kept(top, commit, UNKNOWN if status is None else stamps[0], stamps[1], clean)
    facts = {
        "folder": str(top),
        "prefix": prefix,
        "commit": commit,
        "branch": branch,
        "remote": clean.text((remote or b"").decode(errors="replace").strip()) or None,
        "changed": None if status is None else bool(changed),
        "untracked": new[:UNTRACKED],
        "diff": diff if kept.diff else None,
        "diff_bytes": kept.whole_bytes,
        "redacted": kept.redacted,
    }
    return Source(facts, kept.diff)


class _Kept(NamedTuple):
    """A diff without secrets, how long it was with them, and whether it had any."""

    diff: bytes
    whole_bytes: int
    redacted: bool


Stamp = tuple[str, int, int]
"""Name of a file, time of its last change in nanoseconds, bytes."""

UNKNOWN: tuple[Stamp, ...] = (("", 0, 0),)
"""Stands for the files that are changed where git has not told them in time."""


@lru_cache(maxsize=4)
def _kept(
    top: Path, commit: str, changed: tuple[Stamp, ...], new: tuple[Stamp, ...], clean: "Redaction"
) -> _Kept:
    """Return how a tree differs from its commit, source files that git does not track included.

    The same files with the same times make the same diff: several runs of a process ask once.
    """
    asked = _git(top, *DIFF) if changed else None
    tracked = (asked.answer() or b"") if asked else b""
    whole = tracked + b"".join(_as_new(top, name) for name, _, _ in new if _is_source(top, name))
    if len(whole) > DIFF_BYTES:
        return _Kept(b"", len(whole), redacted=False)
    safe = clean.text(whole.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    return _Kept(safe, len(whole), redacted=safe != whole)


def _told(status: bytes | None) -> tuple[str | None, list[str], list[str]]:
    """Return the branch, the files that are changed and those that are not tracked, as `git status`
    tells them."""
    branch = None
    changed = []
    new = []
    for entry in os.fsdecode(status or b"").split("\0"):
        if entry.startswith("# branch.head ") and not entry.endswith("(detached)"):
            branch = entry.removeprefix("# branch.head ")
        elif entry[:2] in FIELDS:
            changed.append(entry.split(" ", FIELDS[entry[:2]])[-1])
        elif entry.startswith("? "):
            new.append(entry[2:])
    return branch, changed, new


def _stamp(top: Path, name: str) -> Stamp:
    try:
        found = (top / name).stat()
    except OSError:  # deleted
        return name, 0, 0
    return name, found.st_mtime_ns, found.st_size


class _Asked:
    """A question to git that is under way."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def answer(self) -> bytes | None:
        """Return the answer, None where git fails or takes too long."""
        try:
            found, _ = self._process.communicate(timeout=GIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return None
        if self._process.returncode == 0:
            return found
        return None


def _git(folder: Path, *words: str) -> _Asked | None:
    """Ask git something in a folder; it takes no lock and talks to nobody."""
    quiet = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        process = subprocess.Popen(
            ["git", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=quiet | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            start_new_session=True,  # Ctrl-C is for the run
        )
    except OSError:
        return None
    return _Asked(process)


def _of_a_run(path: Path, top: Path, skip: Path | None) -> bool:
    """Tell whether a file lies in this run folder or in that of another run."""
    for parent in path.parents:
        if parent == skip or (parent / "status.json").is_file():
            return True
        if parent == top:
            return False
    return False


def _is_source(top: Path, name: str) -> bool:
    path = top / name
    try:
        return (
            _PLAIN.fullmatch(name) is not None
            and path.suffix in SOURCES
            and path.is_file()
            and path.stat().st_size <= NEW_BYTES
        )
    except OSError:
        return False


def _as_new(top: Path, name: str) -> bytes:
    """Return a file as the part of a diff that creates it."""
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
    body = b"".join(b"+" + line for line in lines)
    end = b"" if content.endswith(b"\n") else b"\n\\ No newline at end of file\n"
    return head + b"--- /dev/null\n+++ b/%b\n@@ -0,0 +1,%d @@\n" % (label, len(lines)) + body + end


def _processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            named = next(
                (line.partition(":")[2].strip() for line in file if line.startswith("model name")),
                "",
            )
    except OSError:
        named = ""
    return named or platform.processor() or platform.machine()


def _entries(folder: str) -> Iterator[str]:
    try:
        yield from sorted(one.name for one in Path(folder or ".").iterdir())
    except OSError:
        return
