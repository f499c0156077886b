"""Parts of self-supervised runs: a task that checks losses over ranks, and parts that do not save
their state."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phasetrain.addons.vision.self_supervised import SelfSupervised
from phasetrain.addons.vision.self_supervised_losses.barlow_twins import BarlowTwins
from phasetrain.addons.vision.self_supervised_losses.deepcluster import DeepClusterV2
from phasetrain.addons.vision.self_supervised_losses.dino import DINO
from phasetrain.addons.vision.self_supervised_losses.moco import MoCo
from phasetrain.addons.vision.self_supervised_losses.npid import NPID
from phasetrain.addons.vision.self_supervised_losses.simclr import SimCLR
from phasetrain.addons.vision.self_supervised_losses.swav import SwAV, build_swav
from phasetrain.distributed import World
from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.losses import LOSSES
from phasetrain.tasks import TASKS, Stateful

ROWS, FEATURES, SIZE, BATCHES = 12, 5, 4, 3


@LOSSES.register("forgetful_moco")
class ForgetfulMoCo(MoCo):
    """MoCo that does not save its queue."""

    def __init__(
        self, dimensions: int, batch_size: int = 1, queue: int = 40, world: World | None = None
    ) -> None:
        super().__init__(dimensions, batch_size, queue, world=world)
        self.register_buffer("queue", self.queue, persistent=False)


class NPIDOfNeighbours(NPID):
    """NPID whose negatives do not depend on the rank."""

    def _draw_negatives(self, count: int) -> Tensor:
        return (self._places[:, None] + torch.arange(1, self.negatives + 1)) % len(self.memory)


@TASKS.register("forgetful_self_supervised")
class ForgetfulSelfSupervised(SelfSupervised):
    """A task that does not save its teacher."""

    def stateful(self) -> dict[str, Stateful]:
        return {name: part for name, part in super().stateful().items() if name != "teacher"}


def losses(world: World) -> dict[str, nn.Module]:
    """Return losses with every kind of state, initialised equally on all ranks."""
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        "simclr": SimCLR(0.2, world),
        "moco": MoCo(SIZE, ROWS, 30, 0.3, world=world),
        "barlow_twins": BarlowTwins(0.01, world=world),
        "swav": build_swav(SIZE, ROWS, 6, queue=20, queue_updates=1, world=world),
        "dino": DINO(SIZE, world=world),
        "deepcluster": DeepClusterV2(SIZE, ROWS, [3, 4], world=world),
        "npid": NPIDOfNeighbours(SIZE, ROWS, negatives=2, world=world),
    }
    return {name: loss.double() for name, loss in made.items()}


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return samples `(views, rows, features)` and the outputs of a teacher for two views."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(3, ROWS, FEATURES, dtype=torch.float64, generator=generator)
    return inputs, torch.randn(2, ROWS, SIZE, dtype=torch.float64, generator=generator)


def learn(loss: nn.Module, share: slice, size: int) -> list[Tensor]:
    """Return losses, gradients and buffers over some batches, averaged over `size` ranks."""
    weight = (
        torch.linspace(-1, 1, FEATURES * SIZE, dtype=torch.float64)
        .sin()
        .view(FEATURES, SIZE)
        .requires_grad_()
    )
    found = []
    for number in range(BATCHES):
        inputs, targets = batch(number)
        for part in loss.modules():
            if isinstance(part, SwAV | DINO):
                part.advance(number / BATCHES, number)
            if hasattr(part, "select_samples"):
                part.select_samples(torch.arange(ROWS)[share])
                if number and isinstance(part, DeepClusterV2):
                    part.begin_epoch(number)
        embeddings = [view[share] @ weight for view in inputs]
        value = loss(embeddings, list(targets[:, share]))
        gradients = torch.autograd.grad(value, [weight, *loss.parameters()])
        for tensor in (value.detach(), *gradients):
            if size > 1:
                dist.all_reduce(tensor)
            found.append(tensor / size)
        found += [buffer.clone() for buffer in loss.buffers()]
    return found


def measure(loss: nn.Module, begin: int, end: int) -> Tensor:
    """Return the sum of the test loss over some rows."""
    if isinstance(loss, NPID):
        return torch.zeros(())  # it has no tests
    inputs, targets = batch(9)
    with torch.no_grad():
        total: Tensor = loss(
            [view[begin:end, :SIZE] for view in inputs], list(targets[:, begin:end])
        ) * (end - begin)
    return total


@HOOKS.register("view_losses")
class ViewLosses(Hook):
    """Raises if a loss over the rows of all ranks differs from the loss of a single process, in
    training or in a test."""

    main_only = False
    observe_only = True

    def on_start(self, run: Run) -> None:
        world = run.world
        size = ROWS // world.size
        share = slice(world.rank * size, (world.rank + 1) * size)
        alone, together = losses(World()), losses(world)
        bounds = (
            (0, 5, ROWS) if world.size == 2 else (0, 5, 5, ROWS)
        )  # unequal shares, of three one without a row
        for name, loss in together.items():
            torch.testing.assert_close(
                learn(loss, share, world.size), learn(alone[name], slice(ROWS), 1)
            )
            mine = measure(loss.eval(), bounds[world.rank], bounds[world.rank + 1])
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, measure(alone[name].eval(), 0, ROWS))
            if name in (
                "simclr",
                "barlow_twins",
                "swav",
            ):  # in a test the others have no term of several samples
                cut = measure(alone[name], 0, 5) + measure(alone[name], 5, ROWS)
                assert not torch.allclose(cut, mine), (
                    f"{name}: the check would pass without an exchange"
                )
        run.world.all_gather(None)
        print("all losses agree")  # noqa: T201 - what the test looks for
