"""Whether a run can learn at all: one batch, again and again."""

import math
from collections.abc import Sequence

from phasetrain.commands.plan.rehearsal import Silent
from phasetrain.errors import NumericsError
from phasetrain.tasks import Position
from phasetrain.testing.build import built


def assert_learns_one_batch(
    overrides: Sequence[str],
    *,
    updates: int = 200,
    factor: float = 10.0,
    config_dir: str | None = None,
) -> list[float]:
    """See that training on one fixed batch makes its loss fall, and return the loss of each update.

    The first batch of the run is kept, its transforms applied once; hooks take no part. Schedules
    go from their beginning to their end within the updates. The mean loss of the last tenth is
    compared with the first loss.

    Args:
        overrides: describe the run.
        updates: updates to make.
        factor: how many times smaller the loss must become; for a loss that cannot come near 0,
            such as one with label smoothing, a smaller one. Where the first loss is not positive,
            any fall will do.
        config_dir: a folder with configs of your own.

    Raises:
        AssertionError: the loss did not fall so far, or is not finite; the curve is shown in short.

    Example:
        >>> assert_learns_one_batch(["experiment=digits", "LOSS.name=my_parts.focal"])
    """
    losses = _losses(overrides, updates, config_dir)
    tail = losses[-max(1, updates // 10) :]
    first = losses[0]
    last = sum(tail) / len(tail)
    wanted = first / factor if first > 0 else first
    if all(map(math.isfinite, losses)) and last < wanted:
        return losses
    raise AssertionError(
        f"the loss of one batch went from {first:.4g} to {last:.4g} in {updates} updates, expected under {wanted:.4g}: "
        f"{_curve(losses)}. Usual causes: a learning rate that is too low or too high, a target that does not belong "
        "to its input, a loss that has no gradient, weights that are not among the trained parameters"
    )


def _losses(overrides: Sequence[str], updates: int, config_dir: str | None) -> list[float]:
    made = built(overrides, config_dir)
    task = made.task
    machine = made.setup.machine
    phase = next((phase for phase in made.plan.phases if phase.is_train), None)
    if phase is None:
        raise ValueError(
            "these overrides describe a run without a train phase; set PHASES.epochs=1"
        )
    losses: list[float] = []
    try:
        with machine.apply_settings():
            task.begin(phase, fresh=True)
            batches = next(iter(task.batches(phase, 0)))
            for number in range(updates):
                out = task.train_step(
                    batches, Position(phase.split, number, number, number / updates), Silent()
                )
                losses.append(float(out.loss))
    except NumericsError as error:
        raise AssertionError(
            f"one batch cannot be learned, after {_curve(losses)}: {error}"
        ) from error
    finally:
        task.close()
    return losses


def _curve(losses: list[float]) -> str:
    """Return some of the losses with their updates, the first and the last among them."""
    if not losses:
        return "no update"
    last = len(losses) - 1
    places = sorted({round(last * part / 7) for part in range(8)})
    return ", ".join(f"{losses[place]:.4g} ({place + 1})" for place in places)
