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
    # The last wave is cut off.
    "rounded period": (
        {"wave_type": "full", "restart_interval_length": 0.334, "is_adaptive": True},
        [3.596849, 2.859232, 0.095863, 0.115827, 1.077289, 0.792235, 0.07457],
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


SETTINGS = "MODEL.FEATURE_EVAL_SETTINGS"
WEIGHTS = {"MODEL.WEIGHTS_INIT.PARAMS_FILE": "resnet.torch"}
EVAL = {f"{SETTINGS}.EVAL_MODE_ON": True}


def convert_keys(changes):
    return convert_vissl(VisslConfig({**SUPERVISED, **changes}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # VISSL loads the head unless EVAL_MODE_ON is set without EVAL_TRUNK_AND_HEAD.
        ({}, {"strict": False}),
        (EVAL, {"reinit": ["fc.*"]}),
        ({**EVAL, f"{SETTINGS}.EVAL_TRUNK_AND_HEAD": True}, {"strict": False}),
        # It reads no prefix for its own files.
        ({**EVAL, "MODEL.WEIGHTS_INIT.APPEND_PREFIX": "trunk."}, {"reinit": ["fc.*"]}),
        ({"MODEL.WEIGHTS_INIT.SKIP_LAYERS": ["heads", "bn1"]}, {"reinit": ["fc.*", "*bn1*"]}),
    ],
)
def test_head_of_a_file_is_loaded_if_vissl_loads_it(changes, expected):
    weights = dict(convert_keys({**WEIGHTS, **changes}).experiment["MODEL"]["weights"])
    assert weights.pop("path") == "resnet.torch"
    rules = [[r"^trunk\.(base_model\.)?_feature_blocks\.", ""]]
    if "reinit" not in expected:
        rules.append([r"^heads\.0\.clf\.0\.", "fc."])
    assert weights == {"rename": rules, **expected}


def test_prefix_is_added_to_other_files():
    changes = {"APPEND_PREFIX": "trunk._feature_blocks.", "STATE_DICT_KEY_NAME": ""}
    found = convert_keys(
        WEIGHTS | {f"MODEL.WEIGHTS_INIT.{key}": value for key, value in changes.items()}
    )
    assert found.experiment["MODEL"]["weights"]["rename"] == [
        ["^", "trunk._feature_blocks."],
        [r"^trunk\._feature_blocks\.fc\.", "unused."],
        [r"^trunk\.(base_model\.)?_feature_blocks\.", ""],
        [r"^heads\.0\.clf\.0\.", "fc."],
    ]


NORMS = {"types": "*Norm*", "weight_decay": 0.0}
BIASES = {"match": "*.bias", "weight_decay": 0.0}
BN, BIAS = "OPTIMIZER.regularize_bn", "OPTIMIZER.regularize_bias"
CONSTRUCTOR = "OPTIMIZER.param_group_constructor"
VIT = {"MODEL.TRUNK.NAME": "vision_transformer"}
HEAD = "OPTIMIZER.head_optimizer_params"


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({BN: False, BIAS: False}, [NORMS, BIASES]),
        ({BN: False, BIAS: True}, [NORMS]),
        ({BN: True, BIAS: False}, [BIASES]),
        ({BN: True, BIAS: True}, None),
        ({BN: False, "OPTIMIZER.construct_single_param_group_only": True}, None),
        ({BN: False, "OPTIMIZER.weight_decay": 0.0}, None),
        # Its transformer has timm's names, in which VISSL finds none of these words.
        (
            {**VIT, BN: True, BIAS: True, "OPTIMIZER.non_regularized_parameters": ["class_token"]},
            None,
        ),
        ({BN: True, CONSTRUCTOR: "dino"}, [BIASES]),
        ({**VIT, CONSTRUCTOR: "dino"}, [BIASES, {"match": "*norm*", "weight_decay": 0.0}]),
        (
            {**VIT, CONSTRUCTOR: "lr_decay", "OPTIMIZER.layer_wise_lr_decay.decay": 0.5},
            [
                BIASES,
                {"match": "*norm*", "weight_decay": 0.0},
                {"match": "norm.*", "lr_scale": 0.5},
            ],
        ),
        (
            {f"{HEAD}.use_different_wd": True, f"{HEAD}.weight_decay": 0.25, BN: True, BIAS: True},
            [{"match": "fc.*", "weight_decay": 0.25}],
        ),
    ],
)
def test_weights_that_do_not_decay_are_those_of_vissl(changes, groups):
    found = convert_keys(changes)
    assert found.missing == ()
    assert found.experiment["OPTIMIZER"].get("groups") == groups


