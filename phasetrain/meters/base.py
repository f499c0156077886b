"""What a meter is, and the registry of meters (section METERS)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from phasetrain.config.registry import Factory, Registry
from phasetrain.distributed import World, gather_rows, reduce
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError

Better = Literal["larger", "smaller"]
"""Which of two values of a metric is better."""

COUNTS = frozenset({"absent", "groups", "left_out"})
"""Names of metrics that tell what a metric was taken over; more of it is neither better nor
worse."""


class Meter(nn.Module, ABC):
    """A metric that accumulates over a phase in summed buffers.

    Its state is its buffers and nothing else: `state_dict` holds a half-finished phase, and the sum
    of the buffers of all processes (of rows: all of them, one process after the other) is the state
    of the whole. `update` runs in every step and must not wait for the device: no `.item()`, no
    branch on a tensor's value. In training, outputs carry a graph; what is added is detached.

    One that does not look at `out.target` sets `needs_target` to False, and may be used in tests
    without targets.

    Sums are float64 by default, which the MPS device does not have; a meter for it asks for
    float32.

    Example:
        >>> class MeanOutput(Meter):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.add_sum("total")
        ...         self.add_sum("count", dtype=torch.int64)
        ...     def update(self, out: StepOutput) -> None:
        ...         self.total += out.output.detach().sum()
        ...         self.count += out.output.numel()
        ...     def compute(self) -> float:
        ...         return float(self.total / self.count)

    Attributes:
        better: whether larger or smaller values are better; None: nobody knows.
        first: of a meter of several metrics, the name of the one that stands for all; empty where
            there is one metric; None: which there are depends on parameters or data.
    """

    better: ClassVar[Better | None] = None
    first: ClassVar[str | None] = ""

    needs_target = True

    def __init__(self) -> None:
        super().__init__()
        self._rows: set[str] = set()
        self._room: dict[str, Tensor] = {}

    def add_sum(
        self, name: str, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64
    ) -> None:
        """Add the buffer `name`, zeros of `shape`, to which `update` adds and which is summed over
        processes."""
        self.register_buffer(name, torch.zeros(tuple(shape), dtype=dtype))

    def add_rows(
        self, name: str, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32
    ) -> None:
        """Add the buffer `name`, `(0, *shape)`, to which `keep` appends rows: for what needs all
        scores at once.

        A shape of `()` is settled by the first rows; `(0,)` until then.
        """
        self._rows.add(name)
        self.register_buffer(name, torch.zeros((0, *shape), dtype=dtype))

    def keep(self, name: str, rows: Tensor, mask: Tensor | None = None) -> None:
        """Append rows `(N, ...)` to a buffer made by `add_rows`, those whose mask is False left
        out.

        The buffer is the filled part of a memory that doubles when it is full, so that a phase of
        many steps costs as much as its rows. With a mask it waits for the device; only the last
        steps of a pass have one.

        Raises:
            ValueError: the rows have another shape than those before.
        """
        held = self.get_buffer(name)
        kept = (rows.detach() if mask is None else rows.detach()[mask]).to(held)
        begin = len(held)
        end = len(held) + len(kept)
        if begin and kept.shape[1:] != held.shape[1:]:
            raise ValueError(
                f"{name}: rows of shape {tuple(kept.shape[1:])} after rows of {tuple(held.shape[1:])}"
            )
        room = self._room.get(name)
        if room is None or len(room) < end or room.data_ptr() != held.data_ptr():
            room = self._room[name] = kept.new_empty((max(2 * begin, end), *kept.shape[1:]))
            if begin:
                room[:begin] = held
        room[begin:end] = kept
        self._buffers[name] = room[:end]

    def of_all(self, world: World) -> "Meter":
        """Return a meter that has seen what those of all processes have; every process takes
        part."""
        if world.is_single_process:
            return self
        whole = deepcopy(self)
        for name, buffer in self.named_buffers():
            if name in self._rows:
                found = gather_rows(world, buffer.clone())
            else:
                found = reduce(world, buffer)
            whole.fill({name: found})
        return whole

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Take over buffers by their names; rows may be more or fewer than there were."""
        for name, value in values.items():
            if name in self._rows:
                self._buffers[name] = value.to(self.get_buffer(name), copy=True)
            else:
                self.get_buffer(name).copy_(value)

    def merge(self, processes: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over what the meters of several processes have seen together."""
        for name in processes[0]:
            parts = [one[name] for one in processes]
            self.fill(
                {
                    name: torch.cat(parts)
                    if name in self._rows
                    else torch.stack(parts).sum(0).to(parts[0].dtype)
                }
            )

    @abstractmethod
    def update(self, out: StepOutput) -> None:
        """Add what one step produced; samples whose `out.mask` is False do not count."""

    @abstractmethod
    def compute(self) -> float | dict[str, float]:
        """Return the metric of what was added so far (or several by name); NaN when nothing was."""

    def direction(self, metric: str = "") -> Better | None:
        """Return which values of a metric are better; `metric` is its name where there are
        several."""
        if metric in COUNTS:
            return None
        return self.better

    def metrics(self) -> tuple[str, ...] | None:
        """Return the names of several metrics, none where it is one; None where only the data tells
        them."""
        empty = deepcopy(self)
        empty.reset()
        try:
            found = empty.compute()
        except (
            ArithmeticError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ):  # it needs data to compute
            return None
        if isinstance(found, dict):
            return tuple(found)
        return ()

    def table(self) -> dict[str, dict[str, float]]:
        """Return what is more than a few numbers, as row -> column -> value, for a report; most
        meters have none.

        Of all processes: `meter.of_all(world).table()`, where every process takes part.
        """
        return {}

    def reset(self) -> None:
        """Set all sums to zero, and drop all rows."""
        self._room.clear()
        for name, buffer in list(self.named_buffers()):
            if name in self._rows:
                self._buffers[name] = buffer[:0].clone()
            else:
                buffer.zero_()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for name in self._rows:
            if (given := state_dict.get(prefix + name)) is not None:
                self._buffers[name] = torch.empty_like(given, device=self.get_buffer(name).device)
        super()._load_from_state_dict(state_dict, prefix, *others)


Adapter = Callable[[Factory[Any]], Factory[Any]]
"""Makes of a library's own class a callable that returns a meter; what is not the library's it
returns as it is."""


class Meters(Registry[Meter]):
    """Meters by name, and metrics of other libraries by dotted path, each through an adapter to its
    library."""

    def __init__(self) -> None:
        super().__init__("meter", "METERS")
        self._adapters: list[Adapter] = []

    def adapter(self, library: str, extra: str) -> Callable[[Adapter], Adapter]:
        """Return a decorator that files what makes meters of a library's metrics, see
        `Registry.bridge`."""

        def decorate(adapter: Adapter) -> Adapter:
            self._adapters.append(adapter)
            self.bridge(library, extra)(lambda _name: None)  # its metrics have dotted paths
            return adapter

        return decorate

    def find(self, name: str, where: str | None = None) -> Factory[Meter]:
        """Return the callable behind `name`, see `Registry.find`."""
        found = super().find(name, where)
        for adapter in self._adapters:
            found = adapter(found)
        return found

    def build(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        *,
        where: str | None = None,
        facts: Mapping[str, Any] | None = None,
        used: dict[str, Any] | None = None,
    ) -> Meter:
        """Make a meter, see `Registry.build`.

        Raises:
            ConfigError: also where what was made is no meter.
        """
        made = super().build(name, params, where=where, facts=facts, used=used)
        if not isinstance(made, Meter):
            raise ConfigError(
                f"{where or self.section}.name = {name!r}: it makes a {type(made).__name__}, which is no meter; "
                f"expected a phasetrain.meters.Meter, or a metric of {' or '.join(self._bridges)}"
            )
        return made


METERS = Meters()
