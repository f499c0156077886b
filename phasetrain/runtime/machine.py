"""Seeds, device, precision, threads and determinism (section MACHINE)."""

import os
import pickle
import random
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from phasetrain.errors import ConfigError

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
CpuCapability = Literal["AVX2", "AVX512"]
MAX_THREADS = 256
"""Number of threads that is always allowed, also on a machine with few cores."""

CPU_FLAGS = ("flags", "Features")
"""Starts of the line of /proc/cpuinfo with the extensions of the CPU: x86, ARM."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

GLOBAL_GENERATORS = frozenset({"torch", "numpy", "python"})
"""The libraries whose global generators a run seeds."""

CAPABILITY_VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Environment variables that keep torch and oneDNN from using AVX-512."""

COMPILER_VARIABLE = "TORCHINDUCTOR_DETERMINISTIC"
"""Environment variable that makes torch's compiler deterministic; read when it is imported."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def seed_of(seed: int, *purpose: str | int) -> int:
    """Return the 64-bit seed of a random stream: blake2b of the run's seed and the purpose."""
    # Hashed, never added: with seed + epoch, seed 1 in epoch 0 would equal seed 0 in epoch 1.
    return int.from_bytes(blake2b(repr((seed, purpose)).encode(), digest_size=8).digest(), "little")


def mix_seed(seed: int, *counters: int) -> int:
    """Return the 64-bit seed of a position in a stream: SplitMix64's finalizer per counter.

    A bijection in each counter, at a fraction of the cost of `seed_of`, for seeds needed in every
    step (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).
    """
    for counter in counters:
        word = seed ^ counter
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        seed = word ^ (word >> 31)
    return seed


def reseed(seed: int) -> None:
    """Seed torch's default generators on the CPU and on all CUDA devices in use."""
    # torch.manual_seed does the same, and costs about a hundred times more: it visits every
    # backend. This runs in every micro-batch.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


def reseed_all(seed: int, generators: Collection[str] = GLOBAL_GENERATORS) -> None:
    """Seed the global generators of torch, NumPy and Python, or only those that are named."""
    if "torch" in generators:
        reseed(seed)
    if "numpy" in generators:
        np.random.seed(seed & 0xFFFFFFFF)
    if "python" in generators:
        random.seed(seed)


class GeneratorWatch:
    """Tells from which of the global generators of torch, NumPy and Python code draws.

    It compares numbers instead of states, whose copies would cost 150 us: NumPy and Python convert
    each of their 624 words. NumPy's and Python's generators are not even seeded, which is as slow
    as reading several samples: they are compared with private generators in the same state.

    Example:
        >>> watch = GeneratorWatch()
        >>> watch.start()
        >>> watch.stop(), watch.start(), random.random() < 1, watch.stop()
        (frozenset(), None, True, frozenset({'python'}))
    """

    SEED = 0x5EED

    # One pair for the process, as the global generators are: a watch of datasets and one of models
    # would otherwise take each other's comparisons for draws.
    _python = random.Random()
    _numpy = np.random.RandomState()

    def __init__(self) -> None:
        self._torch = _copy_state(torch.Generator().manual_seed(self.SEED))

    def start(self) -> None:
        """Begin to watch; this changes the state of the generators."""
        reseed(self.SEED)
        if not self._is_python_in_step():
            random.seed(self.SEED)
            self._python.seed(self.SEED)
        if not self._is_numpy_in_step():
            np.random.seed(self.SEED)
            self._numpy.seed(self.SEED)

    def start_between_passes(self, seed: int) -> None:
        """Begin to watch Python's and NumPy's generators, at less cost than `start`.

        Both are seeded only if they were used since they were compared the last time.
        """
        if self.is_used():
            reseed_all(seed, ("numpy", "python"))
            self._python.seed(seed)
            self._numpy.seed(seed & 0xFFFFFFFF)

    def is_used(self) -> bool:
        """Return whether Python's or NumPy's generator was used or seeded since the last
        comparison."""
        return (
            random.random() != self._python.random()
            or np.random.random_sample() != self._numpy.random_sample()
        )

    def stop(self) -> frozenset[str]:
        """Return the names of the generators that were used or seeded since `start`; `torch`
        includes the generators of CUDA devices."""
        used = set()
        if _copy_state(torch.default_generator) != self._torch or self._is_cuda_used():
            used.add("torch")
        if not self._is_numpy_in_step():
            used.add("numpy")
        if not self._is_python_in_step():
            used.add("python")
        return frozenset(used)

    def _is_cuda_used(self) -> bool:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return False
        return any(generator.get_offset() for generator in torch.cuda.default_generators)

    def _is_python_in_step(self) -> bool:
        """Draw a number from both of Python's generators, and return whether they are equal."""
        return random.getrandbits(64) == self._python.getrandbits(64)

    def _is_numpy_in_step(self) -> bool:
        return np.random.random_sample() == self._numpy.random_sample()


