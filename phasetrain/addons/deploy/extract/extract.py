"""Write features and predictions of a model for every sample of some splits
(RUN.engine=extract)."""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, get_args

import torch
from torch import Tensor, nn

from phasetrain import __version__
from phasetrain.addons.deploy.extract.feature_files import LAYER, FeatureFolder, Shard
from phasetrain.addons.deploy.extract.layers import LayerOutputs
from phasetrain.addons.deploy.extract.section import ExtractSection
from phasetrain.addons.deploy.recorded_facts import complete_from_record
from phasetrain.addons.deploy.task_forward import (
    describe_task_call,
    find_task_forward,
    warn_of_task_forward,
)
from phasetrain.app.engines import Extras
from phasetrain.app.result import RunResult
from phasetrain.app.select_checkpoint import NONE, choose_checkpoint, find_stage, load_saved_weights
from phasetrain.app.setup import Setup
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.checkpoint.excluded import excluded_digests
from phasetrain.config.sections.model import WhichWeights
from phasetrain.data import SampleReader
from phasetrain.data.samplers.phase_sampler import SampleOrder, make_sequential
from phasetrain.data.samplers.source import SubsetOrder
from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import AVERAGED, TRAIN, Phase, PhaseTable, Plan
from phasetrain.errors import SHAPE_ERRORS, ConfigError, did_you_mean
from phasetrain.models.digest import hash_model
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import mix_seed, reseed_all, seed_of
from phasetrain.tasks import TASKS, SplitData
from phasetrain.tasks.build.builder import build_model, load_weights
from phasetrain.tasks.build.data_builder import build_loader
from phasetrain.tasks.build.sections import BuildContext
from phasetrain.tasks.shape_errors import (
    describe_failed_forward,
    raise_unless_shape_error,
)

log = logging.getLogger(__name__)

MAX_NAMES = 4
"""Number of targets in a warning."""

NOT_READ = ("batch_size", "micro_batch_size", "sampler", "drop_last", "batch_transforms")
"""Keys of a split without effect on its rows, or recorded under other names."""


def extract(setup: Setup, extras: Extras | None = None) -> RunResult:
    """Write the outputs of layers and the predictions of the model for every sample, see section
    EXTRACT.

    Existing shards are kept if their digest is correct. Takes no lock, so that it may read a run
    that is training. Builds neither loss nor optimizer.

    Raises:
        ConfigError: there is no such checkpoint, split or layer, or the model does not accept the
            input.
        ChangedError: the folder holds other features, or the checkpoint is of another model.
    """
    began = time.perf_counter()
    setup = complete_from_record(setup)
    section: ExtractSection = setup.config["EXTRACT"]
    loaded = choose_checkpoint(setup, RunFolder(setup.config.RUN.dir))
    data = setup.builder().data()
    names = _select_splits(section.splits, data)
    model = _build_model(setup, data, loaded)
    if setup.world.is_main:
        warn_of_task_forward(_find_task(setup))
    stage = find_stage(loaded) if loaded is not None and setup.stages else 0
    rows = []
    root = (section.dir or f"{setup.config.RUN.dir}/extract/{_name_origin(loaded)}").rstrip("/")
    with (
        setup.machine.apply_settings(),
        LayerOutputs(model, section.layers, section.pool) as layers,
    ):
        for name in names:
            done = _Extraction(
                setup, name, data[name].at(stage), model, layers, f"{root}/{name}"
            ).run()
            rows.append((name, *map(str, done)))
    head = ("split", "rows", "shards", "kept from before")
    setup.terminal.print_table(f"features in {root}", head, rows)
    result = RunResult(
        "extracted",
        folder=root,
        digest=hash_model(model),
        seconds=time.perf_counter() - began,
    )
    if loaded is None:
        return result
    return replace(result, reason=loaded.path, updates=loaded.manifest.state["updates"])


