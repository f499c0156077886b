"""Every part of our own that learns, accumulates or draws at random passes the checks that users'
parts pass."""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from own_files import written
from segment_parts import WORDS as SEGMENTED

from phasetrain.data import DATASETS, SAMPLERS, TRANSFORMS
from phasetrain.engine.batch import GeneratedOutput, SequenceOutput
from phasetrain.hooks import HOOKS
from phasetrain.losses import LOSSES
from phasetrain.meters import METERS
from phasetrain.models import MODELS
from phasetrain.optim import OPTIMIZERS, SCALERS, SCHEDULES
from phasetrain.tasks import Position
from phasetrain.tasks.parts import StepEvents
from phasetrain.testing import (
    assert_exact_resume,
    assert_learns_one_batch,
    assert_no_device_sync,
    assert_state_round_trip,
    assert_world_size_invariant,
)
from phasetrain.testing.build import build_run

ROOT = Path(__file__).parents[2]
BATCHES = ["DATA.TRAIN.batch_size=25", "DATA.TEST.batch_size=32"]
"""A size that neither 2, 3 nor 4 processes divide."""

NO_TEST = "DATA.TEST=null"

LANGUAGE = [
    "experiment=text_tiny",
    "MODEL.width=16",
    "MODEL.depth=1",
    "MODEL.heads=2",
    "MODEL.dropout=0.2",
]
VIEWS = ["experiment=digits_moco", "LOSS.queue=60"]
HEADS = [
    "MODEL={name: trunk_heads, trunk: {name: small_cnn, width: 8, dropout: 0.1, cut: head}}",
    "MODEL.heads={digit: {name: mlp, hidden: []}, probe: {name: mlp, hidden: [], from: features.2, pool: 4}}",
    "LOSS={name: weighted_sum}",
    "LOSS.losses={digit: {name: cross_entropy, output: digit}}",
    "LOSS.losses.probe={name: cross_entropy, output: probe, weight: 0.5}",
    "METERS.accuracy=null",
]
PAIRS = [
    *("RUN.imports=[sequence_parts]", "TASK.name=sequence_to_sequence"),
    "DATA.TRAIN={dataset: reversed_tokens, collate: pad, transforms: []}",
    "DATA.TEST={dataset: reversed_tokens, collate: pad}",
    "METERS={loss: {}, accuracy: null, per: {name: token_error_rate}}",
    "OPTIMIZER={name: adam, lr: 0.02}",
    "MODEL={name: seq2seq_gru, width: 32, dropout: 0.1}",
]
GAN = [
    "TASK={name: gan, judge: {name: small_cnn, width: 4, weights: FILES/judge/weights.pt}}",
    "MODEL={name: conditional_gan, size: 8, noise: 4, width: 4}",
    "METERS={loss: null, accuracy: {}}",
    "PHASES.train_meters=false",
    "OPTIMIZER={name: adam, lr: 0.002}",
    "OPTIMIZER.others.critic={name: adam, lr: 0.002, match: critic.*}",
]
SERIES = [
    *(
        f"DATA.{split}={{dataset: ucr, series: Waves, folder: FILES/ucr/}}"
        for split in ("TRAIN", "TEST")
    ),
    "DATA.TRAIN.transforms=[]",
    "MODEL={name: series_fcn, widths: [4, 4, 4]}",
]
MODEL_WORDS = {
    "alexnet": [
        *("MODEL.widths=[8,8,8,8,8]", "OPTIMIZER.name=adam", "OPTIMIZER.lr=0.01"),
        *(f"DATA.{split}.transforms=[{{name: resize, size: 64}}]" for split in ("TRAIN", "TEST")),
    ],
    "conditional_gan": GAN,
    "mlp": ["MODEL.dropout=0.2"],
    "resnet_cifar": [],
    "seq2seq_gru": PAIRS,
    "seq2seq_transformer": [
        *PAIRS[:-1],
        "MODEL={name: seq2seq_transformer, width: 32, depth: 1, dropout: 0.05}",
    ],
    "series_fcn": SERIES,
    "series_resnet": [*SERIES[:-1], "MODEL={name: series_resnet, width: 4}"],
    "small_cnn": ["MODEL.width=8", "MODEL.dropout=0.1"],
    "transformer": LANGUAGE,
    "trunk_head": [*VIEWS, "MODEL.predictor={name: projection}"],
    "trunk_heads": HEADS,
    "unet": SEGMENTED,
}
OPTIMIZER_WORDS = {
    "sgd": ["OPTIMIZER.lr=0.1", "OPTIMIZER.momentum=0.9", "OPTIMIZER.weight_decay=1e-4"],
    "adam": ["OPTIMIZER.lr=0.01"],
    "adamw": ["OPTIMIZER.lr=0.01"],
    "RMSprop": ["OPTIMIZER.lr=0.001", "OPTIMIZER.momentum=0.5"],
    "NAdam": ["OPTIMIZER.lr=0.01"],
    "lamb": ["OPTIMIZER.lr=0.01"],
    "lars": ["OPTIMIZER.lr=1.0", "OPTIMIZER.weight_decay=1e-4"],
    "muon": ["OPTIMIZER.lr=0.01", "MODEL={name: mlp, hidden: [16]}"],
}
SCALER_WORDS = {
    "auto": ["MACHINE.precision=fp16"],
    "grad": [
        "MACHINE.precision=fp16",
        "OPTIMIZER.scaler={name: grad, init_scale: 1e9, growth_interval: 2}",
    ],
}
SCHEDULE_WORDS = {
    "composite": "parts: [{name: linear, start: 0, end: 1, length: 2 updates}, {name: cosine}]",
    "constant": "warmup: 0.5",
    "cosine": "end: 0.1",
    "cosine_restarts": "period: 2 updates, decay: 0.5",
    "exponential": "end: 0.1",
    "inverse_sqrt": "warmup: 2 updates",
    "linear": "end: 0.1",
    "multistep": "milestones: [0.5]",
    "one_cycle": "rise: 0.5",
    "polynomial": "power: 2",
    "step": "every: 1 epochs, factor: 0.5",
    "wsd": "decay: 0.5",
}
TRANSFORM_WORDS = {
    "apply": ["transforms: [{name: random_shift, pixels: 1}]"],
    "center_crop": ["size: 6"],
    "noise": ["std: 0.1"],
    "multi_crop": ["groups: [{views: 2, transforms: [{name: random_resized_crop, size: 8}]}]"],
    "normalize": ["mean: [0.5], std: [0.25]"],
    "random_crop": ["size: 6"],
    "on_fields": ["fields: [0], transforms: [{name: noise, std: 0.1}]"],
    "random_resized_crop": ["size: 6"],
    "random_rotate": ["degrees: 20"],
    "random_shift": ["pixels: 1"],
    "resize": ["size: 10"],
}
FLAT = ["DATA.TRAIN.transforms=[]", "MODEL.name=mlp"]
DATASET_WORDS = {
    "alice": [*LANGUAGE, "DATA.{split}.context=16"],
    "cmudict": [*PAIRS, "DATA.{split}.file=FILES/cmudict/words.dict"],
    "digits": [],
    "file_list": [
        *("DATA.{split}.images=FILES/file_list/images.json", "DATA.{split}.mode=L"),
        "DATA.{split}.labels=FILES/file_list/labels.json",
    ],
    "from_task": [
        *("DATA.{split}.samples=75", "DATA.{split}.transforms=[]", "METERS=null"),
        *("TASK.name=replay_parts.Generated", "MODEL={name: torch.nn.Linear}"),
        *("MODEL.in_features=1", "MODEL.out_features=1"),
    ],
    "huggingface": [
        "DATA.{split}.path=FILES/huggingface/saved",
        "DATA.{split}.input_key=x",
        "MODEL.classes=10",
        "MODEL.input_shape=[8]",
        *FLAT,
    ],
    "idx": ["DATA.{split}.images=FILES/idx/images", "DATA.{split}.labels=FILES/idx/labels", *FLAT],
    "image_folder": [
        "DATA.{split}.path=FILES/image_folder/",
        "DATA.{split}.mode=L",
        "DATA.{split}.size=8",
    ],
    "image_mask_folder": [
        "DATA.{split}.path=FILES/image_mask_folder/",
        "DATA.{split}.classes=2",
        "DATA.TRAIN.transforms=[]",
        *SEGMENTED[4:],
    ],
    "lines": ["DATA.{split}.files=FILES/lines/*.jsonl", "DATA.{split}.classes=10", *FLAT],
    "mixed": ["DATA.{split}.datasets={a: {dataset: digits}, b: {dataset: digits, split: test}}"],
    "sklearn": ["DATA.{split}.data=wine", *FLAT],
    "synthetic": ["DATA.TRAIN.samples=100", "DATA.TEST.samples=64", *FLAT],
    "tokens": [
        *LANGUAGE,
        "DATA.{split}.path=FILES/tokens/written",
        "DATA.{split}.context=16",
        "DATA.{split}.document_mask=true",
        "METERS.bits_per_byte={}",
    ],
    "text": [*LANGUAGE, "DATA.{split}.files=FILES/text/text.txt", "DATA.{split}.context=16"],
    "stamps": [
        "DATA.{split}.stamps=FILES/stamps/stamps",
        "DATA.{split}.backgrounds=FILES/stamps/backgrounds",
        "DATA.{split}.size=16",
        "DATA.{split}.samples=100",
        "DATA.TRAIN.transforms=[]",
        *SEGMENTED[4:],
    ],
    "ucr": SERIES,
    "webdataset": [
        "DATA.{split}.files=FILES/webdataset/*.tar",
        "DATA.{split}.mode=L",
        "DATA.{split}.classes=10",
    ],
    "windows": [
        *("DATA.{split}.pattern=FILES/lines/*.jsonl", "DATA.{split}.parameter=files"),
        *("DATA.{split}.of={dataset: lines, classes: 10}", *FLAT),
    ],
}
"""`{split}` stands for TRAIN and TEST in turn, `FILES` for a folder of the test."""

