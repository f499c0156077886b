import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from raising import raises

from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings
from phasetrain.errors import ConfigError


def read(*words: str) -> PruneSettings | None:
    parser = OverridesParser.create()
    return PruneSettings.read([parser.parse_override(word) for word in words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hydra.sweeper.prune=hyperband"], PruneSettings("hyperband")),
        (
            ["hydra.sweeper.prune={name: halving, eta: 4, min: 1 epoch}"],
            PruneSettings("halving", 4, 1, "epochs"),
        ),
        (
            ["hydra.sweeper.prune=halving", "hydra.sweeper.prune.min=20 updates"],
            PruneSettings("halving", 3, 20, "updates"),
        ),
        (["hydra.sweeper.prune.eta=2"], PruneSettings("halving", 2)),
        (["hydra.sweeper.prune=null"], None),
        ([], None),
    ],
)
def test_settings_are_read_as_a_name_a_mapping_or_single_keys(
    words: list[str], expected: PruneSettings | None
) -> None:
    assert read(*words) == expected


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("hydra.sweeper.prune=halvin", "sweep.prune_unknown"),
        ("hydra.sweeper.prune.eat=3", "sweep.prune_unknown"),
        ("hydra.sweeper.prune.eta=1", "sweep.prune_value"),
        ("hydra.sweeper.prune.eta=2.5", "sweep.prune_value"),
        ("hydra.sweeper.prune.eta=true", "sweep.prune_value"),
        ("hydra.sweeper.prune.min=20", "sweep.prune_value"),
        ("hydra.sweeper.prune.min=0 epochs", "sweep.prune_value"),
        ("hydra.sweeper.prune.min=2 minutes", "sweep.prune_value"),
    ],
)
def test_bad_settings_are_rejected(word: str, code: str) -> None:
    with raises(ConfigError, code=code):
        read(word)
