"""Section MACHINE: device, precision, determinism and compilation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phasetrain.config.sections.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class CompileSection(Section):
    """Arguments of torch.compile."""

    backend: str = key("inductor", "name of the backend", resume="forbidden")
    mode: str | None = key(None, "mode of the backend", resume="forbidden")
    fullgraph: bool = key(False, "fail on graph breaks", resume="forbidden")
    options: Mapping[str, Any] = key(
        {}, "options of the backend, instead of `mode`", resume="forbidden"
    )


@dataclass(frozen=True, kw_only=True)
class MachineSection(Section):
    """Device, precision, determinism and compilation."""

    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "auto: cuda if available, else cpu", resume="free"
    )
    # `apex` is accepted for configs written for older frameworks; a rule replaces it by fp16.
    precision: Literal["fp32", "tf32", "bf16", "fp16", "apex"] = key(
        "fp32",
        "autocast type of the forward pass in training; weights stay fp32. tf32: matrix products "
        "on CUDA at reduced precision; apex: fp16",
        resume="forbidden",
    )
    test_precision: Literal["fp32", "bf16", "fp16"] | None = key(
        None, "autocast type of the forward pass in tests; null: as in training", resume="forbidden"
    )
    # Free, but null takes the number in the checkpoint: sums over threads round differently.
    threads: int | None = key(
        None,
        "CPU threads of torch in the main process; null: torch's default, or on resume the number "
        "in the checkpoint",
        resume="free",
        ge=1,
    )
    cpu_capability: Literal["AVX2", "AVX512"] | None = key(
        None,
        "instructions that CPU kernels use at most, on x86: different CPUs then give equal bits; "
        "null: all that the CPU has, or on resume AVX2 if the checkpoint has it",
        resume="free",
    )
    deterministic: bool = key(
        True,
        "use deterministic kernels only; otherwise identical runs may differ in the last bits",
        resume="forbidden",
    )
    compile: bool | str | Mapping[str, Any] | None = key(
        None,
        "torch.compile of the model in training: true, a backend such as `inductor`, or a mapping "
        "with `backend`, `mode`, `fullgraph`, `options`",
        resume="forbidden",
        fields=CompileSection,
    )
    channels_last: bool = key(
        False,
        "store the weights of convolutions with their channels last, which is often faster: on "
        "CUDA with bf16 or fp16, and on CPUs",
        resume="forbidden",
    )
    activation_checkpointing: tuple[str, ...] = key(
        [],
        "names (with `*`) or classes of modules whose activations are recomputed in the backward "
        "pass instead of stored, which saves memory and costs time",
        resume="free",
    )


@dataclass(frozen=True, kw_only=True)
class DerivedMachineSection(MachineSection):
    """Section MACHINE of a complete config, without aliases."""

    # Aliases are replaced by the rules, so code that compares these values need not know them.
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
