"""Section RUN: engine, run folder, seed and resuming."""

from dataclasses import dataclass
from typing import Literal

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class RunSection(Section):
    """Engine, run folder, seed and resuming."""

    name: str | None = key(
        None,
        "prefix of the default folder name; null: the name of the experiment",
        scope="run",
    )
    # Free, since a run may be moved: the folder does not affect a single bit of the weights.
    dir: str | None = key(
        None,
        "run folder; null: runs/{RUN.name}-{digest of the keys that affect the trajectory}",
        scope="command",
    )
    # `phasetrain.config.sections.extended` limits it to the engines that are installed.
    engine: str = key(
        "train",
        "what to do: train with tests in between, test a checkpoint, extract features from it, "
        "print the plan, replay one past update, or search for a learning rate or batch size",
        scope="command",
    )
    verbosity: Literal["quiet", "normal", "verbose"] = key(
        "normal",
        "what is printed. quiet: warnings and the result; normal: also a line per epoch; "
        "verbose: everything in log.txt",
        scope="run",
    )
    # Forbidden: initial weights, order of samples and augmentation all follow from it.
    seed: int = key(
        0,
        "seed from which all random streams of the run are derived; in a sweep, `seeds(5)` repeats "
        "each config with the seeds 0 to 4",
        resume="forbidden",
        ge=0,
    )
    resume: Literal["auto", "must", "never", "restart"] = key(
        "auto",
        "auto: resume if there is a checkpoint; must: fail without one; never: fail with one; "
        "restart: keep the folder under a number and start over, see `--restart`",
        scope="command",
    )
    checkpoint: str = key(
        "latest",
        "checkpoint for RUN.engine=test and extract: `latest`, `best` (by "
        "CHECKPOINT.best.monitor), a name given by a hook, or the path of a checkpoint folder; "
        "none: no checkpoint, the weights of MODEL.weights or random initial weights",
        scope="command",
    )
    # Free, since a paused run ends with the bits of one that was never paused.
    pause_at: int | None = key(
        None,
        "update after which the run pauses: it makes the tests that follow, saves and ends with "
        "exit code 0; the same command without it continues. It is no part of the run; null: no "
        "pause",
        scope="command",
        ge=1,
    )
    # Free, since the names of the parts count and not the module that registers them.
    imports: tuple[str, ...] = key(
        [],
        "modules to import before the config is checked, so that they can register parts",
        resume="free",
    )
    allow: tuple[str, ...] = key(
        [],
        "changes to accept on resume: names of adjustable keys, `data` (the data has changed), "
        "`no_valid` (start from scratch if no checkpoint can be read)",
        scope="command",
    )
    rehearse: Literal["auto"] | bool = key(
        "auto",
        "before the first step, try one batch of each kind of phase, a save and a restore, and "
        "prove that a resume is exact; auto: with RUN.engine=plan, if the run is expected to take "
        "more than about a minute, and, without the save, if it takes less than a second; events "
        "of custom hooks are tried unless it is false",
        scope="run",
    )
    exact: bool = key(
        True,
        "reject parts that would not resume exactly; false: train nevertheless, and record it",
        scope="run",
    )
    give_up_after: int | None = key(
        5,
        "number of consecutive attempts without a new checkpoint, with the same code and config, "
        "after which the run refuses to start (exit code 6); null: no limit",
        scope="run",
        ge=1,
    )


@dataclass(frozen=True, kw_only=True)
class DerivedRunSection(RunSection):
    """Section RUN of a complete config, in which the name and the folder are derived."""

    # Never null here: mypy lets code read both without a check for None.
    name: str = ""
    dir: str = ""
