"""Converted configs of VISSL train, resume exactly, and take VISSL's weights."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import differences_of_runs
from PIL import Image

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.vissl import convert_vissl
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run
from phasetrain.testing.kills import run_quietly

torchvision = pytest.importorskip("torchvision", reason="the extra `torchvision` is not installed")

pytestmark = pytest.mark.addon("libraries", "vision")

COMMON = {
    "DATA.TRAIN.DATA_SOURCES": ["disk_filelist"],
    "DATA.TRAIN.LABEL_SOURCES": ["disk_filelist"],
    "DATA.TRAIN.BATCHSIZE_PER_REPLICA": 4,
    "DATA.TRAIN.DROP_LAST": True,
    "DATA.NUM_DATALOADER_WORKERS": 0,
    "DISTRIBUTED.NUM_PROC_PER_NODE": 1,
    "TEST_MODEL": False,
    "MACHINE.DEVICE": "cpu",
    "MODEL.TRUNK.NAME": "resnet",
    "MODEL.TRUNK.RESNETS.DEPTH": 18,
    "OPTIMIZER.num_epochs": 2,
    "OPTIMIZER.param_schedulers.lr.values": [0.01, 0.001],
    "OPTIMIZER.param_schedulers.lr.milestones": [1],
}
CROP = [{"name": "RandomResizedCrop", "size": 32}, {"name": "RandomHorizontalFlip"}]
SUPERVISED = {
    "DATA.TRAIN.TRANSFORMS": [*CROP, {"name": "ToTensor"}],
    "MODEL.HEAD.PARAMS": [["mlp", {"dims": [512, 2]}]],
    "LOSS.name": "CrossEntropyLoss",
    "METERS.name": "accuracy_list_meter",
}
SIMCLR = {
    "DATA.TRAIN.TRANSFORMS": [
        {"name": "ImgReplicatePil", "num_times": 2},
        *CROP,
        {"name": "ImgPilColorDistortion", "strength": 0.5},
        {"name": "ImgPilGaussianBlur", "p": 0.5, "radius_min": 0.1, "radius_max": 1.0},
        {"name": "ToTensor"},
    ],
    "DATA.TRAIN.COLLATE_FUNCTION": "simclr_collator",
    "MODEL.HEAD.PARAMS": [
        ["mlp", {"dims": [512, 32], "use_relu": True, "skip_last_layer_relu_bn": False}],
        ["mlp", {"dims": [32, 8]}],
    ],
    "LOSS.name": "simclr_info_nce_loss",
}
MIXED = {
    **SIMCLR,
    "DATA.TRAIN.COLLATE_FUNCTION": "cutmixup_collator",
    "DATA.TRAIN.COLLATE_FUNCTION_PARAMS.ssl_method": "simclr",
    "DATA.TRAIN.COLLATE_FUNCTION_PARAMS.mixup_alpha": 1.0,
    "DATA.TRAIN.COLLATE_FUNCTION_PARAMS.cutmix_alpha": 1.0,
}
ROTATED = {
    **SUPERVISED,
    "DATA.TRAIN.TRANSFORMS": [{"name": "ImgRotatePil"}, *CROP, {"name": "ToTensor"}],
    "MODEL.HEAD.PARAMS": [["mlp", {"dims": [512, 4]}]],
}
NPID = {
    "DATA.TRAIN.TRANSFORMS": [*CROP, {"name": "ToTensor"}],
    "DATA.TRAIN.LABEL_TYPE": "sample_index",
    "MODEL.HEAD.PARAMS": [["mlp", {"dims": [512, 8]}]],
    "LOSS.name": "nce_loss_with_memory",
    "LOSS.nce_loss_with_memory.memory_params.embedding_dim": 8,
    "LOSS.nce_loss_with_memory.negative_sampling_params.num_negatives": 5,
}
DEEPCLUSTER = {
    "DATA.TRAIN.TRANSFORMS": [
        {
            "name": "ImgPilToMultiCrop",
            "total_num_crops": 2,
            "size_crops": [32],
            "num_crops": [2],
            "crop_scales": [[0.14, 1]],
        },
        {"name": "RandomHorizontalFlip", "p": 0.5},
        {"name": "ImgPilColorDistortion", "strength": 1.0},
        {"name": "ToTensor"},
    ],
    "DATA.TRAIN.LABEL_TYPE": "sample_index",
    "DATA.TRAIN.COLLATE_FUNCTION": "multicrop_collator",
    "MODEL.HEAD.PARAMS": [["mlp", {"dims": [512, 8]}]],
    "LOSS.name": "deepclusterv2_loss",
    "LOSS.deepclusterv2_loss.num_clusters": [3, 2],
    "LOSS.deepclusterv2_loss.memory_params.crops_for_mb": [0, 1],
    "LOSS.deepclusterv2_loss.memory_params.embedding_dim": 8,
}
MULTI_CROP = [
    {
        "name": "ImgPilToMultiCrop",
        "total_num_crops": 3,
        "size_crops": [32, 32],
        "num_crops": [2, 1],
        "crop_scales": [[0.14, 1], [0.05, 0.14]],
    },
    {
        "name": "ImgPilMultiCropRandomApply",
        "prob": [0.0, 0.5, 0.5],
        "transforms": [{"name": "ImgPilRandomSolarize", "p": 1.0}],
    },
    {"name": "ToTensor"},
]
SWAV = {
    "DATA.TRAIN.TRANSFORMS": MULTI_CROP,
    "DATA.TRAIN.COLLATE_FUNCTION": "multicrop_collator",
    "MODEL.HEAD.PARAMS": [
        ["swav_head", {"dims": [512, 16, 8], "use_bn": True, "num_clusters": [5]}]
    ],
    "MODEL.TEMP_FROZEN_PARAMS_ITER_MAP": [["module.heads.0.prototypes0.weight", 2]],
    "LOSS.name": "swav_loss",
    "LOSS.swav_loss.queue.queue_length": 9,
    "OPTIMIZER.use_larc": True,
    "OPTIMIZER.larc_config.clip": False,
    "OPTIMIZER.regularize_bn": False,
}
VIT = "MODEL.TRUNK.VISION_TRANSFORMERS"
DINO = {
    "DATA.TRAIN.TRANSFORMS": MULTI_CROP,
    "DATA.TRAIN.COLLATE_FUNCTION": "multicrop_collator",
    "MODEL.TRUNK.NAME": "vision_transformer",
    f"{VIT}.IMAGE_SIZE": 32,
    f"{VIT}.HIDDEN_DIM": 16,
    f"{VIT}.MLP_DIM": 32,
    f"{VIT}.NUM_LAYERS": 2,
    f"{VIT}.NUM_HEADS": 2,
    f"{VIT}.DROP_PATH_RATE": 0.5,
    "MODEL.HEAD.PARAMS": [
        [
            "dino_head",
            {"in_dim": 16, "hidden_dim": 8, "bottleneck_dim": 4, "num_clusters": [6]}
            | {"normalize_last_layer": False},
        ]
    ],
    "MODEL.TEMP_FROZEN_PARAMS_ITER_MAP": [
        ["module.heads.0.prototypes0.weight_g", 2],
        ["module.heads.0.prototypes0.weight_v", 2],
    ],
    "LOSS.name": "dino_loss",
    "LOSS.dino_loss.teacher_temp_warmup_iters": 3,
    "OPTIMIZER.name": "adamw",
    # Without a schedule of its own, the head has another optimizer.
    "OPTIMIZER.param_schedulers.weight_decay.name": "cosine",
    "OPTIMIZER.param_schedulers.weight_decay.start_value": 0.04,
    "OPTIMIZER.param_schedulers.weight_decay.end_value": 0.4,
    "OPTIMIZER.param_schedulers.weight_decay.update_interval": "step",
}
SETTINGS = "MODEL.FEATURE_EVAL_SETTINGS"
PROBES = {
    **SUPERVISED,
    f"{SETTINGS}.EVAL_MODE_ON": True,
    f"{SETTINGS}.FREEZE_TRUNK_ONLY": True,
    f"{SETTINGS}.LINEAR_EVAL_FEAT_POOL_OPS_MAP": [
        ["res4", ["AvgPool2d", [[2, 2], 1, 0]]],
        ["res5", ["AdaptiveAvgPool2d", [[1, 1]]]],
    ],
    "MODEL.HEAD.PARAMS": [
        ["eval_mlp", {"in_channels": 256, "dims": [256, 2]}],
        ["eval_mlp", {"in_channels": 512, "dims": [512, 2]}],
    ],
}


@pytest.fixture
def lists(tmp_path: Path) -> Mapping[str, Any]:
    """Return the keys of VISSL for lists of twelve small images of two classes."""
    draw = np.random.default_rng(0)
    for number in range(12):
        pixels = draw.integers(0, 255, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    np.save(tmp_path / "images.npy", np.array([f"{number}.png" for number in range(12)]))
    np.save(tmp_path / "labels.npy", np.arange(12) % 2)
    return {
        "DATA.TRAIN.DATA_PATHS": [str(tmp_path / "images.npy")],
        "DATA.TRAIN.LABEL_PATHS": [str(tmp_path / "labels.npy")],
    }


def write(given: Mapping[str, Any], lists: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the overrides of a converted config."""
    found = convert_vissl(VisslConfig({**COMMON, **given, **lists}))
    assert found.missing == ()
    path = folder / "converted.yaml"
    path.write_text(found.format_yaml("a test"))
    return [str(path)]


