"""The files of a run folder that describe the run to people: config, command, environment, and a
script that reproduces it."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from phasetrain import __version__
from phasetrain.app.build_hooks import list_hook_classes
from phasetrain.app.setup import Setup
from phasetrain.app.stored.stored_config import list_derived
from phasetrain.app.stored.trust import SIGNATURE, list_code, sign_code
from phasetrain.app.train.resume import (
    describe_environment,
    list_packages,
)
from phasetrain.config.addons import find_service
from phasetrain.config.compose.folders import find_config_dir
from phasetrain.config.compose.override_text import key_of, quote_value
from phasetrain.data import SampleError
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.records import format_deviations
from phasetrain.runtime.environment import (
    describe_host,
    describe_numerics,
    list_devices,
    list_distributions,
    list_variables,
)
from phasetrain.runtime.machine import preserve_generators
from phasetrain.runtime.redaction import REDACTED, Redaction, has_secrets
from phasetrain.runtime.terminal import in_notebook
from phasetrain.tasks import SplitData
from phasetrain.tasks.build.builder import measure_rank, measure_sample

GIT_DIFF = "git.diff"
PACKAGE_DIFF = "phasetrain.diff"
"""Files with the uncommitted changes of the working directory's and of the package's git tree."""

FOLDER_COMMANDS = """These commands need only this folder; each takes changes such as SECTION.key=value:

    {program} resume {folder}
    phasetrain test {folder}{best}
    phasetrain predict {folder} FILE ...
    phasetrain export {folder} model.onnx
    phasetrain extract {folder} EXTRACT.layers=[NAME]
    phasetrain report {folder}
    {program} rerun {folder}                (in a new folder; checks that every bit is the same)"""

OBJECT_COMMANDS = """The parts of this run are objects of that program (environment.json lists them), so that other commands cannot build
them from the folder. These can do without:

    phasetrain report {folder}
    phasetrain export {folder} OUT           (the weights; phasetrain.load({folder!r}, model=model) in Python)"""

RUN_MD = """# Run {name}

Command:

    {command}

The same command resumes from the newest checkpoint, and returns at once if the run has finished.
{commands}
{deviations}
{files}

Trackers add files and folders that are named after their label in HOOKS.

    phasetrain runs list .        all runs below a folder: state, progress, best metric, time left
    phasetrain runs follow A      log and progress of a run that is running
    phasetrain runs compare A B   configs, metrics, and the first update at which two runs differ
"""

FILES = {
    "RUN.md": "this page",
    "config.yaml": "every value of the config, resolved",
    "overrides.yaml": "overrides of the command line",
    "environment.json": "environment of the newest attempt: versions, machine, threads, seeds, "
    "commit",
    "git.diff": "uncommitted changes of the source, including new files; only if there were any",
    "phasetrain.diff": "the same for the package, if it is in another git tree",
    "plan.json": "all phases, and when checkpoints are saved",
    "metrics.jsonl": "a JSON object per logged step and phase; only `time` differs between equal "
    "runs",
    "steps.ledger": "a short binary record per update, for `phasetrain replay` and `runs diff`",
    "log.txt, log-1.txt, ...": "log of rank 0, 1, ...",
    "stacks.txt": "stack traces of all threads, after SIGUSR2 or if no step completed for long",
    "status.json": "state (running, finished, paused, interrupted, preempted, failed), reason, "
    "exit code, time, heartbeat",
    "owner.json, run.lock": "the process that is running; deleted when it ends",
    "checkpoints/": "a folder per checkpoint, named by completed phases and steps of the next",
    "numerics/": "batches and weights of updates that were not finite, for `phasetrain replay`",
    "test-*.json": "metrics of a checkpoint, from `phasetrain test`",
    "extract/": "features and predictions by checkpoint and split, from `phasetrain extract`",
    "find/": "results of `phasetrain find-lr` and `find-batch-size`",
    "launch/": "logs of cluster jobs",
    "report.html": "curves, results and environment; `phasetrain report` writes it again",
    "breakdown.json": "time of each part of a step in the newest attempt, from HOOKS.breakdown",
    "predictions.json": "confusion matrices and samples of the last tests, for the report",
    "profile/": "traces of some updates and their slowest operators, from HOOKS.profiler",
    "memory.json, memory-attempt1.pickle": "peak memory and a CUDA snapshot, from HOOKS.memory",
    "attempts.jsonl": "outcome and time of each attempt before the newest",
    "reproduce.sh": "repeats the run from the start in a new folder and a clean clone",
}
"""File of a run folder, or several that belong together -> its content, for RUN.md."""

WRITTEN_FIRST = frozenset(
    {
        "RUN.md",
        "config.yaml",
        "overrides.yaml",
        "environment.json",
        "plan.json",
        "metrics.jsonl",
        "steps.ledger",
        "log.txt",
        "status.json",
        "checkpoints",
        "reproduce.sh",
    }
)
"""Files that every run has soon after its start."""

MORE = "A repetition may have other weights: this run is not the result of its command alone."
"""Heading of the list of deviations."""

REPRODUCE = """#!/bin/sh
# Repeats this training from the start, in a new folder:   sh reproduce.sh [NEW_FOLDER]
# In a clone of the source at the same commit, it runs there, after git.diff is applied;
# elsewhere it runs in the folder in which the training was started. PYTHON=... selects the Python interpreter.
# On an equal machine (see environment.json) the digest of the weights equals that in status.json.
{deviations}from=$(cd "$(dirname "$0")" && pwd) || exit
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
        echo "$(pwd) has other changes than the run ($from/git.diff): running with them" >&2
    fi
    cd {prefix} || exit
    if [ -d "$top/phasetrain" ]; then  # from any folder of the clone, its own package
        PYTHONPATH=$top${{PYTHONPATH:+:$PYTHONPATH}}
        export PYTHONPATH
    fi
