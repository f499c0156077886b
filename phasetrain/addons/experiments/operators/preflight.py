"""Find the modules of a model that need an operator without a deterministic kernel.

The forward and the backward pass run on fake tensors, which have shapes and no values. They call
the operators of the real passes, so that CUDA can be asked about on a machine without it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from phasetrain.addons.experiments.operators.nondeterministic import Operation, find_operations
from phasetrain.config.nested import to_json_value
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase, Plan
from phasetrain.errors import list_user_frames
from phasetrain.runtime.machine import preserve_generators
from phasetrain.runtime.nested import list_tensors, map_tensors
from phasetrain.tasks import Task
from phasetrain.tasks.shape_errors import check_step_output

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

log = logging.getLogger(__name__)

BACKWARD = "(backward pass)"
"""Stands for the module of an operator that is called by no module."""

OUTSIDE = "(loss or task)"

NEEDS_VALUES: Mapping[str, str] = MappingProxyType(
    {
        "DataDependentOutputException": "it reads the value of a tensor, as `.item()`, `float(x)` "
        "and `if x:` do",
        "DynamicOutputShapeException": "it makes a tensor whose shape depends on values, as "
        "`x[mask]` and `nonzero` do",
    }
)
"""Exception of torch's fake tensors -> what a model does."""


@dataclass(frozen=True)
class Finding:
    """An operator without a deterministic kernel.

    Attributes:
        operation: as torch documents it.
        operator: name of the ATen operator.
        modules: names of the modules that call it.
        devices: types of devices without a deterministic kernel.
        replacement: advice on an operator to use instead.
        is_replaced: torch itself uses something slower if MACHINE.deterministic is true.
    """

    operation: str
    operator: str
    modules: tuple[str, ...]
    devices: tuple[str, ...]
    replacement: str
    is_replaced: bool = False

    def describe(self) -> str:
        """Return the finding as text."""
        places = ", ".join(self.modules[:4])
        if len(self.modules) > 4:
            places += f", and {len(self.modules) - 4} more"
        return f"{places}: {self.operation} ({self.operator}); use {self.replacement}"


@dataclass(frozen=True)
class Preflight:
    """The outcome of tracing a model.

    Attributes:
        findings: operators without a deterministic kernel on some device.
        untraced: why the rest of the passes could not be traced, or empty.
    """

    findings: tuple[Finding, ...] = ()
    untraced: str = ""

    def plain(self) -> dict[str, Any]:
        """Return JSON data."""
        return asdict(self)

    def on_device(self, device: str, *, deterministic: bool) -> list[Finding]:
        """Return the findings for a type of device."""
        return [
            finding
            for finding in self.findings
            if device in finding.devices and not (finding.is_replaced and deterministic)
        ]


def find_operators(task: Task, plan: Plan, *, deterministic: bool) -> dict[str, Any] | None:
    """Return the operators of the first train step without a deterministic kernel, and lines about
    them, as JSON data; None if there is no train step."""
    preflight = trace_first_batch(task, plan)
    if preflight is None:
        return None
    device = task.parts.machine.device.type
    lines = describe_findings(preflight, device, deterministic=deterministic)
    content: dict[str, Any] = to_json_value(preflight.plain() | {"lines": lines})
    return content


def name_operators(task: Task, plan: Plan) -> list[str]:
    """Return a line for each operator of the first train step that torch rejects because of
    MACHINE.deterministic."""
    preflight = trace_first_batch(task, plan) or Preflight()
    device = task.parts.machine.device.type
    return [operator.describe() for operator in preflight.on_device(device, deterministic=True)]


