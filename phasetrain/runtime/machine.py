"""The machine a run computes on: seeds, device, precision, threads and determinism (section
MACHINE)."""

import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch

from phasetrain.errors import ConfigError

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
MOST_THREADS = 256
"""Threads that a machine with few cores may have too."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def seed_of(seed: int, *purpose: str | int) -> int:
    """Return the 64-bit seed of one random stream: blake2b of the run's seed and what the stream is
    for.

    Seeds are hashed, never added: with `seed + epoch`, seed 1 in epoch 0 would equal seed 0 in
    epoch 1.
    """
    return int.from_bytes(blake2b(repr((seed, purpose)).encode(), digest_size=8).digest(), "little")


def mix_seed(seed: int, *counters: int) -> int:
    """Return the 64-bit seed of one place in a stream: the finaliser of SplitMix64 after each
    counter.

    A bijection in each counter, at a fraction of the cost of `seed_of`, for what is seeded in every
    step (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).
    """
    for counter in counters:
        word = seed ^ counter
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        seed = word ^ (word >> 31)
    return seed


def reseed(seed: int) -> None:
    """Seed torch's default generators: the CPU's, and those of all CUDA devices in use.

    `torch.manual_seed` does the same at about a hundred times the cost, because it visits every
    backend.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


def reseed_all(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python; for code that draws from any of
    them."""
    reseed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Put the global generators of torch, on all CUDA devices in use, NumPy and Python back to
    where they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


@dataclass(frozen=True)
class Machine:
    """Where and how a run computes.

    Args:
        device: `cpu`, `cuda`, `mps`, or `cuda:1` and the like.
        precision: type of activations in forward passes; weights stay fp32. `tf32` computes
            products of matrices and convolutions with fewer digits, on CUDA.
        test_precision: the same in tests; None: as in training.
        threads: CPU threads of torch in this process; None leaves torch's default.
        deterministic: allow only deterministic kernels.
    """

    device: torch.device
    precision: Precision = "fp32"
    threads: int | None = None
    deterministic: bool = True
    test_precision: Precision | None = None

    def uses_autocast(self, *, train: bool = True) -> bool:
        """Tell whether activations have another type than weights."""
        return self._precision_of(train=train) in AUTOCAST

    def autocast(self, *, train: bool = True) -> AbstractContextManager[object]:
        """Return the context of a forward pass: torch's autocast for bf16 and fp16, nothing for
        fp32 and tf32."""
        if not self.uses_autocast(train=train):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self._precision_of(train=train)])

    def _precision_of(self, *, train: bool) -> Precision:
        if train or self.test_precision is None:
            return self.precision
        return self.test_precision

    @contextmanager
    def apply_settings(self) -> Iterator[None]:
        """Set threads and determinism, and put back on the way out what was set before."""
        threads = torch.get_num_threads()
        fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        benchmark = torch.backends.cudnn.benchmark
        tf32 = torch.backends.cudnn.allow_tf32
        matmul = torch.get_float32_matmul_precision()
        try:
            if (
                self.device.type == "cuda"
            ):  # torch allows tf32 in convolutions unless it is told otherwise
                torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
                torch.set_float32_matmul_precision(
                    "high" if self.precision == "tf32" else "highest"
                )
            if self.threads is not None:
                torch.set_num_threads(self.threads)
            if self.deterministic:
                os.environ.setdefault(
                    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
                )  # cuBLAS reads it when CUDA first needs it
                torch.use_deterministic_algorithms(mode=True)
                torch.backends.cudnn.benchmark = False
                # Filling fresh memory hides reads of uninitialised memory and costs a kernel per
                # allocation.
                torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            torch.backends.cudnn.benchmark = benchmark
            torch.backends.cudnn.allow_tf32 = tf32
            torch.set_float32_matmul_precision(matmul)
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that the machine cannot have; torch would end the process without
    a word.

    More threads than cores are slow, but may be what equal bits need: those of a larger machine.

    Raises:
        ConfigError: it is above four times the number of cores, and above 256.
    """
    cores = os.cpu_count() or 1
    most = max(4 * cores, MOST_THREADS)
    if threads is not None and threads > most:
        raise ConfigError(
            f"MACHINE.threads = {threads}: this machine has {cores} cores, and more than {most} threads are refused; "
            f"set MACHINE.threads={cores}, or null for torch's default"
        )


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device that `MACHINE.device` names; `auto` is cuda where there is one, else cpu.

    Args:
        name: the value of the key.
        local_rank: number of this process on its machine, where there are several: each gets a CUDA
            device of its own.

    Raises:
        ConfigError: the device does not exist on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "MACHINE.device = 'cuda': torch finds no CUDA device here; set MACHINE.device=auto or cpu"
        )
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            "MACHINE.device = 'mps': torch finds no MPS device here; set MACHINE.device=auto or cpu"
        )
    if name == "cuda" and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"MACHINE.device = 'cuda': process {local_rank} of this machine finds {torch.cuda.device_count()} CUDA "
                "devices; start at most as many processes per machine"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device(name)
