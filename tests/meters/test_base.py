import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from raising import raises
from torch.utils._python_dispatch import TorchDispatchMode

from phasetrain.distributed import World
from phasetrain.engine.batch import GeneratedOutput, SequenceOutput, StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS, Meter
from phasetrain.tasks.metering import compute_metrics

# Other test modules register parts too, so the registry depends on the order of collection.
# Boxes are no tensor: test_detection.py has the same tests for them.
OWN = sorted(
    name
    for name, part in METERS.items()
    if part.__module__.startswith("phasetrain.") and name != "mean_average_precision"
)

RANDOM = torch.Generator().manual_seed(5)
FACTS = {
    "classes": 4,
    "class_names": ("cat", "dog", "cow", "hen"),
    "token_bytes": [1, 2, 3, 4],
    "ignore_index": -100,
}


def step(output, target):
    return StepOutput(torch.rand((), generator=RANDOM), 4.0, len(output), output, target)


SINGLE = [
    step(
        torch.randn(6, 4, generator=RANDOM),
        torch.randint(4, (6,), generator=RANDOM, dtype=torch.int64),
    )
    for _ in range(4)
]
LABELS = [
    step(
        torch.randn(6, 4, generator=RANDOM),
        torch.randint(2, (6, 4), generator=RANDOM, dtype=torch.int64),
    )
    for _ in range(4)
]
NUMBERS = [
    step(torch.randn(6, 2, generator=RANDOM), torch.randn(6, 2, generator=RANDOM)) for _ in range(4)
]
GROUPS = [
    step(
        torch.randn(6, generator=RANDOM),
        {"label": torch.tensor([0, 1, 1, 0, 1, 0]), "group": torch.tensor([0, 0, 1, 1, 2, 2])},
    )
    for _ in range(4)
]
DECODED = [
    SequenceOutput(
        *(torch.zeros(()), 6.0, 6, torch.zeros(1)),
        decoded=torch.tensor([[0]] * right + [[1]] * (6 - right)),
        references=torch.zeros(6, 1, 1, dtype=torch.int64),
    )
    for right in (1, 5, 2, 6)
]
GENERATED = [
    GeneratedOutput(
        *(torch.zeros(()), 6.0, 6, torch.zeros(6, 3)),
        features=torch.randn(6, 3, generator=RANDOM),
        real_features=torch.randn(6, 3, generator=RANDOM),
    )
    for _ in range(4)
]
OTHERS = {
    "frechet_distance": GENERATED,
    "regression": NUMBERS,
    "grouped_auroc": GROUPS,
    "multilabel_accuracy": LABELS,
    "sequence_error_rate": DECODED,
    "token_error_rate": DECODED,
}


def made(name):
    """Return a meter and the outputs that it takes."""
    return METERS.build(name, facts=FACTS), OTHERS.get(name, SINGLE)


def values(meter):
    found = meter.compute()
    return torch.tensor(
        list(found.values()) if isinstance(found, dict) else [found], dtype=torch.float64
    )


