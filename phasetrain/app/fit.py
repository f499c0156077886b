"""Train a model, datasets and a loss that exist in Python."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from phasetrain.app.api import run
from phasetrain.app.build_hooks import GivenHooks, label_hooks, make_label
from phasetrain.app.engines import OnException
from phasetrain.app.python_objects.describe_optimizer import describe_optimizer
from phasetrain.app.result import RunResult
from phasetrain.app.select_checkpoint import load_saved_weights
from phasetrain.app.train.training import Loop
from phasetrain.checkpoint.weights import find_checkpoint
from phasetrain.config.addons import require_service
from phasetrain.config.compose.folders import find_config_dir
from phasetrain.config.compose.sources import ConfigFiles
from phasetrain.config.problems import raise_all
from phasetrain.config.registry import parameters
from phasetrain.distributed.dtensors import full_tensor
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import ConfigError, Problem, did_you_mean
from phasetrain.hooks import Hook, Run
from phasetrain.losses import LOSSES, FunctionLoss
from phasetrain.models.sources import WeightSource
from phasetrain.runtime.nested import map_tensors
from phasetrain.runtime.storage import open_storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Task


def fit(  # noqa: PLR0913 - all but two are keywords, each of which a caller knows from elsewhere
    model: Any,
    train: Any = None,
    *,
    test: Any = None,
    loss: Any = None,
    optimizer: Any = None,
    metrics: Any = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    hooks: GivenHooks | None = None,
    loop: Loop = PhaseEngine.run,
    terminal: Terminal | None = None,
    config_dir: str | Path | None = None,
    on_exception: OnException = "raise",
    **overrides: Any,
) -> RunResult:
    """Train a model on a dataset, both given as objects, and return the result.

    The objects become parts of a config like any other run's: `phasetrain.run` trains it, and the
    same call, in this process or the next, resumes it. At the end `model` has the weights of the
    run. See docs/python.md for the effect of each kind of object on an exact resume.

    Args:
        model: a torch.nn.Module, which the run copies, or a class or name of models; also a
            LightningModule, whose steps compute the loss and which configures the optimizer.
        train: a map-style dataset of pairs (input, target), a torch DataLoader of one, or a name;
            without it and with `test`, the model is tested and not trained.
        test: as `train`, or a mapping from names of test splits to such.
        loss: a module or function `loss(output, target)` that returns the mean over the batch, or a
            class or name of losses; `from_model` for a model that returns its own loss.
        optimizer: a class such as torch.optim.AdamW, an optimizer of the parameters of `model`, a
            function of parameters that returns one, or a name.
        metrics: meters, torchmetrics metrics or functions of all outputs and targets: one, a list,
            or a mapping from labels; each an object, a class or a name. The mean loss is always
            measured.
        epochs: passes over the training data.
        batch_size: samples per update, if `train` is not a DataLoader.
        hooks: hooks in addition to section HOOKS: a list, or a mapping from labels.
        loop: runs the engine of a training, see `phasetrain.run`.
        terminal: where to print; standard output by default.
        config_dir: folder with your configs.
        on_exception: `ignore` returns a failed run's result instead of raising its exception.
        **overrides: sections of the config, such as `OPTIMIZER={"clip_norm": 1.0}` or
            `RUN={"dir": "runs/a"}`; they win over the arguments.

    Raises:
        KeyboardInterrupt: Ctrl-C has stopped the run, which is saved; `model` has its weights.
        PhasetrainError: as for `phasetrain.run`; an argument is missing (code
            `config.missing_argument`), or cannot be described (see `describe_optimizer` and
            `split_loader`).

    Example:
        >>> result = phasetrain.fit(
        ...     net, train, test=test, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW,
        ...     metrics=["accuracy"], epochs=3
        ... )
        >>> result.last["test/accuracy"]
    """
    _check_names(overrides)
    loss, optimizer, sections = _read_steps(model, loss, optimizer)
    overrides = sections | overrides
    only_tests = train is None and test is not None and not epochs and not _names(overrides, "DATA")
    required = {"MODEL": model, "LOSS": loss}
    if not only_tests:
        required |= {"DATA": train, "OPTIMIZER": optimizer}
    _check_given(overrides, required)
    config: dict[str, Any] = {
        "experiment": None,
        "RUN": {"name": make_label(model)},
        "MODEL": _describe_name("MODEL", model, config_dir),
    }
    if only_tests:
        config["RUN"] |= {"engine": "test", "checkpoint": "none"}
    if data := _describe_data(train, test):
        config["DATA"] = data
    if batch_size is not None:
        config["DATA.TRAIN.batch_size"] = batch_size
    if loss is not None:
        loss = _as_part(loss)
        config["LOSS"] = _describe_name("LOSS", loss, config_dir)
    if optimizer is not None:
        modules = [module for module in (model, loss) if isinstance(module, nn.Module)]
        config["OPTIMIZER"] = describe_optimizer(optimizer, *modules)
    # The loss comes last: the first metric is the one by which `best` chooses.
    config["METERS"] = _describe_metrics(metrics)
    config["METERS"].setdefault("loss", {})
    if epochs is not None:
        config["PHASES"] = {"epochs": epochs}
    extra = label_hooks(hooks)
    if isinstance(model, nn.Module):
        _check_adapters(overrides)
        extra = {"return_weights": ReturnWeights(model), **extra}  # the first hook is closed last
    result = run(
        [config, overrides],
        hooks=extra,
        loop=loop,
        terminal=terminal,
        config_dir=config_dir,
        on_exception=on_exception,
    )
    _raise_interrupt(result)
    if isinstance(model, nn.Module) and result.state == "finished" and not result.seconds:
        _load_finished(model, result)
    return result


class ReturnWeights(Hook):
    """Copies the weights at the end of the run into the model that was given.

    Args:
        model: the caller's model; the run has trained a copy.
    """

    main_only = False
    observe_only = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._task: Task | None = None

    def on_end(self, run: Run) -> None:
        """Keep the task: other hooks may still change its weights, or load the best ones."""
        self._task = run.task

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Copy nothing."""
        self._task = None

    def close(self) -> None:
        """Copy the weights."""
        if self._task is not None:
            weights = self._task.shared_state()["model"]
            self.model.load_state_dict(map_tensors(weights, full_tensor))
            self._task = None


