"""Values that follow from others: pure rules, each of which says what it did."""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from phasetrain.config.attrdict import ConfigDict
from phasetrain.config.changes import trajectory_digest
from phasetrain.config.compose.composed import Composed
from phasetrain.config.compose.merge import leaves, lookup, origin_of
from phasetrain.config.problems import raise_all, shown
from phasetrain.config.rules.compiling import compile_settings
from phasetrain.config.rules.scaling import lr_factor
from phasetrain.config.schema import Schema
from phasetrain.config.stages import LENGTHS
from phasetrain.errors import ConfigError

_NAME = re.compile(r"[\w.+-]+")


@dataclass(frozen=True)
class Derived:
    """The config that a run is built from.

    Attributes:
        config: frozen, complete.
        lines: one per value that a rule changed: `SECTION.key: a -> b (why)`.
    """

    config: ConfigDict
    lines: tuple[str, ...]


def derive(
    composed: Composed,
    schema: Schema,
    *,
    device: str,
    processes: int = 1,
    monitor: Callable[[], str] = lambda: "",
) -> Derived:
    """Apply the rules to a checked config.

    Args:
        device: what `MACHINE.device: auto` means on this machine.
        processes: of the run; the folder's name does not depend on them.
        monitor: returns what CHECKPOINT.best.monitor = auto stands for; asked where it is wanted.

    Raises:
        ConfigError: lists every rule that cannot be met: the length of training, micro-batches that
            do not divide the batch, a name that cannot be a folder's.
    """
    rules = _Rules(composed, schema)
    learns = rules.config["RUN"]["engine"] not in (
        "test",
        "extract",
    )  # those take any number of processes
    rules.length()
    rules.micro_batches(processes if learns else None)
    rules.test_micro_batches()
    rules.learning_rate()
    rules.monitor(monitor)
    rules.device(device)
    rules.precision()
    rules.compile()
    rules.folder()
    rules.launch()
    rules.communication(processes)
    if not rules.problems and (learns or processes == 1):
        rules.processes(processes)
    raise_all(rules.problems)
    return Derived(ConfigDict(rules.config), tuple(rules.lines))


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
        """PHASES: of epochs, updates, samples and stages one is set; the highest layer wins over
        those below."""
        phases = self.config["PHASES"]
        given = {
            key: self._rank(f"PHASES.{key}")
            for key in (*LENGTHS, "stages")
            if phases[key] is not None and phases[key] != []
        }
        if not given and self.config["RUN"]["engine"] == "extract":
            return
        if not given:
            self.problems.append(
                "PHASES: one of epochs, updates, samples must be set, as in PHASES.epochs=10"
            )
            return
        highest = [key for key, rank in given.items() if rank == max(given.values())]
        if len(highest) > 1:
            told = " and ".join(f"PHASES.{key} = {phases[key]}" for key in highest)
            self.problems.append(
                f"{told} are both set ({self._layer(f'PHASES.{highest[0]}')}); keep one of them"
            )
            return
        for key in given.keys() - set(highest):
            winner = f"PHASES.{highest[0]} = {phases[highest[0]]} ({self._layer(f'PHASES.{highest[0]}')})"
            self._set(
                f"PHASES.{key}",
                [] if key == "stages" else None,
                f"{winner} comes above {self._layer(f'PHASES.{key}')}",
            )

    def micro_batches(self, processes: int | None) -> None:
        """DATA.TRAIN.batch_size = micro_batch_size x OPTIMIZER.accumulate, and x processes where
        both are given."""
        batch = self.config["DATA"]["TRAIN"]["batch_size"]
        micro = self.config["DATA"]["TRAIN"]["micro_batch_size"]
        accumulate = self.config["OPTIMIZER"]["accumulate"]
        if micro is not None and accumulate is not None:
            if processes is not None and micro * accumulate * processes != batch:
                times = ""
                rest = ""
                if processes > 1:
                    times = f" times {processes} processes"
                    rest = ", and the other one follows from the number of processes"
                self.problems.append(
                    f"DATA.TRAIN.micro_batch_size = {micro} times OPTIMIZER.accumulate = {accumulate}{times} is "
                    f"{micro * accumulate * processes}, not DATA.TRAIN.batch_size = {batch}; set only one of the "
                    f"two{rest}"
                )
        elif accumulate is not None:
            if self._divides("OPTIMIZER.accumulate", accumulate, "DATA.TRAIN.batch_size", batch):
                why = f"batch_size {batch} / OPTIMIZER.accumulate {accumulate}"
                self._set("DATA.TRAIN.micro_batch_size", batch // accumulate, why)
        elif micro is None:
            self._set("DATA.TRAIN.micro_batch_size", batch, "batch_size in one piece")
            self._set("OPTIMIZER.accumulate", 1, "batch_size in one piece")
        elif self._divides("DATA.TRAIN.micro_batch_size", micro, "DATA.TRAIN.batch_size", batch):
            self._set(
                "OPTIMIZER.accumulate",
                batch // micro,
                f"batch_size {batch} / micro_batch_size {micro}",
            )

    def test_micro_batches(self) -> None:
        """DATA.*.micro_batch_size of a test split divides its batch_size, and is batch_size when
        not given."""
        for split, section in self.config["DATA"].items():
            if split == "TRAIN":
                continue
            path = f"DATA.{split}"
            batch = section["batch_size"]
            micro = section["micro_batch_size"]
            if micro is None:
                self._set(f"{path}.micro_batch_size", batch, "batch_size in one piece")
            else:
                self._divides(f"{path}.micro_batch_size", micro, f"{path}.batch_size", batch)

    def processes(self, size: int) -> None:
        """DATA.TRAIN.batch_size = micro_batch_size x processes x OPTIMIZER.accumulate, unless
        reduction is ordered."""
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
        train = self.config["DATA"]["TRAIN"]
        optimizer = self.config["OPTIMIZER"]
        batch = train["batch_size"]
        micro = train["micro_batch_size"]
        accumulate = optimizer["accumulate"]
        keys = ("DATA.TRAIN.micro_batch_size", "OPTIMIZER.accumulate")
        micro_given, accumulate_given = (
            lookup(self._composed.config, key) is not None for key in keys
        )
        if micro_given and accumulate_given:
            return  # `micro_batches` has seen that they fit
        whole, each = (accumulate, micro) if micro_given else (micro, accumulate)
        if whole % size:
            self.problems.append(_uneven(batch, size, whole, each, micro_given=micro_given))
        elif micro_given:
            why = f"batch_size {batch} / micro_batch_size {micro} / {size} processes"
            self._set("OPTIMIZER.accumulate", accumulate // size, why)
        else:
            why = f"batch_size {batch} / accumulate {accumulate} / {size} processes"
            self._set("DATA.TRAIN.micro_batch_size", micro // size, why)

    def _virtual_shards(self, size: int, shards: int) -> None:
        """DATA.TRAIN.batch_size = micro_batch_size x virtual_shards; each process does an equal
        number of them."""
        batch = self.config["DATA"]["TRAIN"]["batch_size"]
        path = "DISTRIBUTED.virtual_shards"
        if shards & (shards - 1):
            near = 1 << (shards.bit_length() - 1)
            self.problems.append(
                f"{path} = {shards}: expected a power of two, such as {near} or {2 * near}"
            )
        elif shards % size:
            self.problems.append(
                f"{path} = {shards} and {size} processes: DISTRIBUTED.reduction = 'ordered' works on 1, 2, 4, ... "
                f"processes, up to {shards}; start as many, or take DISTRIBUTED.reduction=native"
            )
        elif self._divides(path, shards, "DATA.TRAIN.batch_size", batch):
            for key, section in (
                ("DATA.TRAIN.micro_batch_size", "DATA"),
                ("OPTIMIZER.accumulate", "OPTIMIZER"),
            ):
                if lookup(self._composed.config, key) is not None:
                    self.problems.append(
                        f"{key} = {lookup(self._composed.config, key)} and DISTRIBUTED.reduction = 'ordered', under "
                        f"which {path} decides of it; leave {key} out ({section} has its default, null)"
                    )
            why = f"{path} = {shards}, {size} process{'es' if size > 1 else ''}"
            self._set("DATA.TRAIN.micro_batch_size", batch // shards, why)
            self._set("OPTIMIZER.accumulate", shards // size, why)

    def learning_rate(self) -> None:
        """OPTIMIZER.lr is multiplied as auto_lr_scaling says, which is null then: the config goes
        on to hold once."""
        optimizer = self.config["OPTIMIZER"]
        if optimizer["auto_lr_scaling"] is None:
            return
        try:
            factor, why = lr_factor(
                optimizer["auto_lr_scaling"], self.config["DATA"]["TRAIN"]["batch_size"]
            )
        except ConfigError as error:
            self.problems.append(str(error))
            return
        self._set("OPTIMIZER.lr", optimizer["lr"] * factor, why)
        self._set("OPTIMIZER.auto_lr_scaling", None, "it is in OPTIMIZER.lr")

    def monitor(self, first: Callable[[], str]) -> None:
        """CHECKPOINT.best.monitor: auto, and null with load_best, is the first metric of the first
        test split."""
        section = self.config["CHECKPOINT"]
        path = "CHECKPOINT.best.monitor"
        if section["best"]["monitor"] == "auto" or (
            section["best"]["monitor"] is None and section["load_best"]
        ):
            try:
                self._set(path, first(), "the first metric of the first test split")
            except ConfigError as error:
                if section["best"]["monitor"]:
                    asked = f"{path} = 'auto'"
                else:
                    asked = "CHECKPOINT.load_best = true"
                self.problems.append(f"{asked}: {error}")

    def device(self, device: str) -> None:
        """MACHINE.device: auto is what the machine has."""
        if self.config["MACHINE"]["device"] == "auto":
            self._set("MACHINE.device", device, "what this machine has")

    def precision(self) -> None:
        """MACHINE and DISTRIBUTED: what was Apex's is torch's own today."""
        if self.config["MACHINE"]["precision"] == "apex":
            self._set("MACHINE.precision", "fp16", "mixed precision of Apex is torch.amp today")
        if (
            self.config["MACHINE"]["precision"] == "tf32"
            and self.config["MACHINE"]["device"] != "cuda"
        ):
            device = self.config["MACHINE"]["device"]
            self.problems.append(
                f"MACHINE.precision = 'tf32' and MACHINE.device = {device!r}: only CUDA devices have it; take fp32"
            )
        if self.config["DISTRIBUTED"]["sync_batch_norm"] == "apex":
            self._set("DISTRIBUTED.sync_batch_norm", "global", "Apex's is torch's today")

    def compile(self) -> None:
        """MACHINE.compile: a bare backend is spelled out; what makes bits depend on what came
        before is refused."""
        if self.config["MACHINE"]["compile"] is None:
            return
        spelled, problems = compile_settings(self.config)
        self.problems += problems
        if not problems and spelled != self.config["MACHINE"]["compile"]:
            self._set("MACHINE.compile", spelled, "spelled out")

    def communication(self, size: int) -> None:
        """DISTRIBUTED: what several processes cannot do on this device, or not in this order, is
        refused."""
        section = self.config["DISTRIBUTED"]
        device = self.config["MACHINE"]["device"]
        how = section["communication"]
        path = "DISTRIBUTED.communication"
        if how == "powersgd":
            self.problems.append(
                f"{path} = 'powersgd': each process keeps what the others have not been sent, a tensor as large as the "
                "gradient, which no checkpoint holds, so no resume would be exact; take fp16 or bf16"
            )
        elif how not in ("none", "fp16", "bf16"):
            self.problems.append(
                f"{path} = {how!r} ({self._layer(path)}): expected none, fp16 or bf16"
            )
        elif how == "bf16" and size > 1 and device != "cuda":
            self.problems.append(
                f"{path} = 'bf16' and MACHINE.device = {device!r}: only NCCL, between CUDA devices, adds bf16 "
                "gradients; take fp16 or none"
            )
        for key, given in (
            ("communication", how != "none"),
            ("sync_batch_norm", section["sync_batch_norm"]),
        ):
            if given and section["reduction"] == "ordered":
                self.problems.append(
                    f"DISTRIBUTED.{key} = {shown(section[key])} and DISTRIBUTED.reduction = 'ordered': bits would "
                    "depend on the number of processes, which ordered promises they do not; leave one of them out"
                )
        if (
            self.config["MACHINE"]["compile"] is not None
            and size > 1
            and section["strategy"] == "sharded_ddp"
        ):
            self.problems.append(
                "MACHINE.compile and DISTRIBUTED.strategy = 'sharded_ddp': fairscale knows nothing of torch.compile; "
                "take the strategy zero or ddp, or leave out MACHINE.compile"
            )
        if section["sync_batch_norm"] and size > 1 and device != "cuda":
            self.problems.append(
                f"DISTRIBUTED.sync_batch_norm = {shown(section['sync_batch_norm'])} and MACHINE.device = {device!r}: "
                "torch synchronises batch norm over several processes on CUDA devices only; leave it out here"
            )

    def folder(self) -> None:
        """RUN.name is the experiment's name, RUN.dir is runs/{name}-{digest of what shapes the
        trajectory}."""
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
            self._set(
                "RUN.dir",
                f"runs/{run['name']}-{digest}",
                "RUN.name and the digest of what shapes the run",
            )

    def launch(self) -> None:
        """LAUNCH: the warning comes before the time limit, and a local job is one of this
        machine."""
        launch = self.config["LAUNCH"]
        if launch["lead_seconds"] >= 60 * launch["minutes"]:
            self.problems.append(
                f"LAUNCH.lead_seconds = {launch['lead_seconds']} and LAUNCH.minutes = {launch['minutes']}: the run is "
                f"to be warned before its time is up; set LAUNCH.lead_seconds below {60 * launch['minutes']}"
            )
        if launch["cluster"] == "local" and launch["nodes"] > 1:
            self.problems.append(
                f"LAUNCH.cluster = 'local' and LAUNCH.nodes = {launch['nodes']}: a local job has this machine only; "
                "set LAUNCH.nodes=1, and LAUNCH.processes to the number of processes"
            )

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


def _uneven(batch: int, size: int, whole: int, each: int, *, micro_given: bool) -> str:
    """Return what to say of a batch of `whole` x `each` samples where processes cannot share the
    `whole` evenly."""
    sizes = _listed(nearest_divisors(whole, size))
    batches = _listed([n * size * each for n in (whole // size, whole // size + 1) if n])
    near = f"nearest numbers of processes that work: {sizes}; nearest batch sizes: {batches}"
    if not micro_given:
        given = f"DATA.TRAIN.batch_size = {batch} / OPTIMIZER.accumulate {each} = {whole}"
        return f"{given}, which {size} processes cannot share evenly; {near}"
    if batch % size == 0:
        near += f"; nearest DATA.TRAIN.micro_batch_size: {_listed(nearest_divisors(batch // size, each))}"
    given = f"DATA.TRAIN.batch_size = {batch} = DATA.TRAIN.micro_batch_size {each} x {whole}"
    return f"{given}, which {size} processes cannot share evenly; {near}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


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
