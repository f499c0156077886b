import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torchmetrics
from raising import raises

from phasetrain.addons.libraries.torchmetrics import metric_as_meter
from phasetrain.engine.batch import StepOutput
from phasetrain.errors import ConfigError
from phasetrain.meters import METERS
from phasetrain.meters.base import MeterRegistry

GENERATOR = torch.Generator().manual_seed(21)
FACTS = {"classes": 4, "class_names": ("cat", "dog", "cow", "hen")}


def step(output, target, mask=None):
    return StepOutput(torch.tensor(0.0), 1.0, 8, output, target, mask)


def randn(*shape):
    return torch.randn(shape, generator=GENERATOR)


def randint(high, *shape):
    return torch.randint(high, shape, generator=GENERATOR)


STEPS = {
    "classes": [step(randn(16, 4), torch.arange(4).repeat(4)) for _ in range(5)],
    "labels": [step(randn(16, 4), randint(2, 16, 4)) for _ in range(5)],
    "numbers": [step(randn(16), randn(16)) for _ in range(5)],
    "binary": [step(randn(16).sigmoid(), randint(2, 16)) for _ in range(5)],
    "queries": [
        step(randn(16), {"target": randint(2, 16), "indexes": randint(6, 16), "unused": 1})
        for _ in range(5)
    ],
}
# name, parameters, outputs, how its states come together
CASES = [
    ("torchmetrics.AUROC", {"task": "multiclass"}, "classes"),  # lists, cat
    (
        "torchmetrics.AUROC",
        {"task": "binary", "thresholds": 20},
        "binary",
    ),  # a sum, and a buffer that is none
    ("torchmetrics.F1Score", {"task": "multilabel", "average": "macro"}, "labels"),  # sums
    (
        "torchmetrics.classification.MulticlassAccuracy",
        {"average": None},
        "classes",
    ),  # one value per class
    ("torchmetrics.R2Score", {}, "numbers"),  # sums
    ("torchmetrics.PearsonCorrCoef", {}, "numbers"),  # one row per process
    ("torchmetrics.MaxMetric", {}, "numbers"),  # max
    ("torchmetrics.MinMetric", {}, "numbers"),  # min
    ("torchmetrics.image.PeakSignalNoiseRatio", {"data_range": 2.0}, "numbers"),  # sums, and a mean
    ("torchmetrics.retrieval.RetrievalMAP", {}, "queries"),  # lists that are not reduced
]
IDS = [f"{name.rpartition('.')[2]}-{kind}" for name, _, kind in CASES]


def made(name, params):
    return METERS.build(name, params, where="METERS.m", facts=FACTS)


def near(one, other):
    first, second = (
        [found] if isinstance(found, float) else list(found.values()) for found in (one, other)
    )
    torch.testing.assert_close(
        torch.tensor(first), torch.tensor(second), rtol=1e-5, atol=1e-6, equal_nan=True
    )
    return True


def theirs(name, params, outputs):
    """Return what the metric of torchmetrics gives by itself."""
    folder, _, kind = name.rpartition(".")
    counts = {"num_classes": 4} if "lticlass" in f"{name}{params}" else {}
    counts |= {"num_labels": 4} if params.get("task") == "multilabel" else {}
    metric = vars(import_module(folder))[kind](**counts, **params)
    for out in outputs:
        if kind in ("MaxMetric", "MinMetric"):
            metric.update(out.output)
        elif isinstance(out.target, dict):
            metric.update(out.output, out.target["target"], out.target["indexes"])
        else:
            metric.update(out.output, out.target)
    found = metric.compute()
    return float(found) if found.numel() == 1 else dict(enumerate(found.tolist()))


