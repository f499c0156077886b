"""Section PHASES: length of the training, and when to test."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.config.sections.keys import Section, group, key


@dataclass(frozen=True, kw_only=True)
class TestEverySection(Section):
    """Interval between tests. A test always follows the last update; if all are null, it is the
    only one."""

    __test__ = False  # pytest would otherwise collect the class, because of its name

    epochs: int | None = key(1, "epochs between tests", resume="adjustable", ge=1)
    updates: int | None = key(None, "updates between tests", resume="adjustable", ge=1)
    when: str | None = key(
        None,
        "dotted path of a function that gets a `phasetrain.engine.plan.Progress` after each update "
        "and returns whether to test",
        resume="adjustable",
    )


@dataclass(frozen=True, kw_only=True)
class LimitSection(Section):
    """Limits for quick experiments."""

    train: int | None = key(None, "maximum updates per epoch", resume="adjustable", ge=1)
    test: int | None = key(None, "maximum batches per test", resume="adjustable", ge=1)
    windows: int | None = key(
        None, "maximum windows of data that comes in windows", resume="adjustable", ge=1
    )


@dataclass(frozen=True, kw_only=True)
class PhasesSection(Section):
    """Length of the training, its stages, and when to test."""

    epochs: int | None = key(
        None,
        "epochs over DATA.TRAIN; exactly one of epochs, updates, samples, stages is set",
        resume="adjustable",
        ge=0,
        le=1_000_000,
    )
    updates: int | None = key(None, "optimizer updates", resume="adjustable", ge=0)
    samples: int | None = key(
        None, "training samples, rounded up to whole updates", resume="adjustable", ge=0
    )
    stages: tuple[Mapping[str, Any], ...] = key(
        [],
        "consecutive parts of the training, each with `epochs`, `updates` or `samples`, optionally "
        "a `name`, and the keys that it changes: transforms, batch size, loss, frozen weights, "
        "learning rate, schedules; with `continues: true` it begins within the epoch, without a "
        "test before it",
        resume="adjustable",
    )
    extend: Literal["continue", "stretch", "cycle"] = key(
        "continue",
        "what schedules do if the length changes on a resume: `continue` from their present value "
        "to their end, `stretch` over the new length as if it had been planned, or begin a new "
        "`cycle`, with its warm-up",
        resume="adjustable",
        scope="run",
    )
    test_every: TestEverySection = group(TestEverySection)
    train_meters: bool = key(
        True, "measure METERS in train phases too, not only in tests", resume="adjustable"
    )
    test_first: bool = key(False, "test once before the first update", resume="adjustable")
    overfit: int | None = key(
        None,
        "train on this number of batches, the same in each epoch, to check that the model can "
        "memorize them",
        resume="forbidden",
        ge=1,
    )
    limit: LimitSection = group(LimitSection)