IN_MEMORY = ("digits", "synthetic")
"""Data sets that are crossed with every sampler; each of the others is read in one order."""

SAMPLER_WORDS = {
    "infinite": "samples: 60",
    "lanes": "lanes: 5",
    "length_bucketed": "pool: 2, file: FILES/lengths/lengths.txt",
    "proportional": "proportions: {a: 1, b: 2}",
    "stratified": "classes_per_batch: 5",
    "weighted": "balanced: true",
}
SAMPLER_DATA = {"lanes": "lines", "length_bucketed": "digits", "proportional": "mixed"}
"""Samplers of one kind of data."""

LOSS_WORDS = {
    "barlow_twins": ["experiment=digits_barlow"],
    "byol": ["experiment=digits_byol"],
    "cross_entropy": [],
    "deepcluster_v2": ["experiment=digits_deepcluster"],
    "dice": [*(word for word in SEGMENTED if "LOSS" not in word), "LOSS={name: dice}"],
    "dino": ["experiment=digits_dino"],
    "from_model": [
        *(
            "RUN.imports=[task_parts]",
            "MODEL.name=own_loss",
            "LOSS={name: from_model, with_target: true}",
        ),
        "METERS={accuracy: {output: scores}}",
    ],
    "moco": VIEWS,
    "npid": ["experiment=digits_simclr", "LOSS.name=npid", "LOSS.negatives=16", NO_TEST],
    "simclr": ["experiment=digits_simclr"],
    "soft_targets": [
        *(
            "DATA.TRAIN={dataset: lines, files: 'FILES/scores/*.jsonl', classes: 10}",
            "LOSS.name=soft_targets",
            *FLAT,
        ),
        *("DATA.TEST={dataset: lines, files: 'FILES/scores/*.jsonl'}", "METERS.accuracy=null"),
        *("OPTIMIZER.name=adam", "OPTIMIZER.lr=0.05"),
    ],
    "swav": [
        "experiment=digits_swav",
        "LOSS.queue=60",
        "LOSS.queue_updates=1",
        "LOSS.frozen_updates=2",
    ],
    "view_distillation": ["experiment=digits_dino", "LOSS={name: view_distillation}"],
    "weighted_sum": HEADS,
}
VIEWED = "tests/addons/vision/test_self_supervised_runs.py::test_features_are_better_than_those_of_random_weights"
LEARNS_ELSEWHERE = {
    **dict.fromkeys(
        (
            "barlow_twins",
            "byol",
            "deepcluster_v2",
            "dino",
            "moco",
            "npid",
            "simclr",
            "swav",
            "trunk_head",
        ),
        VIEWED,
    ),
    "conditional_gan": "tests/addons/vision/test_gan.py::test_generator_learns_and_a_killed_run_resumes_exactly",
    "transformer": "tests/addons/text/test_language_runs.py::TestTextTiny::test_whole_experiment_reaches_its_metric",
}
"""Parts whose loss of one batch does not come near 0: views of a batch stay what they are to each
other."""

