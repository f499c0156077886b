"""Conversion of VISSL's configs: single keys, the report, and the command."""

import json

import pytest
import yaml
from raising import raises

from phasetrain.addons.vissl.compose import VisslConfig, read_defaults, read_vissl
from phasetrain.addons.vissl.draft import find_row, list_table_rows, read_key_table
from phasetrain.addons.vissl.key_page import key_page
from phasetrain.addons.vissl.optimizer import convert_schedule
from phasetrain.addons.vissl.vissl import convert_vissl
from phasetrain.cli import main
from phasetrain.errors import ConfigError
from phasetrain.optim.schedules.schedules import make_composite

SUPERVISED = {
    "DATA.TRAIN.DATA_SOURCES": ["disk_folder"],
    "DATA.TRAIN.LABEL_SOURCES": ["disk_folder"],
    "DATA.TRAIN.DATA_PATHS": ["photos/train"],
    "DATA.TRAIN.BATCHSIZE_PER_REPLICA": 32,
    "DATA.TRAIN.TRANSFORMS": [
        {"name": "RandomResizedCrop", "size": 224},
        {"name": "RandomHorizontalFlip"},
        {"name": "ToTensor"},
        {"name": "Normalize", "mean": [0.5] * 3, "std": [0.25] * 3},
    ],
    "MODEL.TRUNK.NAME": "resnet",
    "MODEL.HEAD.PARAMS": [["mlp", {"dims": [2048, 7]}]],
    "LOSS.name": "cross_entropy_multiple_output_single_target",
    "METERS.name": "accuracy_list_meter",
    "METERS.accuracy_list_meter.topk_values": [1, 5],
    "OPTIMIZER.num_epochs": 90,
    "DISTRIBUTED.NUM_PROC_PER_NODE": 8,
}
VIEWS = [
    {"name": "ImgPilToMultiCrop", "total_num_crops": 3, "num_crops": [2, 1]}
    | {"size_crops": [224, 96], "crop_scales": [[0.4, 1], [0.05, 0.4]]},
    {"name": "RandomHorizontalFlip", "p": 0.5},
    {"name": "ImgPilMultiCropRandomApply", "prob": [1.0, 0.0, 0.5]}
    | {"transforms": [{"name": "ImgPilRandomSolarize", "p": 1.0}]},
    {"name": "ImgPilColorDistortion", "strength": 0.5},
]


def convert(**changes):
    given = SUPERVISED | {key.replace("__", "."): value for key, value in changes.items()}
    return convert_vissl(VisslConfig(given))


def status_of(found, key):
    return next((one.status, one.text) for one in found.keys if one.key == key)


@pytest.mark.feature(
    "vissl", "converted VISSL configs, with a report on every key", "`phasetrain migrate vissl`"
)
def test_supervised_training_becomes_an_experiment():
    found = convert()
    assert found.missing == ()
    experiment = found.experiment
    train = experiment["DATA"]["TRAIN"]
    assert (train["dataset"], train["path"], train["batch_size"]) == (
        "image_folder",
        "photos/train",
        256,
    )
    assert train["transforms"] == [
        {"name": "random_resized_crop", "size": 224},
        {"name": "random_flip"},
        {"name": "normalize", "mean": [0.5] * 3, "std": [0.25] * 3},
    ]
    assert "TEST" not in experiment["DATA"]
    assert experiment["MODEL"] == {"name": "torchvision.resnet50", "classes": 7}
    assert experiment["LOSS"] == {"name": "cross_entropy"}
    assert experiment["METERS"] == {
        "loss": {},
        "accuracy": {"name": "accuracy"},
        "accuracy_top5": {"name": "accuracy", "topk": 5},
    }
    optimizer = experiment["OPTIMIZER"]
    assert (optimizer["name"], optimizer["lr"], optimizer["momentum"]) == ("sgd", 0.1, 0.9)
    assert optimizer["SCHEDULES"]["lr"] == {
        "name": "multistep",
        "milestones": ["30 epochs", "60 epochs"],
        "factor": 0.1,
    }
    assert experiment["PHASES"] == {"epochs": 90}