class _Extraction:
    """The features of one split. Rank r of world size n makes every n-th missing shard, starting
    with the r-th."""

    def __init__(
        self,
        setup: Setup,
        name: str,
        split: SplitData,
        model: nn.Module,
        layers: LayerOutputs,
        path: str,
    ) -> None:
        self.setup = setup
        self.name = name
        self.model = model
        self.layers = layers
        self.section: ExtractSection = setup.config["EXTRACT"]
        self.world = setup.world
        self.folder = FeatureFolder(path, self.section.format)
        self.split = _read_in_order(split)
        self.batch_size: int = split.section.micro_batch_size or split.section.batch_size
        seed = setup.config.RUN.seed
        self._stream = seed_of(seed, "extract", name)
        # The stream of the passes of a test of these weights, on one rank.
        weights = self.section.weights
        tested = name if weights == "model" else f"{name}{AVERAGED}{weights}"
        self._test_stream = None if name == TRAIN else seed_of(seed, "model", tested, 0)
        self._micros = ceil(split.section.batch_size / self.batch_size)
        self._is_scalar_reported = False
        self._skipped_targets: set[str] = set()
        # Shape of the rows of each column, without the rows of other ranks.
        self._shapes: dict[str, torch.Size] = {}

    def run(self) -> tuple[int, int, int]:
        """Make the missing shards, and return the number of rows, of shards, and of reused
        shards."""
        count = ceil(self.split.length / self.section.rows_per_shard)
        self.world.run_on_main(lambda: self.folder.begin(self._describe_request()))
        own = range(self.world.rank, count, self.world.size)
        kept = {number: shard for number in own if (shard := self.folder.read_intact(number))}
        try:
            made = dict(self._make_shards([number for number in own if number not in kept]))
        except ConfigError:
            # The command with which the error is repaired is another request.
            if self.world.is_main:
                self.folder.abandon()
            raise
        # Each rank knows only its own shards, and the index lists the shards of all ranks.
        by_number: dict[int, Shard] = {}
        for part in self.world.all_gather(kept | made):
            by_number |= part
        shards = [by_number[number] for number in sorted(by_number)]
        self.world.run_on_main(lambda: self.folder.finish(shards, self._describe_columns()))
        computed = self.world.all_reduce_sum(len(made))
        return sum(shard.rows for shard in shards), len(shards), len(shards) - computed

    def _make_shards(self, missing: list[int]) -> Iterator[tuple[int, Shard]]:
        phases = [self._phase_of_shard(index, number) for index, number in enumerate(missing)]
        # A World of one rank: the ranks share the shards, and each reads whole batches.
        loader = build_loader(
            BuildContext(self.setup.config, self.setup.machine, World()),
            self.split,
            Plan(PhaseTable(phases)),
        )
        try:
            for number, phase in zip(missing, phases, strict=True):
                parts = [
                    self._make_columns(batch, phase.offset + step * self.batch_size)
                    for step, batches in enumerate(loader.batches(phase))
                    for batch in batches
                ]
                columns = {
                    name: self._join_rows(name, [part[name] for part in parts]) for name in parts[0]
                }
                yield number, self.folder.write(number, phase.offset, columns)
                log.debug("%s: shard %d written, %d rows", self.name, number, len(columns["id"]))
        finally:
            loader.close()

    def _join_rows(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of a shard.

        Raises:
            ConfigError: they differ in shape from each other or from those of earlier shards.
        """
        for part in parts:
            first = self._shapes.setdefault(name, part.shape[1:])
            if part.shape[1:] != first:
                raise ConfigError(
                    f"EXTRACT.splits: rows of {name} of {self.name} have the shape {tuple(first)} "
                    f"in one batch and {tuple(part.shape[1:])} in another; expected one shape. If "
                    "sequences are padded per batch, pad all to a fixed length in the dataset or a "
                    "custom collate function, or, unless it is a target, set "
                    "EXTRACT.predictions=false and name layers with rows of one shape",
                    code="extract.shapes",
                )
        return torch.cat(list(parts))

    def _phase_of_shard(self, index: int, number: int) -> Phase:
        """Return the phase over the samples of one shard; its batches do not depend on other
        shards."""
        first = number * self.section.rows_per_shard
        end = min(first + self.section.rows_per_shard, self.split.length)
        steps = ceil((end - first) / self.batch_size)
        return Phase(index, self.name, 0, 0, steps, first, end, self.batch_size)

    def _seed_pass(self, batch: Batch, begin: int) -> None:
        """Seed the forward pass of a batch that begins with a row of the split.

        A function of the place: a model that draws random numbers returns the same rows on any rank
        and after any number of shards that were kept. If the batch is one of a test, they are those
        that the test has measured.
        """
        if self._test_stream is None or begin % self.batch_size:
            reseed_all(mix_seed(self._stream, int(batch.ids[0])))
            return
        # As `StepRunner.reseed` does it in a test.
        step, micro = divmod(begin // self.batch_size, self._micros)
        reseed_all(mix_seed(self._test_stream, 0, step << 16 | micro))

    @torch.no_grad()
    def _make_columns(self, batch: Batch, begin: int) -> dict[str, Tensor]:
        """Return the columns of a batch that begins with a row of the split, on the CPU."""
        self._seed_pass(batch, begin)
        moved = batch.to(self.setup.machine.device)
        try:
            with self.setup.machine.autocast(train=False):
                output = self.model(moved.input)
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            sentence = describe_failed_forward(self.model, error, batch.input, batch.ids.tolist())
            advice = describe_task_call(_find_task(self.setup))
            raise ConfigError(
                f"{sentence}, of DATA.{self.name.upper()}{advice}", code="config.misfit"
            ) from error
        columns = {"id": batch.ids, **self._select_targets(batch)}
        if self.section.predictions:
            columns |= self._make_predictions(output, columns)
        columns |= {f"{LAYER}{name}": value for name, value in self.layers.pop_outputs().items()}
        for name, value in columns.items():
            if not value.ndim or len(value) != len(batch.ids):
                key, advice = "EXTRACT.layers", "name another layer"
                if name.startswith("scores"):
                    key = "EXTRACT.predictions = true"
                    advice = (
                        "let the model return it in training only, set it to false, or use "
                        "task.predict in Python, if a sample has many rows as a graph has"
                    )
                raise ConfigError(
                    f"{key}: {name} has shape {tuple(value.shape)} for a batch of "
                    f"{len(batch.ids)} samples, expected a row for each sample; {advice}"
                )
        return {name: _to_saved_type(value) for name, value in columns.items()}

    def _select_targets(self, batch: Batch) -> dict[str, Tensor]:
        """Return the targets that have rows, and warn once of the others."""
        columns = flatten_outputs("target", batch.target)
        samples = len(batch.ids)
        # Entries of a list that belong to samples, such as the boxes of each image, have one name.
        names = {column: re.sub(r"\.\d+(?=\.|$)", ".*", column, count=1) for column in columns}
        counts = Counter(names.values())
        without_rows = {
            names[column] if counts[names[column]] == samples else column
            for column, value in columns.items()
            if not value.ndim or len(value) != samples
        }
        if new := without_rows - self._skipped_targets:
            self._skipped_targets |= new
            log.warning(
                "extract: targets of %s are left out, since they have no row for each sample: %s. "
                "DATA.%s.targets=[] reads none. In Python, task.predict takes samples with many "
                "rows, as a graph has",
                self.name,
                join_first(sorted(new), MAX_NAMES),
                self.name.upper(),
            )
        skipped = self._skipped_targets
        return {
            column: value
            for column, value in columns.items()
            if not {column, names[column]} & skipped
        }

    def _make_predictions(self, output: Any, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scores of a batch, and the labels of those that classify.

        Args:
            output: output of the model.
            columns: the targets, by the names of their columns.
        """
        scores = flatten_outputs("scores", output)
        if not scores:
            raise ConfigError(
                f"EXTRACT.predictions = true: {type(self.model).__name__} returns "
                f"{type(output).__name__}, expected a tensor of scores in it; set "
                "EXTRACT.predictions=false and name layers in EXTRACT.layers"
            )
        scores = self._leave_out_scalars(scores)
        # One output is decoded if it has a score for each class; ordinal models have one less.
        classes = None if len(scores) > 1 else self.split.facts.get("classes")
        labels = {}
        for name, value in scores.items():
            target = columns.get(name.replace("scores", "target", 1), columns.get("target"))
            is_regression = target is not None and target.is_floating_point() and classes is None
            has_scores = value.ndim == 2 and value.shape[1] > 1 and value.is_floating_point()
            if has_scores and classes in (None, value.shape[1]) and not is_regression:
                labels[name.replace("scores", "label", 1)] = value.argmax(1)
        return scores | labels

    def _leave_out_scalars(self, scores: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs that have rows, and warn once of the others; all if none has rows."""
        with_rows = {name: value for name, value in scores.items() if value.ndim}
        if not with_rows:
            return scores
        scalars = sorted(name.removeprefix("scores.") for name in scores.keys() - with_rows)
        if scalars and not self._is_scalar_reported:
            self._is_scalar_reported = True
            log.warning(
                "extract: scalars of the model's output are left out of %s, since they have no row "
                "for each sample: %s",
                self.name,
                ", ".join(scalars),
            )
        return with_rows

    def _describe_request(self) -> dict[str, Any]:
        """Return everything that the rows depend on, except for facts that change last bits
        only."""
        section = self.section
        keys = ("pool", "predictions", "format", "rows_per_shard")
        return {
            "phasetrain": __version__,
            "model": hash_model(self.model),
            "split": self.name,
            "samples": self.split.length,
            "fingerprint": self.split.fingerprint(),
            "seed": self.setup.config.RUN.seed,
            "batch_size": self.batch_size,
            "precision": self.setup.machine.test_precision or self.setup.machine.precision,
            "EXTRACT.layers": list(section.layers),
            **{f"EXTRACT.{key}": section[key] for key in keys},
            **self._describe_data(),
        }

    def _describe_data(self) -> dict[str, Any]:
        """Return the keys of the split that its samples depend on."""
        section = f"DATA.{self.name.upper()}"
        schema = self.setup.schema
        items = self.split.section.plain().items()
        return {
            f"{section}.{key}": value
            for key, value in items
            if key not in NOT_READ and schema.resume(f"{section}.{key}") == "forbidden"
        }

    def _describe_columns(self) -> dict[str, Any]:
        """Return what readers of the columns need to know: the classes, and whether tests measure
        other outputs."""
        names = self.split.facts.get("class_names")
        content = {
            "classes": self.split.facts.get("classes"),
            "class_names": None if names is None else list(names),
        }
        if find_task_forward(_find_task(self.setup)) is None:
            return content
        return {**content, "task_forward_used": False}


def flatten_outputs(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of nested mappings and lists by their dotted paths; empty for None."""
    if isinstance(value, Tensor):
        return {name: value}
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    return {
        path: tensor
        for key, item in pairs
        for path, tensor in flatten_outputs(f"{name}.{key}", item).items()
    }


def _to_saved_type(value: Tensor) -> Tensor:
    """Return a tensor on the CPU, with floats of less than 32 bits as float32."""
    if value.is_floating_point() and value.itemsize < 4:
        # numpy, and with it the format npz, has no bfloat16
        return value.to("cpu", torch.float32)
    return value.cpu()


def _find_task(setup: Setup) -> Any:
    return TASKS.find(setup.config.TASK.name, "TASK.name")


def _read_in_order(split: SplitData) -> SplitData:
    """Return the split in the order of the dataset; unreadable samples are skipped or raise."""
    if not isinstance(split.reader, SampleReader):
        raise ConfigError(
            "EXTRACT.splits: DATA.TRAIN.datasets have batch sizes, and features are extracted from "
            "one source at a time; name other splits",
            code="config.conflict",
        )
    reader = split.reader
    if reader.on_bad_sample == "substitute":
        reader = reader.with_policy("drop")  # a substitute would be another sample's second row
    order: SampleOrder = make_sequential()
    length = len(reader.dataset)
    if reader.chosen is not None:
        order, length = SubsetOrder(order, reader.chosen), len(reader.chosen)
    return replace(
        split,
        reader=reader,
        order=order,
        length=length,
        train=False,
        windows=(),
        stages=(),
        loader=None,
        excluded=None,  # updates leave samples out, and features are wanted of these too
    )


def _select_splits(wanted: Any, data: Mapping[str, SplitData]) -> list[str]:
    """Return the splits that EXTRACT.splits names, in this order; all splits by default."""
    if not data:
        raise ConfigError(
            "RUN.engine = 'extract': DATA has no split; add one, such as DATA.TEST.dataset=...",
            code="config.missing_dataset",
        )
    if wanted is None:
        return list(data)
    if not wanted:
        raise ConfigError(
            f"EXTRACT.splits = []: name at least one of {', '.join(data)}, or null for all of them"
        )
    for name in wanted:
        if name not in data:
            raise ConfigError(
                f"EXTRACT.splits: DATA has no split {name!r}{did_you_mean(name, data) or '.'} "
                f"It has {', '.join(data)}"
            )
    return list(dict.fromkeys(wanted))


def _build_model(
    setup: Setup, data: Mapping[str, SplitData], loaded: LoadedCheckpoint | None
) -> nn.Module:
    """Return the model in test mode with the weights of a checkpoint, of MODEL.weights, or
    initialized from the seed."""
    builder = setup.builder()
    section: ExtractSection = setup.config["EXTRACT"]
    which = section.weights
    model = build_model(builder.context, builder.facts(data, Plan()))
    if loaded is None:
        load_weights(builder.context, model)
        return model.to(setup.machine.device).eval()
    if excluded_digests(loaded):
        load_weights(builder.context, model)
    learned = loaded.state["task"]
    if which not in learned:
        averages = (
            ", ".join(name for name in learned if name in get_args(WhichWeights)[1:]) or "none"
        )
        raise ConfigError(
            f"EXTRACT.weights = {which!r}: {loaded.path} has no such weights; averages in it: "
            f"{averages}; set EXTRACT.weights=model for the trained weights"
        )
    load_saved_weights(model, loaded, which)
    return model.to(setup.machine.device).eval()


def _name_origin(loaded: LoadedCheckpoint | None) -> str:
    if loaded is None:
        return NONE
    return loaded.path.rstrip("/").rpartition("/")[2]