def _raise_interrupt(result: RunResult) -> None:
    """Raise KeyboardInterrupt if the run was interrupted: a loop over calls would start the next
    one."""
    if result.state == "interrupted":
        # torch imports it at the exit, and Python then forgets the interrupt: exit code 1, not 130
        with suppress(ImportError):
            import_module("tabulate")
        raise KeyboardInterrupt(
            f"Ctrl-C after {result.updates} updates; {result.folder} is saved, and the same call "
            "resumes it"
        )


def _load_finished(model: nn.Module, result: RunResult) -> None:
    """Load the weights of a run that had finished before this call."""
    source = WeightSource(result.loaded_checkpoint or result.folder, where="fit")
    loaded = find_checkpoint(source, open_storage(result.folder))
    load_saved_weights(model, loaded)


def _read_steps(model: Any, loss: Any, optimizer: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return loss, optimizer and further sections; a LightningModule defines its own."""
    if not hasattr(model, "configure_optimizers"):
        return loss, optimizer, {}
    describe = require_service("describe_lightning_module", "libraries", "MODEL: a LightningModule")
    described: tuple[Any, Any, dict[str, Any]] = describe(model, loss, optimizer)
    return described


def _check_adapters(overrides: Mapping[str, Any]) -> None:
    """Reject adapters for a model of the caller, whose layers have none to take the weights."""
    section = overrides.get("MODEL")
    if isinstance(section, Mapping) and section.get("adapters") is not None:
        raise ConfigError(
            "MODEL.adapters: the run trains a copy of the model, and your object has no adapters "
            "that could take the weights; pass the class of the model",
            code="config.conflict",
        )


def _check_names(overrides: Mapping[str, Any]) -> None:
    """Reject a keyword that is rather a misspelt argument of `fit` than a key of the config."""
    for key in overrides:
        near = did_you_mean(key, list(parameters(fit)))
        if near and key.islower() and key != "experiment":
            raise ConfigError(
                f"{key}: fit has no such argument{near}", code="config.unknown_argument"
            )


def _names(overrides: Mapping[str, Any], section: str) -> bool:
    return any(key.partition(".")[0] in (section, "experiment") for key in overrides)


def _check_given(overrides: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    missing = []
    for section, value in required.items():
        if value is None and not _names(overrides, section):
            word = {"DATA": "train"}.get(section, section.lower())
            message = (
                f"{section}: fit has no default for it; give the argument `{word}`, or "
                f"{section}={{...}}"
            )
            missing.append(Problem.from_message(message, "config.missing_argument"))
    raise_all(missing)


def _as_part(loss: Any) -> Any:
    """Return a loss; a function of output and target that no name describes becomes a module."""
    if not isinstance(loss, FunctionType | BuiltinFunctionType):
        return loss
    # A config takes a function of this form for the loss, and any other one for a factory.
    if LOSSES.name_of(loss) and list(parameters(loss))[1:2] == ["target"]:
        return loss
    return NamedFunctionLoss(loss)


class NamedFunctionLoss(FunctionLoss):
    """A function `loss(output, target)` whose text identifies it.

    Args:
        function: function that returns the mean loss over the batch.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, {})

    def extra_repr(self) -> str:
        """Return the name of the function."""
        return f"{self._function.__module__}.{self._function.__qualname__}"


