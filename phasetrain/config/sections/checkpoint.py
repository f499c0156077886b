"""Section CHECKPOINT: when checkpoints are saved, and which ones are kept."""

from dataclasses import dataclass
from typing import Literal

from phasetrain.config.sections.keys import Section, group, key


@dataclass(frozen=True, kw_only=True)
class KeepEverySection(Section):
    """Checkpoints that are saved and never deleted. A checkpoint NAME is not deleted either while
    there is a file NAME.pinned next to it."""

    updates: int | None = key(
        None,
        "save and keep checkpoints at multiples of this number of updates",
        scope="run",
        ge=1,
    )
    epochs: int | None = key(
        None,
        "save and keep checkpoints at the end of every n-th epoch",
        scope="run",
        ge=1,
    )


@dataclass(frozen=True, kw_only=True)
class BestSection(Section):
    """Checkpoints that are kept for the metrics of their weights. They are saved right after the
    phase that measured the metric."""

    monitor: str | None = key(
        None,
        "`split/metric`, such as valid/accuracy, with a leading minus sign if lower is better: "
        "-valid/loss; auto: the first metric of the validation split (VALID, VALIDATION, VAL or "
        "DEV), else of the first test split",
        resume="free",
    )
    keep: int = key(1, "number of best checkpoints to keep", resume="free", ge=1)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection(Section):
    """When checkpoints are saved, and which ones are kept."""

    every_updates: int | None = key(None, "updates between saves", scope="run", ge=1)
    every_epochs: int | None = key(
        1,
        "epochs between saves, each at the end of the epoch's last train phase",
        scope="run",
        ge=1,
    )
    every_minutes: float | Literal["auto"] | None = key(
        "auto",
        "minutes between saves; auto: the interval that loses the least time, from the measured "
        "cost of a save, between 0.5 and 10 minutes, unless no other rule saves",
        scope="run",
        gt=0,
    )
    at_end: bool = key(
        True,
        "save at the end of the run; otherwise a finished run looks like a killed one",
        scope="run",
    )
    on_exception: bool = key(
        True,
        "save if an exception is raised between two steps, for example by an unreadable sample",
        scope="run",
    )
    background: bool = key(
        True,
        "write in the background, from a copy in memory of the same size as the checkpoint",
        scope="run",
    )
    on_save_error: Literal["continue", "stop"] = key(
        "continue",
        "what to do after a failed save: continue training and count it, or stop the run",
        scope="run",
    )
    grace_seconds: float | None = key(
        None,
        "skip the save on a stop signal if the last save took longer than this; null: always save",
        scope="run",
        gt=0,
    )
    keep_last: int = key(
        3,
        "newest checkpoints to keep; older ones are deleted after a newer one is committed; 1 "
        "keeps 2 as well, since the newest may turn out to be damaged",
        scope="run",
        ge=1,
    )
    keep_every: KeepEverySection = group(KeepEverySection)
    best: BestSection = group(BestSection)
    exclude: tuple[str, ...] = key(
        [],
        "patterns for names in the model's state_dict that checkpoints leave out: weights that "
        "MODEL.freeze freezes for the whole run, and buffers of such modules; a resume takes them "
        "from MODEL.weights or the seed again, and verifies their digests",
        resume="free",
    )
    load_best: bool = key(
        False,
        "load the best weights by best.monitor (null: auto) into the model once the run has "
        "finished and its last state is saved; the result and `weights sha256` refer to them",
        resume="free",
    )
    verify: Literal["full", "size", "off"] = key(
        "full",
        "what to verify before a checkpoint is loaded: digests, file sizes, or nothing",
        scope="run",
    )


def list_update_intervals(section: CheckpointSection) -> list[int]:
    """Return the numbers of updates at whose multiples a checkpoint is saved."""
    return [every for every in (section.every_updates, section.keep_every.updates) if every]


def list_epoch_intervals(section: CheckpointSection) -> list[int]:
    """Return the numbers of epochs at whose multiples a checkpoint is saved."""
    return [every for every in (section.every_epochs, section.keep_every.epochs) if every]