LR_HEAD = "OPTIMIZER.param_schedulers.lr_head"


def test_head_with_another_schedule_has_its_own_optimizer():
    cosine = {f"{LR_HEAD}.name": "cosine", f"{LR_HEAD}.start_value": 0.5}
    changes = {**cosine, f"{LR_HEAD}.end_value": 0.0, f"{HEAD}.use_different_lr": True}
    found = convert_keys({**changes, BN: False, BIAS: True})
    optimizer = found.experiment["OPTIMIZER"]
    entry = optimizer["others"]["head"]
    assert (entry["match"], entry["name"], entry["lr"]) == ("fc.*", "sgd", 0.5)
    assert entry["SCHEDULES"] == {
        "lr": {"name": "cosine", "end": 0.0, "every": "epoch"},
        "weight_decay": {"name": "constant"},
    }
    assert optimizer["groups"] == [NORMS]
    # The same steps from another value are a factor.
    steps = {f"{LR_HEAD}.values": [1.0, 0.1, 0.01], f"{LR_HEAD}.milestones": [30, 60]}
    found = convert_keys({**steps, f"{HEAD}.use_different_lr": True, BN: True, BIAS: True})
    assert found.experiment["OPTIMIZER"]["groups"] == [{"match": "fc.*", "lr_scale": 10.0}]


def test_trunk_that_is_frozen_without_features_stays_in_training_mode():
    changes = {**EVAL, f"{SETTINGS}.FREEZE_TRUNK_ONLY": True}
    experiment = convert_keys({**changes, BN: True, BIAS: True}).experiment
    assert "freeze" not in experiment["MODEL"]
    assert experiment["OPTIMIZER"]["groups"] == [{"match": "trunk.*", "lr_scale": 0.0}]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (
            ["vision_transformer_head", {"in_plane": 9, "hidden_dim": 5, "num_classes": 7}],
            {"hidden": [5], "activation": "tanh"},
        ),
        (["mlp", {"dims": [9, 5, 7], "use_relu": True}], {"hidden": [5]}),
        # Without use_relu, VISSL has no activation.
        (["mlp", {"dims": [9, 5, 7]}], {"hidden": [5], "activation": "none"}),
    ],
)
def test_classifier_has_the_activation_of_vissl(head, expected):
    found = convert_keys({"MODEL.HEAD.PARAMS": [head]})
    assert found.experiment["MODEL"]["heads"]["head"] == {"name": "mlp", "classes": 7, **expected}


VIEWED = {"DATA.TRAIN.TRANSFORMS": VIEWS}


