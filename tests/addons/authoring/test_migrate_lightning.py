"""A config of the lightning-hydra-template becomes an experiment, and names what is left to change."""

from pathlib import Path

import pytest
from raising import raises

from phasetrain.addons.authoring.lightning.convert import migrate_lightning
from phasetrain.app.setup import resolve_config
from phasetrain.cli import main
from phasetrain.errors import ConfigError

FILES = {
    "train.yaml": """
# @package _global_
defaults:
  - _self_
  - data: mnist
  - model: mnist
  - callbacks: default
  - logger: null
  - trainer: default
  - paths: default
  - hydra: default
  - experiment: null
  - optional local: default
task_name: train
tags: [dev]
train: true
test: true
ckpt_path: null
seed: 12
""",
    "data/mnist.yaml": """
_target_: src.data.mnist_datamodule.MNISTDataModule
data_dir: ${paths.data_dir}
batch_size: 128
train_val_test_split: [55_000, 5_000, 10_000]
num_workers: 0
pin_memory: false
""",
    "model/mnist.yaml": """
_target_: src.models.mnist_module.MNISTLitModule
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.001, weight_decay: 0.0}
scheduler:
  _target_: torch.optim.lr_scheduler.ReduceLROnPlateau
  _partial_: true
  mode: min
  factor: 0.1
  patience: 10
net: {_target_: phasetrain.models.SmallCNN, width: 4}
compile: false
""",
    "callbacks/default.yaml": """
defaults: [model_checkpoint, early_stopping, model_summary, swa, _self_]
model_checkpoint: {monitor: val/acc, mode: max, save_last: true}
early_stopping: {monitor: val/acc, patience: 100, mode: max}
""",
    "callbacks/model_checkpoint.yaml": """
model_checkpoint: {_target_: lightning.pytorch.callbacks.ModelCheckpoint, save_top_k: 1}
""",
    "callbacks/early_stopping.yaml": """
early_stopping: {_target_: lightning.pytorch.callbacks.EarlyStopping, min_delta: 0.}
""",
    "callbacks/model_summary.yaml": "model_summary: {max_depth: -1}",
    "callbacks/swa.yaml": "swa: {_target_: lightning.pytorch.callbacks.StochasticWeightAveraging}",
    "logger/wandb.yaml": "wandb: {project: digits, offline: false}",
    "trainer/default.yaml": """
_target_: lightning.pytorch.trainer.Trainer
default_root_dir: ${paths.output_dir}
min_epochs: 1
max_epochs: 10
accelerator: cpu
devices: 1
check_val_every_n_epoch: 1
deterministic: false
""",
    "trainer/long.yaml": """
defaults: [default]
max_epochs: 40
precision: bf16-mixed
accumulate_grad_batches: 2
gradient_clip_val: 0.5
limit_train_batches: 0.1
""",
    "paths/default.yaml": "{root_dir: '${oc.env:PROJECT_ROOT}', data_dir: '${paths.root_dir}/data/'}",
    "experiment/wide.yaml": """
# @package _global_
defaults: [{override /trainer: long}]
seed: 7
model: {net: {width: 8}}
""",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    for name, text in FILES.items():
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path / "configs" / "train.yaml")


@pytest.mark.feature(
    "authoring.migrate_lightning",
    "configs of the lightning-hydra-template are converted; what to change is named",
    "`phasetrain migrate lightning`",
)
def test_keys_with_a_counterpart_are_translated(config: str) -> None:
    assert migrate_lightning(config).experiment == {
        "RUN": {"name": "train", "seed": 12},
        "DATA": {split: {"batch_size": 128, "workers": 0} for split in ("TRAIN", "VALID", "TEST")},
        "MODEL": {"name": "phasetrain.models.SmallCNN", "width": 4},
        "OPTIMIZER": {"name": "Adam", "lr": 0.001, "weight_decay": 0.0},
        "MACHINE": {"compile": False, "device": "cpu", "deterministic": False},
        "HOOKS": {
            "plateau": {"monitor": "-valid/loss", "factor": 0.1, "patience": 11},
            "early_stopping": {"monitor": "valid/accuracy", "patience": 100, "min_delta": 0.0},
        },
        "CHECKPOINT": {"best": {"monitor": "valid/accuracy", "keep": 1}},
        "PHASES": {"epochs": 10, "test_every": {"epochs": 1}},
    }


def test_what_is_left_to_change_is_named(config: str) -> None:
    migration = migrate_lightning(config)
    changes = {key.key: key.text for key in migration.to_change}
    assert changes.keys() == {"data._target_", "model._target_", "callbacks.swa"}
    assert "src.data.mnist_datamodule.MNISTDataModule" in changes["data._target_"]
    assert "train_val_test_split=[55000, 5000, 10000]" in changes["data._target_"]
    assert "LOSS and METERS" in changes["model._target_"]
    assert {"paths", "hydra"} - {key.key for key in migration.keys} == {"hydra"}


def test_choices_replace_those_of_the_defaults_list(config: str) -> None:
    migration = migrate_lightning(config, ["trainer=long", "logger=wandb"])
    experiment = migration.experiment
    assert experiment["PHASES"] == {"epochs": 40, "test_every": {"epochs": 1}}
    assert experiment["OPTIMIZER"]["clip_norm"] == 0.5
    assert experiment["OPTIMIZER"]["accumulate"] == 2
    assert experiment["DATA"]["TRAIN"]["batch_size"] == 256
    assert experiment["MACHINE"]["precision"] == "bf16"
    assert experiment["HOOKS"]["wandb"] == {"project": "digits"}
    assert "trainer.limit_train_batches" in {key.key for key in migration.to_change}


def test_experiment_of_the_template_is_merged_over_all(config: str) -> None:
    experiment = migrate_lightning(config, ["experiment=wide"]).experiment
    assert (experiment["RUN"]["seed"], experiment["MODEL"]["width"]) == (7, 8)
    assert experiment["PHASES"]["epochs"] == 40


def test_result_trains_after_the_changes(config: str, tmp_path: Path) -> None:
    out = tmp_path / "digits.yaml"
    assert main(["migrate", "lightning", config, "--out", str(out)]) == 1
    assert "# CHANGE data._target_: set DATA.TRAIN.dataset" in out.read_text()
    words = [f"DATA.{split}.dataset=digits" for split in ("TRAIN", "VALID", "TEST")]
    words += ["DATA.VALID.split=test", "DATA.TEST.split=test", "METERS={accuracy: {}, loss: {}}"]
    setup = resolve_config([str(out), *words])
    assert setup.config.CHECKPOINT.best.monitor == "valid/accuracy"
    assert setup.config.OPTIMIZER.name == "Adam"


@pytest.mark.parametrize(
    ("choice", "code"),
    [("trainer", "config.syntax"), ("trainer=gpu", "config.not_found")],
)
def test_wrong_choice_is_rejected(config: str, choice: str, code: str) -> None:
    with raises(ConfigError, code=code):
        migrate_lightning(config, [choice])


def test_other_yaml_is_rejected(config: str) -> None:
    with raises(ConfigError, code="config.not_found"):
        migrate_lightning(str(Path(config).parent / "paths" / "default.yaml"))
