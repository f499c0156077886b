"""A loss over coupled samples is rejected before training if a batch is split."""

from pathlib import Path

import pytest
from torch import nn

import phasetrain
from phasetrain.addons.vision.self_supervised_losses.byol import BYOL
from phasetrain.addons.vision.self_supervised_losses.simclr import SimCLR
from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.tasks.build.coupling import check_coupled, list_coupled
from phasetrain.testing.build import build_run, resolve_overrides

SIMCLR = ["experiment=digits_simclr"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["OPTIMIZER.accumulate=2"],
            r"LOSS\.name = 'simclr' .*OPTIMIZER\.accumulate = 2",
        ),
        (
            ["DATA.TRAIN.micro_batch_size=32"],
            r"OPTIMIZER.accumulate = 4 \(DATA.TRAIN.micro_batch_size = 32\)",
        ),
        (
            ["DISTRIBUTED.reduction=ordered"],
            r"DISTRIBUTED\.reduction = 'ordered' ",
        ),
    ],
)
def test_split_batch_is_rejected(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build_run([*SIMCLR, f"RUN.dir={tmp_path}", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["DATA.TRAIN.drop_last=false"],
            r"DATA\.TRAIN\.drop_last = false ",
        ),
        (
            ["DATA.TRAIN.on_bad_sample=drop"],
            r"DATA\.TRAIN\.on_bad_sample = 'drop' ",
        ),
    ],
)
def test_unequal_shards_of_ranks_are_rejected(words: list[str], message: str) -> None:
    config = resolve_overrides([*SIMCLR, *words]).config
    with pytest.raises(ConfigError, match=message):
        check_coupled(SimCLR(), [config], World(rank=1, size=4), train=True)
    check_coupled(SimCLR(), [config], World(), train=True)
    check_coupled(BYOL(), [config], World(rank=1, size=4), train=True)


def test_coupled_term_makes_the_loss_coupled() -> None:
    term = SimCLR()
    assert list_coupled(nn.ModuleList([nn.MSELoss(), term])) == [term]
    assert list_coupled(nn.ModuleList([nn.MSELoss(), BYOL()])) == []


class Pairs(nn.Module):
    """Compares samples of its own rank only."""

    coupled = True


def test_ranks_that_exchange_nothing_are_rejected() -> None:
    config = resolve_overrides(SIMCLR).config
    for loss in (Pairs(), nn.ModuleList([SimCLR(), Pairs()])):
        with pytest.raises(ConfigError, match="constructor of Pairs take `world`") as caught:
            check_coupled(loss, [config], World(rank=1, size=2), train=True)
        assert caught.value.code == "loss.coupled"
        check_coupled(loss, [config], World(), train=True)


def test_parts_of_a_test_are_rejected(tmp_path: Path) -> None:
    words = [*SIMCLR, "DATA.TEST.batch_size=64"]
    config = resolve_overrides([*words, "DATA.TEST.micro_batch_size=32"]).config
    check_coupled(SimCLR(), [config], World(rank=1, size=2), train=True)  # a rank has 32 samples
    with pytest.raises(ConfigError, match=r"DATA\.TEST\.micro_batch_size = 32") as caught:
        check_coupled(SimCLR(), [config], World(), train=True)
    assert caught.value.code == "loss.coupled"
    check_coupled(BYOL(), [config], World(), train=True)
    check_coupled(SimCLR(), [resolve_overrides(words).config], World(), train=True)
    words += ["DATA.TEST.micro_batch_size=32", "RUN.engine=test", "RUN.checkpoint=none"]
    with pytest.raises(ConfigError, match=r"DATA\.TEST\.micro_batch_size = 32") as caught:
        phasetrain.run([*words, f"RUN.dir={tmp_path}"])
    assert caught.value.code == "loss.coupled"