@pytest.mark.parametrize(
    ("params", "scaled"),
    [
        ({"name": "dino_head"}, False),
        ({"name": "dino_head", "normalize_last_layer": False}, True),
        (
            {"name": "swav_head", "dims": [9, 2048, 2048, 256], "use_bn": False}
            | {"activation_name": "GELU", "use_weight_norm_prototypes": True},
            True,
        ),
    ],
)
def test_norms_of_prototypes_train_as_in_vissl(params, scaled):
    name = params.pop("name")
    head = [name, {"in_dim": 9, "num_clusters": [8], **params}]
    frozen = [
        ["module.heads.0.prototypes0.weight_g", 9],
        ["module.heads.0.prototypes0.weight_v", 9],
    ]
    found = convert_keys(
        {**VIEWED, "LOSS.name": "dino_loss", "MODEL.HEAD.PARAMS": [head]}
        | {"MODEL.TEMP_FROZEN_PARAMS_ITER_MAP": frozen}
    )
    model = found.experiment["MODEL"]
    expected = {"dimensions": 8, "hidden": [2048, 2048], "bottleneck": 256}
    trained = {"trained_scale": True} if scaled else {}
    assert model["head"] == {"name": "prototypes", **expected, **trained}
    rules = [{"match": "head.scales", "for": 9}] if scaled else []
    assert model["freeze_updates"] == [*rules, {"match": "head.prototypes", "for": 9}]


def test_teacher_of_dino_has_no_stochastic_depth_and_its_temperature_rises_for_updates():
    head = [["dino_head", {"in_dim": 9, "num_clusters": [8]}]]
    changes = {**VIEWED, **VIT, "LOSS.name": "dino_loss", "MODEL.HEAD.PARAMS": head}
    changes |= {"MODEL.TRUNK.VISION_TRANSFORMERS.DROP_PATH_RATE": 0.1}
    experiment = convert_keys(
        {**changes, "LOSS.dino_loss.teacher_temp_warmup_iters": 37530}
    ).experiment
    assert experiment["TASK"]["teacher_drop_path"] is False
    assert experiment["LOSS"]["warmup_updates"] == 37530


def test_queue_of_swav_is_a_multiple_of_the_batch_and_prototypes_are_projected():
    head = [["swav_head", {"dims": [9, 5, 4], "use_bn": True, "num_clusters": [8]}]]
    changes = {**VIEWED, "LOSS.name": "swav_loss", "MODEL.HEAD.PARAMS": head}
    changes |= {"LOSS.swav_loss.queue.queue_length": 1000}
    loss = convert_keys(changes).experiment["LOSS"]
    assert (loss["queue"], loss["projected"]) == (768, True)  # batches of 256
    found = convert_keys({**changes, "LOSS.swav_loss.normalize_last_layer": False})
    assert [one.key for one in found.missing] == ["LOSS.swav_loss.normalize_last_layer"]


def test_last_layer_of_barlow_twins_has_no_bias():
    hidden = {"dims": [9, 5], "use_bn": True, "use_relu": True, "use_bias": False}
    hidden["skip_last_layer_relu_bn"] = False
    heads = [["mlp", hidden], ["mlp", {"dims": [5, 4], "use_bias": False}]]
    changes = {**VIEWED, "LOSS.name": "barlow_twins_loss"}
    head = convert_keys({**changes, "MODEL.HEAD.PARAMS": heads}).experiment["MODEL"]["head"]
    assert head == {
        "name": "projection",
        "hidden": [5],
        "dimensions": 4,
        "batch_norm": True,
        "last_bias": False,
    }
    head = convert_keys({**changes, "MODEL.HEAD.PARAMS": heads[:1]}).experiment["MODEL"]["head"]
    assert (head["hidden"], head["last_hidden"]) == ([], True)


def test_larc_scales_all_weights_and_lars_those_of_its_config():
    optimizer = convert_keys({"OPTIMIZER.use_larc": True}).experiment["OPTIMIZER"]
    assert (optimizer["name"], optimizer["all_weights"]) == ("lars", True)
    for excluded in (False, True):
        changes = {"OPTIMIZER.name": "lars", "OPTIMIZER.exclude_bias_and_norm": excluded}
        optimizer = convert_keys(changes).experiment["OPTIMIZER"]
        assert (optimizer["all_weights"], optimizer["joint_norm"]) == (not excluded, True)