@pytest.mark.feature("vissl")
@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [SUPERVISED, SIMCLR, PROBES, MIXED, ROTATED, NPID, SWAV, DINO],
    ids=["supervised", "ssl", "probes", "mixed", "rotated", "npid", "swav", "dino"],
)
def test_converted_training_resumes_exactly(
    given: Mapping[str, Any], lists: Mapping[str, Any], tmp_path: Path
) -> None:
    assert_exact_resume(write(given, lists, tmp_path), steps=[2, 4], workers=None)


@pytest.mark.slow
def test_converted_deepcluster_is_bit_identical_after_a_kill(
    lists: Mapping[str, Any], tmp_path: Path
) -> None:
    """The process is killed in the second epoch, whose clusters come from the memory of the first
    one."""
    given = [
        *write(DEEPCLUSTER, lists, tmp_path),
        "MACHINE.threads=1",
        "CHECKPOINT.every_updates=1",
    ]
    strike = ["RUN.imports=[process_parts]", "HOOKS.strike={rank: 0, update: 5}"]

    def start(name: str, *words: str) -> int:
        """Train in a fork, and return its exit code, negative after a signal."""
        if (pid := os.fork()) == 0:
            code = 1
            with suppress(BaseException):  # the fork must not continue with the code of its parent
                run_quietly([*given, *words, f"RUN.dir={tmp_path / name}"])
                code = 0
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert start("whole") == 0
    assert start("run", *strike) == -signal.SIGKILL
    assert start("run", *strike) == 0
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []


