"""Learning without targets, from several views of each sample."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import takewhile
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from phasetrain.addons.vision.batch_transforms.each_view import EachView
from phasetrain.addons.vision.distillation import MakeModel, Teacher, build_teacher
from phasetrain.addons.vision.momentum_teacher import MomentumTeacher
from phasetrain.addons.vision.multi_crop import MultiCrop, MultiCropOfSamples
from phasetrain.addons.vision.self_supervised_losses.multi_view import (
    ClusteringLoss,
    FreezingLoss,
    MemoryLoss,
)
from phasetrain.data import SampleReader
from phasetrain.data.loading.per_stage import PerStageReader
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import TRAIN, Phase
from phasetrain.engine.position import Position
from phasetrain.errors import SHAPE_ERRORS, ConfigError, is_out_of_memory
from phasetrain.meters import Meter
from phasetrain.runtime.machine import seed_of
from phasetrain.runtime.nested import map_tensors
from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.parts import Parts, StepEvents
from phasetrain.tasks.shape_errors import describe_failed_forward, raise_unless_shape_error
from phasetrain.tasks.state import Stateful
from phasetrain.tasks.step_runner import GradientPass


@TASKS.register("self_supervised")
class SelfSupervised(Task):
    """Compares embeddings of several views of each sample, with each other or with a teacher.

    `DATA.*.transforms` makes the views (`multi_crop`), the model takes the list of them and returns
    the list of their embeddings (`trunk_head`), and the loss gets
    `(embeddings, embeddings of the teacher or None)`. Targets of the dataset are ignored. It logs
    `embedding_std`, the spread of the normalised embeddings of the first view over the batch: 1 if
    they point in all directions evenly, 0 if they have collapsed into one point.

    The teacher is a copy of the model. At the beginning of each update its weights t move towards
    the weights w of the model: t = m t + (1 - m) w, where m goes along half a cosine wave from
    `momentum` to `momentum_end` over the training (Grill et al. 2020, arXiv:2006.07733, 3.3).
    A skipped update leaves it unchanged. With `teacher`, it is a trained model instead, which never
    changes, see `phasetrain.addons.vision.distillation.Teacher`.

    Args:
        parts: parts of the task.
        momentum: m at the start, in [0, 1]; None makes no copy.
        momentum_end: m at the end.
        teacher_views: number of leading views that the teacher sees.
        teacher_drop_path: whether layers are dropped at random in the copy as in the model, if it
            has stochastic depth; the teacher of DINO has none.
        teacher: `name` of a trained model, its parameters, and `weights` as MODEL.weights.
        make_model: fact; makes models.

    Attributes:
        teacher: the copy, or None.
        trained_teacher: the trained model, or None.

    Raises:
        ConfigError: the loss needs a teacher and there is none, or the other way round; the
            strategy does not support one; a split does not make several views; a meter needs
            targets or scores of classes.
    """

    def __init__(
        self,
        parts: Parts,
        momentum: float | None = None,
        momentum_end: float = 1.0,
        teacher_views: int = 2,
        teacher: Mapping[str, Any] | None = None,
        make_model: MakeModel | None = None,
        *,
        teacher_drop_path: bool = True,
    ) -> None:
        super().__init__(parts)
        for name, value in (("momentum", momentum), ("momentum_end", momentum_end)):
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"TASK.{name} = {value}: expected a number in [0, 1]")
        if teacher_views < 1:
            raise ConfigError(f"TASK.teacher_views = {teacher_views}: expected at least 1")
        if teacher is not None and momentum is not None:
            raise ConfigError(
                f"TASK.momentum = {momentum} and TASK.teacher: the teacher is a copy of the model "
                "or a trained model; leave one of the two out"
            )
        self._has_teacher = teacher is not None or momentum is not None
        self._momentum = momentum
        self._teacher_views = teacher_views
        self._teacher_drop_path = teacher_drop_path
        losses: list[Any] = list(parts.loss.modules())
        self._freezing_losses: list[FreezingLoss] = [
            part for part in losses if hasattr(part, "frozen_parameters")
        ]
        self._memory_losses: list[MemoryLoss] = [
            part for part in losses if hasattr(part, "select_samples")
        ]
        self._check_parts()
        self._momentum_teacher: MomentumTeacher | None = None
        self.teacher: nn.Module | None = None
        if momentum is not None:
            self._momentum_teacher = MomentumTeacher(parts, momentum, momentum_end)
            self.teacher = self._momentum_teacher.model
        self.trained_teacher: Teacher | None = None
        if teacher is not None:
            assert make_model is not None
            self.trained_teacher = build_teacher(parts, make_model, teacher)

    def begin(self, phase: Phase, *, fresh: bool) -> None:
        """Prepare for a phase; the teacher gets the model's mode."""
        super().begin(phase, fresh=fresh)
        if self.teacher is not None:
            self.teacher.train(phase.is_train)
            if not self._teacher_drop_path:
                for module in self.teacher.modules():
                    # By name: timm and torchvision have a class each.
                    if type(module).__name__ in ("DropPath", "StochasticDepth"):
                        module.eval()
            if not phase.is_train:
                self._strategy.prepare_test(self.teacher)

    def begin_epoch(self, phase: Phase) -> None:
        """Let the loss find the clusters of the epoch; an empty memory is filled by forward passes
        over the epoch."""
        losses = [part for part in self._memory_losses if _prepares_epochs(part)]
        if any(part.needs_fill() for part in losses):
            self._run_epoch(phase)
        for part in losses:
            part.begin_epoch(seed_of(self.parts.seed, "clusters", phase.epoch))

    @torch.no_grad()
    def _run_epoch(self, phase: Phase) -> None:
        """Run the forward passes of the epoch of a phase, without updates."""
        phases = self.parts.loaders[TRAIN].plan.phases
        for part in takewhile(lambda later: later.epoch == phase.epoch, phases[phase.index :]):
            if part.is_train:
                for step, batches in enumerate(self.batches(part, 0)):
                    for batch in batches:
                        self.run_forward(batch, Position(TRAIN, 0, step, 0.0))

    def begin_update(self, at: Position) -> None:
        """Set the options of the update, and move the teacher."""
        super().begin_update(at)
        if self._momentum_teacher is not None:
            # Before the forward pass, so the teacher is a function of weights that were saved: a
            # resume at this update starts from the same two models.
            self._momentum_teacher.move(at.where)

    def update(self, done: GradientPass, at: Position, events: StepEvents) -> StepOutput:
        """Update all weights but those that the loss freezes."""
        for part in self._freezing_losses:
            for parameter in part.frozen_parameters():
                # None and not zero: momentum and weight decay would still move a weight with a zero
                # gradient.
                parameter.grad = None
        return super().update(done, at, events)

    def forward(self, batch: Batch) -> StepOutput:
        """Return loss and embeddings of a micro-batch of views `[(N, ...), ...]`."""
        views = self._views(batch)
        try:
            embeddings = [_to_float32(embedding) for embedding in self.model(views)]
            targets = self._embed_with_teacher(views)
        except (*SHAPE_ERRORS, AttributeError) as error:
            raise_unless_shape_error(error)
            sentence = describe_failed_forward(self.parts.model, error, views, batch.ids.tolist())
            raise ConfigError(
                f"{sentence}; a model of this task takes a list of views, such as the one that "
                "MODEL.name=trunk_head builds from a trunk and a head",
                code="config.misfit",
            ) from error
        embeddings = self.events.on_output(batch, embeddings)
        if batch.mask is not None:
            # Padding must not take part in comparisons within the batch.
            embeddings = map_tensors(embeddings, lambda e: e[batch.mask])
            targets = map_tensors(targets, lambda e: e[batch.mask])
        if self.model.training:
            for part in self._memory_losses:
                part.select_samples(self._find_places(batch))
        try:
            # Temperatures of 0.1 and below turn the rounding of half precision into large changes
            # of scores.
            with torch.autocast(self._device.type, enabled=False):
                loss = self.loss(embeddings, targets)
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            raise ConfigError(
                f"LOSS: {type(self.parts.loss).__name__} does not take embeddings "
                f"{_shapes(embeddings)}: {error}"
            ) from error
        logs = {"embedding_std": spread(embeddings[0].detach())}
        return StepOutput(loss, batch.size, batch.size, embeddings, None, None, batch.ids, logs)

    def stateful(self) -> dict[str, Stateful]:
        """Return every part that learns or accumulates, including the teacher."""
        parts = super().stateful()
        if self.trained_teacher is not None:
            parts["teacher"] = self.trained_teacher
        elif self.teacher is not None:
            parts["teacher"] = self.teacher
        return parts

    def _views(self, batch: Batch) -> list[Tensor]:
        views = batch.input
        if not isinstance(views, list) or not all(isinstance(view, Tensor) for view in views):
            raise ConfigError(
                f"TASK.name = 'self_supervised': the input of a batch is {type(views).__name__}, "
                "expected a list of views, each a tensor (N, ...); make multi_crop the last "
                "transform of the split"
            )
        return views

    def _find_places(self, batch: Batch) -> Tensor:
        """Return the places of the samples of a batch in the training data, `(N,)`."""
        reader = self.parts.loaders[TRAIN].reader
        assert isinstance(reader, SampleReader)  # `_check_parts` rejects others
        places = batch.ids
        if reader.chosen is not None:
            places = torch.from_numpy(np.searchsorted(reader.chosen, places.numpy()))
        return places.to(self._device)

    @torch.no_grad()
    def _embed_with_teacher(self, views: Sequence[Tensor]) -> list[Tensor] | None:
        teacher = self.teacher if self.trained_teacher is None else self.trained_teacher
        if teacher is None:
            return None
        return [_to_float32(target) for target in teacher(list(views[: self._teacher_views]))]

    def _check_parts(self) -> None:
        loss = type(self.parts.loss).__name__
        teacher_losses: list[Any] = [
            part for part in self.parts.loss.modules() if hasattr(part, "uses_teacher")
        ]
        if any(part.uses_teacher for part in teacher_losses) and not self._has_teacher:
            raise ConfigError(
                f"TASK.momentum = null: the loss {loss} needs a teacher; set TASK.momentum, for "
                "example to 0.99, or TASK.teacher"
            )
        if (
            teacher_losses
            and not any(part.uses_teacher for part in teacher_losses)
            and self._has_teacher
        ):
            raise ConfigError(
                f"TASK.momentum = {self._momentum}: the loss {loss} does not use a teacher; leave "
                "momentum and teacher out"
            )
        mixes = [
            transform
            for pipeline in self.parts.batch_transforms
            for transform in pipeline.transforms
        ]
        if not all(isinstance(mixing, EachView) for mixing in mixes):
            raise ConfigError(
                "DATA.TRAIN.batch_transforms mixes inputs and targets, and TASK.name = "
                "'self_supervised' has views and no targets; leave it out, or mix views: "
                "[{name: each_view, transforms: [mixup, cutmix]}]"
            )
        for label, meter in self.meters.items():
            _check_meter(label, meter, self._device)
        self._check_splits(loss)

    def _check_splits(self, loss: str) -> None:
        """Reject data that does not make the views for a loss of this name."""
        views = self._teacher_views if self._has_teacher else 1
        least = 2
        if any(hasattr(part, "contrasts_with_memory") for part in self._memory_losses):
            least = 1
            if set(self.parts.loaders) != {TRAIN}:
                raise ConfigError(
                    f"LOSS: {loss} compares with a memory of the training samples, and a test has "
                    "others; set DATA.TEST=null"
                )
        for split, loader in self.parts.loaders.items():
            if self._memory_losses and loader.sampler.excluded is not None:
                raise ConfigError(
                    f"DATA.{split.upper()}.exclude: the loss {loss} compares with a memory of all "
                    "samples, also of those without an update; leave the samples out of the "
                    "dataset, or use another loss",
                    code="config.conflict",
                )
            if isinstance(loader.reader, PerStageReader):
                if self._memory_losses and split == TRAIN:
                    raise ConfigError(
                        f"PHASES.stages: the loss {loss} remembers every training sample, and the "
                        "stages have other data; leave DATA.TRAIN out of the stages"
                    )
                readers = loader.reader.readers
            else:
                readers = (loader.reader,)
            for reader in readers:
                if not isinstance(reader, SampleReader):
                    raise ConfigError(
                        f"DATA.{split.upper()}.datasets.*.batch_size: TASK.name = "
                        "'self_supervised' takes batches of one source; leave the batch sizes out"
                    )
                _check_views(split, reader, views, least)


