"""Knowledge distillation: a student learns from the logits of a teacher."""

from torch import Tensor, nn
from torch.nn import functional

from phasetrain.config.checks import check_positive
from phasetrain.losses.base import LOSSES


@LOSSES.register("soft_targets")
class SoftTargets(nn.Module):
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) in nats, averaged over samples.

    From Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2. Both are logits, `(N, C)` or
    `(..., C)`. The factor T^2 keeps the size of the gradients when the temperature T changes.

    Args:
        temperature: T; a higher temperature gives small logits more weight.

    Raises:
        ValueError: the temperature is not positive; on a call: the shapes differ.
    """

    def __init__(self, temperature: float = 4.0) -> None:
        super().__init__()
        check_positive(temperature=temperature)
        self.temperature = temperature

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over samples, a scalar; `target` is the output of the teacher."""
        if output.shape != target.shape:
            raise ValueError(
                f"the teacher returns {tuple(target.shape)}, the student {tuple(output.shape)}; "
                "both need the same classes"
            )
        student = functional.log_softmax(output / self.temperature, dim=-1).flatten(0, -2)
        # The teacher in log space as well: the logarithm of an underflowed probability would be
        # infinite.
        teacher = functional.log_softmax(target / self.temperature, dim=-1).flatten(0, -2)
        # Leading dimensions are flattened because "batchmean" divides by the first dimension only.
        return self.temperature**2 * functional.kl_div(
            student, teacher, reduction="batchmean", log_target=True
        )
