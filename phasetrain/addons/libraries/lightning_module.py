"""A LightningModule as the model of `phasetrain.fit`: its steps are the task, its optimizer is
section OPTIMIZER."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phasetrain.app.python_objects.describe_optimizer import describe_optimizer
from phasetrain.engine.batch import Batch
from phasetrain.engine.step_logs import RESERVED, log
from phasetrain.errors import ConfigError
from phasetrain.tasks import TASKS, Supervised

GUIDE = "docs/guides/lightning.md lists the replacements"

METHODS = (
    "backward",
    "clip_gradients",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "configure_sharded_model",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""Methods that Lightning calls and this task does not, in addition to those that begin with on_."""

UNSUPPORTED_SCHEDULERS = (
    "ChainedScheduler",
    "LambdaLR",
    "MultiplicativeLR",
    "ReduceLROnPlateau",
    "SequentialLR",
)


def describe_lightning_module(
    module: nn.Module, loss: Any, optimizer: Any
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return loss, optimizer and further sections that train a LightningModule.

    Args:
        module: the LightningModule.
        loss: argument of `fit`; must be None.
        optimizer: argument of `fit`; None: what `configure_optimizers` returns.

    Raises:
        ConfigError: the module has code that only Lightning's Trainer calls (code
            `lightning.unsupported`), or its optimizer cannot be described (code
            `config.invalid_optimizer`).
    """
    if loss is not None:
        raise _unsupported(
            "LOSS", "the `training_step` of a LightningModule computes the loss; omit `loss`"
        )
    _check_methods(module)
    if optimizer is None:
        optimizer = _describe_configured(module)
    return {"name": "from_model"}, optimizer, {"TASK": {"name": "lightning"}}


@TASKS.register("lightning")
class LightningTask(Supervised):
    """Learns the loss that `training_step` of a LightningModule returns.

    A step gets the list [input, target], or the input if samples have no target. Tests call
    `validation_step`, or `test_step` if there is none; it has to return the loss. `self.log` calls
    `phasetrain.log`. The index of a batch and `self.trainer` cannot be used.

    Raises:
        ConfigError: a step uses what only Lightning's Trainer has, or returns no loss.
    """

    def output_of(self, batch: Batch) -> Any:
        """Return the loss of a micro-batch."""
        module: Any = self.parts.model
        step = module.training_step if self._trains else _find_test_step(module)
        values = batch.input if batch.target is None else [batch.input, batch.target]
        arguments = (values, _NoIndex(step.__name__))[: len(inspect.signature(step).parameters)]
        with _without_trainer(module, step):
            # Through the wrapper of the strategy, which synchronizes gradients.
            output = self.model(*arguments)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise _unsupported(
                "MODEL",
                f"`{step.__name__}` returns no loss; return the loss, or a mapping with `loss`",
            )
        return loss


def _find_test_step(module: Any) -> Callable[..., Any]:
    for step in (module.validation_step, module.test_step):
        if _is_overridden(module, step.__name__):
            named: Callable[..., Any] = step
            return named
    raise _unsupported(
        "DATA.TEST", "the module has neither `validation_step` nor `test_step`; omit `test`"
    )


class _NoTrainer:
    """Replaces the Trainer: without one, the current epoch would silently be 0."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _unsupported("MODEL", f"a step of the LightningModule uses `trainer.{name}`; {GUIDE}")


class _NoIndex:
    """Replaces the index of a batch, which depends on how a run was resumed."""

    def __init__(self, step: str) -> None:
        self._step = step

    def _reject(self, *args: Any) -> NoReturn:
        raise _unsupported(
            "MODEL",
            f"`{self._step}` uses the index of the batch, which a run here does not have; "
            "log with self.log, which needs no index, or write a task (docs/task.md)",
        )

    __add__ = __bool__ = __eq__ = __float__ = __floordiv__ = __ge__ = __gt__ = _reject
    __index__ = __int__ = __le__ = __lt__ = __mod__ = __mul__ = __ne__ = __radd__ = _reject
    __rmul__ = __rsub__ = __sub__ = __truediv__ = __hash__ = __str__ = _reject


@contextmanager
def _without_trainer(module: Any, step: Callable[..., Any]) -> Iterator[None]:
    """Let the next call of a module be a step, without a Trainer and with phasetrain's log."""
    own = vars(module)
    before = {name: own[name] for name in ("_trainer", "forward", "log", "log_dict") if name in own}

    def call_step(*args: Any) -> Any:
        del own["forward"]  # the step calls the module itself
        return step(*args)

    own |= {
        "_trainer": _NoTrainer(),
        "forward": call_step,
        "log": _log,
        "log_dict": _log_all,
    }
    try:
        yield
    finally:
        for name in ("_trainer", "forward", "log", "log_dict"):
            own.pop(name, None)
        own.update(before)