def _prepares_epochs(loss: MemoryLoss) -> TypeGuard[ClusteringLoss]:
    return hasattr(loss, "needs_fill") and hasattr(loss, "begin_epoch")


def _to_float32(embedding: Tensor) -> Tensor:
    """Return an embedding in float32 at least: half precision is too coarse for temperatures."""
    return embedding.to(torch.promote_types(embedding.dtype, torch.float32))


def spread(embeddings: Tensor) -> Tensor:
    """Return the spread of normalised embeddings `(N, D)` over the batch, 0-d; NaN for fewer than
    two.

    The root mean square of their distances from their mean, which is at most 1.
    """
    if len(embeddings) > 1:
        return normalize(embeddings, dim=1).var(dim=0, correction=0).sum().sqrt()
    return embeddings.new_full((), float("nan"))


def _check_views(split: str, reader: SampleReader, teacher_views: int, least: int) -> None:
    """Reject a split that makes too few views; with custom transforms the first batch shows it."""
    transforms = reader.pipeline.transforms
    last = transforms[-1] if transforms else None
    if not reader.draws_at_random and not isinstance(last, MultiCrop):
        raise ConfigError(
            f"DATA.{split.upper()}.transforms makes one view of a sample, and TASK.name = "
            "'self_supervised' compares several; add multi_crop as the last transform, such as "
            f"[{{name: multi_crop, groups: [{{views: {least}, transforms: [...]}}]}}], or leave "
            "the split out"
        )
    if isinstance(last, MultiCrop | MultiCropOfSamples) and last.views < least:
        raise ConfigError(
            f"DATA.{split.upper()}.transforms: multi_crop makes {last.views} view, expected at "
            f"least {least}; raise the views of its groups"
        )
    if isinstance(last, MultiCrop | MultiCropOfSamples) and last.views < teacher_views:
        raise ConfigError(
            f"TASK.teacher_views = {teacher_views}: multi_crop in DATA.{split.upper()}.transforms "
            f"makes only {last.views} views; lower teacher_views, or make more views"
        )


def _check_meter(label: str, meter: Meter, device: torch.device) -> None:
    """Reject a meter that does not accept a loss and embeddings without targets."""
    views = [torch.zeros(2, 2, device=device), torch.zeros(2, 2, device=device)]
    try:
        # A copy, so that the trial leaves no sample in the sums of the meter.
        deepcopy(meter).update(StepOutput(torch.zeros((), device=device), 2, 2, views, None))
    except (*SHAPE_ERRORS, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"METERS.{label} needs scores and targets, and TASK.name = 'self_supervised' has "
            f"embeddings of views and no targets ({type(error).__name__}: {error}); use "
            "METERS.loss, and evaluate the features with a probe afterwards"
        ) from error


def _shapes(views: Sequence[Any]) -> str:
    return "[" + ", ".join(str(tuple(view.shape)) for view in views) + "]"
