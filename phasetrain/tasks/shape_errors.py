"""Exceptions with which models, losses and meters reject their inputs."""

import re
from collections.abc import Sequence
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch import Tensor, nn

from phasetrain.data import SampleError
from phasetrain.distributed import is_lost_peer
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.position import Position
from phasetrain.errors import ConfigError, is_out_of_memory
from phasetrain.losses import name_loss
from phasetrain.runtime.format import join_first

SHOWN_SAMPLES = 3
"""Maximum number of sample indices in an error."""


def raise_unless_shape_error(error: Exception) -> None:
    """Raise an exception again if the config is not to blame for it.

    Exhausted memory, a killed loader worker and a lost rank surface as a RuntimeError in whatever
    line runs next; a ConfigError already names its key.
    """
    if (
        isinstance(error, ConfigError)
        or is_out_of_memory(error)
        or "DataLoader worker" in str(error)
        or is_lost_peer(error)
    ):
        raise error


def check_step_output(task: object, out: Any) -> StepOutput:
    """Return the output of a task's `forward`.

    Raises:
        ConfigError: it is not a `StepOutput`.
    """
    if not isinstance(out, StepOutput):
        raise ConfigError(
            f"TASK.name ({type(task).__name__}): forward returned {type(out).__name__}, expected "
            "StepOutput(loss=..., weight=batch.size, samples=batch.size)",
            code="config.wrong_part",
        )
    return out


def explain_no_gradient(model: nn.Module, loss: nn.Module, output: object) -> ConfigError:
    """Return the error of a loss without a gradient: whether the loss, the model, or frozen weights
    are to blame."""
    advice = "remove detach(), no_grad() and conversions to numbers or NumPy"
    if isinstance(output, Tensor) and output.requires_grad:
        sentence = f"LOSS: {name_loss(loss)} returns a loss without a gradient"
    else:
        sentence = f"MODEL: the output of {type(model).__name__} carries no gradient"
        if not any(weight.requires_grad for weight in model.parameters()):
            advice = "all its weights are frozen: see MODEL.freeze"
    return ConfigError(f"{sentence}; {advice}", code="task.no_gradient")


def explain_no_effect(model: nn.Module, count: int) -> ConfigError:
    """Return the error of a loss that depends on none of the weights that its updater trains."""
    return ConfigError(
        f"MODEL: the loss depends on none of {count} trained weights of {type(model).__name__}; "
        "expected a gradient for at least one: compute it with the model itself, not with a copy, "
        "or see OPTIMIZER.others and MODEL.freeze for what is trained",
        code="task.no_gradient",
    )


def explain_several_passes(task_class: type) -> ConfigError:
    """Return the error of a task that several ranks run with the wrapper of the whole model, which
    shares the gradients of one pass only."""
    return ConfigError(
        f"TASK.name: {task_class.__name__} makes several gradient passes in a step, or passes for "
        "some of the parameters; on several ranks its class needs several_passes = True",
        code="task.several_passes",
    )


def raise_if_unused(model: nn.Module, error: Exception) -> None:
    """Raise the error of parameters that the loss does not depend on, for which DDP waits."""
    if "find_unused_parameters" not in str(error):
        return
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    # torch names numbers only: "Parameter indices which did not receive grad for rank 0: 2 3".
    numbers = re.search(r"for rank \d+: ([\d ]+)", str(error))
    unused = [trained[int(number)] for number in numbers[1].split()] if numbers else []
    raise ConfigError(
        "DISTRIBUTED.find_unused_parameters = false: in the step before, the loss of this rank did "
        f"not depend on {join_first(unused, SHOWN_SAMPLES, empty='some parameters')}; use them, "
        "freeze them with MODEL.freeze, or set DISTRIBUTED.find_unused_parameters=true",
        code="distributed.unused_parameters",
    ) from error


