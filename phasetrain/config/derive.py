"""Values that follow from others: pure rules, each of which says what it did."""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.changes import trajectory_digest
from phasetrain.config.check import raise_all, shown
from phasetrain.config.compose import Composed
from phasetrain.config.layers import leaves, lookup, origin_of
from phasetrain.config.schema import Schema

LENGTHS = ("epochs", "updates", "samples")  # of PHASES, of which one is set

_NAME = re.compile(r"[\w.+-]+")


@dataclass(frozen=True)
class Derived:
    """The config that a run is built from.

    Attributes:
        config: frozen, complete.
        lines: one per value that a rule changed: `SECTION.key: a -> b (why)`.
    """

    config: AttrDict
    lines: tuple[str, ...]


def derive(composed: Composed, schema: Schema, *, device: str, processes: int = 1) -> Derived:
    """Apply the rules to a checked config.

    Args:
        device: what `MACHINE.device: auto` means on this machine.
        processes: of the run; the folder's name does not depend on them.

    Raises:
        ConfigError: lists every rule that cannot be met: the length of training, micro-batches that do not divide
            the batch, a name that cannot be a folder's.
    """
    rules = _Rules(composed, schema)
    rules.length()
    rules.micro_batches()
    rules.test_micro_batches()
    rules.device(device)
    rules.folder()
    if not rules.problems:
        rules.processes(processes)
    raise_all(rules.problems)
    return Derived(AttrDict(rules.config), tuple(rules.lines))


def overview(composed: Composed, schema: Schema) -> list[tuple[str, Any, str]]:
    """Return (path, value, layer) of each leaf that is no default, in the order of the keys."""
    found = []
    for path, value in leaves(composed.config).items():
        key = schema.key(path)
        if key is None or value != key.default:
            found.append((path, value, origin_of(composed.origins, path)))
    return found


