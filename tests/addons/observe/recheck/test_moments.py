"""Each interval has one random moment, and the automatic interval bounds the cost."""

import time

import pytest

from phasetrain.addons.observe.recheck.moments import Moments


def test_each_interval_has_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    moments = Moments(every_minutes=1)
    moments.start()
    found = []
    for _ in range(50):
        assert not moments.take()
        now[0] = moments._moment
        found.append(int((now[0] - 100) // 60))
        assert moments.take()
        assert not moments.take()
        moments.choose_next(3.0)
    assert found == list(range(50))


def test_automatic_interval_spends_one_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    moments = Moments("auto")
    moments.choose_next(0.25)
    assert moments._interval_end == 25.0
