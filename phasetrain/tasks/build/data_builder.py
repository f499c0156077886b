"""Builds datasets, readers and loaders (section DATA)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.registry import Registry, parameters
from phasetrain.data import (
    DATASETS,
    TRANSFORMS,
    CustomLoader,
    LoaderSettings,
    PerStageReader,
    PerStageSampler,
    PhaseLoader,
    PhaseSampler,
    SampleReader,
    SampleSource,
    WindowedDataset,
)
from phasetrain.data.datasets import Fingerprinted, Samples
from phasetrain.data.datasets.forward import ENDLESS, ForwardDataset
from phasetrain.data.fingerprints import hash_dataset
from phasetrain.data.loading.custom_loader import CustomLoaderSpec
from phasetrain.data.loading.reader import BatchReader
from phasetrain.data.protocols import read_facts
from phasetrain.data.samplers.excluded import ExcludedSamples, read_excluded
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import (
    SampleOrder,
    pass_length,
    splits_batches,
)
from phasetrain.data.transforms import Pipeline
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import TRAIN, PhaseSettings, Plan, Split, SplitInterval, Stage
from phasetrain.errors import SHAPE_ERRORS, ConfigError
from phasetrain.optim.averaging.average_settings import read_average_settings
from phasetrain.optim.schedules.durations import UNITS
from phasetrain.runtime.machine import digest_generators, reseed_all, seed_of
from phasetrain.tasks.build.dataset_builder import open_dataset
from phasetrain.tasks.build.loading_builder import (
    build_collate,
    build_custom_loader,
    build_order,
    build_selection,
    build_source,
    check_callable,
    check_excludable,
    count_workers,
    find_field_kinds,
    find_source_builder,
)
from phasetrain.tasks.build.sections import BuildContext
from phasetrain.tasks.shape_errors import raise_unless_shape_error

PREDICATES: Registry[bool] = Registry("predicate", "PHASES.test_every.when")
"""Functions of a `phasetrain.engine.plan.Progress` that return whether to test at this point."""


WITHOUT = "-without:"
"""Part of the fingerprint of a split before the digest of its excluded samples."""

ROLES = frozenset({"split", "part", "train"})
"""Parameters by which a dataset knows for which split it is."""

SHARED_FACTS = ("classes", "class_names", "tokenizer_digest")
"""Facts of the training data that test splits get: labels and tokens must mean the same in all."""


@dataclass(frozen=True)
class SplitData:
    """The data of one split.

    Attributes:
        section: its config.
        reader: makes batches.
        order: order of the samples within a pass.
        length: samples of a pass.
        facts: properties of the dataset; the shape of an input is measured after the transforms.
        train: whether it is the split that is learned from.
        windows: samples of successive passes if the dataset comes in windows; see
            `phasetrain.engine.plan.Split`.
        stages: the same split in each stage of PHASES.stages; empty without stages.
        loader: the custom loader, if any.
        excluded: samples that updates leave out; None: none.
        is_drawn: whether the dataset was built with random numbers of its split.
    """

    section: AttrDict
    reader: BatchReader
    order: SampleOrder
    length: int
    facts: Mapping[str, Any]
    train: bool = False
    windows: tuple[int, ...] = ()
    stages: tuple["SplitData", ...] = ()
    loader: CustomLoaderSpec | None = None
    excluded: ExcludedSamples | None = None
    is_drawn: bool = False

    def at(self, stage: int) -> "SplitData":
        """Return the split as it is in a stage."""
        if self.stages:
            return self.stages[stage]
        return self

    @property
    def excluded_ids(self) -> Indices:
        """Ids of the samples that updates leave out, int64 `(N,)`, ascending."""
        if self.excluded is None:
            return np.empty(0, dtype=np.int64)
        return self.excluded.ids

    @property
    def shared_facts(self) -> dict[str, Any]:
        """The facts that test splits get from this one, the training data."""
        return {key: self.facts[key] for key in SHARED_FACTS if key in self.facts}

    def fingerprint(self) -> str:
        """Return the fingerprint of the dataset and of the excluded samples."""
        return self._add_details(find_fingerprint(self.section, self.reader.dataset))

    def has_fingerprint(self, recorded: str, *, compares_excluded: bool = True) -> bool:
        """Return whether a fingerprint in a checkpoint is of this data.

        Args:
            recorded: the fingerprint.
            compares_excluded: whether the excluded samples have to be the same, too.
        """
        known = [self.fingerprint()]
        dataset = self.reader.dataset
        if not isinstance(dataset, Fingerprinted):
            # What earlier versions have recorded.
            known.append(self._add_details(name_and_length(self.section, dataset)))
        if compares_excluded:
            return recorded in known
        return recorded.partition(WITHOUT)[0] in [text.partition(WITHOUT)[0] for text in known]

    def _add_details(self, fingerprint: str) -> str:
        if self.is_drawn:
            # Earlier versions drew the same numbers for all splits.
            fingerprint += "-drawn"
        if self.excluded is not None:
            # The config may name a file, whose content can change.
            return f"{fingerprint}{WITHOUT}{self.excluded.digest()[:16]}"
        return fingerprint

    def digest_first(self) -> list[str]:
        """Return what a resume compares of a stream, see `ForwardDataset.digest_first`."""
        dataset = self.reader.dataset
        if isinstance(dataset, ForwardDataset) and self.section.exact:
            return dataset.digest_first()
        return []


def find_fingerprint(section: AttrDict, dataset: Any) -> str:
    """Return the fingerprint of a dataset, see `hash_dataset`, or name and length."""
    return hash_dataset(dataset) or name_and_length(section, dataset)


def name_and_length(section: AttrDict, dataset: Any) -> str:
    """Return the fingerprint of a dataset about which nothing else is known."""
    return f"{section.dataset}:{len(dataset)}"


def build_data(context: BuildContext) -> dict[str, SplitData]:
    """Return the data of every split, `train` first if there is training data; opens datasets, but
    reads no sample."""
    sections = context.config.DATA
    splits: dict[str, SplitData] = {}
    names: dict[str, Any] = {}
    # Train first: test splits take its class names, so that labels mean the same in both.
    if sections.TRAIN.dataset is not None:
        train = build_split(context, TRAIN, sections.TRAIN, {})
        splits[TRAIN] = train
        names = train.shared_facts
    splits |= {
        key.lower(): build_split(context, key.lower(), sections[key], names)
        for key in sections
        if key != "TRAIN"
    }
    splits = _align_windows(context, splits)
    return {name: _add_stages(context, name, split, names) for name, split in splits.items()}


def build_plan(context: BuildContext, data: Mapping[str, SplitData]) -> Plan:
    """Return every phase of a run from its beginning."""
    return interleave(build_stages(context, data))


def build_stages(context: BuildContext, data: Mapping[str, SplitData]) -> tuple[Stage, ...]:
    """Return the stages of the plan; a single one if PHASES has no stages.

    Raises:
        ConfigError: the length is in epochs, and an epoch of the sampler never ends.
    """
    names = [
        stage.get("name") or f"stage {number}"
        for number, stage in enumerate(context.config.PHASES.stages, 1)
    ]
    configs = context.stage_configs
    lengths = {
        unit: length for unit in UNITS if (length := context.config.PHASES.get(unit)) is not None
    }
    averages = read_average_settings(context.config.MODEL).items()
    averaged = {name: average.share(lengths) for name, average in averages if average.test}
    for number, config in enumerate(configs):
        where = f"PHASES.stages[{number}]" if names else "PHASES"
        if TRAIN in data:
            _check_end(data[TRAIN].at(number), config, where)
        elif any(config.PHASES.get(unit) for unit in UNITS):
            raise ConfigError(
                f"DATA.TRAIN: no dataset is set, and {where} asks for training; set "
                "DATA.TRAIN.dataset, or a length of 0 for tests only",
                code="config.missing_dataset",
            )
    continued = [stage.get("continues", False) for stage in context.config.PHASES.stages]
    return tuple(
        Stage(
            list_splits(data, number),
            replace(phase_settings(config), averaged=averaged),
            name,
            continues,
        )
        for number, (config, name, continues) in enumerate(
            zip(configs, names or [""], continued or [False], strict=True)
        )
    )


def list_splits(data: Mapping[str, SplitData], stage: int = 0) -> dict[str, Split]:
    """Return the splits of a stage, as the plan sees them."""
    splits = {}
    for name, split in data.items():
        at = split.at(stage)
        every = None if split.train else _read_interval(at.section.every)
        splits[name] = Split(
            name, at.length, at.section.batch_size, at.section.drop_last, at.windows, every
        )
    return splits


def count_left_out(split: SplitData, phases: Mapping[str, Any]) -> int:
    """Return the number of samples that `drop_last`, or the proportions of a mixture, leave out of
    each pass over a split, at most if stages differ.

    Args:
        split: the split.
        phases: section PHASES; a limit shortens passes, and then nothing is said about their end.
    """
    if split.stages:
        # A stage may have its own sampler, and so another number of samples.
        return max(count_left_out(stage, phases) for stage in split.stages)
    is_limited = phases["limit"]["train" if split.train else "test"] is not None
    is_limited |= split.train and phases["overfit"] is not None
    if is_limited or split.windows or split.length >= ENDLESS:
        return 0
    rest = split.length % int(split.section.batch_size) if split.section.drop_last else 0
    count_undrawn = getattr(split.order, "count_undrawn", None)
    return rest if count_undrawn is None else int(count_undrawn(split.length - rest))


def _read_interval(every: str | Mapping[str, Any] | None) -> SplitInterval | None:
    if isinstance(every, Mapping):
        return SplitInterval(**every)
    if every == "end":
        return SplitInterval()
    return None


def _align_windows(context: BuildContext, found: dict[str, SplitData]) -> dict[str, SplitData]:
    """Return the splits with the same number of windows: the smallest of any split, limited by
    PHASES.limit.windows."""
    limit = context.config.PHASES.limit.windows
    counts = [len(split.windows) for split in found.values() if split.windows]
    if limit is not None and not counts:
        raise ConfigError(
            f"PHASES.limit.windows = {limit}: no dataset of this run has windows; leave it out"
        )
    if limit is not None:
        counts.append(limit)
    count = min(counts, default=0)
    aligned = dict(found)
    for name, split in found.items():
        if split.windows:
            kept = split.windows[:count]
            aligned[name] = replace(split, windows=kept, length=sum(kept))
    return aligned


def _add_stages(
    context: BuildContext, name: str, split: SplitData, facts: Mapping[str, Any]
) -> SplitData:
    """Return a split with its variant in each stage; the dataset is opened once."""
    key = name.upper()
    if name == TRAIN:
        facts = {}
    variants: list[SplitData] = []
    for config in context.stages:
        section = config.DATA[key]
        # Stages with the same section share one reader and one order.
        made = next((variant for variant in variants if variant.section == section), None)
        if made is None and section == context.config.DATA[key]:
            made = split
        if made is None:
            made = build_split(context, name, section, facts, split.reader.dataset)
        variants.append(replace(made, windows=split.windows))
    return replace(split, stages=tuple(variants))


def build_split(
    context: BuildContext,
    name: str,
    section: AttrDict,
    facts: Mapping[str, Any],
    dataset: Samples | None = None,
) -> SplitData:
    """Return the data of one split; `dataset` is one that is open already.

    Raises:
        ConfigError: the dataset, a transform, the sampler or the collate function cannot be
            built.
    """
    where = f"DATA.{name.upper()}"
    reseed_all(seed_of(context.seed, "init", "data"))
    is_drawn = False
    if dataset is None:
        dataset, is_drawn = _open_dataset(context, name, section, facts)
    source = build_source(where, section, dataset)
    build_sources = find_source_builder(dataset)
    reader: BatchReader
    if build_sources is not None:
        reader, order = build_sources(context, name, section)
    else:
        reader = build_reader(context, where, section, source, context.seed)
        order = build_order(context, where, section, source)
    if name == TRAIN and context.config.PHASES.overfit is not None:
        order = _overfit_order(context, order, section.batch_size, pass_length(order, len(dataset)))
    dataset_facts = _facts(dataset, where, source.chosen)
    if "input_shape" in dataset_facts:
        pipeline = reader.list_readers()[0].pipeline
        shape = _shape_after(pipeline, dataset_facts.pop("input_shape"), f"{where}.transforms")
        if shape is not None:
            dataset_facts["input_shape"] = shape
    windows: tuple[int, ...] = ()
    if isinstance(dataset, WindowedDataset):
        windows = tuple(dataset.window_lengths)
    if windows and hasattr(order, "samples"):
        raise ConfigError(
            f"{where}.dataset = {section.dataset!r}: each pass covers one window of this dataset; "
            "use a sampler that draws each sample once, such as shuffled, without PHASES.overfit"
        )
    loader = build_custom_loader(context, where, section, source)
    if loader is None:
        length = pass_length(order, len(dataset))
    else:
        length = loader.pass_samples
    if length >= ENDLESS and name != TRAIN:
        raise ConfigError(
            f"{where}.sampler = {section.sampler!r}: a pass of this sampler never ends, and a test "
            "is one pass; use sequential, or set `samples` of the sampler"
        )
    return SplitData(
        section,
        reader,
        order,
        length,
        dataset_facts,
        train=name == TRAIN,
        windows=windows,
        loader=loader,
        excluded=_read_excluded(where, section, dataset) if name == TRAIN else None,
        is_drawn=is_drawn,
    )


def _open_dataset(
    context: BuildContext, name: str, section: AttrDict, facts: Mapping[str, Any]
) -> tuple[Samples, bool]:
    """Return the dataset of a split, and whether it was built with random numbers of its split."""
    factory = DATASETS.find(section.dataset, f"DATA.{name.upper()}")
    if name == TRAIN or not ROLES.isdisjoint(parameters(factory)):
        # The same numbers for all splits, so that the parts of a random division are disjoint.
        return open_dataset(context, name, section, facts), False
    reseed_all(seed_of(context.seed, "init", "data", name))
    before = digest_generators()
    dataset = open_dataset(context, name, section, facts)
    is_drawn = digest_generators() != before
    # Random transforms are the same in all splits.
    reseed_all(seed_of(context.seed, "init", "data"))
    return dataset, is_drawn


def _read_excluded(where: str, section: AttrDict, dataset: Any) -> ExcludedSamples | None:
    """Return the samples that DATA.TRAIN.exclude names; None without."""
    if section.exclude is None:
        return None
    check_excludable(where, section, dataset)
    fingerprint = find_fingerprint(section, dataset)
    return read_excluded(section.exclude, f"{where}.exclude", len(dataset), fingerprint)


def build_reader(
    context: BuildContext, where: str, section: AttrDict, source: SampleSource, seed: int
) -> SampleReader:
    """Return the reader of a split, or of a source of it."""
    kinds = find_field_kinds(where, section, source.dataset)
    transforms = build_transforms(context, where, section)
    pipeline = Pipeline(transforms)
    if kinds:
        from phasetrain.data.transforms import FieldPipeline

        try:
            pipeline = FieldPipeline(transforms, kinds, where)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{where}.{error}", code="config.conflict") from error
    return SampleReader(
        source.dataset,
        pipeline,
        build_collate(where, section.collate),
        seed=seed,
        on_bad_sample=section.on_bad_sample,
        selection=build_selection(where, section, kinds),
        chosen=source.chosen,
    )


def build_transforms(context: BuildContext, where: str, section: AttrDict) -> list[Any]:
    """Return the transforms of a split.

    Raises:
        ConfigError: one cannot be built or called.
    """
    transforms = [
        context.named(TRANSFORMS, item, f"{where}.transforms[{i}]")
        for i, item in enumerate(section.transforms)
    ]
    for number, transform in enumerate(transforms):
        check_callable(f"{where}.transforms[{number}]", transform, "of an input")
    return transforms


def _overfit_order(
    context: BuildContext, order: SampleOrder, batch_size: int, samples: int
) -> SampleOrder:
    from phasetrain.data.samplers.overfit import OverfitOrder

    batches: int = context.config.PHASES.overfit
    if batches * batch_size > samples:
        raise ConfigError(
            f"PHASES.overfit = {batches}: a pass over DATA.TRAIN has only {samples // batch_size} "
            f"full batches of {batch_size}; lower one of the two"
        )
    return OverfitOrder(order, batches * batch_size, seed_of(context.seed, "order", TRAIN, 0))


def build_loader(context: BuildContext, split: SplitData, plan: Plan) -> PhaseLoader:
    """Return the batches of one split."""
    section = split.section
    samplers = [_build_sampler(context, variant) for variant in split.stages or (split,)]
    readers = split.stages
    sampler: PhaseSampler | PerStageSampler = samplers[0]
    if len(samplers) > 1:
        sampler = PerStageSampler(samplers)
    reader: BatchReader | PerStageReader
    if len(readers) > 1:
        reader = PerStageReader([variant.reader for variant in readers])
    else:
        reader = split.at(0).reader
    folder = context.config.RUN.dir
    # Workers write their stacks to a local file, which a run folder in remote storage has not.
    stacks = None if "://" in folder else f"{folder}/stacks.txt"
    is_cuda = context.machine.device.type == "cuda"
    copies_ahead = is_cuda and section.prefetch_to_device is not False
    settings = LoaderSettings(
        workers=count_workers(section.workers, split.reader),
        prefetch=section.prefetch,
        start_method=section.start_method,
        timeout_seconds=section.timeout_seconds,
        pin_memory=is_cuda if section.pin_memory is None else section.pin_memory,
        bad_sample_budget=section.bad_sample_budget,
        stacks=stacks,
        device=context.machine.device if copies_ahead else None,
    )
    if split.loader is not None:
        assert isinstance(split.reader, SampleReader), "batches of sources have no custom loader"
        selection = split.reader.selection
        arguments = (split.reader, _build_sampler(context, split), plan, settings)
        return CustomLoader(split.loader, selection, context.seed, *arguments)
    return PhaseLoader(reader, sampler, plan, settings)


def _build_sampler(context: BuildContext, split: SplitData) -> PhaseSampler:
    fixed = split.train and context.config.DISTRIBUTED.reduction == "ordered"
    if fixed and splits_batches(split.order):
        raise ConfigError(
            f"DATA.TRAIN.sampler = {split.section.sampler!r} and DISTRIBUTED.reduction = "
            "'ordered': max_tokens makes micro-batches that depend on the world size, and ordered "
            "reduction needs fixed ones; leave max_tokens out, or set DISTRIBUTED.reduction=native",
            code="config.conflict",
        )
    sampler = PhaseSampler(
        split.order,
        len(split.reader.dataset),
        seed=context.seed,
        micro_batch_size=split.section.micro_batch_size or split.section.batch_size,
        world=context.world,
        fixed=fixed,
        windows=split.windows,
    )
    sampler.excluded = split.excluded
    return sampler


def phase_settings(config: AttrDict) -> PhaseSettings:
    """Return section PHASES as the plan takes it."""
    section = config.PHASES
    when = None
    if section.test_every.when is not None:
        when = PREDICATES.find(section.test_every.when, "PHASES.test_every.when")
    return PhaseSettings(
        epochs=section.epochs,
        updates=section.updates,
        samples=section.samples,
        test_every_epochs=section.test_every.epochs,
        test_every_updates=section.test_every.updates,
        test_when=when,
        test_first=section.test_first,
        limit_train=section.limit.train,
        limit_test=section.limit.test,
    )


def _check_end(split: SplitData, config: AttrDict, where: str) -> None:
    """Reject a length in epochs if an epoch never ends."""
    epochs = config.PHASES.epochs
    if split.length < ENDLESS or not epochs or config.PHASES.limit.train is not None:
        return
    raise ConfigError(
        f"DATA.TRAIN.sampler = {split.section.sampler!r}: an epoch of this sampler never ends, "
        f"and {where}.epochs = {epochs}; set a length in updates or samples instead "
        f"({where}.updates=...), or set `samples` of the sampler"
    )


def _facts(dataset: Samples, where: str, chosen: Indices | None = None) -> dict[str, Any]:
    try:
        return {**read_class_attributes(dataset), **read_facts(dataset, chosen)}
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_class_attributes(dataset: Any) -> dict[str, Any]:
    """Return the facts `classes` and `class_names` of a dataset whose `facts()` do not give them:
    its attribute `class_names`, or `classes`, which in torchvision is the list of names."""
    facts: dict[str, Any] = {}
    for value in (getattr(dataset, "classes", None), getattr(dataset, "class_names", None)):
        if isinstance(value, int) and not isinstance(value, bool):
            facts["classes"] = value
        elif (
            isinstance(value, list | tuple)
            and value
            and all(isinstance(item, str) for item in value)
        ):
            facts["class_names"] = tuple(value)
            facts.setdefault("classes", len(value))
    return facts


def _shape_after(pipeline: Pipeline, shape: tuple[int, ...], where: str) -> tuple[int, ...] | None:
    try:
        return pipeline.shape_after(shape)
    except SHAPE_ERRORS as error:
        raise_unless_shape_error(error)
        raise ConfigError(
            f"{where}: the transforms do not fit the inputs of the dataset, of shape {shape}: "
            f"{error}"
        ) from error