def describe_findings(preflight: Preflight, device: str, *, deterministic: bool) -> list[str]:
    """Return a line for each finding on the device, and a line about CUDA for a run on the CPU."""
    lines = []
    effect = "torch will raise an error there"
    if not deterministic:
        effect = "a resume may differ in the last bits"
    here = preflight.on_device(device, deterministic=deterministic)
    lines += [
        f"MACHINE.deterministic = {str(deterministic).lower()}: no deterministic kernel on "
        f"{device}, so {effect}: {finding.describe()}"
        for finding in here
    ]
    if device == "cpu":
        others = preflight.on_device("cuda", deterministic=deterministic)
        lines += [
            f"on cuda, there would be no deterministic kernel: {finding.describe()}"
            for finding in others
            if finding not in here
        ]
    if preflight.untraced:
        lines.append(
            "operators without a deterministic kernel are looked for on tensors without values, "
            f"and this model needs values: {preflight.untraced}; operators after it are not checked"
        )
    return lines


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of interest, by module.

    Args:
        name_module: returns the name of the module that is called.
    """

    def __init__(self, name_module: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name_module = name_module
        # operator and row -> modules, as keys
        self.found: dict[tuple[str, Operation], dict[str, None]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            self._record(func, args, named)
        # Recorded before the call, which may fail for want of values.
        return func(*args, **named)

    def _record(
        self, func: torch._ops.OpOverload, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        operator = func._schema.name.partition("::")[2]
        names = [argument.name for argument in func._schema.arguments]
        # Not strict: trailing arguments with a default are left out.
        arguments = dict(zip(names, args, strict=False)) | dict(named)
        has_grad = any(tensor.requires_grad for tensor in list_tensors(arguments))
        for row in find_operations(operator, func._overloadname, arguments, has_grad=has_grad):
            self.found.setdefault((operator, row), {})[self._name_module()] = None


@dataclass
class _Modules:
    """Knows which module is called: hooks push and pop its name."""

    names: list[str] = field(default_factory=lambda: [OUTSIDE])

    def current(self) -> str:
        return self.names[-1]

    @contextmanager
    def watch(self, model: nn.Module, loss: nn.Module) -> Iterator[None]:
        """Watch the modules of a model, and a loss as a whole, during the context."""
        with ExitStack() as stack:
            modules = {
                f"MODEL.{name}".rstrip("."): module for name, module in model.named_modules()
            }
            for name, module in {**modules, "LOSS": loss}.items():
                stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                # always_call: an error must not leave the name behind
                handle = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(handle.remove)
            yield

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.names.append(name)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self.names) > 1:
            self.names.pop()


def trace_first_batch(task: Task, plan: Plan) -> Preflight | None:
    """Trace the first train step of a plan; return None if there is none, or no rank can trace it.

    Args:
        task: the task; it is not trained afterwards, see `trace_task`.
        plan: all phases.
    """
    phase = next((phase for phase, _ in plan.phases.kinds if phase.is_train and phase.steps), None)
    if phase is None or task.shards_weights:
        return None
    loader = task.parts.loaders[phase.data]
    batch = loader.read(loader.find_first_draw(phase))
    if not batch.size:
        return None
    return trace_task(task, phase, batch.to(task.parts.machine.device))


def trace_task(task: Task, phase: Phase, batch: Batch) -> Preflight:
    """Trace a forward and a backward pass of a train phase on fake tensors.

    The task may keep fake tensors: use one that is not trained afterwards.

    Args:
        task: the task; its model and loss are called without the strategy's wrapper.
        phase: a train phase.
        batch: on the task's device, with at least one sample; its values are not used.
    """
    task.begin(phase, fresh=False)
    task.model = task.parts.model
    task.loss = task.parts.loss
    autocast = task.parts.machine.autocast(train=True)

    def compute(fake: Callable[[Any], Any]) -> Tensor:
        # Indices of samples are read on the host, so they keep their values.
        fake_batch = Batch(
            fake(batch.input), fake(batch.target), batch.ids, batch.size, fake(batch.mask)
        )
        with autocast:
            return check_step_output(task, task.forward(fake_batch)).loss

    return trace_passes(task.model, task.loss, compute)


def trace_passes(
    model: nn.Module, loss: nn.Module, compute: Callable[[Callable[[Any], Any]], Tensor]
) -> Preflight:
    """Trace a loss and its backward pass.

    Args:
        model, loss: modules whose weights are replaced by fake ones while they are traced.
        compute: returns the loss; it gets a function that makes tensors fake.
    """
    # torch's compiler is imported with it, which takes a second.
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Constants of a model that are no buffers are not fake.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    modules = _Modules()
    operators = _Operators(modules.current)
    untraced = ""

    def fake(value: Any) -> Any:
        return map_tensors(value, mode.from_tensor)

    with preserve_generators(), _fake_weights(mode, model, loss):
        try:
            with mode, operators:
                with modules.watch(model, loss):
                    result = compute(fake)
                modules.names = [BACKWARD]
                result.backward()  # type: ignore[no-untyped-call]
        # Whatever a part does without values, the plan of the run is made all the same.
        except Exception as error:  # noqa: BLE001
            untraced = _describe_untraced(error)
            log.debug("the model could not be traced: %s", untraced)
    return Preflight(tuple(_list_findings(operators)), untraced)


@contextmanager
def _fake_weights(mode: "FakeTensorMode", *modules: nn.Module) -> Iterator[None]:
    """Replace the parameters and buffers of modules by fake tensors during the context."""
    # Private: torch.func.functional_call uses it, but calls a single module.
    from torch.nn.utils.stateless import _reparametrize_module

    with ExitStack() as stack:
        for module in modules:
            tensors = dict([*module.named_parameters(), *module.named_buffers()])
            fakes = {
                name: mode.from_tensor(tensor).requires_grad_(tensor.requires_grad)
                for name, tensor in tensors.items()
            }
            stack.enter_context(_reparametrize_module(module, fakes))
        yield


def _describe_untraced(error: Exception) -> str:
    """Return which code needs values, in words."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    reason = NEEDS_VALUES.get(type(error).__name__, text)
    return " ".join([reason, *(f"({frame})" for frame in list_user_frames(error)[-1:])])


def _list_findings(operators: _Operators) -> Iterator[Finding]:
    for (operator, row), modules in operators.found.items():
        # A row of the forward pass names the module; its backward pass says nothing more.
        named = [name for name in modules if name != BACKWARD] or [BACKWARD]
        yield Finding(
            operation=row.name,
            operator=operator,
            modules=tuple(named),
            devices=tuple(sorted(row.devices)),
            replacement=row.replacement,
            is_replaced=row.is_replaced,
        )