@pytest.mark.feature("vissl")
def test_each_key_of_the_files_is_reported_once():
    found = convert(VERBOSE=True, DATA__TRAIN__COPY_TO_LOCAL_DISK=True, OPTIMIZER__momentun=0.5)
    keys = [one.key for one in found.keys]
    assert len(keys) == len(set(keys)) == len(SUPERVISED) + 3
    assert status_of(found, "DATA.TRAIN.DATA_PATHS") == ("translated", "DATA.TRAIN.dataset")
    assert status_of(found, "VERBOSE")[0] == "not needed"
    assert status_of(found, "OPTIMIZER.momentun") == (
        "not needed",
        "VISSL reads no such key; check its spelling",
    )


def test_copied_keys_are_renamed_and_unused_sections_not_needed():
    found = convert(SEED_VALUE=3, LOSS__moco_loss__queue_size=7)
    assert found.experiment["RUN"] == {"seed": 3}
    assert status_of(found, "SEED_VALUE") == ("renamed", "RUN.seed")
    assert status_of(found, "LOSS.moco_loss.queue_size")[0] == "not needed"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MODEL.TRUNK.NAME", "alexnet_jigsaw"),
        ("LOSS.name", "msn_loss"),
        ("MODEL.HEAD.PARAMS", [["siamese_concat_view", {"num_towers": 9}]]),
        ("METERS.model_output_mask", True),
        ("DATA.TRAIN.COLLATE_FUNCTION", "siamese_collator"),
        ("MODEL.HEAD.PARAMS", [["mlp", {"dims": [2048, 9, 7], "use_bias": False}]]),
        ("DATA.TRAIN.TRANSFORMS", [{"name": "ImgPilRandomPhotometric"}]),
        ("DATA.TRAIN.TRANSFORMS", [{"name": "MNISTImgPil2RGB", "size": 20}]),
        ("OPTIMIZER.name", "adafactor"),
        ("DATA.TRAIN.TRANSFORMS", [{"name": "ImgPil2LabTensor"}]),
    ],
)
def test_gaps_are_missing_with_a_reason(key, value):
    status, reason = status_of(convert(**{key.replace(".", "__"): value}), key)
    if key == "METERS.model_output_mask":
        assert (status, reason) == ("translated", "METERS.LABEL.name")
    else:
        assert status == "missing"
        assert reason


def test_views_of_one_kind_are_groups_of_multi_crop():
    changes = {"DATA__TRAIN__TRANSFORMS": VIEWS, "LOSS__name": "simclr_info_nce_loss"}
    first = {"dims": [2048, 2048], "use_relu": True, "skip_last_layer_relu_bn": False}
    changes |= {"MODEL__HEAD__PARAMS": [["mlp", first], ["mlp", {"dims": [2048, 2048]}]]}
    found = convert(**changes, DATA__TRAIN__LABEL_SOURCES=[])
    (crop,) = found.experiment["DATA"]["TRAIN"]["transforms"]
    assert [group["views"] for group in crop["groups"]] == [1, 1, 1]
    names = [[one["name"] for one in group["transforms"]] for group in crop["groups"]]
    tail = ["apply", "torchvision.RandomGrayscale"]
    assert names == [
        ["random_resized_crop", "random_flip", "random_solarize", *tail],
        ["random_resized_crop", "random_flip", *tail],
        ["random_resized_crop", "random_flip", "apply", *tail],
    ]
    assert found.experiment["MODEL"]["trunk"] == {"name": "torchvision.resnet50", "cut": "fc"}
    assert found.experiment["MODEL"]["head"] == {
        "name": "projection",
        "hidden": [2048],
        "dimensions": 2048,
    }
    assert found.experiment["TASK"] == {"name": "self_supervised"}
    assert found.experiment["DATA"]["TRAIN"]["label_type"] == "sample_index"