def _log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    if name in RESERVED:  # such as `loss`, which every run measures
        return
    if not isinstance(value, Tensor | int | float):
        raise _unsupported(
            f"METERS.{name}",
            f"self.log got {type(value).__name__}, expected a number; log its value, or give the "
            "metric in METERS",
        )
    log(name, value)


def _log_all(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    for name, value in values.items():
        _log(name, value)


def _check_methods(module: nn.Module) -> None:
    if not getattr(module, "automatic_optimization", True):
        raise _unsupported(
            "MODEL",
            "the LightningModule has automatic_optimization = False, so `training_step` makes the "
            f"updates; write a task: {GUIDE}",
        )
    names = [name for name in dir(type(module)) if name.startswith("on_") or name in METHODS]
    overridden = [name for name in names if _is_overridden(module, name)]
    if overridden:
        raise _unsupported(
            "MODEL",
            f"the LightningModule overrides {', '.join(overridden)}, which would not be called; "
            f"remove it, or write a hook: {GUIDE}",
        )


def _is_overridden(module: nn.Module, name: str) -> bool:
    """Return whether a class of the user defines a method, not Lightning."""
    owner = next((owner for owner in type(module).__mro__ if name in vars(owner)), None)
    return owner is not None and owner.__module__.split(".")[0] not in (
        "lightning",
        "pytorch_lightning",
        "torch",
    )


def _describe_configured(module: Any) -> dict[str, Any]:
    """Return section OPTIMIZER for what `configure_optimizers` returns."""
    optimizers, schedulers = _split_configured(module.configure_optimizers())
    if len(optimizers) != 1 or len(schedulers) > 1 or not isinstance(optimizers[0], Optimizer):
        raise _unsupported(
            "OPTIMIZER",
            f"`configure_optimizers` returns {len(optimizers)} optimizers and {len(schedulers)} "
            "schedulers; expected one optimizer and at most one scheduler; give "
            "OPTIMIZER={...}, several as OPTIMIZER.others (docs/optimizer.md)",
        )
    section = describe_optimizer(_drop_scheduler(optimizers[0]), module)
    if schedulers:
        section["SCHEDULES"] = {"lr": _describe_scheduler(schedulers[0])}
    return section


def _split_configured(configured: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the optimizers and schedulers in one of the forms that Lightning accepts."""
    if isinstance(configured, Mapping):
        scheduler = configured.get("lr_scheduler")
        return [configured["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(configured, list | tuple):
        if len(configured) == 2 and all(isinstance(item, list | tuple) for item in configured):
            return configured[0], configured[1]
        return configured, []
    return [] if configured is None else [configured], []


def _drop_scheduler(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer without what its scheduler has changed."""
    groups = [dict(group) for group in optimizer.param_groups]
    for group in groups:
        if "initial_lr" in group:
            group["lr"] = group.pop("initial_lr")
    takes = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in takes}
    return type(optimizer)(groups, **options)


def _describe_scheduler(configured: Any) -> dict[str, Any]:
    """Return the schedule that makes a scheduler of torch again."""
    config = configured if isinstance(configured, Mapping) else {"scheduler": configured}
    scheduler = config["scheduler"]
    scheduler_class = type(scheduler)
    name = scheduler_class.__name__
    takes = list(inspect.signature(scheduler_class).parameters)[1:]
    takes = [key for key in takes if key not in ("last_epoch", "verbose")]
    is_known = isinstance(scheduler, LRScheduler) and scheduler_class.__module__.startswith("torch")
    if (
        not is_known
        or name in UNSUPPORTED_SCHEDULERS
        or config.get("frequency", 1) != 1
        or not set(takes) <= vars(scheduler).keys()
    ):
        raise _unsupported(
            "OPTIMIZER.SCHEDULES.lr",
            f"the scheduler {name} of `configure_optimizers` cannot be described in a config; "
            "return the optimizer alone, and give OPTIMIZER={'SCHEDULES': {'lr': ...}} "
            "(docs/optimizer.md)",
        )
    arguments = {key: vars(scheduler)[key] for key in takes}
    if name == "MultiStepLR":  # it counts equal milestones
        arguments["milestones"] = sorted(arguments["milestones"].elements())
    every = "update" if config.get("interval") == "step" else "epoch"
    return {"name": f"torch.{name}", **arguments, "every": every}


def _unsupported(key: str, problem: str) -> ConfigError:
    return ConfigError(f"{key}: {problem}", code="lightning.unsupported")
