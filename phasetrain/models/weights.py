"""Initialise a model with pretrained weights (`MODEL.weights`)."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phasetrain.distributed import World
from phasetrain.distributed.dtensors import local_shard
from phasetrain.errors import ConfigError, nearest
from phasetrain.models.adapters.base import CHILD, list_adapted
from phasetrain.models.sources import SourceContent, WeightSource, read_source
from phasetrain.runtime.format import join_first
from phasetrain.runtime.name_patterns import filter_names, match_names
from phasetrain.runtime.storage.urls import redact_url
from phasetrain.runtime.terminal import plain_table

log = logging.getLogger(__name__)

ROWS = 40
MAX_LISTED = 6
"""Maximum number of rows in the logged table, and of names in an error."""

COUNTER = "num_batches_tracked"
"""A counter of batch norm that is missing in files of old torch versions; nothing depends on it."""

WRAPPED = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to all names."""


@dataclass(frozen=True)
class TensorOrigin:
    """Where a tensor of the model comes from: number of the source in the config, and its name
    there."""

    source: int
    name: str


@dataclass
class LoadReport:
    """The result for each tensor of the model and of the sources.

    Attributes:
        sources: path, file that was read, format, digest and number of tensors of each source.
        shapes: name in the model -> shape and type, for all its tensors.
        loaded: name in the model -> origin.
        missing: names in the model without a source, except tied tensors and counters.
        reinit: names in the model that keep their initial values by `reinit`.
        mismatched: name in the model -> shape and type in the source, which differ from the model.
        unexpected: renamed name in a source -> number of the source.
    """

    sources: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, TensorOrigin] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    reinit: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return asdict(self)

    def to_rows(self) -> list[tuple[str, str, str]]:
        """Return (name, shape, result) of each tensor, the ones that were not loaded first."""
        rows = [
            (name, self.shapes[name], f"mismatched: the source has {has}")
            for name, has in self.mismatched.items()
        ]
        rows += [
            (name, self.shapes[name], "missing: keeps its initial values") for name in self.missing
        ]
        rows += [
            (name, self.shapes[name], "reinit: keeps its initial values") for name in self.reinit
        ]
        rows += [
            (name, "", f"unexpected: only in source {number}")
            for name, number in self.unexpected.items()
        ]
        return rows + [
            (name, self.shapes[name], f"loaded from source {origin.source}: {origin.name}")
            for name, origin in self.loaded.items()
        ]


