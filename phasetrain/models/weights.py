"""Starting from weights that somebody has trained before (`MODEL.weights`)."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phasetrain.distributed import World
from phasetrain.distributed.dtensors import local_shard
from phasetrain.errors import ConfigError, did_you_mean, nearest
from phasetrain.models.sources import Content, Source, read
from phasetrain.runtime.format import join_first
from phasetrain.runtime.terminal import plain_table

log = logging.getLogger(__name__)

ROWS = 40
SHOWN = 6
"""Rows of the printed table, and names that an error lists, at most."""

COUNTER = "num_batches_tracked"
"""A counter of batch norm that files of old versions of torch do not have, and that nothing depends
on."""

WRAPPED = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put in front of all names."""


@dataclass(frozen=True)
class Origin:
    """Where a tensor of the model comes from: number of the source in the config, and its name
    there."""

    source: int
    name: str


@dataclass
class Report:
    """What became of the tensors of a model, and of those in the sources.

    Attributes:
        sources: of each the path, what was read, its format, its digest and its number of tensors.
        shapes: name in the model -> shape and type, of all its tensors.
        loaded: name in the model -> where it comes from.
        missing: names in the model that no source has, tied ones and counters left out.
        reinit: names in the model that keep their initial values because the config says so.
        mismatched: name in the model -> shape and type in the source, which are not the model's.
        unexpected: name in a source, as it was changed -> number of the source.
    """

    sources: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, Origin] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    reinit: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, int] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, shape, what became of it) of each tensor, those that were not loaded
        first."""
        found = [
            (name, self.shapes[name], f"mismatched: the source has {has}")
            for name, has in self.mismatched.items()
        ]
        found += [
            (name, self.shapes[name], "missing: keeps its initial values") for name in self.missing
        ]
        found += [
            (name, self.shapes[name], "reinit: keeps its initial values") for name in self.reinit
        ]
        found += [
            (name, "", f"unexpected: only in source {number}")
            for name, number in self.unexpected.items()
        ]
        return found + [
            (name, self.shapes[name], f"loaded from source {origin.source}: {origin.name}")
            for name, origin in self.loaded.items()
        ]


def start_from(model: nn.Module, sources: Sequence[Source], world: World) -> Report:
    """Give a model the weights in the sources, of which later ones win over earlier ones, and log
    what became of each.

    The main process alone reads, so files need not be on other machines; then tensors go round one
    by one. Every process takes part.

    Args:
        model: on any device, not yet divided over processes.
        sources: in the order of the config.
        world: the processes.

    Raises:
        ConfigError: a source cannot be read, or does not fit: names, shapes, patterns that match
            nothing.
    """
    own = model_tensors(model)
    report, values = chosen(own, sources, world)
    parameters = dict(
        [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    )
    others: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, value in sent(report, own, values, world):
            if parameters.get(name) is own[name]:
                own[name].copy_(value)
            else:  # the module has a way of its own to write its state
                others[name] = value
    if others:
        model.load_state_dict(others, strict=False)
    if world.is_main:
        show(report)
    return report


def chosen(
    own: Mapping[str, Tensor], sources: Sequence[Source], world: World
) -> tuple[Report, dict[str, Tensor]]:
    """Return which tensors of a model come from where, and on the main process the tensors
    themselves.

    Raises:
        ConfigError: see `start_from`.
    """
    values: dict[str, Tensor] = {}

    def look() -> Report:
        _see_all(sources)
        matching = Matching(own, sources)
        for number, source in enumerate(sources):
            matching.add(number, source, read(source))
        matching.finish()
        values.update(matching.values)
        return matching.report

    return world.run_on_main(look), values


def sent(
    report: Report, own: Mapping[str, Tensor], values: Mapping[str, Tensor], world: World
) -> Iterator[tuple[str, Tensor]]:
    """Yield on every process the name and the value of each tensor that was loaded, in the model's
    type, on the CPU."""
    for name in report.loaded:
        like = own[name]
        if world.is_main:
            value = values[name].to(like.dtype).contiguous()
        else:
            value = torch.empty(like.shape, dtype=like.dtype)
        if not world.is_single_process and value.numel():
            dist.broadcast(value.view(-1).view(torch.uint8), src=0, group=world.control)
        yield name, value


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state by name, parameters and buffers themselves."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def show(report: Report) -> None:
    """Log what became of each tensor."""
    for number, source in enumerate(report.sources):
        log.info(
            "weights from source %d: %s (%s, %d tensors, digest %s)",
            *(number, source["read"], source["format"], source["tensors"], source["digest"][:16]),
        )
    rows = report.rows()
    if len(rows) > ROWS:
        rows = [*rows[:ROWS], (f"and {len(rows) - ROWS} more, see plan.json", "", "")]
    title = f"{len(report.loaded)} of {len(report.shapes)} tensors of the model start from them"
    log.info(plain_table(title, ("tensor", "shape", "what became of it"), rows))


class Matching:
    """Finds for the tensors of a model those of sources.

    Args:
        own: name -> tensor of the model.
        sources: all of them.

    Attributes:
        values: name in the model -> what it gets.
        report: what became of each.
    """

    def __init__(self, own: Mapping[str, Tensor], sources: Sequence[Source]) -> None:
        self._own = own
        self._sources = sources
        self.values: dict[str, Tensor] = {}
        self.report = Report(shapes={name: described(tensor) for name, tensor in own.items()})
        self._reinit: set[str] = set()
        for source in sources:
            for number, pattern in enumerate(source.reinit):
                what = f"{source.where}.reinit[{number}] = {pattern!r}"
                self._reinit |= set(
                    _matching(pattern, own, f"{what}: no tensor of the model has such a name")
                )

    def add(self, number: int, source: Source, content: Content) -> None:
        """Take what fits from a source.

        Raises:
            ConfigError: nothing fits, shapes differ, or a pattern matches nothing.
        """
        self.match(number, source, content.tensors)
        facts = {
            "path": source.path,
            "read": content.path,
            "format": content.format,
            "digest": content.digest,
        }
        self.report.sources.append(facts | {"tensors": len(content.tensors)})

    def match(self, number: int, source: Source, tensors: Mapping[str, Tensor]) -> None:
        """Take what fits of some tensors; see `add`."""
        names = _renamed(source, list(tensors), self._own)
        fitting = 0
        mismatched = {}
        for name, was in _taken(source, names).items():
            tensor = tensors[was]
            like = self._own.get(name)
            if like is None:
                self.report.unexpected[name] = number
                continue
            fitting += 1
            if name in self._reinit:
                continue
            if tensor.shape != like.shape or tensor.is_floating_point() != like.is_floating_point():
                mismatched[name] = described(tensor)
                continue
            self.values[name], self.report.loaded[name] = tensor, Origin(number, was)
        if not fitting:
            raise source.refused(self._nothing_fits(source, names))
        if mismatched and not source.skip_mismatched:
            raise source.refused(self._mismatched(source, mismatched))
        self.report.mismatched |= mismatched

    def finish(self) -> None:
        """See that nothing of the model was forgotten.

        Raises:
            ConfigError: it was, and all sources are strict.
        """
        report = self.report
        report.reinit = [name for name in self._own if name in self._reinit]
        report.loaded = {name: report.loaded[name] for name in self._own if name in report.loaded}
        left_out = report.mismatched.keys() - report.loaded.keys()
        report.mismatched = {
            name: report.mismatched[name] for name in self._own if name in left_out
        }
        report.unexpected = {
            name: at for name, at in report.unexpected.items() if name not in self._own
        }
        tied = {_place(self._own[name]) for name in report.loaded}
        left = self._own.keys() - report.loaded.keys() - self._reinit - report.mismatched.keys()
        report.missing = [
            name
            for name in self._own
            if name in left and not name.endswith(COUNTER) and _place(self._own[name]) not in tied
        ]
        if report.missing and all(source.strict for source in self._sources):
            raise ConfigError(self._left(report.missing))

    def _left(self, missing: Sequence[str]) -> str:
        where = self._sources[-1].where
        names = [f"{name} {self.report.shapes[name]}{self._near(name)}" for name in missing]
        return (
            f"{self._sources[0].where.partition('[')[0]}: {len(missing)} of {len(self._own)} tensors of the model have "
            f"no source: {join_first(names, SHOWN)}. {_advice(where, missing, list(self.report.unexpected))}Keep initial "
            f"values where they are meant to be kept, with {where}.reinit=[{_pattern(missing)}], or wherever there is "
            f"no source, with {where}.strict=false"
        )

    def _near(self, name: str) -> str:
        found = nearest(name, self.report.unexpected)
        if found:
            return f" (the source has {found!r})"
        return ""

    def _nothing_fits(self, source: Source, names: Mapping[str, str]) -> str:
        advice = _advice(source.where, list(self._own), list(names))
        return (
            f"nothing of it fits: the model has {join_first(self._own, SHOWN)}, and it has, after {source.where}.rename and its "
            f"like, {join_first(names, SHOWN)}. {advice}See {source.where}.prefix_remove, prefix_add and rename"
        )

    def _mismatched(self, source: Source, mismatched: Mapping[str, str]) -> str:
        pairs = [
            f"{name}: {has} in the source, {self.report.shapes[name]} in the model"
            for name, has in mismatched.items()
        ]
        return (
            f"{join_first(pairs, SHOWN)}. Keep the model's initial values there with "
            f"{source.where}.reinit=[{_pattern(list(mismatched))}], or wherever shapes differ, with "
            f"{source.where}.skip_mismatched=true"
        )


def described(tensor: Tensor) -> str:
    """Return shape and type of a tensor, such as `(10, 128) float32`."""
    return f"({', '.join(map(str, tensor.shape))}) {str(tensor.dtype).removeprefix('torch.')}"


def _see_all(sources: Sequence[Source]) -> None:
    """Refuse the first source that is not there, before any is read."""
    for source in sources:
        storage = source.storage()
        if not storage.exists(source.path):
            parent, _, name = source.path.rstrip("/").rpartition("/")
            raise source.refused(
                f"there is no such file or folder{did_you_mean(name, storage.list_names(parent or '.'))} (A start needs it; "
                "a run that goes on from a checkpoint does not.)"
            )


def _renamed(source: Source, names: Sequence[str], own: Mapping[str, Tensor]) -> dict[str, str]:
    """Return new name -> old one of the tensors of a source."""
    if source.prefix_remove and not any(name.startswith(source.prefix_remove) for name in names):
        raise ConfigError(
            f"{source.where}.prefix_remove = {source.prefix_remove!r}: no name in {source.path!r} begins so; it has "
            f"{join_first(names, SHOWN)}"
        )
    found = {name: name.removeprefix(source.prefix_remove) for name in names}
    for number, (pattern, replacement) in enumerate(source.rename):
        what = f"{source.where}.rename[{number}] = [{pattern!r}, {replacement!r}]"
        try:
            changed = {old: re.sub(pattern, replacement, new) for old, new in found.items()}
        except (re.error, IndexError) as error:
            raise ConfigError(f"{what}: the replacement cannot be used: {error}") from error
        if not any(re.search(pattern, new) for new in found.values()):
            raise ConfigError(
                f"{what}: it finds nothing; the names in {source.path!r} are {join_first(found.values(), SHOWN)}"
            )
        found = changed
    for prefix in WRAPPED:
        if all(new.startswith(prefix) for new in found.values()) and not any(
            name.startswith(prefix) for name in own
        ):
            found = {old: new.removeprefix(prefix) for old, new in found.items()}
    back: dict[str, str] = {}
    for old, new in found.items():
        if back.setdefault(source.prefix_add + new, old) != old:
            raise source.refused(
                f"{back[source.prefix_add + new]!r} and {old!r} would both be named {source.prefix_add + new!r}; see "
                f"{source.where}.prefix_remove and rename"
            )
    return back


def _taken(source: Source, names: Mapping[str, str]) -> dict[str, str]:
    taken = set(names)
    for key, patterns in (("include", source.include), ("exclude", source.exclude)):
        found: set[str] = set()
        for number, pattern in enumerate(patterns):
            what = f"{source.where}.{key}[{number}] = {pattern!r}: nothing in {source.path!r} has such a name"
            found |= set(_matching(pattern, names, what))
        if patterns:
            taken = taken & found if key == "include" else taken - found
    return {name: old for name, old in names.items() if name in taken}


def _matching(pattern: str, names: Mapping[str, Any], otherwise: str) -> list[str]:
    found = [name for name in names if fnmatchcase(name, pattern)]
    if not found:
        raise ConfigError(
            f"{otherwise}{did_you_mean(pattern, names) or '.'} There are {join_first(names, SHOWN)}"
        )
    return found


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tied tensors have in common; one without memory is tied to nothing."""
    own = local_shard(tensor)
    if own.numel():
        return (own.data_ptr(), tuple(tensor.shape))
    return (id(tensor),)


def _advice(where: str, missing: Sequence[str], offered: Sequence[str]) -> str:
    """Return a sentence about the prefix by which the names of a source differ from those of the
    model."""
    removed = Counter(
        one[: -len(name)] for one in offered for name in missing if one.endswith(f".{name}")
    )
    added = Counter(
        name[: -len(one)] for one in offered for name in missing if name.endswith(f".{one}")
    )
    for key, found in (("prefix_remove", removed), ("prefix_add", added)):
        if found:
            prefix, count = found.most_common(1)[0]
            return f"{where}.{key}={prefix} would fit {count} of them. "
    return ""


def _pattern(names: Sequence[str]) -> str:
    """Return a pattern, or two, that an error offers for some names."""
    parents = sorted({f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names})
    return ", ".join(parents[:2]) + (", ..." if len(parents) > 2 else "")
