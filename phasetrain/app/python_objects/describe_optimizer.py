"""Describes an optimizer of Python as section OPTIMIZER."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from phasetrain.errors import ConfigError
from phasetrain.optim import OPTIMIZERS
from phasetrain.optim.groups import Weight, list_weights
from phasetrain.runtime.format import join_first


def describe_optimizer(optimizer: Any, *modules: nn.Module) -> dict[str, Any]:
    """Return the keys of section OPTIMIZER for an optimizer.

    A class or an object keeps its choice of kernel, and a name without a learning rate has torch's,
    so that the run has the bits of a plain loop with the same optimizer.

    Args:
        optimizer: a name, a mapping, a class of optimizers, an optimizer of the parameters of
            `modules` that has made no step, or a function of parameters that returns one.
        modules: model and loss, if they are modules.

    Raises:
        ConfigError: it cannot be described (code `config.invalid_optimizer`); the message says why.
    """
    if isinstance(optimizer, str):
        optimizer = {"name": optimizer}
    if isinstance(optimizer, Mapping):
        optimizer_class = optimizer.get("name")
        kernel = _describe_kernel(optimizer_class) if isinstance(optimizer_class, type) else {}
        return _find_rate(optimizer_class) | kernel | dict(optimizer)
    if isinstance(optimizer, type):
        return {"name": optimizer, **_find_rate(optimizer), **_describe_kernel(optimizer)}
    if isinstance(optimizer, Optimizer):
        _check_unused(optimizer)
        return _describe_defaults(optimizer) | _describe_groups(optimizer, list_weights(*modules))
    if callable(optimizer):
        return _describe_defaults(_make_on_trial(optimizer))
    raise _invalid(
        f"{type(optimizer).__name__} is not an optimizer",
        "give a name, a class such as torch.optim.AdamW, an optimizer, or a function of parameters",
    )


def _find_rate(kind: Any) -> dict[str, Any]:
    """Return the learning rate that torch's optimizer has by default, if it has one."""
    if isinstance(kind, str):
        # The built-in names are those of torch's classes in lower case.
        by_name = {name.lower(): member for name, member in vars(torch.optim).items()}
        kind = by_name.get(kind.lower())
    if not isinstance(kind, type):
        return {}
    rate = inspect.signature(kind).parameters.get("lr")
    if rate is None or not isinstance(rate.default, float | int):
        return {}
    return {"lr": rate.default}


def _describe_kernel(kind: type, *, fused: bool | None = None) -> dict[str, Any]:
    """Return the choice between torch's kernels, which differ in the last bits."""
    if "fused" not in inspect.signature(kind).parameters:
        return {}
    return {"fused": fused}


def _make_on_trial(make: Callable[..., Any]) -> Optimizer:
    made = make([nn.Parameter(torch.zeros(1))])
    if not isinstance(made, Optimizer):
        raise _invalid(
            f"the function returns {type(made).__name__}", "return a torch.optim.Optimizer"
        )
    return made


def _check_unused(optimizer: Optimizer) -> None:
    if optimizer.state:
        raise _invalid(
            f"this {type(optimizer).__name__} has made steps already, and a run starts with a new "
            "one",
            "give one that has made none, or its class",
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise _invalid(
            f"a scheduler of torch has changed this {type(optimizer).__name__}",
            "leave the scheduler out, and set OPTIMIZER.SCHEDULES.lr",
        )


def _describe_defaults(optimizer: Optimizer) -> dict[str, Any]:
    """Return class, learning rate and the arguments that are not the defaults of the class."""
    optimizer_class = type(optimizer)
    takes = inspect.signature(optimizer_class).parameters
    # A learning rate may be a tensor.
    options = {key: _to_plain(value) for key, value in optimizer.defaults.items() if key in takes}
    arguments = {
        key: value for key, value in options.items() if value != _to_plain(takes[key].default)
    }
    try:
        again = optimizer_class([nn.Parameter(torch.zeros(1))], **options).defaults
    except (TypeError, ValueError) as error:
        again = {"error": str(error)}
    same = {key: _to_plain(value) for key, value in again.items()} == {
        key: _to_plain(value) for key, value in optimizer.defaults.items()
    }
    if not same or OPTIMIZERS.name_of(optimizer_class) is None:
        raise _invalid(
            f"{optimizer_class.__name__} cannot be made again from its options",
            "give its class, which can be imported, and its parameters in OPTIMIZER",
        )
    section = {
        "name": optimizer_class,
        **arguments,
        **_describe_kernel(optimizer_class, fused=options.get("fused")),
    }
    if "lr" in options:
        section["lr"] = options["lr"]
    return section


def _describe_groups(optimizer: Optimizer, weights: list[Weight]) -> dict[str, Any]:
    """Return a rule for each group of parameters whose options differ from the optimizer's."""
    names = {id(weight.parameter): weight.name for weight in weights}
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if strange := held - names.keys():
        raise _invalid(
            f"{len(strange)} of its parameters are not trained parameters of the model or the loss",
            "give an optimizer of model.parameters()",
        )
    if missing := [name for number, name in names.items() if number not in held]:
        raise _invalid(
            f"it does not have {join_first(missing, 3)}",
            "add them, or freeze them with requires_grad_(False)",
        )
    rules = []
    for group in optimizer.param_groups:
        differing = {
            key: _to_plain(value)
            for key, value in group.items()
            if key in optimizer.defaults and value != optimizer.defaults[key]
        }
        if "lr" in differing:
            differing["lr_scale"] = _ratio(differing.pop("lr"), optimizer)
        if differing:
            rules.append({"match": [names[id(weight)] for weight in group["params"]], **differing})
    return {"groups": rules} if rules else {}


def _ratio(rate: float, optimizer: Optimizer) -> float:
    base = float(optimizer.defaults["lr"])
    if not base:
        raise _invalid(
            "its learning rate is 0, and the learning rates of groups are relative to it",
            "give it a learning rate",
        )
    # 15 digits, so that 0.01 / 0.1 is written as 0.1 and not as 0.09999999999999999.
    return float(f"{rate / base:.15g}")


def _to_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    return value


def _invalid(problem: str, advice: str) -> ConfigError:
    return ConfigError(f"OPTIMIZER: {problem}; {advice}", code="config.invalid_optimizer")
