"""Parts are built from sections: facts fill open parameters, and errors name their key."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from torch import nn
from torch.utils.data import Subset

from phasetrain.app.setup import resolve_config
from phasetrain.config.attrdict import AttrDict
from phasetrain.data import COLLATES, SAMPLERS, SampleReader
from phasetrain.data.transforms.base import Pipeline
from phasetrain.distributed import Strategy, World
from phasetrain.engine.plan import Plan, Split
from phasetrain.errors import ConfigError
from phasetrain.losses import CrossEntropy
from phasetrain.meters import METERS, Accuracy
from phasetrain.models import SmallCNN
from phasetrain.models.digest import hash_model
from phasetrain.models.prepare import CompiledModel
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import TASKS, Builder, Parts, SplitData, Supervised
from phasetrain.tasks.build.builder import build_loss, list_updates_per_epoch
from phasetrain.tasks.build.data_builder import list_splits
from phasetrain.testing.build import build_run as built_whole

WORDS = ("DATA.TRAIN.batch_size=64", "PHASES.epochs=2", "MODEL.name=mlp")

STAGES = (
    "PHASES={{epochs: null, stages: [{{updates: {}}}, {{updates: {}, continues: true, "
    "DATA: {{TRAIN: {{batch_size: 128}}}}}}]}}"
)


@METERS.register("ignoring")
class Ignoring(Accuracy):
    """Ignores a class also if the loss ignores none."""

    def __init__(self, ignore_index: int | None = -100) -> None:
        super().__init__(ignore_index=ignore_index)


@TASKS.register("paced")
class Paced(Supervised):
    """Has parameters with the names of facts, one of them with a default."""

    def __init__(self, parts: Parts, updates: int, epochs: int = 7) -> None:
        super().__init__(parts)
        self.updates = updates
        self.epochs = epochs


PLAIN = """
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


def plain(samples: int = 64) -> Dataset:
    return TensorDataset(torch.rand(samples, 3, 8, 6), torch.arange(samples) % 2)


class Net(nn.Module):
    def __init__(self, input_shape: tuple, channels: int, width: int = 2) -> None:
        super().__init__()
        self.shape, self.channels = input_shape, channels
        self.layer = nn.Linear(channels * input_shape[1] * input_shape[2], width)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))
"""


COUNTING = """
import torch
from torch import nn


class Inner(nn.Linear):
    as_tensor = True

    def get_extra_state(self):
        return torch.tensor(3) if self.as_tensor else {"calls": 3}


class Counting(nn.Sequential):
    def __init__(self, classes, as_tensor):
        super().__init__()
        self.add_module("flat", nn.Flatten())
        self.add_module("inner", Inner(64, classes))
        self.inner.as_tensor = as_tensor
