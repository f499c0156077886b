"""Section DATA: DATA.TRAIN, and any number of test splits with upper-case names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.config.sections.keys import Section, group, key

PartOrName = str | Mapping[str, Any]
Fields = str | int | tuple[Any, ...] | None


@dataclass(frozen=True, kw_only=True)
class SubsetSection(Section):
    """A subset of the dataset: a slice of the sample list, which is shuffled once. Subsets with the
    same seed and different `skip` or `fold` can be made disjoint."""

    samples: int | None = key(
        None,
        "number of samples; null: all that remain, or with `balanced` the largest equal number per "
        "class",
        resume="forbidden",
        ge=1,
    )
    seed: int = key(
        0, "seed of the shuffled list, independent of RUN.seed", resume="forbidden", ge=0
    )
    balanced: bool = key(
        False, "take the same number of samples from each class", resume="forbidden"
    )
    skip: int = key(0, "samples to skip at the start of the list", resume="forbidden", ge=0)
    folds: int | None = key(
        None,
        "divide the list into this many equal parts, and take the part `fold`",
        resume="forbidden",
        ge=2,
    )
    fold: int = key(0, "part of the list to take, from 0", resume="forbidden", ge=0)
    complement: bool = key(False, "take all samples of the dataset but these", resume="forbidden")


@dataclass(frozen=True, kw_only=True)
class SplitSection(Section):
    """Keys that DATA.TRAIN and the test splits have in common."""

    dataset: str | None = key(
        None,
        "name of a dataset, or a dotted path; its parameters are given next to it; null: the split "
        "does not exist, and only tests and extraction need no DATA.TRAIN",
        resume="forbidden",
    )
    batch_size: int = key(256, "samples per step, over all ranks", resume="forbidden", ge=1)
    micro_batch_size: int | None = key(
        None,
        "samples per forward pass on each rank; null: batch_size",
        resume="forbidden",
        ge=1,
    )
    fields: Mapping[str, Any] | tuple[Any, ...] | None = key(
        None,
        "kinds of the fields of a sample, which transforms then change together: name -> `image`, "
        "`mask`, `boxes`, `labels`, `keypoints` or `value`, or a list for samples that are tuples; "
        "null: as the dataset declares, if it does",
        resume="forbidden",
    )
    inputs: Fields = key(
        None,
        "fields of a sample that the model gets: a name, an index into a tuple, or several; null: "
        "the first of a pair, or the images among declared fields",
        resume="forbidden",
    )
    targets: Fields = key(
        None,
        "fields of a sample that the loss gets, as for `inputs`; []: none; null: the second of a "
        "pair, or all other declared fields",
        resume="forbidden",
    )
    label_type: Literal["given", "sample_index", "zero"] = key(
        "given",
        "the target: as given by the dataset, the index of the sample, or 0",
        resume="forbidden",
    )
    subset: SubsetSection = group(SubsetSection)
    # Free: random numbers depend on the sample and not on the worker that loads it.
    workers: int | Literal["auto"] = key(
        0,
        "data loading processes per rank; 0: load in the main process; auto: number of cores minus "
        "one, at most 8, and 0 for data in memory",
        scope="machine",
        ge=0,
        le=1024,
    )
    drop_last: bool = key(
        False, "drop the last batch of an epoch if it is not full", resume="forbidden"
    )
    sampler: PartOrName = key(
        "sequential",
        "order of the samples in an epoch: `shuffled`, `sequential`, `lanes` (for files that are "
        "read sequentially), `weighted`, `stratified` and others, or a custom or torch sampler",
        resume="forbidden",
    )
    transforms: tuple[Any, ...] = key(
        [],
        "transforms of the input, in order; each a name, or a mapping with `name` and parameters",
        resume="forbidden",
    )
    collate: PartOrName = key(
        "stack",
        "how samples are collated if the dataset does not return whole batches: `stack`, `pad`, "
        "`list`, or a dotted path",
        resume="forbidden",
    )
    loader: PartOrName | None = key(
        None,
        "custom loader: a dotted path to a callable that returns an iterable of whole batches, "
        "such as torchdata.stateful_dataloader.StatefulDataLoader",
        resume="forbidden",
    )
    # Free: it changes how the position in the epoch is reached, not the position.
    fast_forward: bool = key(
        False,
        "on resume, replay the epoch from its start if the custom loader cannot save its position",
        scope="machine",
    )
    prefetch: int = key(2, "batches that each worker loads in advance", scope="machine", ge=1)
    start_method: Literal["fork", "spawn", "forkserver"] | None = key(
        None, "start method of the workers; null: torch's default", scope="machine"
    )
    timeout_seconds: float = key(
        0,
        "seconds to wait for a batch from a worker before the run fails; 0: no timeout",
        scope="machine",
        ge=0,
    )
    pin_memory: bool | None = key(
        None,
        "copy batches of workers to page-locked memory, for faster transfer to CUDA devices; null: "
        "on CUDA",
        scope="machine",
    )
    prefetch_to_device: bool | None = key(
        None,
        "copy the next step's batches to the CUDA device on a separate stream during the current "
        "step; needs memory for one more step, and pays off with pin_memory; null: on CUDA",
        scope="machine",
    )
    # Adjustable, so that a run which has met an unreadable sample can resume and skip it.
    on_bad_sample: Literal["raise", "substitute", "drop"] = key(
        "raise",
        "what to do with an unreadable sample: fail, use another sample instead, or skip it",
        resume="adjustable",
    )
    # Adjustable, because it withdraws a promise of the run.
    exact: bool = key(
        True,
        "reject a dataset or transform that gives different samples for the same seeds; false: "
        "accept it, and record that a resumed or repeated run has other samples",
        resume="adjustable",
    )
    bad_sample_budget: int = key(
        100,
        "maximum number of distinct unreadable samples before the run fails",
        resume="free",
        ge=0,
    )


@dataclass(frozen=True, kw_only=True)
class TrainSplitSection(SplitSection):
    """The training data."""

    batch_size: int = key(
        64,
        "samples per update, over all ranks and micro-batches",
        resume="adjustable",
        ge=1,
    )
    micro_batch_size: int | None = key(
        None,
        "samples per forward pass on each rank; null: derived from OPTIMIZER.accumulate",
        resume="forbidden",
        ge=1,
    )
    # True, unlike in tests: a smaller last batch would give its samples a larger weight in the
    # update.
    drop_last: bool = key(
        True, "drop the last batch of an epoch if it is not full", resume="forbidden"
    )
    sampler: PartOrName = key(
        "shuffled",
        "order of the samples in an epoch: `shuffled`, `sequential`, `lanes` (for files that are "
        "read sequentially), `weighted`, `stratified` and others, or a custom or torch sampler",
        resume="forbidden",
    )
    exclude: str | tuple[Any, ...] | None = key(
        None,
        "ids of samples to leave out of their updates, without changing the order of the others: a "
        "file of ids, or a list of ids and of such files",
        resume="adjustable",
    )
    batch_transforms: tuple[Any, ...] = key(
        [],
        "transforms of the inputs and targets of a micro-batch on the device, such as `mixup` and "
        "`cutmix`; each a name, or a mapping with `name` and parameters",
        resume="forbidden",
    )


@dataclass(frozen=True, kw_only=True)
class SplitIntervalSection(Section):
    """Interval between tests of one split. A test always follows the last update."""

    epochs: int | None = key(None, "epochs between tests", resume="adjustable", ge=1)
    updates: int | None = key(None, "updates between tests", resume="adjustable", ge=1)


@dataclass(frozen=True, kw_only=True)
class TestSplitSection(SplitSection):
    """A test split, with the keys of DATA.TRAIN except `batch_transforms`. Without
    DATA.TEST.dataset there are no tests; every other upper-case key of DATA is another test
    split."""

    __test__ = False  # pytest would otherwise collect the class, because of its name

    every: Literal["end"] | Mapping[str, Any] | None = key(
        None,
        "how often the split is tested: `epochs` or `updates` between tests, or end: only after "
        "the last update; null: as PHASES.test_every says",
        resume="adjustable",
        fields=SplitIntervalSection,
    )


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """Training data and test splits."""

    TRAIN: TrainSplitSection = group(TrainSplitSection)
    TEST: TestSplitSection = group(TestSplitSection)