def test_digits_are_pasted_and_images_are_solarized_as_in_vissl():
    items = [{"name": "MNISTImgPil2RGB", "size": 32, "box": [1, 2]}]
    items += [{"name": "ImgPilRandomSolarize"}, {"name": "ImgPilRandomColorJitter", "p": 0.3}]
    train = convert_keys({"DATA.TRAIN.TRANSFORMS": items}).experiment["DATA"]["TRAIN"]
    pad, solarize, jitter = train["transforms"]
    assert pad == {"name": "torchvision.Pad", "padding": [1, 2, 3, 2]}
    assert solarize == {"name": "random_solarize", "probability": 0.66}
    assert (jitter["probability"], jitter["transforms"][0]["hue"]) == (0.3, 0.2)


def test_neighbours_compare_the_output_of_the_head():
    data = {key: value for key, value in SUPERVISED.items() if key.startswith(("DATA", "MODEL.T"))}
    first = {"dims": [2048, 512], "use_relu": True, "skip_last_layer_relu_bn": False}
    changes = {**EVAL, f"{SETTINGS}.EVAL_TRUNK_AND_HEAD": True}
    changes |= {f"{SETTINGS}.FREEZE_TRUNK_AND_HEAD": True, **WEIGHTS}
    changes |= {"MODEL.HEAD.PARAMS": [["mlp", first], ["mlp", {"dims": [512, 128]}]]}
    found = convert_vissl(VisslConfig({**data, **changes, "NEAREST_NEIGHBOR.L2_NORM_FEATS": False}))
    assert found.missing == ()
    assert found.experiment["EXTRACT"] == {"layers": ["head"], "predictions": False}
    assert found.experiment["MODEL"]["head"]["hidden"] == [512]
    (note,) = [one for one in found.notes if one.startswith("Nearest neighbours")]
    assert "--similarity dot" in note
    rule = [r"^heads\.1\.clf\.0\.", "head.2."]
    assert rule in found.experiment["MODEL"]["weights"]["rename"]


def test_targets_are_ignored_as_in_vissl():
    key = "LOSS.cross_entropy_multiple_output_single_target.ignore_index"
    found = convert_keys({key: -1})
    assert found.experiment["LOSS"] == {"name": "cross_entropy", "ignore_index": -1}
    frozen = {**EVAL, f"{SETTINGS}.FREEZE_TRUNK_ONLY": True, key: -1}
    frozen |= {f"{SETTINGS}.LINEAR_EVAL_FEAT_POOL_OPS_MAP": [["res5", ["Identity", []]]]}
    found = convert_keys(frozen)
    assert found.experiment["LOSS"]["losses"] == {
        "res5": {"name": "cross_entropy", "output": "res5"}
    }
    assert any(one.startswith("A target of -1 is an error here") for one in found.notes)


def test_predictions_of_probes_are_the_scores_of_their_heads():
    data = {key: value for key, value in SUPERVISED.items() if key.startswith(("DATA", "MODEL.T"))}
    settings = {**EVAL, f"{SETTINGS}.FREEZE_TRUNK_AND_HEAD": True}
    settings[f"{SETTINGS}.EVAL_TRUNK_AND_HEAD"] = True
    pool = ["AdaptiveAvgPool2d", [[1, 1]]]
    settings[f"{SETTINGS}.LINEAR_EVAL_FEAT_POOL_OPS_MAP"] = [["res5", pool], ["res5", pool]]
    head = ["eval_mlp", {"in_channels": 2048, "dims": [2048, 7]}]
    given = {**data, **settings, **WEIGHTS, "engine_name": "extract_label_predictions"}
    found = convert_vissl(VisslConfig({**given, "MODEL.HEAD.PARAMS": [head, head]}))
    assert found.missing == ()
    assert found.experiment["EXTRACT"]["layers"] == ["heads.res5", "heads.res5_"]
    assert found.experiment["MODEL"]["heads"]["res5_"]["input_norm"] is True
    rules = found.experiment["MODEL"]["weights"]["rename"]
    assert [r"^heads\.1\.clf\.clf\.0\.", "heads.res5_.layers.1."] in rules


