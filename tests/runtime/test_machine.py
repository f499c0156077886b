"""Seeds are hashed, generators are set at once, and what a run changes of the process is put
back."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.app.api import run
from phasetrain.app.setup import resolve_config
from phasetrain.errors import ConfigError
from phasetrain.hooks import on
from phasetrain.runtime.machine import (
    CpuCapability,
    Machine,
    check_cpu_capability,
    check_threads,
    has_bf16_units,
    limit_cpu_capability,
    preserve_generators,
    reseed,
    reseed_all,
    resolve_device,
    seed_of,
)
from phasetrain.runtime.terminal import Terminal

CPU = torch.device("cpu")


class TestSeeds:
    def test_literal_values_stay_as_they_are_for_ever(self) -> None:
        assert seed_of(0) == 6987580337721894910
        assert seed_of(0, "order", "train", 1) == 3605213561634440288

    @pytest.mark.feature("13", "one seed; all streams derived by hash", "`RUN.seed`")
    def test_they_are_not_added(self) -> None:
        seeds = {seed_of(seed, "order", epoch) for seed in range(20) for epoch in range(20)}
        assert len(seeds) == 400
        assert all(0 <= seed < 2**64 for seed in seeds)

    def test_purposes_do_not_run_together(self) -> None:
        assert (
            len(
                {
                    seed_of(0, "a", "b"),
                    seed_of(0, "ab"),
                    seed_of(0, "a, b"),
                    seed_of(0, "a", 1),
                    seed_of(0, "a1"),
                }
            )
            == 5
        )

    def test_a_number_and_its_text_differ(self) -> None:
        assert seed_of(0, 1) != seed_of(0, "1")

    def test_reseed_is_manual_seed(self) -> None:
        torch.manual_seed(2**63 + 5)
        expected = torch.randn(3)
        reseed(2**63 + 5)
        assert torch.equal(torch.randn(3), expected)

    def test_reseed_leaves_numpy_and_python_alone(self) -> None:
        np.random.seed(1)
        random.seed(1)
        expected = np.random.random(), random.random()
        np.random.seed(1)
        random.seed(1)
        reseed(5)
        assert (np.random.random(), random.random()) == expected

    def test_reseed_all(self) -> None:
        def drawn(seed: int) -> tuple[float, float, float]:
            reseed_all(seed)
            return float(torch.rand(())), float(np.random.random()), random.random()

        assert drawn(2**64 - 1) == drawn(2**64 - 1)
        assert not set(drawn(0)) & set(drawn(1))


class TestAutocast:
    @pytest.mark.parametrize(
        ("precision", "dtype"),
        [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
    )
    def test_types_of_activations(self, precision: Any, dtype: torch.dtype) -> None:
        with Machine(CPU, precision).autocast():
            assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype

    @pytest.mark.feature("59")
    def test_tests_may_have_another_precision(self, tmp_path: Path) -> None:
        machine = Machine(CPU, "bf16", test_precision="fp32")
        assert (machine.uses_autocast(), machine.uses_autocast(train=False)) == (True, False)
        seen: dict[str, set[torch.dtype]] = {"train": set(), "test": set()}

        @on("forward")
        def look(run: Any, phase: Any, out: Any) -> None:
            seen[phase.split].add(out.output.dtype)

        words = [
            "PHASES={epochs: 1, limit: {train: 2, test: 1}}",
            "MACHINE.precision=bf16",
            f"RUN.dir={tmp_path}",
        ]
        run(
            [*words, "MACHINE.test_precision=fp32"],
            hooks={"look": look},
            terminal=Terminal(live=False),
        )
        assert seen == {"train": {torch.bfloat16}, "test": {torch.float32}}

    def test_tf32_is_no_type_of_activations(self) -> None:
        assert not Machine(CPU, "tf32").uses_autocast()


class TestApplied:
    def test_it_is_set_and_put_back(self) -> None:
        threads = torch.get_num_threads()
        with Machine(CPU, threads=threads + 1).apply_settings():
            assert torch.get_num_threads() == threads + 1
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.get_num_threads() == threads
        assert not torch.are_deterministic_algorithms_enabled()

    def test_it_is_put_back_after_an_error(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with pytest.raises(ZeroDivisionError), Machine(CPU).apply_settings():
                _ = 1 / 0
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        finally:
            torch.use_deterministic_algorithms(False)

    def test_nothing_is_set_unasked(self) -> None:
        threads = torch.get_num_threads()
        with Machine(CPU, deterministic=False).apply_settings():
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.get_num_threads() == threads


class TestThreads:
    @pytest.mark.parametrize("threads", [None, 1, 256])
    def test_what_a_machine_can_have(self, threads: int | None) -> None:
        check_threads(threads)

    def test_so_many_that_torch_would_crash(self) -> None:
        with raises(ConfigError, key="MACHINE.threads", given="100000"):
            check_threads(100_000)

    def test_the_command_line_refuses_them_before_anything_is_made(self) -> None:
        with raises(ConfigError, key="MACHINE.threads", given="100000"):
            resolve_config(["MACHINE.threads=100000"])


class TestDevice:
    def test_cpu(self) -> None:
        assert resolve_device("cpu") == CPU

    @pytest.mark.feature("10")
    def test_auto_is_what_is_there(self) -> None:
        assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")

    @pytest.mark.feature("10")
    @pytest.mark.parametrize(
        ("visible", "local_rank", "index"),
        [(4, 0, 0), (4, 3, 3), (1, 0, 0), (1, 3, 0), (2, 2, None), (0, 0, None)],
    )
    def test_local_rank_selects_the_device_unless_one_alone_is_visible(
        self, monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, index: int | None
    ) -> None:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        if index is None:
            with raises(ConfigError, key="MACHINE.device", code="machine.too_few_devices"):
                resolve_device("cuda", local_rank)
            assert chosen == []
        else:
            assert resolve_device("cuda", local_rank) == torch.device("cuda", index)
            assert chosen == [index]

    @pytest.mark.skipif(
        not hasattr(torch.backends.cudnn, "conv"), reason="the functions are new in torch 2.9"
    )
    def test_precision_that_a_program_has_set_by_newer_functions_is_named(self) -> None:
        before = torch.get_float32_matmul_precision()
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            with (
                raises(ConfigError, key="MACHINE.precision", code="machine.fp32_precision"),
                Machine(CPU).apply_settings(),
            ):
                pass
        finally:
            torch.set_float32_matmul_precision(before)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
    def test_a_device_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError) as caught:
            resolve_device("cuda")
        assert str(caught.value) == (
            "MACHINE.device = 'cuda': torch finds no CUDA device here; set MACHINE.device=auto or cpu"
        )


def test_generators_are_put_back() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    with preserve_generators():
        torch.rand(3), np.random.rand(), random.random()
    after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]


@pytest.mark.parametrize(
    ("cpuinfo", "found"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("model name: x\n", None),
        (None, None),
    ],
)
def test_bf16_units_are_read_from_the_flags_of_the_cpu(
    tmp_path: Path, cpuinfo: str | None, found: bool | None
) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert has_bf16_units(str(tmp_path / "cpuinfo")) is found


class TestCpuCapability:
    """Kernels of this process have been chosen long ago, so that a limit comes too late."""

    @pytest.fixture(autouse=True)
    def _computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
        monkeypatch.setattr("phasetrain.runtime.machine.read_cpu_flags", lambda: {"avx512f"})
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "")
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)

    def test_late_limit_leaves_the_environment_alone(self) -> None:
        limit_cpu_capability("AVX2")
        assert os.environ["ATEN_CPU_CAPABILITY"] == ""
        assert "ONEDNN_MAX_CPU_ISA" not in os.environ

    def test_limit_in_time_holds_for_other_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
        limit_cpu_capability("AVX2")
        assert os.environ["ATEN_CPU_CAPABILITY"] == "avx2"
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"

    def test_cpu_without_avx512_needs_no_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("phasetrain.runtime.machine.read_cpu_flags", lambda: {"avx2"})
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
        limit_cpu_capability("AVX2")
        assert os.environ["ATEN_CPU_CAPABILITY"] == ""

    def test_late_limit_is_rejected_with_the_variables(self) -> None:
        machine = Machine(CPU, cpu_capability="AVX2")
        with (
            raises(ConfigError, code="machine.cpu_capability", given="'AVX2'") as caught,
            machine.apply_settings(),
        ):
            pass
        assert "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2" in str(caught.value)

    def test_cpu_that_has_less_is_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
        with raises(ConfigError, code="machine.cpu_capability", given="'AVX512'"):
            check_cpu_capability("AVX512")

    @pytest.mark.parametrize("capability", [None, "AVX512"])
    def test_what_the_kernels_use_is_accepted(self, capability: CpuCapability | None) -> None:
        with Machine(CPU, cpu_capability=capability).apply_settings():
            pass


@pytest.mark.parametrize(("units", "hints"), [(False, True), (True, False), (None, False)])
def test_slow_bf16_is_mentioned(
    monkeypatch: pytest.MonkeyPatch, units: bool | None, hints: bool
) -> None:
    monkeypatch.setattr("phasetrain.runtime.machine.has_bf16_units", lambda: units)
    assert ("MACHINE.precision" in Machine(CPU, "bf16").slow_precision()) == hints
    assert ("MACHINE.precision" in Machine(CPU, test_precision="bf16").slow_precision()) == hints
    assert Machine(CPU).slow_precision() == ""
    assert Machine(torch.device("cuda"), "bf16").slow_precision() == ""
