"""What a loss over coupled samples is refused with, in words and before training."""

from pathlib import Path

import pytest
from torch import nn

from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.losses import BYOL, SimCLR
from phasetrain.tasks.build.coupling import check_coupled, is_coupled
from phasetrain.testing.build import build_run, resolve_overrides

SIMCLR = ["experiment=digits_simclr"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["OPTIMIZER.accumulate=2"],
            "LOSS.name = 'simclr' compares samples .*OPTIMIZER.accumulate = 2",
        ),
        (
            ["DATA.TRAIN.micro_batch_size=32"],
            r"OPTIMIZER.accumulate = 4 \(DATA.TRAIN.micro_batch_size = 32\)",
        ),
        (
            ["DISTRIBUTED.reduction=ordered"],
            "DISTRIBUTED.reduction = 'ordered' computes a batch in parts",
        ),
    ],
)
def test_a_batch_in_parts_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build_run([*SIMCLR, f"RUN.dir={tmp_path}", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["DATA.TRAIN.drop_last=false"],
            "DATA.TRAIN.drop_last = false can leave .*unequal size",
        ),
        (
            ["DATA.TRAIN.on_bad_sample=drop"],
            "DATA.TRAIN.on_bad_sample = 'drop' can leave shards of unequal size",
        ),
    ],
)
def test_unequal_shares_of_several_processes_are_refused(words: list[str], message: str) -> None:
    config = resolve_overrides([*SIMCLR, *words]).config
    with pytest.raises(ConfigError, match=message):
        check_coupled(SimCLR(), [config], World(rank=1, size=4))
    check_coupled(SimCLR(), [config], World())
    check_coupled(BYOL(), [config], World(rank=1, size=4))


def test_a_part_of_a_loss_counts() -> None:
    assert is_coupled(nn.ModuleList([nn.MSELoss(), SimCLR()]))
    assert not is_coupled(nn.ModuleList([nn.MSELoss(), BYOL()]))
