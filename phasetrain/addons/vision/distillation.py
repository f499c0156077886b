"""Learning from a trained model, the teacher."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phasetrain.addons.vision.soft_targets import SoftTargets
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.errors import SHAPE_ERRORS, ConfigError
from phasetrain.models.digest import hash_model
from phasetrain.models.sources import parse_sources
from phasetrain.tasks.base import TASKS
from phasetrain.tasks.parts import Parts
from phasetrain.tasks.shape_errors import raise_unless_shape_error
from phasetrain.tasks.state import Stateful
from phasetrain.tasks.supervised import Supervised

TEACHER = "TASK.teacher"


class Teacher:
    """A frozen model in test mode; a checkpoint holds only the digest of its weights.

    Args:
        model: on the device.
        where: config path, for messages.
    """

    def __init__(self, model: nn.Module, where: str = TEACHER) -> None:
        self.where = where
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.digest = hash_model(model)

    @torch.no_grad()
    def __call__(self, inputs: Any) -> Any:
        """Return the scores of the teacher."""
        return self.model(inputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the digest of the weights; the weights themselves stay in their file."""
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the weights are the same.

        Raises:
            ValueError: the weights differ.
        """
        if state["digest"] != self.digest:
            raise ValueError(
                f"{self.where}.weights differ from the weights that the run has used so far "
                f"(sha256 {self.digest[:16]} instead of {state['digest'][:16]}); restore the old "
                "file, or start a new run in another folder with RUN.dir=..."
            )


MakeModel = Callable[[Mapping[str, Any], str], nn.Module]


def check_teacher(section: Mapping[str, Any], where: str = TEACHER) -> None:
    """Raise ConfigError unless TASK.teacher has weights."""
    if not parse_sources(section.get("weights"), f"{where}.weights"):
        raise ConfigError(
            f"{where}.weights: a {where.rpartition('.')[2]} needs trained weights; set it to a "
            "file, a run or a checkpoint"
        )


def build_teacher(
    parts: Parts, make_model: MakeModel, section: Mapping[str, Any], where: str = TEACHER
) -> Teacher:
    """Return the teacher that TASK.teacher describes, with its weights, on the device.

    Args:
        parts: parts of the task.
        make_model: makes models, with their weights.
        section: `name` of a model, its parameters, and `weights`.
        where: config path of the section.

    Raises:
        ConfigError: it has no weights, or they cannot be loaded.
    """
    check_teacher(section, where)
    return Teacher(make_model(section, where).to(parts.machine.device), where)


@TASKS.register("distillation")
class Distillation(Supervised):
    """Learns the scores of a teacher in addition to the targets (Hinton et al. 2015,
    arXiv:1503.02531).

    In training the loss is `soft_share` times the loss of soft targets
    (`SoftTargets`) plus 1 - `soft_share` times LOSS; both are logged, as
    `loss_soft` and `loss_hard`. In tests it is LOSS alone. The teacher sees the same inputs, in
    test mode, and never changes. Its weights are not in a checkpoint: a digest of them is, and a
    resume with other weights is rejected. A test of a checkpoint does not need them.

    Args:
        parts: fact; parts of the task.
        make_model: fact; makes models.
        teacher: `name` of a model, its parameters, and `weights` as MODEL.weights.
        temperature: temperature of the soft targets.
        soft_share: share of the soft targets in the loss, in [0, 1].

    Raises:
        ConfigError: a teacher without weights, a share outside [0, 1], or a temperature that is not
            above 0; on a step: a teacher that does not take the input or whose scores have
            another shape.
    """

    def __init__(
        self,
        parts: Parts,
        make_model: MakeModel,
        teacher: Mapping[str, Any],
        temperature: float = 4.0,
        soft_share: float = 0.9,
    ) -> None:
        super().__init__(parts)
        if not 0 <= soft_share <= 1:
            raise ConfigError(f"TASK.soft_share = {soft_share}: expected a share in [0, 1]")
        self.soft_share = soft_share
        self.soft = SoftTargets(temperature)
        self.teacher: Teacher | None = None
        check_teacher(teacher)
        # A test needs no teacher, so a checkpoint can be tested where the teacher's file is
        # missing.
        if parts.updater is not None:
            self.teacher = build_teacher(parts, make_model, teacher)

    def forward(self, batch: Batch) -> StepOutput:
        """Return mean loss and output of a micro-batch."""
        out = super().forward(batch)
        if self.teacher is None or not self.model.training:
            return out
        soft = self._soft_loss(self.teacher, out.output, batch)
        out.logs = {"loss_soft": soft.detach(), "loss_hard": out.loss.detach()}
        out.loss = self.soft_share * soft + (1 - self.soft_share) * out.loss
        return out

    def stateful(self) -> dict[str, Stateful]:
        """Return every part that learns or accumulates, and the digest of the teacher."""
        stateful = super().stateful()
        if self.teacher is not None:
            stateful["teacher"] = self.teacher
        return stateful

    def _soft_loss(self, teacher: Teacher, output: Any, batch: Batch) -> Tensor:
        try:
            soft_loss: Tensor = self.soft(output, teacher(batch.input))
        except (*SHAPE_ERRORS, AttributeError) as error:
            raise_unless_shape_error(error)
            raise ConfigError(f"{TEACHER} ({type(teacher.model).__name__}): {error}") from error
        return soft_loss