def test_probes_of_layers_are_heads_with_a_loss_and_meters_each():
    settings = "MODEL__FEATURE_EVAL_SETTINGS__"
    pools = [
        ["res4", ["AvgPool2d", [[8, 8], 3, 0]]],
        ["res5", ["AdaptiveAvgPool2d", [[2, 1]]]],
    ]
    found = convert(
        **{
            f"{settings}EVAL_MODE_ON": True,
            f"{settings}FREEZE_TRUNK_ONLY": True,
            f"{settings}LINEAR_EVAL_FEAT_POOL_OPS_MAP": pools,
            "MODEL__HEAD__PARAMS": [
                ["eval_mlp", {"in_channels": 1024, "dims": [9216, 7]}],
                ["mlp", {"dims": [4096, 7]}],
            ],
        }
    )
    model = found.experiment["MODEL"]
    assert model["heads"] == {
        "res4": {"name": "mlp", "hidden": [], "classes": 7, "input_norm": True, "from": "layer3"}
        | {"pool": {"kernel": [8, 8], "stride": 3, "padding": 0}},
        "res5": {"name": "mlp", "hidden": [], "classes": 7, "from": "layer4", "pool": [2, 1]},
    }
    assert (model["freeze"], model["input_shape"]) == (["trunk"], [3, 224, 224])
    assert found.experiment["LOSS"]["losses"]["res5"] == {"name": "cross_entropy", "output": "res5"}
    assert list(found.experiment["METERS"]) == [
        "loss",
        "res4_accuracy",
        "res4_accuracy_top5",
        "res5_accuracy",
        "res5_accuracy_top5",
    ]


SCALED = {
    "OPTIMIZER.param_schedulers.lr.auto_lr_scaling.auto_scale": True,
    "OPTIMIZER.param_schedulers.lr.auto_lr_scaling.base_value": 0.3,
    "OPTIMIZER.param_schedulers.lr.name": "composite",
    "OPTIMIZER.param_schedulers.lr.schedulers": [
        {"name": "linear", "start_value": 0.6, "end_value": 4.8},
        {"name": "cosine", "start_value": 4.8, "end_value": 0.0048},
    ],
    "OPTIMIZER.param_schedulers.lr.lengths": [0.1, 0.9],
    "OPTIMIZER.param_schedulers.lr.interval_scaling": ["rescaled", "fixed"],
    "OPTIMIZER.param_schedulers.lr.update_interval": "step",
}


def test_learning_rate_is_scaled_as_vissl_does():
    four = convert_vissl(VisslConfig({**SUPERVISED, **SCALED, "DISTRIBUTED.NUM_NODES": 4}))
    # 32 x 8 x 4 = 1024 samples: 0.3 x 1024 / 256; the warm-up starts at the rate of one node.
    assert four.experiment["OPTIMIZER"]["lr"] == 1.2
    assert four.experiment["OPTIMIZER"]["SCHEDULES"]["lr"] == {
        "name": "composite",
        "parts": [
            {"name": "linear", "start": 0.25, "end": 1.0, "length": 0.1},
            {"name": "cosine", "end": 0.001, "scaling": "fixed"},
        ],
    }
    one = convert_vissl(VisslConfig({**SUPERVISED, **SCALED, "DISTRIBUTED.NUM_NODES": 1}))
    assert one.experiment["OPTIMIZER"]["lr"] == 0.3
    assert one.experiment["OPTIMIZER"]["SCHEDULES"]["lr"] == {"name": "cosine", "end": 0.001}


FULL = {"wave_type": "full", "restart_interval_length": 0.25, "lr_multiplier": 0.5}
RESTARTS = {
    "full": (FULL, [4.8, 3.143299, 0.233521, 1.572479, 1.572479, 0.118931, 1.085869]),
    "adaptive half": (
        {"wave_type": "half", "restart_interval_length": 0.25, "is_adaptive": True},
        [4.8, 3.143299, 3.706916, 1.418883, 1.57405, 0.639983, 0.071858],
    ),
    "adaptive full": (
        {"wave_type": "full", "restart_interval_length": 0.25, "is_adaptive": True},
        [4.097759, 2.683677, 0.23375, 1.57405, 1.57405, 0.0048, 0.0048],
    ),
}


@pytest.mark.parametrize(("params", "expected"), RESTARTS.values(), ids=RESTARTS)
def test_restarts_follow_the_curve_of_vissl(params, expected):
    """The values were computed once by VISSL's class."""
    given = {"name": "cosine_warm_restart", "start_value": 4.8, "end_value": 0.0048, **params}
    peak, found = convert_schedule({**given, "update_interval": "step"})
    assert found.pop("name") == "composite"
    curve = make_composite(found["parts"], updates=1000, updates_per_epoch=100, batch_size=1)
    places = (0, 0.1, 0.3, 0.4, 0.6, 0.8, 0.95)
    assert [peak * curve(where) for where in places] == pytest.approx(expected, abs=2e-5)