@pytest.mark.slow
def test_weights_of_vissl_load_into_the_converted_model(
    lists: Mapping[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    weights = torchvision.models.resnet18(num_classes=2).state_dict()
    head = {"0.clf.0.weight": weights.pop("fc.weight"), "0.clf.0.bias": weights.pop("fc.bias")}
    trunk = {f"_feature_blocks.{name}": value for name, value in weights.items()}
    state = {"base_model": {"model": {"trunk": trunk, "heads": head}}}
    torch.save({"classy_state_dict": state}, tmp_path / "vissl.torch")
    given = {**PROBES, "MODEL.WEIGHTS_INIT.PARAMS_FILE": str(tmp_path / "vissl.torch")}
    model = build_run(write(given, lists, tmp_path)).task.model
    loaded = model.trunk.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    given = {**SUPERVISED, "MODEL.WEIGHTS_INIT.PARAMS_FILE": str(tmp_path / "vissl.torch")}
    given |= {f"{SETTINGS}.EVAL_MODE_ON": True, f"{SETTINGS}.EVAL_TRUNK_AND_HEAD": True}
    whole = build_run(write(given, lists, tmp_path)).task.model.state_dict()
    assert torch.equal(whole["fc.weight"], head["0.clf.0.weight"])
    assert torch.equal(whole["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])


@pytest.mark.slow
def test_teacher_of_dino_drops_no_layers(lists: Mapping[str, Any], tmp_path: Path) -> None:
    run = build_run(write(DINO, lists, tmp_path))
    run.task.begin(run.plan.phases[0], fresh=True)
    modes = {
        name: {module.training for module in net.modules() if type(module).__name__ == "DropPath"}
        for name, net in (("model", run.task.parts.model), ("teacher", run.task.teacher))
    }
    assert modes == {"model": {True}, "teacher": {False}}
    assert run.task.teacher.training