class _Rules:
    """A copy of the config with the rules applied so far."""

    def __init__(self, composed: Composed, schema: Schema) -> None:
        self.config = deepcopy(composed.config)
        self.lines: list[str] = []
        self.problems: list[str] = []
        self._composed = composed
        self._schema = schema

    def length(self) -> None:
        """PHASES: of epochs, updates and samples one is set; the highest layer wins over those below."""
        phases = self.config["PHASES"]
        given = {key: self._rank(f"PHASES.{key}") for key in LENGTHS if phases[key] is not None}
        if not given:
            self.problems.append("PHASES: one of epochs, updates, samples must be set, as in PHASES.epochs=10")
            return
        highest = [key for key, rank in given.items() if rank == max(given.values())]
        if len(highest) > 1:
            told = " and ".join(f"PHASES.{key} = {phases[key]}" for key in highest)
            self.problems.append(f"{told} are both set ({self._layer(f'PHASES.{highest[0]}')}); keep one of them")
            return
        for key in given.keys() - set(highest):
            winner = f"PHASES.{highest[0]} = {phases[highest[0]]} ({self._layer(f'PHASES.{highest[0]}')})"
            self._set(f"PHASES.{key}", None, f"{winner} comes above {self._layer(f'PHASES.{key}')}")

    def micro_batches(self) -> None:
        """DATA.TRAIN.batch_size = micro_batch_size x OPTIMIZER.accumulate."""
        batch, micro = self.config["DATA"]["TRAIN"]["batch_size"], self.config["DATA"]["TRAIN"]["micro_batch_size"]
        accumulate = self.config["OPTIMIZER"]["accumulate"]
        if micro is not None and accumulate is not None:
            if micro * accumulate != batch:
                self.problems.append(
                    f"DATA.TRAIN.micro_batch_size = {micro} times OPTIMIZER.accumulate = {accumulate} is "
                    f"{micro * accumulate}, not DATA.TRAIN.batch_size = {batch}; set only one of the two"
                )
        elif accumulate is not None:
            if self._divides("OPTIMIZER.accumulate", accumulate, "DATA.TRAIN.batch_size", batch):
                why = f"batch_size {batch} / OPTIMIZER.accumulate {accumulate}"
                self._set("DATA.TRAIN.micro_batch_size", batch // accumulate, why)
        elif micro is None:
            self._set("DATA.TRAIN.micro_batch_size", batch, "batch_size in one piece")
            self._set("OPTIMIZER.accumulate", 1, "batch_size in one piece")
        elif self._divides("DATA.TRAIN.micro_batch_size", micro, "DATA.TRAIN.batch_size", batch):
            self._set("OPTIMIZER.accumulate", batch // micro, f"batch_size {batch} / micro_batch_size {micro}")

    def test_micro_batches(self) -> None:
        """DATA.*.micro_batch_size of a test split divides its batch_size, and is batch_size when not given."""
        for split, section in self.config["DATA"].items():
            if split == "TRAIN":
                continue
            path, batch, micro = f"DATA.{split}", section["batch_size"], section["micro_batch_size"]
            if micro is None:
                self._set(f"{path}.micro_batch_size", batch, "batch_size in one piece")
            else:
                self._divides(f"{path}.micro_batch_size", micro, f"{path}.batch_size", batch)

    def processes(self, size: int) -> None:
        """DATA.TRAIN.batch_size = micro_batch_size x processes x OPTIMIZER.accumulate, unless reduction is ordered."""
        section = self.config["DISTRIBUTED"]
        if section["reduction"] == "ordered":
            self._virtual_shards(size, section["virtual_shards"])
            return
        if size == 1:
            return
        if section["strategy"] == "none":
            self.problems.append(
                f"DISTRIBUTED.strategy = 'none' and {size} processes: each would train for itself; take another "
                "strategy, such as DISTRIBUTED.strategy=ddp, or start one process"
            )
        train, optimizer = self.config["DATA"]["TRAIN"], self.config["OPTIMIZER"]
        batch, micro, accumulate = train["batch_size"], train["micro_batch_size"], optimizer["accumulate"]
        given = self._composed.config
        if given["DATA"]["TRAIN"]["micro_batch_size"] is not None:
            if accumulate % size:
                sizes = ", ".join(str(n) for n in nearest_divisors(accumulate, size))
                micros = ", ".join(str(n) for n in nearest_divisors(batch // size, micro)) if batch % size == 0 else ""
                instead = f", or take DATA.TRAIN.micro_batch_size={micros}" if micros else ""
                self.problems.append(
                    f"DATA.TRAIN.batch_size = {batch} = DATA.TRAIN.micro_batch_size {micro} x {accumulate}, which "
                    f"{size} processes cannot share evenly; numbers of processes that work: {sizes}{instead}"
                )
                return
            why = f"batch_size {batch} / micro_batch_size {micro} / {size} processes"
            self._set("OPTIMIZER.accumulate", accumulate // size, why)
        elif micro % size:
            sizes = ", ".join(str(n) for n in nearest_divisors(micro, size))
            batches = ", ".join(str(n * size * accumulate) for n in (micro // size, micro // size + 1) if n)
            self.problems.append(
                f"DATA.TRAIN.batch_size = {batch} / OPTIMIZER.accumulate {accumulate} = {micro}, which {size} "
                f"processes cannot share evenly; nearest numbers of processes that work: {sizes}; nearest batch "
                f"sizes: {batches}"
            )
        else:
            why = f"batch_size {batch} / accumulate {accumulate} / {size} processes"
            self._set("DATA.TRAIN.micro_batch_size", micro // size, why)

    def _virtual_shards(self, size: int, shards: int) -> None:
        """DATA.TRAIN.batch_size = micro_batch_size x virtual_shards; each process does an equal number of them."""
        batch, path = self.config["DATA"]["TRAIN"]["batch_size"], "DISTRIBUTED.virtual_shards"
        if shards & (shards - 1):
            near = 1 << (shards.bit_length() - 1)
            self.problems.append(f"{path} = {shards}: expected a power of two, such as {near} or {2 * near}")
        elif shards % size:
            self.problems.append(
                f"{path} = {shards} and {size} processes: DISTRIBUTED.reduction = 'ordered' works on 1, 2, 4, ... "
                f"processes, up to {shards}; start as many, or take DISTRIBUTED.reduction=native"
            )
        elif self._divides(path, shards, "DATA.TRAIN.batch_size", batch):
            for key, section in (("DATA.TRAIN.micro_batch_size", "DATA"), ("OPTIMIZER.accumulate", "OPTIMIZER")):
                if lookup(self._composed.config, key) is not None:
                    self.problems.append(
                        f"{key} = {lookup(self._composed.config, key)} and DISTRIBUTED.reduction = 'ordered', under "
                        f"which {path} decides of it; leave {key} out ({section} has its default, null)"
                    )
            why = f"{path} = {shards}, {size} process{'es' if size > 1 else ''}"
            self._set("DATA.TRAIN.micro_batch_size", batch // shards, why)
            self._set("OPTIMIZER.accumulate", shards // size, why)

    def device(self, device: str) -> None:
        """MACHINE.device: auto is what the machine has."""
        if self.config["MACHINE"]["device"] == "auto":
            self._set("MACHINE.device", device, "what this machine has")

    def folder(self) -> None:
        """RUN.name is the experiment's name, RUN.dir is runs/{name}-{digest of what shapes the trajectory}."""
        run = self.config["RUN"]
        if run["name"] is None:
            experiment = self._composed.experiment
            self._set("RUN.name", experiment.replace("/", "-") or "run", "name of the experiment")
        elif _NAME.fullmatch(run["name"]) is None:
            self.problems.append(
                f"RUN.name = {run['name']!r} ({self._layer('RUN.name')}): it becomes part of a folder's name; "
                f"use letters, digits and . _ + - only"
            )
        if run["dir"] is None:
            digest = trajectory_digest(self.config, self._schema)
            self._set("RUN.dir", f"runs/{run['name']}-{digest}", "RUN.name and the digest of what shapes the run")

    def _divides(self, path: str, part: int, whole_path: str, whole: int) -> bool:
        if whole % part == 0:
            return True
        near = ", ".join(str(n) for n in nearest_divisors(whole, part))
        self.problems.append(
            f"{path} = {part} ({self._layer(path)}) does not divide {whole_path} = {whole} "
            f"({whole} = {whole // part} x {part} + {whole % part}); nearest that work: {near}"
        )
        return False

    def _set(self, path: str, value: Any, why: str) -> None:
        parent, _, name = path.rpartition(".")
        section = lookup(self.config, parent)
        self.lines.append(f"{path}: {shown(section[name])} -> {shown(value)} ({why})")
        section[name] = value

    def _layer(self, path: str) -> str:
        return origin_of(self._composed.origins, path)

    def _rank(self, path: str) -> int:
        layers: Sequence[str] = self._composed.layers
        return len(layers) - 1 - layers[::-1].index(self._layer(path))


def nearest_divisors(whole: int, part: int) -> list[int]:
    """Return the largest divisor of `whole` below `part` and the smallest above, where they exist.

    Example:
        >>> nearest_divisors(64, 3)
        [2, 4]
    """
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n < part]
    above = [n for n in divisors if n > part]
    return below[-1:] + above[:1]