def test_parts_of_a_composite_schedule_are_one_list():
    wave = {"name": "cosine_warm_restart", "start_value": 4.8, "end_value": 0.0048, **FULL}
    parts = [{"name": "linear", "start_value": 0.6, "end_value": 4.8}, wave]
    given = {"name": "composite", "schedulers": parts, "lengths": [0.2, 0.8]}
    _, found = convert_schedule({**given, "update_interval": "step"})
    assert [one["name"] for one in found["parts"]] == ["linear"] + ["one_cycle"] * 4
    assert [one.get("length") for one in found["parts"]] == [0.2, 0.2, 0.2, 0.2, None]


def test_weights_of_a_resnet_are_renamed():
    found = convert(MODEL__WEIGHTS_INIT__PARAMS_FILE="resnet.torch")
    assert found.experiment["MODEL"]["weights"] == {
        "path": "resnet.torch",
        "rename": [
            [r"^trunk\.(base_model\.)?_feature_blocks\.", ""],
            [r"^heads\.0\.clf\.0\.", "fc."],
        ],
        "strict": False,
    }


def test_catalog_has_the_paths():
    given = SUPERVISED | {"DATA.TRAIN.DATA_PATHS": [], "DATA.TRAIN.DATASET_NAMES": ["mine"]}
    catalog = {"mine": {"train": ["a", "b"], "val": ["c", "d"]}}
    found = convert_vissl(VisslConfig(given), catalog)
    assert found.experiment["DATA"]["TRAIN"]["path"] == "a"
    found = convert_vissl(VisslConfig(given))
    assert found.experiment["DATA"]["TRAIN"]["path"] == "mine/train"
    assert any("--catalog" in note for note in found.notes)


def test_later_files_are_merged_over_earlier_ones(tmp_path):
    base = {"config": {"OPTIMIZER": {"num_epochs": 3, "weight_decay": "1e-4"}}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "more.yaml").write_text("config: {OPTIMIZER: {num_epochs: 5, momentum: 1e-1}}")
    found = read_vissl([tmp_path / "base.yaml", tmp_path / "more.yaml"])
    assert found.get("OPTIMIZER.num_epochs") == 5
    assert found.get("OPTIMIZER.momentum") == 0.1
    assert found.get("OPTIMIZER.name") == "sgd"
    assert set(found.given) == {f"OPTIMIZER.{key}" for key in ("num_epochs", "weight_decay")} | {
        "OPTIMIZER.momentum"
    }


def test_other_files_are_rejected(tmp_path):
    (tmp_path / "other.yaml").write_text("MODEL: {name: mlp}")
    with raises(ConfigError, code="config.wrong_type"):
        read_vissl([tmp_path / "other.yaml"])
    with raises(ConfigError, code="file.unreadable"):
        read_vissl([tmp_path / "none.yaml"])


