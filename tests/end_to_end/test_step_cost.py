"""What a step does beside its arithmetic, counted in calls of Python functions: time itself is for
`benchmarks/`."""

import sys
from types import FrameType
from typing import Any

import pytest

from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import RunState
from phasetrain.hooks import Hooks
from phasetrain.testing.build import build_run

WORDS = (
    "experiment=null",
    "DATA.TRAIN={dataset: synthetic, samples: 800, input_shape: [16], classes: 16, batch_size: 8}",
    "DATA.TEST=null",
    "MODEL={name: torch.nn.Linear, in_features: 16, out_features: 16}",
    "OPTIMIZER={name: sgd, lr: 0.01, momentum: 0.9}",
    "PHASES.epochs=1",
)


LIMIT = 81
"""Calls per update when this was written: 80.1, six of them to notice a model or a hook that begins
to draw random numbers, and two in place of a wrapper of torch; each costs a fraction of a
microsecond."""


def calls_per_update(*words: str) -> float:
    """Return the calls of functions of phasetrain per update."""
    made, counted = build_run([*WORDS, *words]), 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event == "call" and "/phasetrain/" in frame.f_code.co_filename

    engine = PhaseEngine(made.task, made.plan, RunState(), Hooks())
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        engine.run()
    finally:
        sys.setprofile(before)
    return counted / made.plan.updates


@pytest.mark.feature(
    "B8",
    "overhead per step below other frameworks",
    "`benchmarks/overhead.py`, `benchmarks/peers_overhead.py`",
)
def test_a_step_makes_few_calls_and_what_is_not_asked_for_makes_none() -> None:
    plain = calls_per_update("OPTIMIZER.on_nonfinite=ignore")
    assert plain < LIMIT
    assert plain < calls_per_update(), "the guard against what is not finite makes some more"
    assert calls_per_update("OPTIMIZER.on_nonfinite=ignore", "MODEL.ema={}") > plain