"""


def builder(*words: str) -> Builder:
    setup = resolve_config([*WORDS, *words], terminal=Terminal(io.StringIO()))
    return Builder(setup.config, setup.machine, World())


def built(*words: str, train: bool = True) -> tuple[Parts, Plan, dict[str, SplitData]]:
    setup = resolve_config([*WORDS, *words], terminal=Terminal(io.StringIO()))
    made = Builder(setup.config, setup.machine, World())
    data = made.data()
    plan = made.plan(data)
    return made.parts(data, plan, train=train), plan, data


def paced(*words: str) -> tuple[Paced, Parts]:
    made = builder("TASK.name=paced", *words)
    data = made.data()
    parts = made.parts(data, made.plan(data))
    task = made.task(parts)
    assert isinstance(task, Paced)
    return task, parts


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        built(*words)
    return str(caught.value)


class TestData:
    def test_splits_have_their_length_and_batch_size(self) -> None:
        made = builder("DATA.VALID={dataset: digits, batch_size: 10}", "DATA.TEST.drop_last=true")
        data = made.data()
        assert {name: split.length for name, split in data.items()} == {
            "train": 1442,
            "test": 355,
            "valid": 355,
        }
        assert list_splits(data) == {
            "train": Split("train", 1442, 64, drop_last=True),
            "test": Split("test", 355, 256, drop_last=True),
            "valid": Split("valid", 355, 10, drop_last=False),
        }

    def test_dataset_reads_the_part_of_its_split(self) -> None:
        data = builder().data()
        assert data["train"].fingerprint() != data["test"].fingerprint()
        same = builder("DATA.TEST.split=train").data()
        assert same["train"].fingerprint() == same["test"].fingerprint()

    def test_input_shape_is_taken_after_the_transforms(self) -> None:
        data = builder("DATA.TRAIN.transforms=[{name: center_crop, size: 6}]").data()
        assert data["train"].facts["input_shape"] == (1, 6, 6)

    def test_fingerprint_falls_back_to_name_and_length(self) -> None:
        reader = SampleReader([0] * 7, Pipeline(), COLLATES["stack"](), seed=0)
        split = SplitData(
            builder().context.config.DATA.TRAIN, reader, SAMPLERS["sequential"](), 7, {}
        )
        assert split.fingerprint() == "digits:7"

    def test_run_of_an_earlier_version_has_name_and_length_of_a_subset(self) -> None:
        reader = SampleReader(Subset([0] * 7, [1, 2]), Pipeline(), COLLATES["stack"](), seed=0)
        section = builder().context.config.DATA.TRAIN
        split = SplitData(section, reader, SAMPLERS["sequential"](), 2, {})
        assert split.fingerprint() != "digits:2"
        assert split.has_fingerprint("digits:2")
        assert split.has_fingerprint(split.fingerprint())
        assert not split.has_fingerprint("digits:3")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ["DATA.TRAIN={dataset: synthetic, noise: -1}", "DATA.TRAIN.transforms=[]"],
                "DATA.TRAIN (dataset 'synthetic'): ",
            ),
            (
                ["DATA.TRAIN.transforms=[{name: random_flip, probability: 3}]"],
                "DATA.TRAIN.transforms[0] (transform 'random_flip'): probability = 3",
            ),
            (
                ["DATA.TRAIN.transforms=[flatten, {name: center_crop, size: 4}]"],
                "DATA.TRAIN.transforms: ",
            ),
        ],
    )
    def test_bad_datasets_and_transforms_are_rejected(self, words: list[str], message: str) -> None:
        assert refused(*words).startswith(message)


class TestParts:
    @pytest.mark.feature(
        "8",
        "facts of data and plan are passed to parts by parameter name",
        "parameters `classes`, `updates`, ...",
    )
    def test_facts_fill_open_parameters(self) -> None:
        parts, plan, _ = built()
        assert parts.facts["MODEL.classes"] == 10
        assert parts.facts["MODEL.input_shape"] == (1, 8, 8)
        assert parts.model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
        assert plan.updates == 44

    def test_facts_fill_parameters_of_a_task_without_a_default(self) -> None:
        task, parts = paced()
        assert (task.updates, task.epochs) == (44, 7)
        assert {key for key in parts.facts if key.startswith("TASK.")} == {"TASK.updates"}
        task, parts = paced("TASK.updates=3", "TASK.epochs=4")
        assert (task.updates, task.epochs) == (3, 4)
        assert not any(key.startswith("TASK.") for key in parts.facts)

    @pytest.mark.parametrize(
        ("words", "updates"),
        [
            ((), [22.0]),
            (("DATA.TRAIN.drop_last=false",), [23.0]),
            (("DATA.TRAIN.drop_last=false", "OPTIMIZER.accumulate=4"), [23.0]),
            (("DATA.TRAIN.drop_last=false", "PHASES.limit.train=5"), [5.0]),
            (("DATA.TRAIN.drop_last=false", "PHASES={epochs: null, updates: 30}"), [23.0]),
            # The second stage begins after 448 samples of an epoch, so its first pass is no unit.
            ((STAGES.format(7, 30),), [22.0, 11.0]),
            (("DATA.TRAIN.drop_last=false", STAGES.format(7, 30)), [23.0, 12.0]),
            # It has no other pass.
            (("DATA.TRAIN.drop_last=false", STAGES.format(7, 8)), [23.0, 12.0]),
            (("PHASES.epochs=0",), [0.0]),
        ],
    )
    def test_epoch_has_all_updates_of_a_pass(
        self, words: tuple[str, ...], updates: list[float]
    ) -> None:
        made = resolve_config([*WORDS, *words], terminal=Terminal(io.StringIO())).builder()
        assert list_updates_per_epoch(made.plan(made.data())) == updates

    def test_config_has_priority_over_facts(self) -> None:
        parts, _, _ = built("MODEL.classes=12")
        assert "MODEL.classes" not in parts.facts
        assert parts.model(torch.zeros(2, 1, 8, 8)).shape == (2, 12)

    def test_weights_depend_on_the_seed_alone(self) -> None:
        digests = [
            hash_model(built(*words)[0].model)
            for words in ([], ["DATA.TRAIN.batch_size=32"], ["RUN.seed=1"])
        ]
        assert digests[0] == digests[1] != digests[2]

    def test_parts_for_a_test_have_no_updater(self) -> None:
        assert built(train=False)[0].updater is None

    def test_meters_keep_their_labels(self) -> None:
        parts, _, _ = built("METERS={top5: {name: accuracy, topk: 5}, accuracy: null, loss: {}}")
        assert {label: type(meter).__name__ for label, meter in parts.meters.items()} == {
            "top5": "Accuracy",
            "loss": "MeanLoss",
        }

    @pytest.mark.feature("meters.ignored_targets")
    @pytest.mark.parametrize(
        ("words", "ignored"),
        [
            ([], {"accuracy": -100, "own": -100, "digit": -100}),
            (["LOSS.ignore_index=255"], {"accuracy": 255, "own": 255, "digit": 255}),
            (["LOSS.name=MSELoss"], {"accuracy": None, "own": -100, "digit": None}),
            (
                ["LOSS.ignore_index=255", "METERS.accuracy.ignore_index=null"],
                {"accuracy": None, "own": 255, "digit": 255},
            ),
            (
                [
                    "LOSS={name: weighted_sum, losses: {a: {name: cross_entropy, ignore_index: 7, "
                    "target: digit}, b: {name: NLLLoss, target: other}}}"
                ],
                {"accuracy": None, "own": -100, "digit": 7},
            ),
            (
                [
                    "PHASES.epochs=null",
                    "PHASES.stages=[{epochs: 1}, {epochs: 1, LOSS: {ignore_index: 7}}]",
                ],
                {"accuracy": None, "own": -100, "digit": None},
            ),
        ],
    )
    def test_meters_ignore_the_targets_that_the_loss_ignores(
        self, words: list[str], ignored: dict[str, int | None]
    ) -> None:
        meters = (
            "METERS={loss: null, own: {name: ignoring}, digit: {name: accuracy, target: digit}}"
        )
        parts = built_whole([*WORDS, meters, *words]).task.parts
        assert {
            label: vars(meter)["ignore_index"] for label, meter in parts.meters.items()
        } == ignored

    def test_task_is_supervised_by_default(self) -> None:
        made = builder()
        data = made.data()
        parts = made.parts(data, made.plan(data))
        assert isinstance(made.task(parts), Supervised)

    def test_accumulation_splits_batches_into_micro_batches(self) -> None:
        parts, plan, _ = built("OPTIMIZER.accumulate=4")
        [first, *_] = parts.loaders["train"].batches(plan.phases[0])
        assert [batch.size for batch in first] == [16, 16, 16, 16]

    def test_part_that_is_no_module_is_rejected(self) -> None:
        assert refused("MODEL.name=builtins.dict").startswith("MODEL.name = 'builtins.dict' ")

    def test_state_other_than_tensors_is_rejected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "counting_mlp.py").write_text(COUNTING)
        monkeypatch.syspath_prepend(tmp_path)
        words = ("MODEL=null", "MODEL.name=counting_mlp.Counting", "MODEL.as_tensor=false")
        with raises(ConfigError, key="MODEL.name", given="'counting_mlp.Counting'") as caught:
            built(*words)
        assert "inner._extra_state" in str(caught.value)
        built("MODEL=null", "MODEL.name=counting_mlp.Counting", "MODEL.as_tensor=true")

    @pytest.mark.feature("8")
    @pytest.mark.parametrize(
        ("words", "shape"),
        [
            ([], (3, 8, 6)),
            (["DATA.TRAIN.transforms=[{name: resize, size: 4}]"], (3, 4, 4)),
            (["MODEL.channels=3", "DATA.TRAIN.transforms=[torch.nn.Identity]"], (3, 8, 6)),
        ],
    )
    def test_shape_that_a_plain_dataset_does_not_report_is_read_from_a_sample(
        self,
        words: list[str],
        shape: tuple[int, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (tmp_path / "plain_parts.py").write_text(PLAIN)
        monkeypatch.syspath_prepend(tmp_path)
        own = ["experiment=null", "DATA.TRAIN.dataset=plain_parts.plain"]
        parts, _, data = built(*own, "MODEL=null", "MODEL.name=plain_parts.Net", *words)
        assert (parts.model.shape, parts.model.channels) == (shape, 3)
        # Only required parameters: what a default covers stays as it was.
        assert "input_shape" not in data["train"].facts

    def test_shape_is_not_read_for_other_collate_functions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "plain_parts.py").write_text(PLAIN)
        monkeypatch.syspath_prepend(tmp_path)
        words = ["experiment=null", "DATA.TRAIN.dataset=plain_parts.plain", "MODEL=null"]
        words += ["MODEL.name=plain_parts.Net", "DATA.TRAIN.collate=list"]
        with raises(ConfigError, code="config.missing_parameter") as caught:
            built(*words)
        assert str(caught.value).count("DATA.TRAIN.collate is stack") == 2

    def test_weights_that_are_loaded_again_are_reported_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        torch.save(built()[0].model.state_dict(), tmp_path / "start.pt")
        caplog.set_level("INFO", "phasetrain")
        made = builder(f"MODEL.weights={tmp_path}/start.pt")
        data = made.data()
        for _ in range(2):
            made.parts(data, made.plan(data))
        assert caplog.text.count("weights from source 0") == 1

    def test_model_without_parameters_is_rejected(self) -> None:
        with raises(ConfigError, key="MODEL.name", given="'torch.nn.Flatten'"):
            built("MODEL.name=torch.nn.Flatten")


class TestLoss:
    def loss(self, *words: str) -> nn.Module:
        return built(*words)[0].loss

    def test_built_in_loss_gets_its_parameters(self) -> None:
        made = self.loss("LOSS.label_smoothing=0.1")
        assert isinstance(made, CrossEntropy)
        assert made.label_smoothing == 0.1

    def test_class_weights_of_a_torch_loss_become_a_tensor(self) -> None:
        made = self.loss("LOSS={name: CrossEntropyLoss, weight: [1, 2, 1, 1, 1, 1, 1, 1, 1, 1]}")
        assert isinstance(made, nn.CrossEntropyLoss)
        assert made.weight is not None
        assert made.weight.tolist() == [1.0, 2.0] + [1.0] * 8

    @pytest.mark.parametrize("weight", [[1, 2.0], (1, 2), torch.tensor([1.0, 2.0])])
    def test_class_weights_may_be_a_fact(self, weight: Any) -> None:
        section = AttrDict({"name": "BCEWithLogitsLoss"})
        made = build_loss(builder().context, {"pos_weight": weight}, section)
        assert isinstance(made.pos_weight, torch.Tensor)
        assert made.pos_weight.tolist() == [1.0, 2.0]

    def test_function_becomes_a_loss_module(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "losses_of_a_test.py").write_text(
            "import torch\n"
            "from phasetrain.losses import LOSSES\n"
            "@LOSSES.register('scaled_for_a_test')\n"
            "def scaled(output: torch.Tensor, target: torch.Tensor, factor: float = 1.0) -> torch.Tensor:\n"
            "    return factor * torch.nn.functional.cross_entropy(output, target)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        words = ["RUN.imports=[losses_of_a_test]", "LOSS={name: scaled_for_a_test, factor: 3.0}"]
        output, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
        expected = 3.0 * nn.functional.cross_entropy(output, target)
        assert torch.equal(self.loss(*words)(output, target), expected)
        assert self.loss(*words).state_dict() == {}

    def test_parameters_of_a_loss_are_trained(self) -> None:
        words = [
            "LOSS={name: torch.nn.AdaptiveLogSoftmaxWithLoss, in_features: 10, n_classes: 10, cutoffs: [5]}"
        ]
        parts, _, _ = built(*words)
        assert parts.updater is not None
        ids = {id(parameter) for parameter in parts.updater.gradients.parameters}
        assert {id(parameter) for parameter in parts.loss.parameters()} <= ids


class TestOptimizer:
    def test_built_in_optimizer_is_fused_and_scheduled(self) -> None:
        parts, _, _ = built(
            "OPTIMIZER={name: adamw, lr: 0.5}", "OPTIMIZER.SCHEDULES={lr: {name: linear}}"
        )
        assert parts.updater is not None
        assert isinstance(parts.updater.optimizer, torch.optim.AdamW)
        assert parts.updater.optimizer.param_groups[0]["fused"] is True
        parts.updater.begin(0.5)
        assert parts.updater.lr == pytest.approx(0.25)

    @pytest.mark.parametrize(
        ("words", "fused"),
        [
            (["OPTIMIZER={name: SGD}"], True),
            (["OPTIMIZER={name: SGD, foreach: true}"], False),
            (["OPTIMIZER={name: Adam, fused: false}"], False),
            (["OPTIMIZER={name: sgd}", "OPTIMIZER.scaler=grad"], False),
        ],
    )
    def test_torch_optimizers_are_fused_unless_configured_otherwise(
        self, words: list[str], fused: bool
    ) -> None:
        parts, _, _ = built(*words, "OPTIMIZER.lr=0.1")
        assert parts.updater is not None
        assert parts.updater.optimizer.param_groups[0]["fused"] is fused

    def test_fp16_gets_a_scaler(self) -> None:
        for precision, scaled in (("fp16", True), ("bf16", False)):
            updater = built(f"MACHINE.precision={precision}")[0].updater
            assert updater is not None
            assert (updater.scaler is not None) is scaled

    def test_schedule_of_an_unknown_option_is_rejected(self) -> None:
        words = [
            "OPTIMIZER={name: RMSprop, lr: 0.1}",
            "OPTIMIZER.SCHEDULES={moment: {name: linear}}",
        ]
        assert "OPTIMIZER.SCHEDULES.moment" in refused(*words)

    def test_value_that_the_optimizer_rejects_is_a_config_error(self) -> None:
        assert refused("OPTIMIZER={name: sgd, momentum: -1}").startswith(
            "OPTIMIZER (optimizer 'sgd'): "
        )


class TestLoaders:
    def test_stacks_of_workers_are_written_to_local_run_folders_only(self) -> None:
        found = {
            folder: built(f"RUN.dir={folder}")[0].loaders for folder in ("some/run", "mem://run")
        }
        assert found["some/run"]["train"].settings.stacks == "some/run/stacks.txt"
        assert found["mem://run"]["train"].settings.stacks is None

    def test_bad_samples_are_counted_per_split_and_saved(self) -> None:
        words = ("DATA.TRAIN.on_bad_sample=drop", "DATA.TRAIN.bad_sample_budget=7")
        parts = built(*words)[0]
        bad = parts.loaders["train"].bad
        assert bad is not None
        assert (bad.policy, bad.budget) == ("drop", 7)
        assert [name for name in builder().task(parts).stateful() if name.startswith("data.")] == [
            "data.train"
        ]
        assert not any(name.startswith("data.") for name in builder().task(built()[0]).stateful())


class Witness(Strategy):
    """Notes what a model is like when the strategy gets hold of it."""

    def __init__(self) -> None:
        super().__init__(World(0, 2))
        self.seen: list[tuple[Any, ...]] = []

    def look(self, event: str, module: nn.Module) -> None:
        if not isinstance(module, SmallCNN):
            return
        parameters = list(module.parameters())
        self.seen.append(
            (
                event,
                parameters[0].device.type,
                any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()),
                sum(not parameter.requires_grad for parameter in parameters),
                "forward" in vars(module.head),
                module._compiled_call_impl is not None,
            )
        )

    def prepare(self, model: nn.Module, loss: nn.Module) -> None:
        self.look("prepare", model)
        self.model = model

    def make_optimizer(self, make: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        self.look("optimizer", self.model)
        return super().make_optimizer(make, parameters)

    def wrap_module(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        self.look("wrap", module)
        return nn.Sequential(module)


class TestPrepare:
    @pytest.mark.feature(
        "65", "SyncBatchNorm over all ranks, a machine or a group", "`DISTRIBUTED.sync_batch_norm`"
    )
    def test_model_is_prepared_in_the_documented_order(
        self,
    ) -> None:
        witness = Witness()

        class Own(Builder):
            def build_strategy(self) -> Strategy:
                return witness

        model = "MODEL={name: small_cnn, width: 4, freeze: [features.0], ema: {}}"
        words = (model, "DISTRIBUTED.sync_batch_norm=true", "MACHINE.compile=aot_eager")
        setup = resolve_config(
            [*words, "MACHINE.activation_checkpointing=[head]", "MACHINE.device=cpu"]
        )
        made = Own(setup.config, setup.machine, World(0, 2))
        data = made.data()
        parts = made.parts(data, made.plan(data))

        assert witness.seen == [
            (event, "cpu", True, 1, True, False) for event in ("prepare", "optimizer", "wrap")
        ]
        assert isinstance(parts.train_model, CompiledModel)
        assert isinstance(parts.train_model.model, nn.Sequential)
        assert parts.train_model.model[0] is parts.model
        assert isinstance(parts.model, SmallCNN)
        mean = parts.averages["ema"].module
        assert isinstance(mean, SmallCNN)
        assert isinstance(mean.features[1], nn.SyncBatchNorm)

    def test_single_process_has_no_sync_batch_norm(self) -> None:
        parts = built("MODEL={name: small_cnn, width: 4}", "DISTRIBUTED.sync_batch_norm=true")[0]
        assert not any(isinstance(part, nn.SyncBatchNorm) for part in parts.model.modules())

    @pytest.mark.parametrize(
        ("word", "stride"), [("true", (36, 1, 12, 4)), ("false", (36, 9, 3, 1))]
    )
    @pytest.mark.parametrize("train", [True, False])
    def test_weights_of_convolutions_have_the_layout_of_the_config(
        self, word: str, stride: tuple[int, ...], train: bool
    ) -> None:
        model = "MODEL={name: small_cnn, width: 4, ema: {}}"
        parts = built(model, f"MACHINE.channels_last={word}", train=train)[0]
        assert parts.model.get_parameter("features.3.weight").stride() == stride
        mean = parts.averages["ema"].module
        assert mean.get_parameter("features.3.weight").stride() == stride

    def test_parts_for_a_test_are_not_compiled_or_checkpointed(self) -> None:
        parts = built(
            "MACHINE.compile=aot_eager",
            "MACHINE.activation_checkpointing=['layers.1']",
            train=False,
        )[0]
        assert parts.train_model is None
        assert not any("forward" in vars(module) for module in parts.model.modules())

    def test_communication_precision_is_rejected_by_other_strategies(self) -> None:
        setup = resolve_config([*WORDS, "DISTRIBUTED={strategy: none, communication: fp16}"])
        joined = World(0, 2, control=object())
        with raises(ConfigError, key="DISTRIBUTED.communication"):
            Builder(setup.config, setup.machine, joined).build_strategy()


class TestGroupsOfWeights:
    RULES = "OPTIMIZER.groups=[{max_ndim: 1, weight_decay: 0.0}, {match: 'head.*', lr_scale: 2.0}]"

    def built(self, *words: str) -> Parts:
        overrides = [
            "experiment=digits",
            "MODEL.name=small_cnn",
            "OPTIMIZER.name=adamw",
            "OPTIMIZER.lr=0.01",
            *words,
        ]
        return built_whole(overrides).task.parts

    def test_rules_reach_the_optimizer_and_the_table(self) -> None:
        parts = self.built(
            self.RULES, "OPTIMIZER.weight_decay=0.1", "OPTIMIZER.SCHEDULES={lr: {name: linear}}"
        )
        assert parts.updater is not None
        groups = parts.updater.optimizer.param_groups
        assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups][
            :2
        ] == [
            (0.01, 0.1, len(groups[0]["params"])),
            (0.01, 0.0, len(groups[1]["params"])),
        ]
        assert {row[0] for row in parts.groups} >= {"defaults", "weight_decay 0"}
        parts.updater.begin(0.5)
        assert [group["lr"] for group in groups][:2] == [0.005, 0.005]

    def test_table_numbers_stages_as_the_plan_does(self) -> None:
        stages = "PHASES.stages=[{epochs: 1, MODEL: {freeze: ['*bias']}}, {epochs: 1}]"
        parts = self.built("PHASES.epochs=null", stages)
        assert [row[0] for row in parts.groups] == ["defaults", "defaults, frozen in stages 0"]

    def test_run_without_rules_has_one_group(self) -> None:
        parts = self.built()
        assert parts.updater is not None
        assert (len(parts.updater.optimizer.param_groups), list(parts.groups)) == (1, [])

    def test_unknown_option_of_a_group_is_rejected(self) -> None:
        with raises(ConfigError, key="OPTIMIZER.groups", suggestion="weight_decay"):
            self.built("OPTIMIZER.groups=[{max_ndim: 1, weight_decy: 0.0}]")
