"""The lines that stay of phases: one for each train phase and the tests after it."""

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap

from phasetrain.engine.plan import Phase
from phasetrain.runtime.format import format_duration, format_metric
from phasetrain.runtime.terminal import SHOWN, Terminal

LONG = 30.0
"""Seconds after which a phase gets its own line at once, where no live line shows it meanwhile."""

GAP = "  "


@dataclass(frozen=True)
class Ended:
    """A phase that is complete, what was measured in it, and the seconds that it took."""

    phase: Phase
    metrics: Mapping[str, float]
    taken: float


class PhaseLines:
    """Prints a line for each train phase and the tests after it; a verbose terminal gets one for
    each phase.

    On a terminal that is wide enough lines are rows of a table, whose head is printed anew when
    there are other columns. log.txt gets a line for each phase at once.

    Args:
        terminal: where to print.

    Attributes:
        epochs: of the plan.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.epochs = 0
        self._waiting: list[Ended] = []
        self._columns: tuple[str, ...] | None = None

    def add(self, phase: Phase, metrics: Mapping[str, float], taken: float) -> None:
        """Take over a phase that is complete."""
        found = "".join(f"{name} {value:.4f}  " for name, value in metrics.items())
        text = f"epoch {phase.epoch + 1}/{self.epochs}  {phase.split:<5}  {found}({format_duration(taken)})"
        SHOWN.info(text)
        if self.terminal.verbosity == "verbose":
            self.terminal.line(text)
            return
        self._waiting = [*self._waiting, Ended(phase, dict(metrics), taken)]
        if not self.terminal.live and taken >= LONG:
            self.end()

    def end(self) -> None:
        """Print what has not been printed."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        width = self.terminal.width
        columns = self._wanted(waiting)
        if width is not None and len(self._head(columns)) <= width:
            if columns != self._columns:
                self._columns = columns
                self.terminal.line(self._head(columns), style="bold")
            self.terminal.line(self._row(columns, waiting))
            return
        self._columns = None
        line = self._line(waiting)
        if width is None or len(line) <= width:
            self.terminal.line(line)
            return
        for ended in waiting:
            self.terminal.line(
                "\n".join(wrap(self._line([ended]), width, subsequent_indent="    "))
            )

    def pending(self) -> str:
        """Return what is waiting for the tests after it, as a line."""
        waiting = self._waiting
        if not waiting:
            return ""
        if self._columns is not None and set(_cells(waiting)) <= set(self._columns):
            return self._row(self._columns, waiting)
        return self._line(waiting)

    def _wanted(self, waiting: list[Ended]) -> tuple[str, ...]:
        """Return the columns: those there were, as long as they are enough."""
        found = tuple(_cells(waiting))
        if self._columns is None:
            return found
        return (*self._columns, *(name for name in found if name not in self._columns))

    def _line(self, waiting: list[Ended]) -> str:
        told = [
            " ".join(
                (
                    ended.phase.split,
                    *(f"{name} {format_metric(value)}" for name, value in ended.metrics.items()),
                )
            )
            for ended in waiting
        ]
        epoch = f"epoch {waiting[0].phase.epoch + 1}/{self.epochs}"
        return GAP.join((epoch, *told, f"({_taken(waiting)})"))

    def _head(self, columns: tuple[str, ...]) -> str:
        return GAP.join(
            (
                "epoch".rjust(self._first),
                *(name.rjust(_width(name)) for name in columns),
                "time".rjust(8),
            )
        )

    def _row(self, columns: tuple[str, ...], waiting: list[Ended]) -> str:
        cells = _cells(waiting)
        epoch = f"{waiting[0].phase.epoch + 1}/{self.epochs}".rjust(self._first)
        values = (
            (format_metric(cells[name]) if name in cells else "").rjust(_width(name))
            for name in columns
        )
        return GAP.join((epoch, *values, _taken(waiting).rjust(8)))

    @property
    def _first(self) -> int:
        return max(5, 2 * len(str(self.epochs)) + 1)


def _cells(waiting: list[Ended]) -> dict[str, float]:
    return {
        f"{ended.phase.split}/{name}": value
        for ended in waiting
        for name, value in ended.metrics.items()
    }


def _width(name: str) -> int:
    return max(len(name), 8)


def _taken(waiting: list[Ended]) -> str:
    return format_duration(sum(ended.taken for ended in waiting))
