"""A hook that changes weights on rank 0 alone ends the run, because the ranks would differ."""

from pathlib import Path

import pytest
from processes import Launcher

WORDS = (
    "RUN.imports=[one_rank_parts]",
    "MACHINE.threads=1",
    "PHASES={epochs: 1, limit: {train: 8, test: 1}}",
    "DATA.TRAIN.batch_size=24",
    "MODEL={name: centered}",
    "HOOKS.console=null",
    "HOOKS.report=null",
)


def outputs(launcher: Launcher, folder: Path, hook: str) -> tuple[list[int], str]:
    done = launcher.run(folder / "run", 2, *WORDS, f"+HOOKS.mine={hook}")
    return done.codes, "".join(done.outputs)


@pytest.mark.feature(
    "hooks.main_only",
    "a hook that changes weights on one rank only ends the run",
    "`Hook.main_only`",
)
@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("{name: one_rank}", "`on_start` changes model.net.weight on rank 0 only"),
        pytest.param(
            "{name: one_rank, what: value}",
            "`on_start` changes `center` of one_rank_parts.Centered on rank 0 only",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{name: one_rank, event: update}",
            "`on_update` changes model.net.weight on rank 0 only",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{name: one_rank, event: late}",
            "model.net.weight of rank 1 differs from that of rank 0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_change_on_rank_0_ends_the_run(
    launcher: Launcher, tmp_path: Path, hook: str, text: str
) -> None:
    codes, output = outputs(launcher, tmp_path, hook)
    assert codes == [2, 2]
    assert text in output
    assert "HOOKS.mine" in output
    assert "main_only = False" in output


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param("{name: each_rank}", marks=pytest.mark.slow),
        pytest.param("{name: each_rank, event: late, what: buffer}", marks=pytest.mark.slow),
        # DistributedDataParallel copies the buffers of rank 0.
        pytest.param("{name: one_rank, what: buffer}", marks=pytest.mark.slow),
    ],
)
def test_change_on_each_rank_is_accepted(launcher: Launcher, tmp_path: Path, hook: str) -> None:
    codes, output = outputs(launcher, tmp_path, hook)
    assert codes == [0, 0], output
