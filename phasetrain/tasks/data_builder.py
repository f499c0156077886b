"""From section DATA to data sets, readers and loaders."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasetrain.config.attrdict import AttrDict
from phasetrain.data import (
    COLLATES,
    DATASETS,
    SAMPLERS,
    TRANSFORMS,
    LoaderSettings,
    PhaseLoader,
    PhaseSampler,
    Reader,
    Sharded,
)
from phasetrain.data.datasets import Described, Samples
from phasetrain.data.sampler import Order
from phasetrain.data.transforms import Pipeline
from phasetrain.errors import ConfigError
from phasetrain.machine import reseed_all, seed_of
from phasetrain.plan import TRAIN, Plan, Split
from phasetrain.tasks.sections import DATA_KEYS, Sections, rest


@dataclass(frozen=True)
class SplitData:
    """The data of one split.

    Attributes:
        section: its config.
        reader: makes batches.
        order: order of the samples within a pass.
        length: samples.
        facts: what the data set knows of itself, the shape of an input taken after the transforms.
        train: whether it is the split that is learned from.
    """

    section: AttrDict
    reader: Reader
    order: Order
    length: int
    facts: Mapping[str, Any]
    train: bool = False

    def fingerprint(self) -> str:
        """Return a digest of the data: of its content where the data set can tell, else of its name and length."""
        if isinstance(self.reader.dataset, Described):
            return self.reader.dataset.fingerprint()
        return f"{self.section.dataset}:{self.length}"


class DataBuilder(Sections):
    """Makes the data of every split."""

    def data(self) -> dict[str, SplitData]:
        """Return the data of every split, `train` first; opens data sets, reads no sample."""
        sections = self.config.DATA
        train = self.build_split(TRAIN, sections.TRAIN, {})
        names = {key: train.facts[key] for key in ("classes", "class_names") if key in train.facts}
        tests = {key.lower(): self.build_split(key.lower(), sections[key], names) for key in sections if key != "TRAIN"}
        return {TRAIN: train, **tests}

    def splits(self, data: Mapping[str, SplitData]) -> dict[str, Split]:
        """Return what the plan needs to know of each split."""
        return {
            name: Split(name, split.length, split.section.batch_size, split.section.drop_last)
            for name, split in data.items()
        }

    def build_split(self, name: str, section: AttrDict, facts: Mapping[str, Any]) -> SplitData:
        """Return the data of one split.

        Raises:
            ConfigError: the data set, a transform, the sampler or the collate function cannot be made.
        """
        where = f"DATA.{name.upper()}"
        reseed_all(
            seed_of(self.seed, "init", "data")
        )  # the same for all splits, so that random ones complete each other
        part = "train" if name == TRAIN else "test"  # a data set that has both gives the one that fits, unless told
        dataset: Samples = DATASETS.build(
            section.dataset,
            rest(section, DATA_KEYS),
            where=where,
            facts={**facts, "split": part, "part": part},
            used=self.used,
        )
        transforms = [
            self.named(TRANSFORMS, item, f"{where}.transforms[{i}]") for i, item in enumerate(section.transforms)
        ]
        pipeline = Pipeline(transforms)
        collate = self.named(COLLATES, section.collate, f"{where}.collate")
        reader = Reader(dataset, pipeline, collate, seed=self.seed, on_bad_sample=section.on_bad_sample)
        size: dict[str, Any] = {"batch_size": section.batch_size}
        sharded = {"shard_lengths": dataset.shard_lengths} if isinstance(dataset, Sharded) else {}
        order = self.named(SAMPLERS, section.sampler, f"{where}.sampler", size | sharded)
        known = dict(dataset.facts()) if isinstance(dataset, Described) else {}
        if "input_shape" in known:
            shape = _shape_after(pipeline, known.pop("input_shape"), f"{where}.transforms")
            known |= {} if shape is None else {"input_shape": shape}
        return SplitData(section, reader, order, len(dataset), known, train=name == TRAIN)

    def build_loader(self, split: SplitData, plan: Plan) -> PhaseLoader:
        """Return the batches of one split."""
        section = split.section
        micro = section.micro_batch_size or section.batch_size
        fixed = split.train and self.config.DISTRIBUTED.reduction == "ordered"
        sampler = PhaseSampler(
            split.order, split.length, seed=self.seed, micro_batch_size=micro, world=self.world, fixed=fixed
        )
        folder = self.config.RUN.dir
        settings = LoaderSettings(
            workers=section.workers,
            prefetch=section.prefetch,
            start_method=section.start_method,
            timeout_seconds=section.timeout_seconds,
            pin_memory=section.pin_memory,
            bad_sample_budget=section.bad_sample_budget,
            stacks=None if "://" in folder else f"{folder}/stacks.txt",
        )
        return PhaseLoader(split.reader, sampler, plan, settings)


def _shape_after(pipeline: Pipeline, shape: tuple[int, ...], where: str) -> tuple[int, ...] | None:
    try:
        return pipeline.shape_after(shape)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ConfigError(f"{where} do not fit the inputs of the data set, of shape {shape}: {error}") from error
