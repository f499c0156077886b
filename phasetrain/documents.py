"""The files of a run folder that are for people: what was asked for, where it ran, and how to do it again."""

import shlex
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from phasetrain import __version__
from phasetrain.folder import RunFolder
from phasetrain.resume import environment, packages
from phasetrain.setup import Setup

RUN_MD = """# Run {name}

Command:

    {command}

The same command, started again, goes on from the newest checkpoint; on a finished run it says so and ends.

| file | what it is |
|---|---|
| config.yaml | every value of the config, resolved |
| overrides.yaml | what was given on the command line |
| environment.json | versions, machine, threads: what the bits of a run depend on beside config and data |
| plan.json | every phase, and what will be saved when |
| metrics.jsonl | one JSON object per logged step and phase; all that may differ between equal runs is under `time` |
| steps.ledger | a short binary record per update, for RUN.engine=replay and for comparing runs |
| log.txt | what was printed, with the time |
| stacks.txt | what every thread was doing when SIGUSR2 came or no step completed for long; seldom there |
| status.json | running, finished, preempted or failed; attempt, updates, reason, exit code, time, heartbeat |
| checkpoints/ | a folder per checkpoint: phases completed, steps in the next; weights in tensors.safetensors |
| extract/ | features and predictions, a folder per checkpoint and split; there after RUN.engine=extract |
| reproduce.sh | runs it again from the start, in a new folder |
"""


def write_documents(setup: Setup, folder: RunFolder) -> None:
    """Write RUN.md, config.yaml, overrides.yaml, environment.json and reproduce.sh."""
    storage = folder.storage
    overrides = list(setup.composed.overrides)
    texts = {
        "config.yaml": OmegaConf.to_yaml(OmegaConf.create(setup.config.plain())),
        "overrides.yaml": OmegaConf.to_yaml(OmegaConf.create(overrides)),
        "RUN.md": RUN_MD.format(name=setup.config.RUN.name, command=command(setup)),
        "reproduce.sh": _reproduce(setup),
    }
    for name, text in texts.items():
        storage.replace(folder.file(name), text.encode(), durable=False)
    storage.replace_json(folder.file("environment.json"), described(setup), durable=False)
    if storage.keeps_files:
        Path(folder.file("reproduce.sh")).chmod(0o755)


def command(setup: Setup) -> str:
    """Return the command that starts or resumes the run."""
    flags = ["--config-dir", setup.config_dir] if setup.config_dir else []
    words = [*flags, *setup.composed.overrides]
    if not any(word.lstrip("+").startswith("RUN.dir=") for word in words):
        words.append(f"RUN.dir={setup.config.RUN.dir}")
    return shlex.join(["phasetrain", *words])


def described(setup: Setup) -> dict[str, Any]:
    """Return where the run takes place: versions, machine and folder."""
    found = {"phasetrain": __version__, **environment(setup, setup.machine), "packages": packages()}
    return found | {"executable": sys.executable, "folder": str(Path.cwd()), "commit": _commit(Path.cwd())}


def _commit(folder: Path) -> str | None:
    """Return the commit that a git work tree around `folder` has checked out."""
    for place in (folder, *folder.parents):
        head = place / ".git" / "HEAD"
        if head.is_file():
            text = head.read_text().strip()
            if not text.startswith("ref: "):
                return text
            ref = place / ".git" / text.removeprefix("ref: ")
            return ref.read_text().strip() if ref.is_file() else None
    return None


def _reproduce(setup: Setup) -> str:
    flags = ["--config-dir", setup.config_dir] if setup.config_dir else []
    own = ("RUN.dir=", "RUN.resume=", "RUN.allow=")  # of this folder, not of the training
    words = [word for word in setup.composed.overrides if not word.lstrip("+").startswith(own)]
    line = shlex.join([sys.executable, "-m", "phasetrain", *flags, *words])
    return (
        "#!/bin/sh\n"
        "# Runs this training again from the start. On an equal machine (see environment.json) the digest of the\n"
        "# weights that it prints at the end is the same.\n"
        f"cd {shlex.quote(str(Path.cwd()))} || exit\n"
        f'exec {line} "RUN.dir=${{1:-{setup.config.RUN.name}-again}}"\n'
    )
