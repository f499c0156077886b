"""Batch norms of averaged weights take their statistics from the training data, in an order of its
own."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from phasetrain.app.setup import resolve_config as settled
from phasetrain.distributed import World
from phasetrain.engine.plan import Phase
from phasetrain.optim.averaging.averages import SWA
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Builder, Task

WORDS = (
    "MODEL={name: small_cnn, width: 4, dropout: 0.5}",
    "DATA.TRAIN.batch_size=24",
    "PHASES={epochs: 1, limit: {train: 4}}",
    "MACHINE.device=cpu",
)


def task(*words: str) -> tuple[Task, Phase]:
    setup = settled([*WORDS, *words])
    made = Builder(setup.config, Machine(torch.device("cpu")), World())
    data = made.data()
    plan = made.plan(data)
    test = next(phase for phase in plan.phases if phase.weights == "swa")
    return made.task(made.parts(data, plan)), test


def swa(made: Task) -> SWA:
    average = made.parts.averages["swa"]
    assert isinstance(average, SWA)
    return average


def statistics(norms: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [
        tensor.clone()
        for norm in norms
        for name, tensor in norm.named_buffers()
        if name.startswith("running")
    ]


def test_statistics_are_those_of_the_first_batches() -> None:
    made, phase = task("MODEL.swa={start: 0.5, batches: 3}")
    average = swa(made)
    average.taken = 1
    made.begin(phase, fresh=True)
    found, model = statistics(average.norms), average.module
    loader, first = made.parts.loaders["train"], made.parts.loaders["train"].plan.phases[0]
    batches = [
        batches[0].input for _, batches in zip(range(3), loader.batches(first), strict=False)
    ]
    for part in model.modules():
        part.p = 0.0  # dropout is off while they are taken
    update_bn(batches, model)
    torch.testing.assert_close(found, statistics(average.norms))
    assert len(found) == 6


def test_statistics_are_weighted_by_samples() -> None:
    made, phase = task(
        "MODEL.swa={start: 0.5}", "DATA.TRAIN.batch_size=1000", "DATA.TRAIN.drop_last=false"
    )
    average = swa(made)
    average.taken = 1
    made.begin(phase, fresh=True)
    loader = made.parts.loaders["train"]
    inputs = [batches[0].input for batches in loader.batches(loader.plan.phases[0])]
    assert [len(batch) for batch in inputs] == [1000, 442]
    convolution, norm = (average.module.get_submodule(f"features.{index}") for index in (0, 1))
    expected = convolution(torch.cat(inputs)).mean((0, 2, 3)).detach()
    torch.testing.assert_close(norm.running_mean, expected)


def test_statistics_depend_on_weights_and_data_alone() -> None:
    made, phase = task("MODEL.swa={start: 0.5}")
    average = swa(made)
    average.taken = 1
    made.begin(phase, fresh=True)
    first = statistics(average.norms)
    for norm in average.norms:
        norm.running_mean += 5.0  # type: ignore[operator]
    torch.manual_seed(7)
    made.begin(phase, fresh=False)
    assert all(
        torch.equal(one, other) for one, other in zip(first, statistics(average.norms), strict=True)
    )
    assert not average.module.training


def test_statistics_before_the_first_average_are_those_of_the_model() -> None:
    made, phase = task("MODEL.swa={start: 0.5}")
    made.parts.model.get_submodule("features.1").running_mean += 5.0
    made.begin(phase, fresh=True)
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            made.parts.model.state_dict().values(),
            swa(made).module.state_dict().values(),
            strict=True,
        )
    )


def test_frozen_statistics_are_kept() -> None:
    made, phase = task("MODEL.swa={start: 0.5}", "MODEL.freeze=[features.1]")
    average = swa(made)
    average.taken = 1
    made.begin(phase, fresh=True)
    assert torch.equal(average.module.get_submodule("features.1").running_mean, torch.zeros(4))
    assert not torch.equal(average.module.get_submodule("features.4").running_mean, torch.zeros(8))