def explain_empty_step(at: Position, *, counts_weights: bool) -> SampleError:
    """Return the error of a step in which nothing counts on any rank.

    Args:
        at: position of the step.
        counts_weights: whether the task counts something else than samples, such as tokens.
    """
    section = f"DATA.{at.split.upper()}"
    if counts_weights:
        return SampleError(
            f"{section}: nothing in step {at.step + 1} of the pass counts in the loss, for example "
            "because all of its targets are ignored; use larger batches, or fix the data",
            code="data.empty_step",
        )
    return SampleError(
        f"{section}.on_bad_sample = 'drop' leaves no sample of a step on any rank, because none of "
        "them can be read; fix the data, use larger batches, or set it to substitute",
        code="data.empty_step",
    )


def describe_failed_forward(
    model: nn.Module, error: Exception, batch: Any, ids: Sequence[int] = ()
) -> str:
    """Return a sentence on a forward pass that has failed: in which layer, and on which input.

    Args:
        model: the whole model.
        error: error of its forward pass.
        batch: input of the model.
        ids: indices of the samples in the batch, if known.
    """
    shapes = describe_shapes(batch)
    samples = ""
    if len(ids):
        samples = f" of samples {join_first(ids, SHOWN_SAMPLES)}"
    sentence = f"MODEL: {type(model).__name__} fails"
    failed_call = _find_failed_call(model, error)
    if failed_call is None:
        return f"{sentence} on the input {shapes}{samples}: {error}"
    name, layer, inputs = failed_call
    return (
        f"{sentence} in {name}: {layer} on {inputs}: {error}; the input of the model is "
        f"{shapes}{samples}"
    )


def describe_shapes(value: Any) -> str:
    """Return shape and dtype of a tensor, or of the tensors in a mapping or a list."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{key}: {describe_shapes(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(describe_shapes, value)) + "]"
    return type(value).__name__


def _find_failed_call(model: nn.Module, error: Exception) -> tuple[str, str, str] | None:
    """Return name, type and inputs of the innermost module of the model that an error has passed;
    None if it is the model itself."""
    names = {id(module): name for name, module in model.named_modules() if name}
    calls = [frame for frame, _ in walk_tb(error.__traceback__) if _is_module_call(frame)]
    for frame in reversed(calls):
        module = frame.f_locals["self"]
        if id(module) in names:
            inputs = [*frame.f_locals["args"], *frame.f_locals["kwargs"].values()]
            shapes = ", ".join(map(describe_shapes, inputs)) or "no input"
            return names[id(module)], _describe_layer(module), shapes
    return None


def _is_module_call(frame: FrameType) -> bool:
    # The frame around `forward`: its arguments are still the inputs of the module, whatever names
    # `forward` has rebound since.
    return frame.f_code is nn.Module._call_impl.__code__


def _describe_layer(module: nn.Module) -> str:
    """Return `Linear(in_features=33, out_features=10, bias=True)`, or only the class of a module
    with submodules."""
    if next(module.children(), None) is None:
        return " ".join(repr(module).split())
    return type(module).__name__


def shorten_shape_error(error: Exception) -> str:
    """Return why a state does not fit a module, with two names of each kind of mismatch.

    torch lists every tensor of the model, which buries the advice.
    """
    first, *lines = str(error).strip().splitlines() or [type(error).__name__]
    if "state_dict" not in first:
        return first
    parts = []
    for problem, pattern in (("missing", "Missing key"), ("unexpected", "Unexpected key")):
        listed = next((line for line in lines if pattern in line), "")
        if names := re.findall(r'"([^"]*)"', listed):
            parts.append(f"{problem}: {join_first(names, 2)}")
    shapes = [line.strip() for line in lines if "size mismatch for " in line]
    names = [re.sub(r"size mismatch for ([^:]*):.*", r"\1", line) for line in shapes]
    if names:
        parts.append(f"of another shape: {join_first(names, 2)}")
    return "; ".join(parts) or first