TRACKERS = {"mlflow", "wandb"}
"""Hooks that start processes of their own, which takes seconds."""

OTHER_TARGETS = {
    "bits_per_byte": (torch.randn(8, 10), torch.arange(8)),
    "grouped_auroc": (
        torch.arange(8.0),
        {"label": torch.arange(8) % 2, "group": torch.arange(8) // 4},
    ),
    "multilabel_accuracy": (torch.arange(80.0).view(8, 10) - 40, torch.arange(80).view(8, 10) % 2),
    **dict.fromkeys(
        ("dice", "mean_iou", "pixel_accuracy"),
        (torch.arange(160.0).view(8, 10, 2) % 7, torch.arange(16).view(8, 2) % 10),
    ),
    "mean_average_precision": (
        [
            {
                "boxes": torch.tensor([[0.0, 0, 4, 4 + at]]),
                "scores": torch.tensor([0.5]),
                "labels": torch.tensor([1]),
            }
            for at in range(8)
        ],
        [{"boxes": torch.tensor([[0.0, 0, 4, 5]]), "labels": torch.tensor([1])}] * 8,
    ),
    "regression": (torch.arange(8.0), torch.arange(8.0) * 2),
}
"""Outputs and targets of meters that do not take those of classification."""
METER_WORDS = {"frechet_distance": GAN, "sequence_error_rate": PAIRS, "token_error_rate": PAIRS}
HOOK_WORDS = {
    "early_stopping": "monitor: test/accuracy",
    "metrics": "every_updates: 1",
    "plateau": "monitor: -test/loss, patience: 1, min_delta: 100",
    "recheck": "every_minutes: 1e-9",
    "reload_weights": "folder: weights, every_updates: 1",
}


def transform(name: str) -> str:
    return f"DATA.TRAIN.transforms=[{{{', '.join([f'name: {name}', *TRANSFORM_WORDS.get(name, [])])}}}]"


def transformed(name: str) -> list[str]:
    """Return the words of a run with a transform."""
    more = {"flatten": ["MODEL.name=mlp"], "multi_crop": VIEWS}
    more["on_fields"] = ["DATA.TRAIN.fields=[image, value]"]
    more["rotate"] = ["MODEL.classes=4", "DATA.TEST.transforms=[rotate]"]
    return [*more.get(name, []), transform(name)]


def schedule(name: str) -> str:
    return f"OPTIMIZER.SCHEDULES.lr={{name: {name}, {SCHEDULE_WORDS[name]}}}"


def data(name: str) -> list[str]:
    both = [f"DATA.{{split}}.dataset={name}"] + [
        word for word in DATASET_WORDS[name] if "{split}" in word
    ]
    others = [word for word in DATASET_WORDS[name] if "{split}" not in word]
    return [
        *others,
        *(word.replace("{split}", split) for word in both for split in ("TRAIN", "TEST")),
    ]


def parameters(word: str) -> str:
    """Return the value of an override."""
    return word.partition("=")[2]


def sampler(name: str) -> str:
    return f"DATA.TRAIN.sampler={{{', '.join([f'name: {name}', *filter(None, [SAMPLER_WORDS.get(name)])])}}}"


def loss(name: str) -> list[str]:
    words = LOSS_WORDS.get(name, [])
    return (
        words
        if any("LOSS={" in word or "experiment" in word for word in words)
        else [f"LOSS.name={name}", *words]
    )


def model(name: str) -> list[str]:
    words = MODEL_WORDS.get(name, [])
    return (
        words
        if any("MODEL={" in word or "experiment" in word for word in words)
        else [f"MODEL.name={name}", *words]
    )


def optimizer(name: str) -> list[str]:
    return [f"OPTIMIZER.name={name}", *OPTIMIZER_WORDS[name]]


def scaler(name: str) -> list[str]:
    return [f"OPTIMIZER.scaler={name}", *SCALER_WORDS.get(name, [])]


def hook(name: str) -> str:
    return f"HOOKS.{name}={{{HOOK_WORDS.get(name, '')}}}"


def own(registry: Mapping[str, Any], leave_out: Collection[str] = ()) -> list[str]:
    """Return the names of the parts that phasetrain brings along."""
    found = [name for name, part in registry.items() if part.__module__.startswith("phasetrain.")]
    return sorted(set(found) - set(leave_out))


def list_marks(words: Iterable[str]) -> list[Any]:
    """Return the marks of a case with these words: the add-ons of the experiment and files."""
    addons = {"experiment=text_tiny": "text", "experiment=digits_": "vision", "/tokens/": "text"}
    addons["name: trunk_heads"] = "vision"
    addons |= dict.fromkeys(
        ("dataset=lines", "dataset: lines", "name: lanes", "name: length_bucketed"), "text"
    )
    addons |= {f"OPTIMIZER.name={name}": "optimizers" for name in ("lamb", "lars", "muon")}
    needed = [name for part, name in addons.items() if any(part in word for word in words)]
    return [pytest.mark.addon(*needed)] if needed else []


def cases(names: Iterable[str], words: Callable[[str], list[str]]) -> list[Any]:
    """Return names as parameters, with the add-ons that their words need."""
    return [pytest.param(name, marks=list_marks(words(name))) for name in names]


def names_of_tests(file: Path) -> set[str]:
    """Return the names of the tests in a file, those of a class behind its name."""

    def found(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for one in body:
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test"):
                yield prefix + one.name
            if isinstance(one, ast.ClassDef) and one.name.startswith("Test"):
                yield from found(one.body, f"{prefix}{one.name}::")

    return set(found(ast.parse(file.read_text("utf-8")).body, ""))


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(named, marks=pytest.mark.addon(Path(named).parts[2]))
        for named in sorted(set(LEARNS_ELSEWHERE.values()))
    ],
)
def test_tests_of_learning_in_other_files_exist(named: str) -> None:
    file, _, test = named.partition("::")
    assert test in names_of_tests(ROOT / file)
    assert test not in names_of_tests(Path(__file__))


