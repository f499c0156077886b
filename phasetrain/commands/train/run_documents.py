"""The files of a run folder that are for people: what was asked for, where it ran, and how to do it
again."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from phasetrain import __version__
from phasetrain.commands.setup import Setup
from phasetrain.commands.train.resume import departures_told, environment, packages
from phasetrain.config.compose.override_text import quoted
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.environment import (
    Redaction,
    Source,
    devices,
    host,
    installed,
    source,
    switches,
    variables,
)

GIT_DIFF = "git.diff"
PACKAGE_DIFF = "phasetrain.diff"
"""Files with what the work tree of this folder, and that of the package, differ in from their
commits."""

_PLAIN = re.compile(r"[A-Za-z_./-][\w./-]*", re.ASCII)

RUN_MD = """# Run {name}

Command:

    {command}

The same command, started again, goes on from the newest checkpoint; on a finished run it says so and ends. To repeat
the run in a new folder and hear whether every bit is the same, in a checkout of the source:

    python tools/run.py --from {folder}
{departures}
| file | what it is |
|---|---|
| RUN.md | this page |
| config.yaml | every value of the config, resolved |
| overrides.yaml | what was given on the command line |
| environment.json | where the newest attempt ran: versions, machine, threads, seeds, switches, command, commit |
| git.diff | how the source differed from that commit, new files included; only there where it did |
| phasetrain.diff | the same of the package's own source, where it stands in a work tree of its own |
| plan.json | every phase, and what will be saved when |
| metrics.jsonl | one JSON object per logged step and phase; all that may differ between equal runs is under `time` |
| steps.ledger | a short binary record per update, for RUN.engine=replay and for comparing runs |
| log.txt, log-1.txt, ... | what process 0, 1, ... had to say, with the time |
| stacks.txt | what every thread was doing when SIGUSR2 came or no step completed for long; seldom there |
| status.json | running, finished, preempted or failed; attempt, updates, reason, exit code, time, heartbeat |
| owner.json, run.lock | which process is at work here; gone when it ends |
| checkpoints/ | a folder per checkpoint: phases completed, steps in the next; weights in tensors.safetensors |
| numerics/ | updates whose loss or gradient was not finite, whole, for RUN.engine=replay; seldom there |
| test-*.json | metrics of a checkpoint, after RUN.engine=test |
| extract/ | features and predictions, a folder per checkpoint and split; there after RUN.engine=extract |
| find/ | what was tried, after RUN.engine=find_lr or find_batch_size |
| launch/ | logs of jobs that the run has submitted to a cluster |
| report.html | curves, results and environment on one page; `python tools/report.py` makes it anew |
| breakdown.json | where the time of steps went in the newest attempt; there with HOOKS.breakdown |
| predictions.json | confusions and samples of the last tests, for the report |
| profile/ | traces of some updates by attempt and last update, and their slowest operators; from hook `profiler` |
| memory.json, memory-attempt1.pickle | the most memory of each attempt, and a snapshot of CUDA's; from hook `memory` |
| attempts.jsonl | how each attempt but the newest ended, and where its time went |
| reproduce.sh | runs it again from the start, in a new folder; made for a clean clone, see its head |

Trackers have folders or files of their own beside these, under the label that they have in HOOKS.

    python tools/runs.py list .          every run below a folder: state, progress, best metric, time left
    python tools/runs.py compare A B     configs, metrics, and the first update at which two runs part
    python tools/runs.py follow A        a run under way