def _describe_name(section: str, part: Any, config_dir: str | Path | None) -> Any:
    """Return the config of a part that is given by its name; anything else is returned as it is."""
    if not isinstance(part, str):
        return part
    folder = find_config_dir(None if config_dir is None else str(config_dir))
    # `LOSS=label_smoothing` selects a file of the section's folder, which may have parameters.
    if part in ConfigFiles(folder).options(section):
        return part
    return {"name": part}


def _describe_data(train: Any, test: Any) -> dict[str, Any]:
    """Return the splits of section DATA; empty if the overrides name the data."""
    splits = _describe_tests(test)
    if train is not None:
        splits["TRAIN"] = _describe_split(train)
    return splits


def _describe_tests(test: Any) -> dict[str, Any]:
    if test is None:
        return {}
    if isinstance(test, Mapping):
        tests = {str(name).upper(): split for name, split in test.items()}
        return {key: _describe_split(split, key) for key, split in tests.items()}
    return {"TEST": _describe_split(test, "TEST")}


def _describe_split(data: Any, key: str = "TRAIN") -> Any:
    if isinstance(data, DataLoader | Mapping):
        return data
    if isinstance(data, tuple | list) and (
        any(isinstance(item, Dataset | DataLoader) for item in data)
        or (isinstance(data, tuple) and all(hasattr(item, "shape") for item in data))
    ):
        raise ConfigError(
            f"DATA.{key}: a {type(data).__name__} of {type(data[0]).__name__} is not a dataset; "
            "tensors become one by TensorDataset(inputs, targets), several tests a mapping from "
            "names, and several datasets one by ConcatDataset(list)",
            code="config.wrong_part",
        )
    return {"dataset": data}


def _describe_metrics(metrics: Any) -> dict[str, Any]:
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return {
            label: {"name": metric} if isinstance(metric, str) else metric
            for label, metric in metrics.items()
        }
    if isinstance(metrics, Sequence) and not isinstance(metrics, str):
        return {make_label(metric): {"name": metric} for metric in metrics}
    return {make_label(metrics): {"name": metrics}}
