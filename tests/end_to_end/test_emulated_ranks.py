"""Runs of two ranks on emulated CUDA devices, killed and resumed under each strategy."""

from pathlib import Path

import pytest
from emulated_cuda import why_not_emulated
from harness import SMALL, differences_of_runs, newest
from processes import Launcher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not_emulated() is not None, reason=why_not_emulated() or ""),
]

WORDS = (
    *SMALL,
    "RUN.imports=[emulated_rank, process_parts]",
    "MACHINE={device: cuda, threads: 1}",
    "PHASES={epochs: 2, limit: {train: 3, test: 1}}",
    "CHECKPOINT.every_updates=1",
)
SHARDING = pytest.mark.addon("sharding")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("DISTRIBUTED.strategy=ddp",), id="ddp"),
        pytest.param(("DISTRIBUTED.strategy=zero",), id="zero", marks=SHARDING),
        pytest.param(("DISTRIBUTED.strategy=fsdp",), id="fsdp", marks=SHARDING),
        pytest.param(("DISTRIBUTED.strategy=sharded_ddp",), id="sharded_ddp", marks=SHARDING),
        pytest.param(("DISTRIBUTED.reduction=ordered",), id="ordered"),
    ],
)
def test_killed_and_resumed(tmp_path: Path, launcher: Launcher, words: tuple[str, ...]) -> None:
    strike = "HOOKS.strike={rank: 1, update: 2}"
    ended = launcher.run(tmp_path / "unbroken", 2, *WORDS, *words)
    assert ended.codes == [0, 0], ended.outputs
    assert launcher.run(tmp_path / "run", 2, *WORDS, *words, strike).codes[1] == -9
    ended = launcher.run(tmp_path / "run", 2, *WORDS, *words, strike)
    assert ended.codes == [0, 0], ended.outputs
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []
    assert newest(tmp_path / "run").promised["environment"]["device"] == "cuda"