"""

MORE = "The weights may be others all the same: this run is more than its newest command."
"""Stands above the list of departures."""

REPRODUCE = """#!/bin/sh
# Runs this training again from the start, in a new folder:   sh reproduce.sh [NEW_FOLDER]
# Called in a clone of its source at the same commit, it runs there, with git.diff applied where there is one; called
# elsewhere, in the folder in which the training was started. PYTHON=... chooses the Python. On an equal machine (see
# environment.json) the digest of the weights that it prints at the end is the one in status.json.
{departures}from=$(cd "$(dirname "$0")" && pwd) || exit
case ${{1:-{again}}} in
    /* | *://*) to=${{1:-{again}}} ;;
    *) to=$(pwd)/${{1:-{again}}} ;;
esac
commit={commit}
if [ -n "$commit" ] && [ "$(git rev-parse HEAD 2>/dev/null)" = "$commit" ]; then
    top=$(git rev-parse --show-toplevel) && cd "$top" || exit
    if [ ! -s "$from/git.diff" ] || git apply --reverse --check "$from/git.diff" 2>/dev/null; then
        :
    elif git diff --quiet HEAD; then
        echo "applying $from/git.diff to $(pwd)" >&2
        git apply "$from/git.diff" || exit
    else
        echo "$(pwd) has other changes than those of the run ($from/git.diff): running with them" >&2
    fi
    cd {prefix} || exit
    if [ -d "$top/phasetrain" ]; then  # from any folder of the clone, its own package
        PYTHONPATH=$top${{PYTHONPATH:+:$PYTHONPATH}}
        export PYTHONPATH
    fi
elif cd {folder} 2>/dev/null; then
    top=$(pwd)
    echo "not in a clone at commit ${{commit:-(none)}}: running in $(pwd), with the source that it has now" >&2
else
    echo "call this in a clone of the source of the run${{commit:+, after: git checkout $commit}}" >&2
    exit 2
fi
if [ -z "${{PYTHON-}}" ]; then
    for one in "$top/.venv/bin/python" {executable} python3; do
        command -v "$one" >/dev/null && PYTHON=$one && break
    done
fi
quoted=$(printf '%s' "$to" | LC_ALL=C sed 's/\\(\\\\*\\)'\\''/\\1\\1\\\\'\\''/g; s/\\(\\\\*\\)$/\\1\\1/')
exec "$PYTHON" {command} "RUN.dir='$quoted'"
"""


def write_documents(
    setup: Setup, folder: RunFolder, departures: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write RUN.md, config.yaml, overrides.yaml, environment.json, reproduce.sh, and how the source
    is changed.

    Args:
        setup: the settled config.
        folder: that of the run.
        departures: in what the run is more than its command, see
            `phasetrain.commands.train.resume.departures`.
    """
    storage = folder.storage
    sources = sources_of(folder.path)
    overrides = list(setup.composed.overrides)
    told = departures_told(list(departures))
    texts = {
        "config.yaml": OmegaConf.to_yaml(OmegaConf.create(setup.config.plain())),
        "overrides.yaml": OmegaConf.to_yaml(OmegaConf.create(overrides)),
        "RUN.md": RUN_MD.format(
            name=setup.config.RUN.name,
            command=command(setup),
            folder=shlex.quote(setup.config.RUN.dir),
            departures="".join((f"\n{MORE}\n", *(f"\n- {line}" for line in told), "\n"))
            if told
            else "",
        ),
        "reproduce.sh": _reproduce(setup, sources["git"], told),
    }
    for name, text in texts.items():
        content = text.encode(errors="surrogateescape")  # paths need not be text in any encoding
        storage.replace(folder.file(name), content, durable=False)
    clean = Redaction(os.environ)
    public = [
        {"updates": one["updates"], "what": [clean.text(line) for line in one["what"]]}
        for one in departures
    ]
    facts = described(setup, sources) | {"departures": public}
    storage.replace_json(folder.file("environment.json"), facts, durable=False)
    _write_diffs(folder, sources)
    if storage.keeps_files:
        Path(folder.file("reproduce.sh")).chmod(0o755)


def command(setup: Setup) -> str:
    """Return the command that starts or resumes the run."""
    return shlex.join(["phasetrain", *_words(setup)])


def _words(setup: Setup) -> list[str]:
    flags = ["--config-dir", setup.config_dir] if setup.config_dir else []
    words = [*flags, *setup.composed.overrides]
    if not any(word.lstrip("+").startswith("RUN.dir=") for word in words):
        words.append(f"RUN.dir={_word(setup.config.RUN.dir)}")
    return words


def _word(text: str) -> str:
    """Return a text as an override has it behind its `=`: in quotes where it must be."""
    if _PLAIN.fullmatch(text):
        return text
    return quoted(text)


def described(setup: Setup, sources: Mapping[str, Source | None]) -> dict[str, Any]:
    """Return where the run takes place: versions, machine, command, seeds, switches and sources,
    without secrets.

    Args:
        setup: the settled config.
        sources: states of the work trees; see `sources_of`.
    """
    clean = Redaction(os.environ)
    machine = setup.machine
    found = {"phasetrain": __version__, **environment(setup, machine), "packages": packages()}
    trees = {name: None if one is None else one.facts for name, one in sources.items()}
    here = trees["git"]
    return found | {
        "executable": sys.executable,
        "folder": str(Path.cwd()),
        "commit": here["commit"] if here else _commit(Path.cwd()),
        "command": clean.words(["phasetrain", *_words(setup)]),
        "config_dir": None if setup.config_dir is None else str(Path(setup.config_dir).absolute()),
        "host": host(),
        "devices": devices(machine.device.type),
        "seeds": {"RUN.seed": setup.config.RUN.seed},
        "switches": switches(deterministic=machine.deterministic),
        "variables": variables(os.environ),
        "installed": installed(sys.path),
        **trees,
    }


def sources_of(run_folder: str) -> dict[str, Source | None]:
    """Return the states of the work tree around this folder and, where it is another one, of that
    of the package."""
    clean = Redaction(os.environ)
    skip = None if "://" in run_folder else Path(run_folder).absolute()
    here = source(Path.cwd(), clean, diff=GIT_DIFF, skip=skip)
    found: dict[str, Source | None] = {"git": here}
    package = Path(__file__).resolve().parents[2]
    if (package.parent / ".git").exists() and (
        here is None or not package.is_relative_to(here.facts["folder"])
    ):
        found["phasetrain_git"] = source(package, clean, diff=PACKAGE_DIFF, skip=skip)
    return found


def _write_diffs(folder: RunFolder, sources: Mapping[str, Source | None]) -> None:
    """Write how the trees differ from their commits; what an earlier attempt has left is taken
    away."""
    kept = {one.facts["diff"]: one.diff for one in sources.values() if one is not None and one.diff}
    for name in (GIT_DIFF, PACKAGE_DIFF):
        if name in kept:
            folder.storage.replace(folder.file(name), kept[name], durable=False)
        elif folder.storage.exists(folder.file(name)):
            folder.storage.remove(folder.file(name))


def _commit(folder: Path) -> str | None:
    """Return the commit that a git work tree around `folder` has checked out, where there is no git
    to ask."""
    for place in (folder, *folder.parents):
        head = place / ".git" / "HEAD"
        if head.is_file():
            text = head.read_text().strip()
            if not text.startswith("ref: "):
                return text
            ref = place / ".git" / text.removeprefix("ref: ")
            if ref.is_file():
                return ref.read_text().strip()
            return None
    return None


def _reproduce(setup: Setup, here: Source | None, told: Sequence[str] = ()) -> str:
    """Return a script that runs the training again: in this commit wherever it is called, else in
    this folder."""
    size = setup.world.size
    seen = {word.lstrip("+").partition("=")[0] for word in setup.composed.overrides}
    own = ("RUN.dir", "RUN.resume", "RUN.allow")  # of this folder, not of the training
    flags = ["--config-dir", setup.config_dir] if setup.config_dir else []
    words = [
        word for word in setup.composed.overrides if word.lstrip("+").partition("=")[0] not in own
    ]
    if "MACHINE.threads" not in seen:
        words.append(f"MACHINE.threads={environment(setup, setup.machine)['threads']}")
    if size > 1:
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m"]
    else:
        launch = []
    facts: Mapping[str, Any] = here.facts if here else {}
    return REPRODUCE.format(
        command=shlex.join(["-m", *launch, "phasetrain", *flags, *words]),
        folder=shlex.quote(str(Path.cwd())),
        prefix=shlex.quote(facts.get("prefix") or "."),
        commit=shlex.quote(facts.get("commit") or ""),
        executable=shlex.quote(sys.executable),
        again=shlex.quote(f"runs/{setup.config.RUN.name}-again"),
        departures="".join(f"# {line}\n" for line in (MORE, *told)) if told else "",
    )