def load_pretrained(
    model: nn.Module, sources: Sequence[WeightSource], world: World, *, logs: bool = True
) -> LoadReport:
    """Load the weights in the sources into a model, later sources overriding earlier ones, and log
    the result for each tensor.

    Only rank 0 reads, so the files may be missing on other machines; then tensors are broadcast one
    by one. A collective call.

    Args:
        model: on any device, before it is sharded over ranks.
        sources: in the order of the config.
        world: the ranks of the run.
        logs: whether to log the result.

    Raises:
        ConfigError: a source cannot be read or does not fit: names, shapes, patterns that match
            nothing.
    """
    # Adapters are no part of the model that the sources were saved from.
    adapters = {f"{layer}.{CHILD}." for layer in list_adapted(model)}
    own = {
        name: tensor
        for name, tensor in model_tensors(model).items()
        if not any(name.startswith(prefix) for prefix in adapters)
    }
    report, values = match_sources(own, sources, world)
    # With duplicates, so that tied tensors are found under each of their names.
    parameters = dict(
        [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    )
    others: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, value in broadcast_loaded(report, own, values, world):
            if parameters.get(name) is own[name]:
                own[name].copy_(value)
            else:  # state that a module creates in state_dict() has to go through load_state_dict()
                others[name] = value
    if others:
        model.load_state_dict(others, strict=False)
    if logs and world.is_main:
        log_report(report, sources[0].where.removesuffix("[0]"))
    return report


def match_sources(
    own: Mapping[str, Tensor], sources: Sequence[WeightSource], world: World
) -> tuple[LoadReport, dict[str, Tensor]]:
    """Return the origin of each tensor of a model, and on rank 0 the tensors themselves.

    Raises:
        ConfigError: see `load_pretrained`.
    """
    values: dict[str, Tensor] = {}

    def read_all() -> LoadReport:
        # Before any is read, because reading a large one takes time.
        for source in sources:
            source.check_exists()
        matching = WeightMatcher(own, sources)
        for number, source in enumerate(sources):
            matching.add_source(number, source, read_source(source))
        matching.check_complete()
        values.update(matching.values)
        return matching.report

    return world.run_on_main(read_all), values


def broadcast_loaded(
    report: LoadReport, own: Mapping[str, Tensor], values: Mapping[str, Tensor], world: World
) -> Iterator[tuple[str, Tensor]]:
    """Yield on every rank the name and value of each loaded tensor, in the type of the model, on
    the CPU."""
    for name in report.loaded:
        like = own[name]
        if world.is_main:
            # Converted before it is sent: the other ranks allocate the type of the model.
            value = values[name].to(like.dtype).contiguous()
        else:
            value = torch.empty(like.shape, dtype=like.dtype)
        if not world.is_single_process and value.numel():
            # As bytes, because gloo does not transfer every type.
            dist.broadcast(value.view(-1).view(torch.uint8), src=0, group=world.control)
        yield name, value


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state by name: the parameters and buffers themselves, not
    copies."""
    # keep_vars returns the tensors themselves, so that they can be written to and compared by
    # identity.
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def log_report(report: LoadReport, where: str) -> None:
    """Log the result for each tensor.

    Args:
        report: the result.
        where: key of the sources, which tells the model: a teacher has weights too.
    """
    for number, source in enumerate(report.sources):
        log.info(
            "%s: weights from source %d: %s (%s, %d tensors, digest %s)",
            *(
                where,
                number,
                source["read"],
                source["format"],
                source["tensors"],
                source["digest"][:16],
            ),
        )
    count = len(report.loaded)
    rows = report.to_rows()
    head = ("tensor", "shape", "result")
    log.debug(plain_table(f"{count} of {len(report.shapes)} tensors are loaded", head, rows))
    if len(rows) == count == len(report.shapes):
        log.info("%s: all %d tensors of the model are loaded", where, count)
        return
    # Those that were loaded as expected need no attention.
    rows = rows[: len(rows) - count]
    if len(rows) > ROWS:
        rows = [*rows[:ROWS], (f"and {len(rows) - ROWS} more, see plan.json", "", "")]
    title = f"{where}: {count} of {len(report.shapes)} tensors of the model are loaded; the others:"
    log.info(plain_table(title, head, rows))


class WeightMatcher:
    """Matches the tensors of a model with the tensors of sources.

    Args:
        own: name -> tensor of the model.
        sources: all of them.

    Attributes:
        values: name in the model -> its new value.
        report: the result for each tensor.
    """

    def __init__(self, own: Mapping[str, Tensor], sources: Sequence[WeightSource]) -> None:
        self._own = own
        self._sources = sources
        self.values: dict[str, Tensor] = {}
        self.report = LoadReport(
            shapes={name: describe_tensor(tensor) for name, tensor in own.items()}
        )
        self._reinit: set[str] = set()
        for source in sources:
            for number, pattern in enumerate(source.reinit):
                what = f"{source.where}.reinit[{number}] = {pattern!r}"
                self._reinit.update(
                    match_names(pattern, own, f"{what}: no tensor of the model matches")
                )

    def add_source(self, number: int, source: WeightSource, content: SourceContent) -> None:
        """Add the matching tensors of a source.

        Raises:
            ConfigError: nothing matches, shapes differ, or a pattern matches nothing.
        """
        self.add_tensors(number, source, content.tensors)
        facts = {
            "path": redact_url(source.path),
            "read": redact_url(content.path),
            "format": content.format,
            "digest": content.digest,
        }
        self.report.sources.append(facts | {"tensors": len(content.tensors)})

    def add_tensors(self, number: int, source: WeightSource, tensors: Mapping[str, Tensor]) -> None:
        """Add the matching ones of some tensors; see `add_source`."""
        names = _rename_tensors(source, list(tensors), self._own)
        fitting = 0
        mismatched = {}
        for name, was in _filter_names(source, names).items():
            tensor = tensors[was]
            like = self._own.get(name)
            if like is None:
                self.report.unexpected[name] = number
                continue
            fitting += 1
            if name in self._reinit:
                continue
            # Other types are converted, such as float16 to float32, but a counter is not a weight.
            kind, own_kind = (
                (value.shape, value.is_floating_point(), value.is_complex())
                for value in (tensor, like)
            )
            if kind != own_kind:
                mismatched[name] = describe_tensor(tensor)
                continue
            self.values[name], self.report.loaded[name] = tensor, TensorOrigin(number, was)
        if not fitting:
            raise source.make_error(self._describe_no_fit(source, names), code="weights.no_fit")
        if mismatched and not source.skip_mismatched:
            raise source.make_error(
                self._describe_mismatch(source, mismatched), code="weights.shape_mismatch"
            )
        self.report.mismatched |= mismatched

    def check_complete(self) -> None:
        """Check that no tensor of the model was forgotten.

        Raises:
            ConfigError: a tensor has no source, and all sources are strict.
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
        # A file may hold tied tensors under one name only: the others are loaded with it.
        tied = {_memory_key(self._own[name]) for name in report.loaded}
        left = self._own.keys() - report.loaded.keys() - self._reinit - report.mismatched.keys()
        report.missing = [
            name
            for name in self._own
            if name in left
            and not name.endswith(COUNTER)
            and _memory_key(self._own[name]) not in tied
        ]
        if report.missing and all(source.strict for source in self._sources):
            raise ConfigError(
                self._describe_missing(report.missing), code="weights.missing_tensors"
            )

    def _describe_missing(self, missing: Sequence[str]) -> str:
        where = self._sources[-1].where
        names = [f"{name} {self.report.shapes[name]}{self._suggest_name(name)}" for name in missing]
        return (
            f"{self._sources[0].where.partition('[')[0]}: {len(missing)} of {len(self._own)} "
            f"tensors of the model have no source: {join_first(names, MAX_LISTED)}. "
            f"{_suggest_prefix(where, missing, list(self.report.unexpected))}To keep the initial "
            f"values of these tensors, set {where}.reinit=[{_suggest_patterns(missing)}]; to keep "
            f"them for all tensors without a source, set {where}.strict=false"
        )

    def _suggest_name(self, name: str) -> str:
        similar = nearest(name, self.report.unexpected)
        if similar:
            return f" (the source has {similar!r})"
        return ""

    def _describe_no_fit(self, source: WeightSource, names: Mapping[str, str]) -> str:
        advice = _suggest_prefix(source.where, list(self._own), list(names))
        return (
            f"no tensor of the source fits: the model has {join_first(self._own, MAX_LISTED)}, and "
            f"the source has, after renaming, {join_first(names, MAX_LISTED)}. {advice}See "
            f"{source.where}.prefix_remove, prefix_add and rename"
        )

    def _describe_mismatch(self, source: WeightSource, mismatched: Mapping[str, str]) -> str:
        pairs = [
            f"{name}: {has} in the source, {self.report.shapes[name]} in the model"
            for name, has in mismatched.items()
        ]
        return (
            f"{join_first(pairs, MAX_LISTED)}. To keep the initial values of these tensors, set "
            f"{source.where}.reinit=[{_suggest_patterns(list(mismatched))}]; to keep them for all "
            f"tensors whose shapes differ, set {source.where}.skip_mismatched=true"
        )


def describe_tensor(tensor: Tensor) -> str:
    """Return shape and type of a tensor, such as `(10, 128) float32`."""
    return f"({', '.join(map(str, tensor.shape))}) {str(tensor.dtype).removeprefix('torch.')}"


def _rename_tensors(
    source: WeightSource, names: Sequence[str], own: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return new name -> old name of the tensors of a source."""
    if source.prefix_remove and not any(name.startswith(source.prefix_remove) for name in names):
        raise ConfigError(
            f"{source.where}.prefix_remove = {source.prefix_remove!r}: no name in {source.path!r} "
            f"starts with this prefix; the source has {join_first(names, MAX_LISTED)}",
            code="config.no_match",
        )
    renamed = {name: name.removeprefix(source.prefix_remove) for name in names}
    for number, (pattern, replacement) in enumerate(source.rename):
        what = f"{source.where}.rename[{number}] = [{pattern!r}, {replacement!r}]"
        try:
            changed = {old: re.sub(pattern, replacement, new) for old, new in renamed.items()}
        except (re.error, IndexError) as error:
            raise ConfigError(f"{what}: the replacement cannot be used: {error}") from error
        if source.strict and not any(re.search(pattern, new) for new in renamed.values()):
            raise ConfigError(
                f"{what}: it finds nothing; the names in {source.path!r} are "
                f"{join_first(renamed.values(), MAX_LISTED)}",
                code="config.no_match",
            )
        renamed = changed
    # Only if all names have the prefix, and none of the model: it is then an artefact of a wrapper.
    for prefix in WRAPPED:
        if all(new.startswith(prefix) for new in renamed.values()) and not any(
            name.startswith(prefix) for name in own
        ):
            renamed = {old: new.removeprefix(prefix) for old, new in renamed.items()}
    back: dict[str, str] = {}
    for old, new in renamed.items():
        if back.setdefault(source.prefix_add + new, old) != old:
            raise source.make_error(
                f"{back[source.prefix_add + new]!r} and {old!r} would both be named "
                f"{source.prefix_add + new!r}; see {source.where}.prefix_remove and rename",
                code="weights.duplicate_name",
            )
    return back


def _filter_names(source: WeightSource, names: Mapping[str, str]) -> dict[str, str]:
    taken = filter_names(
        names,
        source.include,
        source.exclude,
        lambda key, number, pattern: (
            f"{source.where}.{key}[{number}] = {pattern!r}: no name in {source.path!r} matches"
        ),
    )
    return {name: names[name] for name in taken}


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that tied tensors share; a tensor without memory is tied to nothing."""
    own = local_shard(tensor)
    if own.numel():
        # With the shape, because a view of the beginning of a tensor has the same address.
        return (own.data_ptr(), tuple(tensor.shape))
    return (id(tensor),)


def _suggest_prefix(where: str, missing: Sequence[str], offered: Sequence[str]) -> str:
    """Return a sentence about the prefix by which the names of a source differ from the model."""
    removed = Counter(
        candidate[: -len(name)]
        for candidate in offered
        for name in missing
        if candidate.endswith(f".{name}")
    )
    added = Counter(
        name[: -len(candidate)]
        for candidate in offered
        for name in missing
        if name.endswith(f".{candidate}")
    )
    for key, prefixes in (("prefix_remove", removed), ("prefix_add", added)):
        if prefixes:
            prefix, count = prefixes.most_common(1)[0]
            return f"{where}.{key}={prefix} would fit {count} of them. "
    return ""


def _suggest_patterns(names: Sequence[str]) -> str:
    """Return one or two patterns that match some names, for an error."""
    parents = sorted({f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names})
    if len(parents) > 2:
        return ", ".join([*parents[:2], "..."])
    return ", ".join(parents)