@pytest.mark.parametrize(("name", "params", "kind"), CASES, ids=IDS)
class TestMetrics:
    def test_value_equals_the_metric(self, name, params, kind):
        meter = made(name, params)
        for out in STEPS[kind]:
            meter.update(out)
        assert near(meter.compute(), theirs(name, params, STEPS[kind]))
        assert not near_or_error(meter.compute(), theirs(name, params, STEPS[kind][:1]))

    def test_state_is_restored_in_the_middle_of_a_phase(self, name, params, kind):
        through, first, second = (made(name, params) for _ in range(3))
        for out in STEPS[kind]:
            through.update(out)
        for out in STEPS[kind][:2]:
            first.update(out)
        second.update(STEPS[kind][4])  # what loading has to replace
        second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
        for out in STEPS[kind][2:]:
            second.update(out)
        assert second.compute() == through.compute()
        assert second.compute() != first.compute()
        third, copied = made(name, params), deepcopy(first)
        third.load_buffers(dict(first.named_buffers()))
        assert third.compute() == first.compute()
        first.update(STEPS[kind][4])
        assert copied.compute() == third.compute()

    @pytest.mark.feature("111")
    def test_ranks_are_merged(self, name, params, kind):
        whole, left, middle, right, merged = (made(name, params) for _ in range(5))
        for number, out in enumerate(STEPS[kind]):
            whole.update(out)
            (left if number < 2 else right).update(out)
        merged.update(STEPS[kind][0])  # what merging has to replace
        merged.merge_buffers([dict(one.named_buffers()) for one in (middle, left, right)])
        assert near(merged.compute(), whole.compute())
        assert not near_or_error(left.compute(), whole.compute()) or not near_or_error(
            right.compute(), whole.compute()
        )

    def test_state_resumes_with_another_world_size(self, name, params, kind):
        whole, left, right, after = (made(name, params) for _ in range(4))
        for out in STEPS[kind]:
            whole.update(out)
        left.update(STEPS[kind][0])
        right.update(STEPS[kind][1])
        after.merge_buffers([dict(one.named_buffers()) for one in (left, right)])
        for out in STEPS[kind][2:]:
            after.update(out)
        assert near(after.compute(), whole.compute())

    def test_masked_samples_do_not_count(self, name, params, kind):
        mask = torch.tensor([True, False, True, True, False, True, True, False] * 2)
        meter, kept = made(name, params), made(name, params)
        for out in STEPS[kind]:
            meter.update(replace(out, mask=mask))
            target = out.target
            target = (
                {"target": target["target"][mask], "indexes": target["indexes"][mask]}
                if kind == "queries"
                else target[mask]
            )
            kept.update(step(out.output[mask], target))
        meter.update(replace(STEPS[kind][0], mask=torch.zeros(16, dtype=torch.bool)))
        assert meter.compute() == kept.compute()

    def test_reset_starts_a_new_phase(self, name, params, kind):
        meter, fresh = made(name, params), made(name, params)
        assert meter.compute() != meter.compute()  # NaN
        for out in STEPS[kind]:
            meter.update(out)
        meter.compute()
        meter.reset()
        assert meter.compute() != meter.compute()
        meter.update(STEPS[kind][1])
        fresh.update(STEPS[kind][1])
        assert meter.compute() == fresh.compute()


def near_or_error(one, other):
    try:
        return near(one, other)
    except AssertionError:
        return False


def test_states_become_buffers():
    meter = made("torchmetrics.AUROC", {"task": "multiclass"})
    for out in STEPS["classes"][:2]:
        meter.update(out)
    assert {
        name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in meter.named_buffers()
    } == {
        "steps": (torch.int64, ()),
        "ids": (torch.int64, (0,)),
        "state_preds": (torch.float32, (32, 4)),
        "state_target": (torch.int64, (32,)),
    }


class Boxes(torchmetrics.Metric):
    """A metric of detection in small: one tensor of any length per image, not reduced."""

    def __init__(self):
        super().__init__()
        self.add_state("found", [], dist_reduce_fx=None)
        self.add_state("true", [], dist_reduce_fx=None)

    def update(self, preds, target):
        self.found += [image["boxes"] for image in preds]
        self.true += [image["boxes"] for image in target]

    def compute(self):
        pairs = zip(self.found, self.true, strict=True)
        return {
            "images": len(self.true),
            "exact": sum(len(found) == len(true) for found, true in pairs),
        }


def test_tensors_of_a_list_are_kept_apart():
    found = [{"boxes": torch.rand(n, 4, generator=GENERATOR)} for n in (1, 0, 2)]
    true = [{"boxes": torch.rand(n, 4, generator=GENERATOR)} for n in (1, 1, 2)]
    one, other, merged, fewer = (metric_as_meter(Boxes)() for _ in range(4))
    one.update(step(found, true))
    assert one.compute() == {"images": 3.0, "exact": 2.0}
    other.update(step(found[:2], true[:2]))
    merged.merge_buffers([dict(meter.named_buffers()) for meter in (one, other)])
    assert merged.compute() == {"images": 5.0, "exact": 3.0}
    fewer.update(step(found, true, torch.tensor([False, True, True])))
    assert fewer.compute() == {"images": 2.0, "exact": 1.0}


