"""Converts a config of the lightning-hydra-template to an experiment.

Keys that have a counterpart are translated. Code of a Lightning project (the LightningModule, the
LightningDataModule, callbacks) is listed with the keys or parts to write instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from omegaconf import OmegaConf

from phasetrain.addons.authoring.lightning.compose import compose_config
from phasetrain.errors import ConfigError

Status = Literal["translated", "not needed", "change"]

TRAINER: Mapping[str, str] = MappingProxyType(
    {
        "accelerator": "MACHINE.device",
        "accumulate_grad_batches": "OPTIMIZER.accumulate",
        "check_val_every_n_epoch": "PHASES.test_every.epochs",
        "deterministic": "MACHINE.deterministic",
        "devices": "LAUNCH.processes",
        "gradient_clip_val": "OPTIMIZER.clip_norm",
        "limit_test_batches": "PHASES.limit.test",
        "limit_train_batches": "PHASES.limit.train",
        "limit_val_batches": "PHASES.limit.test",
        "log_every_n_steps": "HOOKS.metrics.every_updates",
        "max_epochs": "PHASES.epochs",
        "max_steps": "PHASES.updates",
        "overfit_batches": "PHASES.overfit",
        "precision": "MACHINE.precision",
        "strategy": "DISTRIBUTED.strategy",
        "sync_batchnorm": "DISTRIBUTED.sync_batch_norm",
        "val_check_interval": "PHASES.test_every.updates",
    }
)
"""Argument of the Trainer -> key."""

VALUES: Mapping[str, Mapping[Any, Any]] = MappingProxyType(
    {
        "MACHINE.device": {"gpu": "cuda", "cpu": "cpu", "auto": "auto"},
        "MACHINE.precision": {
            **dict.fromkeys((32, "32", "32-true"), "fp32"),
            **dict.fromkeys((16, "16", "16-mixed"), "fp16"),
            **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
        },
        "DISTRIBUTED.strategy": {"ddp": "ddp", "fsdp": "fsdp"},
    }
)
"""Key -> value of the Trainer -> value here."""

SCHEDULERS = "OPTIMIZER.SCHEDULES"

NOT_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "callbacks.learning_rate_monitor": "metrics.jsonl has the learning rate",
        "callbacks.model_summary": "`phasetrain plan` prints the model",
        "callbacks.rich_progress_bar": "the hook `console` is on by default",
        "callbacks.tqdm_progress_bar": "the hook `console` is on by default",
        "ckpt_path": "the same command resumes a run",
        "data.pin_memory": "chosen by the device",
        "data.persistent_workers": "workers live as long as the run",
        "extras": "of the template",
        "hydra": "run folders are RUN.dir",
        "optimized_metric": "for sweeps: `hydra.sweeper.prune` and the monitor",
        "paths": "folders of the template",
        "tags": "of the template",
        "test": "DATA.TEST is tested if it is there",
        "train": "`phasetrain` trains, `phasetrain test` tests",
        "trainer._target_": "the engine trains",
        "trainer.default_root_dir": "set RUN.dir",
        "trainer.enable_model_summary": "`phasetrain plan` prints the model",
        "trainer.enable_progress_bar": "the hook `console` is on by default",
        "trainer.min_epochs": "only early stopping ends a run before PHASES.epochs",
        "trainer.num_sanity_val_steps": "the rehearsal does it",
    }
)
"""Key of the template -> why it has no counterpart."""

OBJECTS: Mapping[str, str] = MappingProxyType({"net": "MODEL", "optimizer": "OPTIMIZER"})
"""Argument of the LightningModule -> section."""

LOGGERS: Mapping[str, str] = MappingProxyType(
    {"csv": "csv", "mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb"}
)
"""Logger of the template -> hook."""


@dataclass(frozen=True)
class MigratedKey:
    """The result for a key.

    Attributes:
        key: dotted path in the template.
        status: `change`: you have to write or choose something.
        text: the key here with its value, the reason, or the change to make.
    """

    key: str
    status: Status
    text: str


@dataclass
class LightningMigration:
    """An experiment made from a config.

    Attributes:
        source: path of the config.
        experiment: section -> its keys.
        keys: the result for each key.
    """

    source: str
    experiment: dict[str, Any] = field(default_factory=dict)
    keys: list[MigratedKey] = field(default_factory=list)

    @property
    def to_change(self) -> list[MigratedKey]:
        """The keys that are left to change."""
        return [key for key in self.keys if key.status == "change"]

    def put(self, source: str, key: str, value: Any) -> None:
        """Set a key of the experiment."""
        *sections, last = key.split(".")
        node = self.experiment
        for name in sections:
            node = node.setdefault(name, {})
        node[last] = value
        self.keys.append(MigratedKey(source, "translated", f"{key} = {value}"))

    def change(self, source: str, text: str) -> None:
        """Record a change that the user has to make."""
        self.keys.append(MigratedKey(source, "change", text))

    def drop(self, source: str, reason: str) -> None:
        """Record that a key is not needed."""
        self.keys.append(MigratedKey(source, "not needed", reason))

    def format_yaml(self) -> str:
        """Return the experiment as YAML, with the changes to make as comments."""
        lines = [f"# From {self.source}, by `phasetrain migrate lightning`."]
        lines += [f"# CHANGE {key.key}: {key.text}" for key in self.to_change]
        return "\n".join([*lines, OmegaConf.to_yaml(OmegaConf.create(self.experiment))])

    def format_report(self) -> str:
        """Return a line for each key, with the changes to make last."""
        order = ("translated", "not needed", "change")
        rows = sorted(self.keys, key=lambda key: order.index(key.status))
        return "\n".join(f"{key.status:<11} {key.key}: {key.text}" for key in rows)


def migrate_lightning(
    config: str, choices: Sequence[str] = (), out: str | None = None
) -> LightningMigration:
    """Convert a config of the lightning-hydra-template.

    Args:
        config: path of the main file, such as `configs/train.yaml`.
        choices: `GROUP=NAME`, other choices of its defaults list.
        out: file to write; None: none.

    Raises:
        ConfigError: a file cannot be read, or the main file has no model, data and trainer.
    """
    content = compose_config(Path(config), choices)
    if not {"model", "data", "trainer"} & content.keys():
        raise ConfigError(
            f"{config}: no section model, data or trainer; expected the main config of the "
            "lightning-hydra-template, such as configs/train.yaml",
            code="config.not_found",
        )
    migration = LightningMigration(config)
    readers: dict[str, Callable[[LightningMigration, Any], None]] = {
        "callbacks": _read_callbacks,
        "data": _read_data,
        "logger": _read_loggers,
        "model": _read_model,
        "trainer": _read_trainer,
    }
    for name, value in content.items():
        if name in NOT_NEEDED:
            migration.drop(name, NOT_NEEDED[name])
        elif name in readers:
            readers[name](migration, value or {})
        elif name == "seed" and value is not None:
            migration.put(name, "RUN.seed", value)
        elif name == "task_name":
            migration.put(name, "RUN.name", value)
        elif value is not None:
            migration.change(name, "no counterpart is known; see the guide for Lightning")
    passes = content["trainer"].get("accumulate_grad_batches") if content.get("trainer") else None
    train = migration.experiment.get("DATA", {}).get("TRAIN", {})
    if isinstance(passes, int) and passes > 1 and "batch_size" in train:
        # OPTIMIZER.accumulate divides the batch of an update; Lightning's argument multiplies it.
        key = "DATA.TRAIN.batch_size"
        migration.put("trainer.accumulate_grad_batches", key, passes * train["batch_size"])
    if out is not None:
        Path(out).write_text(migration.format_yaml(), "utf-8")
    return migration


def _is_dropped(migration: LightningMigration, key: str) -> bool:
    if key not in NOT_NEEDED:
        return False
    migration.drop(key, NOT_NEEDED[key])
    return True


def _read_trainer(migration: LightningMigration, trainer: Mapping[str, Any]) -> None:
    for name, value in trainer.items():
        source = f"trainer.{name}"
        if value is None or _is_dropped(migration, source):
            continue
        key = TRAINER.get(name)
        converted = VALUES.get(key or "", {value: value} if not isinstance(value, list) else {})
        if name == "gradient_clip_algorithm":
            if value == "value":
                migration.change(source, "rename OPTIMIZER.clip_norm to OPTIMIZER.clip_value")
        elif key is None or value not in converted or _is_share(name, value):
            where = key or "the guide for Lightning"
            migration.change(source, f"{value!r} has no known counterpart; see {where}")
        elif not (name == "max_steps" and value == -1) and not (
            name == "devices" and (value == "auto" or trainer.get("accelerator") == "cpu")
        ):
            migration.put(source, key, converted[value])


def _is_share(name: str, value: Any) -> bool:
    """Return whether a value of the Trainer is a share of an epoch, where a number is expected."""
    counts = name.startswith(("limit_", "overfit_")) or name == "val_check_interval"
    return counts and isinstance(value, float)


def _read_data(migration: LightningMigration, data: Mapping[str, Any]) -> None:
    keys = {"batch_size": "batch_size", "num_workers": "workers"}
    rest = {}
    for name, value in data.items():
        if _is_dropped(migration, f"data.{name}"):
            continue
        if name in keys and isinstance(value, int):
            for split in ("TRAIN", "VALID", "TEST"):
                migration.put(f"data.{name}", f"DATA.{split}.{keys[name]}", value)
        elif name != "_target_":
            rest[name] = value
    migration.change(
        "data._target_",
        f"set DATA.TRAIN.dataset, DATA.VALID.dataset and DATA.TEST.dataset to a dataset of "
        f"phasetrain, or to functions that return the datasets which {data.get('_target_')} makes "
        f"in `setup` (DATA.VALID=null without validation data); its other "
        f"arguments: {_format(rest)}",
    )


def _read_model(migration: LightningMigration, model: Mapping[str, Any]) -> None:
    rest = {}
    for name, value in model.items():
        if name in OBJECTS and isinstance(value, Mapping):
            section = OBJECTS[name]
            target = str(value.get("_target_", ""))
            migration.put(f"model.{name}", f"{section}.name", target.removeprefix("torch.optim."))
            for key, argument in value.items():
                if not key.startswith("_"):
                    migration.put(f"model.{name}.{key}", f"{section}.{key}", argument)
        elif name == "scheduler" and isinstance(value, Mapping):
            _read_scheduler(migration, value)
        elif name == "compile":
            migration.put("model.compile", "MACHINE.compile", bool(value))
        elif name != "_target_" and value is not None:
            rest[name] = value
    migration.change(
        "model._target_",
        f"set LOSS and METERS to what the training_step of {model.get('_target_')} computes; if it "
        f"does more than loss(net(x), y), write a TASK; its other arguments: {_format(rest)}",
    )


def _read_scheduler(migration: LightningMigration, scheduler: Mapping[str, Any]) -> None:
    name = str(scheduler.get("_target_", "")).rpartition(".")[2]
    source = "model.scheduler"
    here: dict[str, Any] = {}
    if name == "ReduceLROnPlateau":
        sign = "-" if scheduler.get("mode", "min") == "min" else ""
        here = {"monitor": f"{sign}valid/loss", "factor": scheduler.get("factor", 0.1)}
        # The hook acts after this number of measurements, torch after one more.
        here["patience"] = int(scheduler.get("patience", 10)) + 1
        migration.put(source, "HOOKS.plateau", here)
        return
    if name == "StepLR":
        every = f"{scheduler.get('step_size')} epochs"
        here = {"name": "step", "factor": scheduler.get("gamma", 0.1), "every": every}
    elif name == "MultiStepLR":
        milestones = [f"{epoch} epochs" for epoch in scheduler.get("milestones", [])]
        here = {"name": "multistep", "factor": scheduler.get("gamma", 0.1)}
        here["milestones"] = milestones
    elif name == "CosineAnnealingLR" and not scheduler.get("eta_min"):
        here = {"name": "cosine"}
        migration.change(source, "cosine goes to 0 at the end of the run; T_max is not read")
    if here:
        migration.put(source, f"{SCHEDULERS}.lr", here)
    else:
        migration.change(source, f"choose a schedule for {name} in {SCHEDULERS}.lr")


def _read_callbacks(migration: LightningMigration, callbacks: Mapping[str, Any]) -> None:
    for name, value in callbacks.items():
        source = f"callbacks.{name}"
        if value is None or _is_dropped(migration, source):
            continue
        if name == "model_checkpoint" and value.get("monitor"):
            migration.put(source, "CHECKPOINT.best.monitor", _convert_monitor(value))
            if isinstance(value.get("save_top_k"), int) and value["save_top_k"] > 0:
                migration.put(source, "CHECKPOINT.best.keep", value["save_top_k"])
        elif name == "model_checkpoint":
            migration.drop(source, "checkpoints are saved by default")
        elif name == "early_stopping" and value.get("monitor"):
            here: dict[str, Any] = {"monitor": _convert_monitor(value)}
            here |= {key: value[key] for key in ("patience", "min_delta") if key in value}
            migration.put(source, "HOOKS.early_stopping", here)
        else:
            migration.change(source, f"write a hook for {value.get('_target_', name)}")


def _convert_monitor(callback: Mapping[str, Any]) -> str:
    """Return `valid/loss` for `val/loss`, with a minus sign if smaller values are better."""
    split, separator, name = str(callback["monitor"]).partition("/")
    if not separator:
        split, _, name = split.partition("_")
    split = "valid" if split in ("val", "validation") else split
    name = "accuracy" if name.removesuffix("_best") == "acc" else name.removesuffix("_best")
    return f"{'-' if callback.get('mode', 'min') == 'min' else ''}{split}/{name}"


def _read_loggers(migration: LightningMigration, loggers: Mapping[str, Any]) -> None:
    for name, value in loggers.items():
        if name in LOGGERS:
            here: dict[str, Any] = {}
            if name == "wandb" and isinstance(value, Mapping):
                here = {key: value[key] for key in ("project", "entity", "group") if value.get(key)}
            migration.put(f"logger.{name}", f"HOOKS.{LOGGERS[name]}", here)
        else:
            migration.change(
                f"logger.{name}", "write a hook, or use csv, tensorboard, wandb, mlflow"
            )


def _format(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items()) or "none"