elif cd {folder} 2>/dev/null; then
    top=$(pwd)
    echo "no clone at commit ${{commit:-(none)}}: running in $(pwd), with its present source" >&2
else
    echo "call this in a clone of the source${{commit:+, after: git checkout $commit}}" >&2
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


@dataclass(frozen=True)
class SourceTree:
    """The state of a work tree.

    Attributes:
        facts: folder, commit, branch, remote, whether it is changed, untracked files; JSON data.
        diff: patch from the commit to the work tree, including untracked source files; empty if
            there are no changes or they are too large.
    """

    facts: dict[str, Any]
    diff: bytes


def write_documents(
    setup: Setup, folder: RunFolder, deviations: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write RUN.md, config.yaml, overrides.yaml, environment.json, reproduce.sh, and the
    uncommitted changes of the source.

    Args:
        setup: the resolved config.
        folder: the run folder.
        deviations: see `phasetrain.app.train.resume.list_deviations`.
    """
    storage = folder.storage
    sources = _find_sources(folder.path)
    # A run folder is copied and shared: config.yaml alone keeps secrets, for a resume.
    clean = Redaction(os.environ)
    overrides = clean.redact_words(setup.composed.overrides)
    lines = _list_deviation_lines(deviations)
    texts = {
        "config.yaml": OmegaConf.to_yaml(OmegaConf.create(setup.config.plain())),
        "overrides.yaml": OmegaConf.to_yaml(OmegaConf.create(overrides)),
        "RUN.md": _format_page(setup, folder, lines),
        "reproduce.sh": _format_script(setup, sources["git"], lines),
    }
    for name, text in texts.items():
        content = text.encode(errors="surrogateescape")  # paths need not be text in any encoding
        storage.replace(folder.file(name), content, durable=False)
    if storage.keeps_files and has_secrets(setup.config.plain()):
        Path(folder.file("config.yaml")).chmod(0o600)
    public = [
        {**deviation, "what": [clean.redact_text(line) for line in deviation["what"]]}
        for deviation in deviations
    ]
    facts = _describe_attempt(setup, sources) | {"departures": public}
    storage.replace_json(folder.file("environment.json"), facts, durable=False)
    _write_diffs(folder, sources)
    if storage.keeps_files:
        Path(folder.file("reproduce.sh")).chmod(0o755)


def update_page(
    setup: Setup, folder: RunFolder, deviations: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write RUN.md again at the end of an attempt, with the files that there are now."""
    text = _format_page(setup, folder, _list_deviation_lines(deviations), is_running=False)
    content = text.encode(errors="surrogateescape")
    folder.storage.replace(folder.file("RUN.md"), content, durable=False)


def _list_deviation_lines(deviations: Sequence[Mapping[str, Any]]) -> list[str]:
    clean = Redaction(os.environ)
    return [clean.redact_text(line) for line in format_deviations(list(deviations))]


def _format_page(
    setup: Setup, folder: RunFolder, deviations: Sequence[str], *, is_running: bool = True
) -> str:
    """Return RUN.md with the files that are in the folder, or that a running run writes first."""
    names = set(folder.storage.list_names(folder.path))
    if is_running:
        names |= WRITTEN_FIRST | {"owner.json"}
    else:
        names -= {"owner.json", "run.lock"}
    for hook in list_hook_classes(setup.config.HOOKS):
        names |= set(hook.last_files)  # written after this page
    rows = [
        f"| {row} | {content} |"
        for row, content in FILES.items()
        if any(fnmatch(name, _match_row(row)) for name in names)
    ]
    deviation_text = ""
    if deviations:
        items = "".join(f"\n- {line}" for line in deviations)
        deviation_text = f"\n{MORE}\n{items}\n"
    return RUN_MD.format(
        name=setup.config.RUN.name,
        command=format_command(setup),
        commands=_format_folder_commands(setup),
        deviations=deviation_text,
        files="\n".join(("| file | content |", "|---|---|", *rows)),
    )


def _match_row(row: str) -> str:
    """Return the pattern for the first file or folder of a row."""
    return row.partition(",")[0].rstrip("/")


def format_command(setup: Setup) -> str:
    """Return the command that starts or resumes the run."""
    if setup.given.by_name:
        return _format_program(setup)
    clean = Redaction(os.environ)
    return shlex.join(
        [*_list_launcher(setup), *_PROGRAM, *clean.redact_words(_command_words(setup))]
    )


def _format_folder_commands(setup: Setup) -> str:
    """Return the part of RUN.md with the commands that need the folder alone."""
    text = OBJECT_COMMANDS if setup.given.by_name else FOLDER_COMMANDS
    program = shlex.join([*_list_launcher(setup), *_PROGRAM])
    best = ""
    if setup.config.CHECKPOINT.best.monitor is not None:
        best = " --checkpoint best"
    return text.format(program=program, folder=shlex.quote(setup.config.RUN.dir), best=best)


_PROGRAM = ("phasetrain",)


def _list_launcher(setup: Setup) -> list[str]:
    """Return the words that start the ranks of this run, before the words of a program."""
    size = setup.place.size
    if size == 1:
        return []
    if "TORCHELASTIC_RUN_ID" in os.environ:
        flags = [f"--nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE', size)}"]
        if setup.place.nodes > 1:
            # Only torchrun knows the address at which the machines meet.
            flags.append(f"--nnodes={setup.place.nodes}")
            flags += ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:PORT"]
        return ["torchrun", *flags, "-m"]
    if "SLURM_STEP_NUM_TASKS" in os.environ and "WORLD_SIZE" not in os.environ:
        return ["srun", f"--ntasks={size}"]
    return []  # LAUNCH starts the ranks


def format_resume(setup: Setup) -> str:
    """Return the shortest command that resumes the run."""
    if setup.given.by_name:
        return _format_program(setup)
    return shlex.join([*_list_launcher(setup), *_PROGRAM, "resume", setup.config.RUN.dir])


def _format_program(setup: Setup) -> str:
    """Return the command of the program that has given objects to the run."""
    # A notebook has no file, and the words of its kernel start no run.
    if "__file__" not in vars(sys.modules["__main__"]) or in_notebook():
        return "the same call in Python"
    launcher = _list_launcher(setup)
    words = sys.orig_argv
    if launcher[:1] == ["torchrun"]:
        # torchrun starts Python itself, and takes a script without -m.
        launcher = launcher[:-1]
        words = sys.argv
    return shlex.join([*launcher, *Redaction(os.environ).redact_words(words)])


def _command_words(setup: Setup) -> list[str]:
    overrides = setup.composed.overrides
    # The command that resumes, not the one that starts over or pauses.
    overrides = tuple(
        word for word in overrides if key_of(word) not in ("RUN.resume", "RUN.pause_at")
    )
    words = [*_config_dir_flags(setup), *overrides]
    if "RUN.dir" not in map(key_of, words):
        words.append(f"RUN.dir={quote_value(setup.config.RUN.dir)}")
    return words


def _config_dir_flags(setup: Setup) -> list[str]:
    """Return the flag of the user's folder of configs, unless it is found without it."""
    config_dir = find_config_dir(None, setup.composed.overrides)
    if setup.config_dir is not None and setup.config_dir != config_dir:
        return ["--config-dir", setup.config_dir]
    return []


def _describe_attempt(setup: Setup, sources: Mapping[str, SourceTree | None]) -> dict[str, Any]:
    """Return the content of environment.json, without secrets.

    Args:
        setup: the resolved config.
        sources: see `_find_sources`.
    """
    clean = Redaction(os.environ)
    machine = setup.machine
    attempt = {"phasetrain": __version__, **describe_environment(setup, machine)}
    attempt["packages"] = list_packages()
    trees = {name: None if source is None else source.facts for name, source in sources.items()}
    here = trees["git"]
    return attempt | {
        "executable": sys.executable,
        "folder": str(Path.cwd()),
        "commit": here["commit"] if here else _read_commit(Path.cwd()),
        "command": clean.redact_words(["phasetrain", *_command_words(setup)]),
        "config_dir": None if setup.config_dir is None else str(Path(setup.config_dir).absolute()),
        "host": describe_host(),
        "devices": list_devices(machine.device.type),
        "derived": list_derived(setup.asked, setup.config.plain()),
        SIGNATURE: sign_code([name for _, name in list_code(setup.config.plain())]),
        "seeds": {"RUN.seed": setup.config.RUN.seed},
        "switches": describe_numerics(deterministic=machine.deterministic),
        "variables": list_variables(os.environ),
        "installed": list_distributions(sys.path),
        "objects": {
            name: {"key": given_object.key, **given_object.facts}
            for name, given_object in setup.given.by_name.items()
        },
        **trees,
    }


def _find_sources(run_folder: str) -> dict[str, SourceTree | None]:
    """Return the state of the git tree around the working directory, under `git`, and perhaps of
    others; None without an add-on that asks git."""
    find_sources = find_service("find_sources")
    sources: dict[str, SourceTree | None] = {"git": None}
    return sources if find_sources is None else {**find_sources(run_folder)}


def _write_diffs(folder: RunFolder, sources: Mapping[str, SourceTree | None]) -> None:
    """Write the uncommitted changes of the trees, and delete files of earlier attempts."""
    kept = {
        source.facts["diff"]: source.diff
        for source in sources.values()
        if source is not None and source.diff
    }
    for name in (GIT_DIFF, PACKAGE_DIFF):
        if name in kept:
            folder.storage.replace(folder.file(name), kept[name], durable=False)
        elif folder.storage.exists(folder.file(name)):
            # of an earlier attempt, whose changes are committed or undone by now
            folder.storage.remove(folder.file(name))


def _read_commit(folder: Path) -> str | None:
    """Return the commit checked out around `folder` without calling git, which may be missing."""
    for parent in (folder, *folder.parents):
        head = parent / ".git" / "HEAD"
        if head.is_file():
            text = head.read_text().strip()
            if not text.startswith("ref: "):
                return text
            ref = parent / ".git" / text.removeprefix("ref: ")
            if ref.is_file():
                return ref.read_text().strip()
            return None
    return None


def _format_script(setup: Setup, here: SourceTree | None, deviations: Sequence[str] = ()) -> str:
    """Return reproduce.sh."""
    size = setup.world.size
    words = [
        word for word in setup.composed.overrides if setup.schema.scope(key_of(word)) != "command"
    ]
    # The number of threads is part of the bits, and its default depends on the machine.
    if "MACHINE.threads" not in map(key_of, words):
        words.append(f"MACHINE.threads={describe_environment(setup, setup.machine)['threads']}")
    launch: list[str] = []
    if size > 1:
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", "-m"]
    facts: Mapping[str, Any] = {}
    if here is not None:
        facts = here.facts
    deviation_text = ""
    if deviations:
        deviation_text = "".join(f"# {line}\n" for line in (MORE, *deviations))
    clean = Redaction(os.environ).redact_words(words)
    if clean != words:
        deviation_text += f"# Secrets are left out: replace {REDACTED} in the last line.\n"
    return REPRODUCE.format(
        command=shlex.join(["-m", *launch, "phasetrain", *_config_dir_flags(setup), *clean]),
        folder=shlex.quote(str(Path.cwd())),
        prefix=shlex.quote(facts.get("prefix") or "."),
        commit=shlex.quote(facts.get("commit") or ""),
        executable=shlex.quote(sys.executable),
        again=shlex.quote(f"runs/{setup.config.RUN.name}-again"),
        deviations=deviation_text,
    )


def record_sample_shapes(content: Mapping[str, Any], data: Mapping[str, SplitData]) -> None:
    """Add the facts `sample_shape` and `sample_rank`, the number of dimensions before the transforms,
    to the splits in plan.json whose dataset reports no `input_shape`: predictions need them to tell
    a sample from a batch.

    Args:
        content: entry `data` of plan.json, which is changed.
        data: split -> data; a sample of it is read.
    """
    for name, split in data.items():
        if "input_shape" in split.facts:
            continue
        # The run reports a sample that cannot be read when it comes to it.
        with preserve_generators(), suppress(SampleError):
            facts = content[name]["facts"]
            shape = measure_sample(split)
            if shape is not None:
                facts["sample_shape"] = list(shape)
            # Transforms may change the number of dimensions, and predictions begin before them.
            if shape is None or split.section.transforms:
                rank = measure_rank(split)
                if rank is not None:
                    facts["sample_rank"] = rank
