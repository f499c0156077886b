"""Estimates of a duration on a machine that is busy with something else."""

import pytest

from phasetrain.app.preflight.machine_load import format_expected, measure_load


@pytest.mark.feature(
    "plan.load", "estimated durations that say when the machine is busy", "`phasetrain plan`"
)
@pytest.mark.parametrize(
    ("others", "threads", "text"),
    [
        (0.4, 2, "70 to 150 s"),  # a load that a desktop has
        (1.0, 1, "70 to 150 s"),  # a core is left
        (2.0, 2, "35 to 150 s, uncertain: other processes have a load of 2.0 on 2 cores"),
        (7.0, 1, "15 to 150 s, uncertain: other processes have a load of 7.0 on 2 cores"),
    ],
)
def test_estimate_is_wide_if_others_want_the_cores(others: float, threads: int, text: str) -> None:
    load = {"others": others, "threads": threads, "cores": 2}
    assert format_expected(100, load) == text


def test_computation_of_this_process_is_no_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 1.0, 1.0))
    monkeypatch.setattr("time.process_time", lambda: 30.0)
    assert measure_load(2) == {"others": 1.0, "threads": 2, "cores": 4}
    monkeypatch.setattr("time.process_time", lambda: 3000.0)
    assert measure_load(1) == {"others": 0.5, "threads": 1, "cores": 4}


def test_system_without_load_averages_counts_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr("os.getloadavg", fail)
    assert measure_load(1)["others"] == 0