@pytest.mark.addon("libraries", "observe", "optimizers", "text", "vision")
def test_overrides_are_for_existing_parts() -> None:
    assert set(MODEL_WORDS) <= set(MODELS)
    assert set(SCALER_WORDS) <= set(SCALERS)
    assert set(SCHEDULE_WORDS) <= set(SCHEDULES)
    assert set(TRANSFORM_WORDS) <= set(TRANSFORMS)
    assert set(DATASET_WORDS) == set(own(DATASETS))
    assert set(SAMPLER_WORDS) | set(SAMPLER_DATA) <= set(own(SAMPLERS))
    assert set(LOSS_WORDS) == set(own(LOSSES))
    assert set(LEARNS_ELSEWHERE) <= set(own(LOSSES)) | set(own(MODELS))
    assert set(HOOK_WORDS) | TRACKERS <= set(HOOKS)
    assert set(own(OPTIMIZERS)) < set(OPTIMIZER_WORDS)


class Steps:
    """A task and how many steps it has made on one batch; a run keeps that number, too."""

    def __init__(self, words: list[str]) -> None:
        made = build_run(words)
        self.task, self.machine, self.step = made.task, made.setup.machine, 0
        self.phase = next(phase for phase in made.plan.phases if phase.is_train)
        self.task.begin(self.phase, fresh=True)
        self.batches = next(iter(self.task.batches(self.phase, 0)))

    def __call__(self) -> torch.Tensor:
        """Make an update and return its loss."""
        at = Position(self.phase.split, self.step, self.step, self.step / 10)
        self.step += 1
        with self.machine.apply_settings():
            return self.task.train_step(self.batches, at, StepEvents()).loss

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step} | {
            name: part.state_dict() for name, part in self.task.stateful().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        for name, part in self.task.stateful().items():
            part.load_state_dict(state[name])


def batch_sizes(words: list[str], train: int = 25, test: int = 32) -> list[str]:
    """Return batch sizes of the splits that a run with these words has."""
    found = [f"DATA.TRAIN.batch_size={train}"]
    return found if NO_TEST in words else [*found, f"DATA.TEST.batch_size={test}"]


def assert_parts_save_all(words: list[str]) -> None:
    words = [*words, *batch_sizes(words, 8, 8), "MACHINE.threads=1"]
    assert_state_round_trip(Steps(words), lambda steps: steps(), fresh=lambda: Steps(words))


@pytest.mark.feature(
    "B11", "proof kit for custom parts; all built-in parts pass it", "`phasetrain.testing`"
)
@pytest.mark.by_default("transformer")  # with dropout, heads and tied embeddings
@pytest.mark.parametrize("name", cases(own(MODELS), model))
def test_models_save_all_they_learn(name: str, tmp_path: Path) -> None:
    assert_parts_save_all(written(tmp_path, model(name)))


@pytest.mark.by_default("adamw", "lars")  # one of torch's and one of our own
@pytest.mark.parametrize("name", cases(OPTIMIZER_WORDS, optimizer))
def test_optimizers_save_their_state(name: str) -> None:
    assert_parts_save_all(["MODEL.width=4", *optimizer(name)])


@pytest.mark.by_default("grad")
@pytest.mark.parametrize("name", own(SCALERS))
def test_scalers_save_their_state(name: str) -> None:
    assert_parts_save_all(["MODEL.width=4", *scaler(name)])


@pytest.mark.by_default("moco", "dino")  # a queue and a running mean
@pytest.mark.parametrize("name", own(LOSSES))
def test_losses_save_their_state(name: str, tmp_path: Path) -> None:
    assert_parts_save_all(written(tmp_path, loss(name)))


@pytest.mark.addon("vision")
@pytest.mark.by_default("LOSS.name=forgetful_moco")
@pytest.mark.parametrize(
    "forgetful",
    ["LOSS.name=forgetful_moco", "TASK={name: forgetful_self_supervised, momentum: 0.9}"],
)
def test_unsaved_state_is_detected(forgetful: str) -> None:
    with pytest.raises(AssertionError, match="state_dict"):
        assert_parts_save_all([*VIEWS, "RUN.imports=[self_supervised_parts]", forgetful])


@pytest.mark.feature("B11")
@pytest.mark.parametrize("name", own(METERS))
def test_meters_save_their_counts(name: str) -> None:
    def step(meter: Any) -> Any:
        output, target = OTHER_TARGETS.get(name, (torch.randn(8, 10), torch.arange(8)))
        # With decoded sequences, which other meters do not look at.
        tokens = torch.arange(32).view(8, 4) % 3
        out: Any = SequenceOutput(torch.rand(()), 8.0, 8, output, target, ids=torch.arange(8))
        out.decoded = tokens
        out.references = tokens.flip(0)[:, None]
        if name == "frechet_distance":
            features = torch.randn(2, 8, 3)
            out = GeneratedOutput(torch.rand(()), 8.0, 8, features=features[0])
            out.real_features = features[1]
        meter.update(out)
        return meter.compute()

    assert_state_round_trip(
        METERS.build(name, facts={"classes": 10, "token_bytes": [1] * 10}), step
    )


def test_transforms_together_do_not_depend_on_the_world_size() -> None:
    """Those that keep the size come first; `resize` gives the crops a size to start from again."""
    names = own(TRANSFORMS, ("flatten", "multi_crop", "on_fields", "resize"))
    listed = ", ".join(
        f"{{{', '.join([f'name: {name}', *TRANSFORM_WORDS.get(name, [])])}}}, {{name: resize, size: 8}}"
        for name in names
    )
    words = [f"DATA.TRAIN.transforms=[{listed}, flatten]", "MODEL.name=mlp", *BATCHES]
    assert_world_size_invariant(words, sizes=(1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", own(TRANSFORMS))
def test_transforms_do_not_depend_on_the_world_size(name: str) -> None:
    assert_world_size_invariant([*transformed(name), *BATCHES], sizes=(1, 3))


ORDERS = [
    *((name, order) for name in IN_MEMORY for order in own(SAMPLERS, SAMPLER_DATA)),
    *((name, order) for order, name in SAMPLER_DATA.items()),
    *((name, "") for name in own(DATASETS, IN_MEMORY)),
]


STREAMS = {"lines", "webdataset"}
"""Datasets whose files are divided among the ranks; the others are read by index."""


@pytest.mark.parametrize(
    ("name", "order"),
    [
        pytest.param(
            *pair,
            marks=[
                *list_marks([*data(pair[0]), sampler(pair[1])]),
                *([] if STREAMS & {*pair} else [pytest.mark.slow]),
            ],
            id="-".join(pair),
        )
        for pair in ORDERS
    ],
)
def test_samples_of_a_dataset_do_not_depend_on_the_world_size(
    name: str, order: str, tmp_path: Path
) -> None:
    words = written(tmp_path, [*BATCHES, *data(name), *([sampler(order)] if order else [])])
    assert_world_size_invariant(words, sizes=(1, 2, 3, 4) if name in IN_MEMORY else (1, 3))


def test_orders_of_all_samplers_do_not_depend_on_the_world_size(tmp_path: Path) -> None:
    """Each sampler orders a test split of its own, so that one run reads them all."""
    names = own(SAMPLERS, ("lanes", "proportional"))
    splits = [
        f"DATA.{name.upper()}={{dataset: digits, split: train, batch_size: 25, sampler: {parameters(sampler(name))}}}"
        for name in names
    ]
    assert_world_size_invariant(written(tmp_path, [*BATCHES, *splits]), sizes=(1, 3))


@pytest.mark.addon("observe")
def test_meters_together_need_no_device_sync() -> None:
    names = own(METERS, {*OTHER_TARGETS, *METER_WORDS})
    listed = ", ".join(f"{name}: {{}}" for name in names)
    assert_no_device_sync([*BATCHES, f"METERS={{{listed}}}"])


@pytest.mark.slow
# Decoding looks after each token whether all sequences have ended, so their meters are left out.
@pytest.mark.parametrize("name", own(METERS, {*OTHER_TARGETS, *METER_WORDS}))
def test_meters_need_no_device_sync(name: str) -> None:
    assert_no_device_sync([*BATCHES, f"METERS={{{name}: {{}}}}"])


@pytest.mark.addon("observe")
def test_hooks_together_need_no_device_sync() -> None:
    # A recheck waits for the device, which the interval makes rare.
    words = [*BATCHES, "OPTIMIZER.clip_norm=1e9"]  # without it, there is no `gradient_norm`
    assert_no_device_sync([*words, *map(hook, own(HOOKS, {*TRACKERS, "recheck"}))])


@pytest.mark.slow
@pytest.mark.addon("observe")
def test_trackers_need_no_device_sync() -> None:
    assert_no_device_sync([*BATCHES, *map(hook, TRACKERS)])


def named(kind: str, words: Callable[[str], list[str]], names: Iterable[str]) -> list[Any]:
    """Return the words for each part, as parameters with its kind and name."""
    return [
        pytest.param(words(name), id=f"{kind} {name}", marks=list_marks(words(name)))
        for name in names
    ]


@pytest.mark.slow
@pytest.mark.addon("observe")
@pytest.mark.parametrize(
    "words",
    [
        *named("model", model, own(MODELS, LEARNS_ELSEWHERE)),
        *named("optimizer", optimizer, OPTIMIZER_WORDS),
        *named("loss", loss, own(LOSSES, LEARNS_ELSEWHERE)),
    ],
)
def test_every_part_learns(words: list[str], tmp_path: Path) -> None:
    assert_learns_one_batch([*written(tmp_path, words), *BATCHES], updates=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *named("model", model, own(MODELS)),
        *named(
            "optimizer", lambda name: [*optimizer(name), "OPTIMIZER.accumulate=5"], OPTIMIZER_WORDS
        ),
        *named("scaler", scaler, own(SCALERS)),
        *named("schedule", lambda name: [schedule(name)], own(SCHEDULES)),
        *named("transform", transformed, own(TRANSFORMS)),
        *named("data set", data, own(DATASETS)),
        *named("hook", lambda name: [hook(name)], own(HOOKS)),
        *named("loss", loss, own(LOSSES)),
        *named(
            "meter",
            lambda name: [*METER_WORDS.get(name, []), f"METERS.{name}={{}}"],
            own(METERS, OTHER_TARGETS),
        ),
        *named(
            "sampler",
            lambda name: [sampler(name), *data(SAMPLER_DATA.get(name, "digits"))],
            own(SAMPLERS),
        ),
    ],
)
def test_every_part_resumes_exactly(words: list[str], tmp_path: Path) -> None:
    assert_exact_resume([*written(tmp_path, words), *batch_sizes(words)])


def test_many_parts_resume_exactly_together() -> None:
    words = [
        "MODEL.name=small_cnn",
        "MODEL.width=4",
        "MODEL.dropout=0.3",
        "OPTIMIZER.name=adamw",
        "OPTIMIZER.lr=0.01",
    ]
    words += ["OPTIMIZER.accumulate=5", schedule("cosine"), "METERS={accuracy: {}, loss: {}}"]
    words += [
        "DATA.TRAIN.transforms=[{name: random_shift, pixels: 1}, random_flip, {name: noise, std: 0.1}]"
    ]
    words += ["HOOKS.csv={}"] if "csv" in HOOKS else []
    assert_exact_resume([*BATCHES, *words], steps=[2, 4], workers=(0, 1))
