import pytest
import torch

from phasetrain.batch import StepOutput
from phasetrain.meters import METERS, Meter

OUTPUTS = [
    StepOutput(torch.tensor(float(i)), 4.0, 4, torch.eye(4)[torch.tensor([i, 0, 1, 2])], torch.tensor([0, 0, 1, 3]))
    for i in range(4)
]


class MeanOutput(Meter):
    def __init__(self):
        super().__init__()
        self.add_sum("total", (2,))
        self.add_sum("count", dtype=torch.int64)

    def update(self, out):
        self.total.add_(out.output.sum(0))
        self.count.add_(len(out.output))

    def compute(self):
        return {"first": float(self.total[0] / self.count), "second": float(self.total[1] / self.count)}


def test_sums_are_buffers_of_zeros():
    meter = MeanOutput()
    assert {name: (b.dtype, b.tolist()) for name, b in meter.named_buffers()} == {
        "total": (torch.float64, [0.0, 0.0]),
        "count": (torch.int64, 0),
    }


def test_update_compute_and_reset():
    meter = MeanOutput()
    meter.update(StepOutput(torch.tensor(0.0), 2.0, 2, torch.tensor([[1.0, 2.0], [3.0, 6.0]])))
    assert meter.compute() == {"first": 2.0, "second": 4.0}
    meter.reset()
    assert meter.total.tolist() == [0.0, 0.0]
    assert meter.count.item() == 0


def test_it_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Meter()


@pytest.mark.parametrize("name", sorted(METERS))
def test_state_in_the_middle_of_a_phase_is_the_whole_state(name):
    through, first, second = (METERS.build(name) for _ in range(3))
    for out in OUTPUTS:
        through.update(out)
    for out in OUTPUTS[:2]:
        first.update(out)
    second.update(OUTPUTS[3])  # what loading has to replace
    second.load_state_dict(first.state_dict())
    for out in OUTPUTS[2:]:
        second.update(out)
    assert second.compute() == through.compute()
    assert second.compute() != first.compute()


@pytest.mark.parametrize("name", sorted(METERS))
def test_processes_add_up(name):
    whole, left, right = (METERS.build(name) for _ in range(3))
    for i, out in enumerate(OUTPUTS):
        whole.update(out)
        (left if i < 1 else right).update(out)
    for buffer, other in zip(left.buffers(), right.buffers(), strict=True):
        buffer += other
    assert left.compute() == whole.compute()


@pytest.mark.parametrize("name", sorted(METERS))
def test_an_empty_phase_has_no_value(name):
    meter = METERS.build(name)
    assert meter.compute() != meter.compute()  # NaN
    meter.update(OUTPUTS[0])
    assert meter.compute() == meter.compute()
    meter.reset()
    assert meter.compute() != meter.compute()