class FirstBoxes(Boxes):
    """A metric that depends on the order of its images."""

    def compute(self):
        return {f"{at}": float(found[0, 0]) for at, found in enumerate(self.found)}


class TestOrder:
    FOUND = [{"boxes": torch.full((1 + at % 2, 4), float(at))} for at in range(6)]

    def rank(self, *ids, mask=None, known=True):
        meter = metric_as_meter(FirstBoxes)()
        for pair in zip(ids[::2], ids[1::2], strict=True):
            found = [self.FOUND[at] for at in pair]
            out = step(found, found, mask)
            meter.update(replace(out, ids=torch.tensor(pair)) if known else out)
        return meter

    def merged(self, *ranks):
        meter = metric_as_meter(FirstBoxes)()
        meter.merge_buffers([dict(rank.named_buffers()) for rank in ranks])
        return meter

    @pytest.mark.feature(
        "meters.torchmetrics_order",
        "torchmetrics' metrics with a tensor per sample, such as mean average precision, have the "
        "same bits on any number of ranks",
        "`METERS.x.name=torchmetrics.detection.MeanAveragePrecision`",
    )
    def test_images_of_ranks_are_in_the_order_of_the_dataset(self):
        whole = {f"{at}": float(at) for at in range(6)}
        ranks = [self.rank(4, 5), self.rank(2, 0), self.rank(3, 1)]
        assert self.merged(*ranks).compute() == whole
        assert self.merged(*ranks[::-1]).compute() == whole
        assert self.rank(4, 5, 2, 0, 3, 1).compute() == whole

    @pytest.mark.feature("meters.torchmetrics_order")
    def test_without_ids_the_order_is_that_of_the_ranks(self):
        ranks = [self.rank(4, 5, known=False), self.rank(2, 0, known=False)]
        assert list(self.merged(*ranks).compute().values()) == [4, 5, 2, 0]

    def test_ids_of_masked_samples_are_dropped(self):
        mask = torch.tensor([False, True])
        assert list(self.rank(5, 3, 4, 1, mask=mask).compute().values()) == [1, 3]

    def test_lists_with_another_number_of_tensors_keep_their_order(self):
        meter = metric_as_meter(torchmetrics.retrieval.RetrievalMAP)()
        for out in STEPS["queries"]:
            meter.update(replace(out, ids=torch.arange(16).flip(0)))
        assert len(meter.get_buffer("ids")) == 0
        assert len(meter.get_buffer("lengths_preds")) == 5


def test_values_per_class_have_the_class_names():
    meter = made("torchmetrics.Recall", {"task": "multiclass", "average": "none"})
    meter.update(STEPS["classes"][0])
    assert list(meter.compute()) == ["of_cat", "of_dog", "of_cow", "of_hen"]


def test_bfloat16_becomes_float32():
    meter = made("torchmetrics.AUROC", {"task": "multiclass"})
    out = STEPS["classes"][0]
    meter.update(replace(out, output=out.output.bfloat16()))
    assert meter.get_buffer("state_preds").dtype == torch.float32


def test_thresholds_move_with_the_meter():
    meter = made("torchmetrics.AUROC", {"task": "binary", "thresholds": 5})
    meter.to("meta")
    assert {buffer.device.type for buffer in meter.buffers()} == {"meta"}
    assert meter.__dict__["_metric"].thresholds.device.type == "meta"


class TestParameters:
    def test_classes_come_from_the_facts(self):
        used = {}
        METERS.build(
            "torchmetrics.AUROC", {"task": "multiclass"}, where="METERS.m", facts=FACTS, used=used
        )
        assert used["METERS.m.classes"] == 4
        used.clear()
        METERS.build("torchmetrics.MeanSquaredError", where="METERS.m", facts=FACTS, used=used)
        assert set(used) == {"METERS.m.class_names"}

    def test_config_takes_precedence_over_facts(self):
        meter = made(
            "torchmetrics.Accuracy", {"task": "multiclass", "num_classes": 9, "average": "none"}
        )
        meter.update(step(randn(8, 9), randint(9, 8)))
        assert len(meter.compute()) == 9

    @pytest.mark.parametrize(
        ("params", "problem"),
        [
            (
                {"task": "multiclass", "averge": "macro"},
                {"key": "METERS.m.averge", "suggestion": "average"},
            ),
            (
                {"task": "multiclass", "sync_on_compute": True},
                {"key": "METERS.m.sync_on_compute"},
            ),
            ({}, {"code": "config.missing_parameter", "key": "METERS.m.task"}),
            ({"task": "many"}, {"key": "METERS.m"}),
        ],
    )
    def test_unknown_parameters_are_rejected(self, params, problem):
        with raises(ConfigError, **problem):
            made("torchmetrics.AUROC", params)


