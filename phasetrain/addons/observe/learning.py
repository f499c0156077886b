"""Checks that a run can learn at all, by overfitting one batch."""

import io
import math
from collections.abc import Sequence

from phasetrain.app.setup import resolve_config
from phasetrain.errors import NumericsError
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Position
from phasetrain.tasks.parts import StepEvents


def assert_learns_one_batch(
    overrides: Sequence[str],
    *,
    updates: int = 200,
    factor: float = 10.0,
    config_dir: str | None = None,
) -> list[float]:
    """Assert that the loss falls when training on one batch, and return the loss of each update.

    The first batch of the run is used throughout, with its transforms applied once, and without
    hooks. Schedules run from start to end within the updates. The mean loss of the last tenth of
    the updates is compared with the first loss.

    Args:
        overrides: describe the run.
        updates: number of updates.
        factor: by which the loss must fall; use a smaller one for a loss that cannot reach 0, such
            as one with label smoothing. If the first loss is not positive, any decrease is enough.
        config_dir: folder with custom configs.

    Raises:
        AssertionError: the loss did not fall enough, or is not finite; contains a short curve.

    Example:
        >>> assert_learns_one_batch(["experiment=digits", "LOSS.name=my_parts.focal"])
    """
    losses = _train_one_batch(overrides, updates, config_dir)
    # A mean, since with dropout or augmentation a single loss is noisy.
    tail = losses[-max(1, updates // 10) :]
    first = losses[0]
    last = sum(tail) / len(tail)
    wanted = first / factor if first > 0 else first
    if all(map(math.isfinite, losses)) and last < wanted:
        return losses
    raise AssertionError(
        f"the loss of one batch went from {first:.4g} to {last:.4g} in {updates} updates, expected "
        f"under {wanted:.4g}: {_format_curve(losses)}. Usual causes: a learning rate that is too "
        "low or too high, a target that does not belong to its input, a loss that has no "
        "gradient, weights that are not among the trained parameters"
    )


def _train_one_batch(overrides: Sequence[str], updates: int, config_dir: str | None) -> list[float]:
    setup = resolve_config(
        overrides, config_dir=config_dir, terminal=Terminal(io.StringIO(), live=False)
    )
    builder = setup.builder()
    data = builder.data()
    plan = builder.plan(data)
    phase = plan.first_training
    if phase is None:
        raise ValueError(
            "these overrides describe a run without a train phase; set PHASES.epochs=1"
        )
    task = builder.task(builder.parts(data, plan))
    losses: list[float] = []
    try:
        with setup.machine.apply_settings():
            task.begin(phase, fresh=True)
            # Once, outside of the loop: random transforms would give another batch each time.
            batches = next(iter(task.batches(phase, 0)))
            for number in range(updates):
                out = task.run_step(
                    batches, Position(phase.split, number, number, number / updates), StepEvents()
                )
                losses.append(float(out.loss))
    except NumericsError as error:
        raise AssertionError(
            f"one batch cannot be learned, after {_format_curve(losses)}: {error}"
        ) from error
    finally:
        task.close()
    return losses


def _format_curve(losses: list[float]) -> str:
    """Return eight of the losses, evenly spaced, with the number of the update."""
    if not losses:
        return "no update"
    last = len(losses) - 1
    places = sorted({round(last * part / 7) for part in range(8)})
    return ", ".join(f"{losses[index]:.4g} ({index + 1})" for index in places)