def _copy_state(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def digest_generators() -> str:
    """Return a digest of the states of the global generators of torch, NumPy and Python."""
    states = (_copy_state(torch.default_generator), np.random.get_state(), random.getstate())
    return blake2b(pickle.dumps(states)).hexdigest()


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the global generators of torch, NumPy, Python and the used CUDA devices on exit."""
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def read_cpu_flags(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str] | None:
    """Return the extensions of this CPU; None if they are unknown."""
    try:
        text = Path(cpuinfo).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    line = next((line for line in text.splitlines() if line.startswith(CPU_FLAGS)), "")
    return frozenset(line.split()) or None


def has_bf16_units(cpuinfo: str = "/proc/cpuinfo") -> bool | None:
    """Return whether this CPU computes in bf16; None if that is unknown."""
    flags = read_cpu_flags(cpuinfo)
    if flags is None:
        return None
    return not BF16_FLAGS.isdisjoint(flags)


@dataclass(frozen=True)
class Machine:
    """Device and numeric settings of a run.

    Args:
        device: such as `cpu`, `cuda` or `cuda:1`.
        precision: dtype of activations in forward passes; weights stay fp32. `tf32` rounds the
            inputs of matrix products and convolutions, on CUDA only.
        test_precision: the same for tests; None: as in training.
        threads: CPU threads of torch in this process; None leaves torch's default.
        deterministic: allow only deterministic kernels.
        cpu_capability: instructions that CPU kernels use at most, see `limit_cpu_capability`.
    """

    device: torch.device
    precision: Precision = "fp32"
    threads: int | None = None
    deterministic: bool = True
    test_precision: Precision | None = None
    cpu_capability: CpuCapability | None = None

    def uses_autocast(self, *, train: bool = True) -> bool:
        """Tell whether activations have another dtype than weights."""
        return self._precision_of(train=train) in AUTOCAST

    def autocast(self, *, train: bool = True) -> AbstractContextManager[object]:
        """Return the context of a forward pass: autocast for bf16 and fp16, else nothing."""
        if not self.uses_autocast(train=train):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self._precision_of(train=train)])

    def slow_precision(self) -> str:
        """Return a hint that bf16 is slow on this CPU, or an empty string."""
        chosen = "bf16" in (self.precision, self.test_precision)
        if self.device.type != "cpu" or not chosen or has_bf16_units() is not False:
            return ""
        return (
            "MACHINE.precision = 'bf16': this CPU has no bf16 units and emulates them, which is "
            "slower than fp32; set MACHINE.precision=fp32"
        )

    def _precision_of(self, *, train: bool) -> Precision:
        if train or self.test_precision is None:
            return self.precision
        return self.test_precision

    @contextmanager
    def apply_settings(self) -> Iterator[None]:
        """Set precision, threads and determinism, and restore the previous settings on exit.

        Raises:
            ConfigError: torch's kernels use other instructions than MACHINE.cpu_capability.
        """
        check_cpu_capability(self.cpu_capability)
        threads = torch.get_num_threads()
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        benchmark = torch.backends.cudnn.benchmark
        compiler = os.environ.get(COMPILER_VARIABLE)
        try:
            tf32 = torch.backends.cudnn.allow_tf32
            matmul = torch.get_float32_matmul_precision()
        except RuntimeError as error:
            raise ConfigError(
                f"MACHINE.precision = {self.precision!r}: this process has set "
                "`torch.backends.*.fp32_precision`, which cannot be restored after the run; leave "
                "it out, because MACHINE.precision decides (`tf32` or `fp32`)",
                code="machine.fp32_precision",
            ) from error
        try:
            if self.device.type == "cuda":
                # Also for fp32: by default, torch allows tf32 in convolutions.
                uses_tf32 = self.precision == "tf32"
                torch.backends.cudnn.allow_tf32 = uses_tf32
                torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            if self.deterministic:
                # cuBLAS reads it when the first handle is created, so it has to be set before.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                _set_determinism(mode=True)
                torch.backends.cudnn.benchmark = False
                # Filling new tensors hides reads of uninitialized memory, and costs a kernel per
                # allocation.
                torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            yield
        finally:
            torch.set_num_threads(threads)
            _set_determinism(mode=deterministic, warn_only=warn_only)
            # Also if the compiler was imported meanwhile: other processes would inherit it.
            os.environ.pop(COMPILER_VARIABLE, None)
            if compiler is not None:
                os.environ[COMPILER_VARIABLE] = compiler
            torch.backends.cudnn.benchmark = benchmark
            torch.backends.cudnn.allow_tf32 = tf32
            torch.set_float32_matmul_precision(matmul)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _set_determinism(*, mode: bool, warn_only: bool = False) -> None:
    """Set the determinism of torch's kernels and of its compiler.

    `torch.use_deterministic_algorithms` imports the compiler, in more than a second, and most runs
    do not use it. If it is imported later, it reads the environment.
    """
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        return
    if mode:
        os.environ[COMPILER_VARIABLE] = "1"
    torch.set_deterministic_debug_mode(("warn" if warn_only else "error") if mode else "default")


def limit_cpu_capability(capability: CpuCapability | None) -> None:
    """Limit the instructions of the CPU kernels of this process and of those that it starts.

    torch chooses its kernels when it computes for the first time, and keeps them, so this has to
    come before, and lasts; later it has no effect. MKL is not limited: on AMD's CPUs it uses AVX2
    in any case.
    """
    # torch does not check whether the CPU has what the variable says.
    if capability != "AVX2" or "avx512f" not in (read_cpu_flags() or ()):
        return
    before = {name: os.environ.get(name) for name in CAPABILITY_VARIABLES}
    os.environ.update(CAPABILITY_VARIABLES)
    if torch.backends.cpu.get_cpu_capability() == capability:
        return
    # Too late here, and other processes would compute with other kernels than this one.
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def check_cpu_capability(capability: CpuCapability | None) -> None:
    """Check that torch's kernels use the instructions of MACHINE.cpu_capability.

    Raises:
        ConfigError: the CPU lacks them, or torch has computed with others before.
    """
    actual = torch.backends.cpu.get_cpu_capability()
    if capability in (None, actual):
        return
    text = f"MACHINE.cpu_capability = {capability!r}: torch's kernels use {actual} in this process"
    if capability == "AVX2" and actual == "AVX512":
        variables = " ".join(f"{name}={value}" for name, value in CAPABILITY_VARIABLES.items())
        raise ConfigError(
            f"{text}, where torch has computed before; set {variables} in the environment before "
            "this process starts",
            code="machine.cpu_capability",
        )
    raise ConfigError(
        f"{text}, because this CPU has no more or the environment variable ATEN_CPU_CAPABILITY "
        "says so; use a machine with such a CPU, or MACHINE.cpu_capability=null, whose results "
        "differ in the last bits",
        code="machine.cpu_capability",
    )


def check_threads(threads: int | None) -> None:
    """Check that the machine can start the number of threads.

    Raises:
        ConfigError: it is above four times the number of cores, and above 256.
    """
    # torch would abort the process without a message. More threads than cores are slow, but
    # reproduce the bits of a run on a larger machine, so they are allowed within reason.
    cores = os.cpu_count() or 1
    most = max(4 * cores, MAX_THREADS)
    if threads is not None and threads > most:
        raise ConfigError(
            f"MACHINE.threads = {threads}: this machine has {cores} cores, and more than {most} "
            f"threads are rejected; set MACHINE.threads={cores}, or null for torch's default",
            code="machine.too_many_threads",
        )


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device of `MACHINE.device`; `auto` is cuda if available, else cpu.

    Args:
        name: the value of the key.
        local_rank: rank of this process on its machine, which selects its CUDA device; None in a
            run of one process.

    Raises:
        ConfigError: the device does not exist on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "MACHINE.device = 'cuda': torch finds no CUDA device here; set MACHINE.device=auto or "
            "cpu",
            code="machine.no_device",
        )
    if name == "cuda" and local_rank is not None:
        count = torch.cuda.device_count()
        # A launcher may make one device visible to each process (`--gpus-per-task` of SLURM).
        index = 0 if count == 1 else local_rank
        if index >= count:
            raise ConfigError(
                f"MACHINE.device = 'cuda': local rank {local_rank} finds {count} CUDA devices; "
                "start at most as many processes per machine, or make one device visible to each",
                code="machine.too_few_devices",
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)