def test_dataset_that_vissl_lacks_is_missing():
    changes = {"DATA.TRAIN.DATA_SOURCES": ["torchvision_dataset"]}
    found = convert_keys({**changes, "DATA.TRAIN.DATASET_NAMES": ["VOC2012_SEGMENTATION"]})
    assert [one.key for one in found.missing] == ["DATA.TRAIN.DATASET_NAMES"]
    assert convert_keys({**changes, "DATA.TRAIN.DATASET_NAMES": ["SVHN"]}).missing == ()


def test_tests_after_other_epochs_are_noted():
    test = {key.replace("TRAIN", "TEST"): SUPERVISED[key] for key in SUPERVISED if "DATA" in key}
    found = convert_keys({**test, "TEST_MODEL": True, "TEST_EVERY_NUM_EPOCH": 5})
    (note,) = [one for one in found.notes if one.startswith("Tests follow")]
    assert "epochs 5, 10" in note
    assert "epochs 1, 6" in note


@pytest.mark.parametrize(
    "changes",
    [
        {"OPTIMIZER.param_schedulers.lr.name": "composite"}
        | {"OPTIMIZER.param_schedulers.lr.schedulers": [{"name": "constant", "value": 1.0}] * 3}
        | {"OPTIMIZER.param_schedulers.lr.lengths": [0.5, 0.5]},
        {"MODEL.HEAD.PARAMS": [[["mlp", {"dims": [9, 7]}], ["siamese_concat_view", {}]]] * 2},
    ],
)
def test_fragments_that_others_complete_have_gaps(changes):
    assert convert_keys(changes).missing != ()


def write_configs(folder):
    base = folder / "configs" / "config" / "pretrain"
    base.mkdir(parents=True)
    (base / "simple.yaml").write_text("config: {OPTIMIZER: {num_epochs: 3, momentum: 0.5}}")
    (base / "more.yaml").write_text("config: {OPTIMIZER: {momentum: 0.7, nesterov: True}}")
    return folder / "configs"


@pytest.mark.feature(
    "vissl.command_line", "VISSL's command line is converted", "`phasetrain migrate vissl config=`"
)
def test_command_line_of_vissl_is_read(tmp_path, monkeypatch):
    configs = write_configs(tmp_path)
    words = ["hydra.verbose=true", "config=pretrain/simple", "config.OPTIMIZER.num_epochs=7"]
    words += ["+config/pretrain=more.yaml", "config.DATA.TRAIN.DATA_PATHS=[/a b,c]"]
    words += ["+config.OPTIMIZER.nesterov=false", "engine_name=extract_features"]
    monkeypatch.chdir(tmp_path)
    for folder in (configs, None):
        assert read_vissl(words, folder).given == {
            "OPTIMIZER.num_epochs": 7,
            "OPTIMIZER.momentum": 0.7,
            "OPTIMIZER.nesterov": False,
            "DATA.TRAIN.DATA_PATHS": ["/a b", "c"],
            "engine_name": "extract_features",
        }


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("config=pretrain/none", "file.not_found"),
        ("OPTIMIZER.lr=1", "config.unknown_key"),
        ("hydra.verbose=true", "config.required"),
        ("config.OPTIMIZER.lr=[", "config.wrong_type"),
    ],
)
def test_other_words_are_rejected(word, code, tmp_path):
    with raises(ConfigError, code=code):
        read_vissl([word], write_configs(tmp_path))


def test_next_commands_are_printed(tmp_path):
    found = convert_keys({**WEIGHTS, **EVAL})
    first, *others = found.list_commands("out.yaml")
    assert first.startswith("phasetrain migrate vissl-weights 'resnet.torch' --out resnet.pt")
    assert others[0] == "phasetrain plan out.yaml"
    assert others[-1] == "phasetrain out.yaml"
    assert "DATA.TRAIN.batch_size=8" in others[1]


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