def test_command_writes_the_experiment_and_reports_every_key(tmp_path, capsys):
    tree = {}
    for key, value in {**SUPERVISED, "DATA.TRAIN.TRANSFORMS": [{"name": "ImgRotate"}]}.items():
        below = tree
        *parents, last = key.split(".")
        for parent in parents:
            below = below.setdefault(parent, {})
        below[last] = value
    config, out = tmp_path / "config.yaml", tmp_path / "out.yaml"
    config.write_text(yaml.safe_dump({"config": tree}))
    words = ["migrate", "vissl", str(config), "--out", str(out), "--json"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert {one["status"] for one in found["keys"]} == {"translated", "missing"}
    text = out.read_text()
    assert text.startswith("# @package _global_\n# Converted from config.yaml")
    assert "# missing: DATA.TRAIN.TRANSFORMS: ImgRotate (unknown transform)" in text
    assert yaml.safe_load(text) == found["experiment"]
    assert main(words) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "file.exists"


def test_every_key_of_vissl_has_an_entry_in_the_table_and_on_the_page():
    page = key_page()
    for key, row in list_table_rows():
        assert row, key
        name = key.replace("DATA.TRAIN.", "DATA.X.").replace("DATA.TEST.", "DATA.X.")
        assert f"| `{name}` | " in page
    assert len(read_defaults()) == 600
    assert find_row("DATA.TRAIN.DROP_LAST") == "DATA.*.drop_last"


def test_page_of_the_docs_is_up_to_date(request):
    path = request.config.rootpath / "docs" / "addons" / "vissl_keys.md"
    assert path.read_text("utf-8") == key_page(), "run `make reference`"


def test_every_pattern_of_the_table_fits_a_key_or_an_addition_to_the_defaults():
    from fnmatch import fnmatchcase

    keys = list(read_defaults())
    additions = ("COLLATE_FUNCTION_PARAMS", "REGNET", "TRUNK_PARAMS", "SLURM", "distillation_loss")
    additions += ("weight_decay",)
    for pattern in read_key_table():
        fits = any(fnmatchcase(key, pattern) for key in keys)
        assert fits or "*" not in pattern or any(word in pattern for word in additions), pattern


def test_svms_of_features_are_a_probe() -> None:
    changes = {"SVM.costs.costs_list": [0.1, 2], "SVM.costs.base": 10.0}
    changes |= {"SVM.costs.power_range": [1, 3], "SVM.low_shot.k_values": [1, 8], "SVM.dual": False}
    data = {key: value for key, value in SUPERVISED.items() if key.startswith(("DATA", "MODEL.T"))}
    found = convert_vissl(VisslConfig({**data, **changes}))
    (note,) = [one for one in found.notes if one.startswith("SVMs")]
    assert "--kind svm --costs 0.1 2 10 100 --folds 3`" in note
    assert "`--shots 1 8 --draws 5`" in note
    assert [one.key for one in found.missing] == ["SVM.dual"]


def test_clusters_are_labels_of_prototypes_or_of_a_clustering():
    data = {key: value for key, value in SUPERVISED.items() if key.startswith(("DATA", "MODEL.T"))}
    head = ["swav_head", {"dims": [2048, 512, 128], "use_bn": True, "num_clusters": [30]}]
    given = {**data, "engine_name": "extract_cluster", "MODEL.HEAD.PARAMS": [head]}
    given |= {"MODEL.WEIGHTS_INIT.PARAMS_FILE": "swav.torch"}
    given |= {"MODEL.FEATURE_EVAL_SETTINGS.EVAL_TRUNK_AND_HEAD": True}
    found = convert_vissl(VisslConfig(given))
    assert found.missing == ()
    model = found.experiment["MODEL"]
    expected = {"name": "prototypes", "dimensions": 30, "hidden": [512], "bottleneck": 128}
    assert model["head"] == {**expected, "batch_norm": True}
    rule = [r"^heads\.0\.prototypes0\.weight(_v)?$", "head.prototypes"]
    assert rule in model["weights"]["rename"]
    given = {**data, "CLUSTERFIT.NUM_CLUSTERS": 20, "CLUSTERFIT.FEATURES.LAYER_NAME": "res5"}
    found = convert_vissl(VisslConfig(given))
    assert found.missing == ()
    (note,) = [one for one in found.notes if one.startswith("Clusters")]
    assert "--layer res5 --clusters 20 --iterations 50 --seed 0 --out .`" in note


def test_teacher_of_views_is_a_trained_model():
    base = "DISTILLATION__TEACHER_MODEL__"
    head = [["dino_head", {"in_dim": 768, "num_clusters": [99]}]]
    changes = {"DATA__TRAIN__TRANSFORMS": VIEWS, "LOSS__name": "dino_distillation_loss"}
    changes |= {"MODEL__HEAD__PARAMS": head, f"{base}HEAD__PARAMS": head}
    changes |= {f"{base}TRUNK__RESNETS__DEPTH": 101}
    changes |= {f"{base}WEIGHTS_INIT__PARAMS_FILE": "teacher.torch"}
    found = convert(**changes, LOSS__dino_distillation_loss__swapped_assignment=True)
    assert found.missing == ()
    task = found.experiment["TASK"]
    assert (task["teacher_views"], task["teacher"]["weights"]["path"]) == (2, "teacher.torch")
    assert task["teacher"]["trunk"] == {"name": "torchvision.resnet101", "cut": "fc"}
    assert task["teacher"]["head"]["dimensions"] == 99
    assert found.experiment["LOSS"]["swapped"] is True


def test_test_only_needs_no_training_data():
    tests = {key.replace("TRAIN", "TEST"): value for key, value in SUPERVISED.items()}
    found = convert_vissl(VisslConfig(SUPERVISED | tests | {"TEST_ONLY": True}))
    assert found.missing == ()
    assert list(found.experiment["DATA"]) == ["TEST"]
    assert found.experiment["PHASES"] == {"epochs": 0, "test_first": True}
    assert status_of(found, "DATA.TRAIN.DATA_PATHS")[0] == "not needed"
