"""What a student learns from the scores of a teacher."""

from torch import Tensor, nn
from torch.nn import functional

from phasetrain.losses.base import LOSSES


@LOSSES.register("soft_targets")
class SoftTargets(nn.Module):
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) in nats, the mean over samples.

    From Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2. Both are scores before softmax,
    `(N, C)` or `(..., C)`. With the factor T^2 gradients keep their size when the temperature T
    changes.

    Args:
        temperature: T; the higher, the more small scores count.

    Raises:
        ValueError: a temperature that is not above 0; on a call: other shapes.
    """

    def __init__(self, temperature: float = 4.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature = {temperature}: expected more than 0")
        self.temperature = temperature

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean over samples, a scalar; `target` is what the teacher gives."""
        if output.shape != target.shape:
            raise ValueError(
                f"the teacher gives {tuple(target.shape)}, the student {tuple(output.shape)}; both have to tell the "
                "same classes apart"
            )
        student = functional.log_softmax(output / self.temperature, dim=-1).flatten(0, -2)
        teacher = functional.log_softmax(target / self.temperature, dim=-1).flatten(0, -2)
        return self.temperature**2 * functional.kl_div(
            student, teacher, reduction="batchmean", log_target=True
        )