class TestRefused:
    def test_state_with_custom_reduction_is_rejected(self):
        class Product(torchmetrics.Metric):
            def __init__(self):
                super().__init__()
                self.add_state("value", torch.ones(()), dist_reduce_fx=torch.prod)

            def update(self, preds, target): ...
            def compute(self): ...

        with raises(ConfigError, code="config.wrong_part"):
            metric_as_meter(Product)()

    def test_summed_list_is_rejected(self):
        class Summed(torchmetrics.Metric):
            def __init__(self):
                super().__init__()
                self.add_state("value", [], dist_reduce_fx="sum")

            def update(self, preds, target): ...
            def compute(self): ...

        with raises(ConfigError, code="config.wrong_part"):
            metric_as_meter(Summed)()

    def test_nested_metric_is_rejected(self):
        with raises(ConfigError, code="config.wrong_part"):
            made("torchmetrics.RunningMean", {})

    def test_curves_and_matrices_are_rejected(self):
        for name in ("ROC", "ConfusionMatrix"):
            meter = made(f"torchmetrics.{name}", {"task": "multiclass"})
            meter.update(STEPS["classes"][0])
            with raises(ConfigError, code="config.wrong_part"):
                meter.compute()

    def test_part_that_is_not_a_metric_is_rejected(self):
        with raises(
            ConfigError,
            code="config.unknown_part",
            key="METERS.m.name",
            given="'torchmetrics.AUROK'",
            suggestion="AUROC",
        ):
            made("torchmetrics.AUROK", {})
        with raises(ConfigError, code="config.wrong_part", key="METERS.m.name"):
            made("torchmetrics.MetricCollection", {"metrics": []})

    def test_missing_arguments_are_rejected(self):
        meter = made("torchmetrics.retrieval.RetrievalMAP", {})
        with pytest.raises(
            ValueError,
            match=r"RetrievalMAP: .*preds, target, indexes",
        ):
            meter.update(STEPS["numbers"][0])

    def test_missing_library_names_the_extra(self):
        meters = MeterRegistry()
        meters.register_adapter("no_such_library", "metrics")(metric_as_meter)
        with raises(ConfigError, code="config.import_failed", key="METERS.m.name"):
            meters.find("no_such_library.AUROC", "METERS.m.name")

    def test_broken_torchvision_is_reported(self, tmp_path, monkeypatch):
        (tmp_path / "broken_library.py").write_text(
            "raise RuntimeError('operator torchvision::nms does not exist')"
        )
        monkeypatch.syspath_prepend(tmp_path)
        meters = MeterRegistry()
        meters.register_adapter("broken_library", "metrics")(metric_as_meter)
        with raises(ConfigError, key="METERS.m.name", given="'broken_library.AUROC'"):
            meters.find("broken_library.AUROC", "METERS.m.name")


def test_custom_metric_by_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "my_metric.py").write_text(
        "import torch, torchmetrics\n"
        "class Bias(torchmetrics.Metric):\n"
        "    def __init__(self, scale: float = 1.0):\n"
        "        super().__init__()\n"
        "        self.scale = scale\n"
        "        self.add_state('total', torch.zeros(()), dist_reduce_fx='sum')\n"
        "    def update(self, preds, target):\n"
        "        self.total = self.total + self.scale * (preds - target).sum()\n"
        "    def compute(self):\n"
        "        return self.total\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    meter = made("my_metric.Bias", {"scale": 2.0})
    meter.update(step(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0])))
    assert meter.compute() == 3.0


def test_other_callables_are_unchanged():
    assert metric_as_meter(dict) is dict
    assert metric_as_meter(print) is print


def test_libraries_are_imported_only_when_a_config_names_one_of_their_parts():
    look = (
        "import sys; from phasetrain.meters import METERS; METERS.build('accuracy'); "
        "import phasetrain.data, phasetrain.models, phasetrain.optim; others = sys.modules.keys() & "
        "{'torchmetrics', 'timm', 'torchvision', 'transformers', 'datasets', 'webdataset', 'matplotlib', 'PIL'}; "
        "print(['phasetrain.addons.libraries.torchmetrics' in sys.modules, bool(others)])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[False, False]", done.stderr