def same(one, other, tolerance=0.0):
    torch.testing.assert_close(
        values(one), values(other), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    return True


class MeanOutput(Meter):
    def __init__(self):
        super().__init__()
        self.add_sum("total", (2,))
        self.add_sum("count", dtype=torch.int64)

    def update(self, out):
        self.total.add_(out.output.sum(0))
        self.count.add_(len(out.output))

    def compute(self):
        return {
            "first": float(self.total[0] / self.count),
            "second": float(self.total[1] / self.count),
        }


def test_sums_start_as_zero_buffers():
    meter = MeanOutput()
    assert {name: (b.dtype, b.tolist()) for name, b in meter.named_buffers()} == {
        "total": (torch.float64, [0.0, 0.0]),
        "count": (torch.int64, 0),
    }


def test_update_accumulates_and_reset_clears():
    meter = MeanOutput()
    meter.update(StepOutput(torch.tensor(0.0), 2.0, 2, torch.tensor([[1.0, 2.0], [3.0, 6.0]])))
    assert meter.compute() == {"first": 2.0, "second": 4.0}
    meter.reset()
    assert meter.total.tolist() == [0.0, 0.0]
    assert meter.count.item() == 0


def test_meter_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Meter()


@pytest.mark.parametrize("name", OWN)
def test_state_saved_in_the_middle_of_a_phase_is_complete(name):
    (through, outputs), (first, _), (second, _) = (made(name) for _ in range(3))
    for out in outputs:
        through.update(out)
    for out in outputs[:2]:
        first.update(out)
    second.update(outputs[3])  # what loading has to replace
    second.load_state_dict(first.state_dict())
    for out in outputs[2:]:
        second.update(out)
    assert same(second, through)
    assert not torch.equal(values(second), values(first))


@pytest.mark.parametrize("name", OWN)
def test_buffers_of_ranks_add_up(name):
    (whole, outputs), (left, _), (right, _), (idle, _), (all_of_them, _) = (
        made(name) for _ in range(5)
    )
    for number, out in enumerate(outputs):
        whole.update(out)
        (left if number < 1 else right).update(out)
    all_of_them.update(outputs[0])  # what merging has to replace
    all_of_them.merge_buffers([dict(one.named_buffers()) for one in (left, idle, right)])
    assert same(
        all_of_them,
        whole,
        0.0
        if name not in ("loss", "logged", "perplexity", "bits_per_byte", "regression")
        else 1e-14,
    )
    assert not torch.equal(values(left), values(whole))


@pytest.mark.parametrize("name", OWN)
def test_order_of_ranks_does_not_matter(name):
    (left, outputs), (right, _), (one, _), (other, _) = (made(name) for _ in range(4))
    for number, out in enumerate(outputs):
        (left if number < 3 else right).update(out)
    one.merge_buffers([dict(meter.named_buffers()) for meter in (left, right)])
    other.merge_buffers([dict(meter.named_buffers()) for meter in (right, left)])
    assert same(one, other, 1e-14)


# The loss has its mask in it, and decoded sequences are those of samples only.
WITHOUT_MASK = {
    *("loss", "logged", "perplexity", "bits_per_byte"),
    *("sequence_error_rate", "token_error_rate"),
}


@pytest.mark.parametrize("name", sorted({*OWN} - WITHOUT_MASK))
def test_padding_samples_do_not_count(name):
    (meter, outputs), (masked, _) = made(name), made(name)
    first, last = outputs[0], outputs[1]
    meter.update(first)
    masked.update(first)
    masked.update(replace(last, mask=torch.zeros(6, dtype=torch.bool)))
    assert same(masked, meter)
    masked.update(last)
    assert not torch.equal(values(masked), values(meter))


@pytest.mark.parametrize("name", OWN)
def test_empty_phase_is_nan(name):
    meter, outputs = made(name)
    assert values(meter)[0].isnan()
    meter.update(outputs[0])
    assert not values(meter)[0].isnan()
    meter.reset()
    assert values(meter)[0].isnan()
    meter.update(outputs[1])  # and goes on after it
    alone, _ = made(name)
    alone.update(outputs[1])
    assert same(meter, alone)


READS = {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero"}


class Reads(TorchDispatchMode):
    """Notes the operators whose result depends on values that lie on the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.found += [name] if name in READS else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OWN)
def test_update_does_not_wait_for_the_device(name):
    meter, outputs = made(name)
    with Reads() as reads:
        for out in outputs:
            meter.update(out)
    assert reads.found == []
    with Reads() as reads:
        meter.compute()
    assert reads.found != []


@pytest.mark.parametrize("name", OWN)
def test_graph_is_released(name):
    meter, outputs = made(name)
    out = outputs[0]
    meter.update(
        replace(
            out, loss=out.loss.clone().requires_grad_(), output=out.output.clone().requires_grad_()
        )
    )
    assert not any(buffer.requires_grad for buffer in meter.buffers())


class Median(Meter):
    """Median of the first score: needs all of them at once."""

    def __init__(self):
        super().__init__()
        self.add_rows("scores", dtype=torch.float64)
        self.add_sum("steps", dtype=torch.int64)

    def update(self, out):
        self.append_rows("scores", out.output[:, 0], out.mask)
        self.steps.add_(1)

    def compute(self):
        return {
            "median": float(self.scores.median()),
            "rows": len(self.scores),
            "steps": int(self.steps),
        }


def scores(*values, mask=None):
    output = torch.tensor(values)[:, None]
    return StepOutput(
        torch.tensor(0.0),
        1.0,
        len(values),
        output,
        None,
        None if mask is None else torch.tensor(mask),
    )


class TestRows:
    def seen(self, *outputs):
        meter = Median()
        for out in outputs:
            meter.update(out)
        return meter

    def test_rows_are_kept_without_masked_ones(self):
        meter = self.seen(scores(5.0, 1.0), scores(9.0, 7.0, mask=[False, True]))
        assert meter.scores.tolist() == [5.0, 1.0, 7.0]
        assert meter.compute() == {"median": 5.0, "rows": 3, "steps": 2}

    def test_shape_of_a_row_may_be_a_number(self):
        meter = Median()
        for shape in (3, (3,)):
            meter.add_rows("rows", shape)
            meter.add_sum("sums", shape)
            assert (meter.rows.shape, meter.sums.shape) == ((0, 3), (3,))

    def test_state_of_any_length_is_loaded(self):
        first, second = self.seen(scores(5.0, 1.0), scores(7.0)), self.seen(scores(0.0))
        second.load_state_dict(first.state_dict())
        second.update(scores(8.0))
        assert second.scores.tolist() == [5.0, 1.0, 7.0, 8.0]
        assert first.scores.tolist() == [5.0, 1.0, 7.0]

    def test_rows_of_ranks_are_concatenated(self):
        merged = Median()
        merged.merge_buffers(
            [
                dict(one.named_buffers())
                for one in (self.seen(scores(5.0)), self.seen(scores(1.0), scores(2.0)))
            ]
        )
        assert merged.scores.tolist() == [5.0, 1.0, 2.0]
        assert merged.steps.item() == 3

    def test_single_process_reduces_to_itself(self):
        meter = self.seen(scores(5.0))
        assert meter.all_reduce(World()) is meter

    def test_reset_removes_rows(self):
        meter = self.seen(scores(5.0))
        meter.reset()
        assert (len(meter.scores), meter.steps.item(), meter.scores.dtype) == (0, 0, torch.float64)

    def test_rows_are_not_copied_at_each_step(self):
        meter, seen = Median(), []
        places = set()
        for number in range(100):
            meter.update(scores(float(number), float(-number)))
            seen += [float(number), float(-number)]
            places.add(meter.scores.data_ptr())
        assert meter.scores.tolist() == seen
        assert len(places) <= 8  # a copy of all rows at each step would be 100

    def test_copy_is_independent(self):
        first = self.seen(scores(5.0), scores(1.0, 2.0), scores(3.0))
        second = deepcopy(first)
        first.update(scores(7.0))
        second.update(scores(9.0))
        assert (first.scores.tolist()[-1], second.scores.tolist()[-1]) == (7.0, 9.0)

    def test_loaded_rows_do_not_share_memory_with_the_checkpoint(self):
        first, second = self.seen(scores(5.0), scores(1.0, 2.0), scores(3.0)), Median()
        second.load_buffers(dict(first.named_buffers()))
        second.update(scores(9.0))
        first.update(scores(7.0))
        assert (first.scores.tolist()[-1], second.scores.tolist()[-1]) == (7.0, 9.0)

    def test_rows_of_another_shape_are_rejected(self):
        meter = Median()
        meter.append_rows("scores", torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"scores: .*\(1,\).*\(3,\)"):
            meter.append_rows("scores", torch.zeros(2, 1))


def test_part_that_is_not_a_meter_is_rejected():
    with raises(
        ConfigError, code="config.wrong_part", key="METERS.x.name", given="'collections.Counter'"
    ):
        METERS.build("collections.Counter", where="METERS.x")


def test_most_meters_have_no_table():
    assert METERS.build("accuracy").table() == {}


@pytest.mark.feature("meters.no_sample", "a metric that saw no sample is left out", "`METERS`")
def test_metric_without_samples_is_left_out_and_a_nan_of_samples_is_not() -> None:
    accuracy, loss = METERS.build("accuracy"), METERS.build("loss")
    loss.update(StepOutput(torch.tensor(float("nan")), 4.0, 4))
    found = compute_metrics({"accuracy": accuracy, "loss": loss}, World())
    assert list(found) == ["loss"]
    assert math.isnan(found["loss"])


@pytest.mark.parametrize("name", OWN)
def test_meter_is_empty_until_it_is_shown_something(name: str) -> None:
    meter = METERS.build(name, facts=FACTS)
    assert meter.is_empty
