import re

import pytest

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.compose import compose
from phasetrain.config.derive import Derived, derive, nearest_divisors, overview
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError

SCHEMA = default_schema()


def derived(*overrides: str, **options) -> Derived:
    return derive(compose(overrides, **options), SCHEMA, device="cpu")


def refused(*overrides: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        derived(*overrides, **options)
    return str(caught.value)


def test_the_default_config_is_complete_and_frozen() -> None:
    found = derived()
    assert isinstance(found.config, AttrDict)
    assert found.config.RUN.name == "digits"
    assert re.fullmatch(r"runs/digits-[0-9a-f]{8}", found.config.RUN.dir)
    assert found.config.MACHINE.device == "cpu"
    assert "MACHINE.device: 'auto' -> 'cpu' (what this machine has)" in found.lines
    assert "RUN.name: null -> 'digits' (name of the experiment)" in found.lines


def test_the_composed_config_is_not_changed() -> None:
    composed = compose([])
    derive(composed, SCHEMA, device="cpu")
    assert composed.config["RUN"]["dir"] is None


def test_what_is_given_stays() -> None:
    found = derived("RUN.name=mine", "RUN.dir=there", "MACHINE.device=cuda", "DATA.TEST=null", "OPTIMIZER.accumulate=4")
    assert (found.config.RUN.name, found.config.RUN.dir, found.config.MACHINE.device) == ("mine", "there", "cuda")
    assert found.lines == ("DATA.TRAIN.micro_batch_size: null -> 16 (batch_size 64 / OPTIMIZER.accumulate 4)",)


def test_the_folder_follows_what_shapes_the_run_and_nothing_else() -> None:
    folder = derived().config.RUN.dir
    assert derived("DATA.TRAIN.workers=2", "MACHINE.device=cuda").config.RUN.dir == folder
    assert derived("OPTIMIZER.accumulate=1").config.RUN.dir == folder, "the same as what is derived"
    assert derived("OPTIMIZER.accumulate=2").config.RUN.dir != folder
    assert derived("RUN.seed=1").config.RUN.dir != folder


def test_an_experiment_in_a_folder_and_none_at_all(user_dir) -> None:
    own = user_dir({"experiment/deep/mine.yaml": "PHASES: {epochs: 1}\n"})
    assert derived("experiment=deep/mine", config_dir=own).config.RUN.name == "deep-mine"
    assert derived("experiment=null", "PHASES.updates=3").config.RUN.name == "run"


def test_a_name_that_is_no_folder_is_refused() -> None:
    assert refused("RUN.name=a/b").startswith("RUN.name = 'a/b' (command line): it becomes part of a folder's name")


@pytest.mark.parametrize(
    ("overrides", "micro", "accumulate"),
    [
        ([], 64, 1),
        (["OPTIMIZER.accumulate=4"], 16, 4),
        (["DATA.TRAIN.micro_batch_size=8"], 8, 8),
        (["DATA.TRAIN.micro_batch_size=8", "OPTIMIZER.accumulate=8"], 8, 8),
        (["DATA.TRAIN.batch_size=96", "DATA.TRAIN.micro_batch_size=96"], 96, 1),
    ],
)
def test_micro_batches(overrides: list[str], micro: int, accumulate: int) -> None:
    config = derived(*overrides).config
    assert (config.DATA.TRAIN.micro_batch_size, config.OPTIMIZER.accumulate) == (micro, accumulate)


def test_micro_batches_that_do_not_divide() -> None:
    assert refused("OPTIMIZER.accumulate=3") == (
        "OPTIMIZER.accumulate = 3 (command line) does not divide DATA.TRAIN.batch_size = 64 (64 = 21 x 3 + 1); "
        "nearest that work: 2, 4"
    )
    assert "DATA.TRAIN.micro_batch_size = 100 (command line) does not divide" in refused(
        "DATA.TRAIN.micro_batch_size=100"
    )
    assert refused("DATA.TRAIN.micro_batch_size=8", "OPTIMIZER.accumulate=4") == (
        "DATA.TRAIN.micro_batch_size = 8 times OPTIMIZER.accumulate = 4 is 32, not DATA.TRAIN.batch_size = 64; "
        "set only one of the two"
    )
    assert "DATA.TEST.micro_batch_size = 3 (command line) does not divide" in refused("DATA.TEST.micro_batch_size=3")


def test_test_splits_go_in_one_piece_unless_told_otherwise() -> None:
    config = derived("DATA.VAL={dataset: digits, batch_size: 30, micro_batch_size: 10}").config
    assert (config.DATA.TEST.micro_batch_size, config.DATA.VAL.micro_batch_size) == (256, 10)


@pytest.mark.parametrize(("whole", "part", "near"), [(64, 3, [2, 4]), (7, 3, [1, 7]), (64, 100, [64]), (6, 4, [3, 6])])
def test_nearest_divisors(whole: int, part: int, near: list[int]) -> None:
    assert nearest_divisors(whole, part) == near


def test_the_higher_layer_decides_the_length() -> None:
    found = derived("PHASES.updates=100")
    assert (found.config.PHASES.epochs, found.config.PHASES.updates) == (None, 100)
    assert found.lines[0] == (
        "PHASES.epochs: 12 -> null (PHASES.updates = 100 (command line) comes above experiment/digits.yaml)"
    )


def test_two_lengths_in_one_layer_or_none_are_refused(user_dir) -> None:
    assert refused("PHASES.updates=100", "PHASES.epochs=3") == (
        "PHASES.epochs = 3 and PHASES.updates = 100 are both set (command line); keep one of them"
    )
    own = user_dir(
        {"experiment/mine.yaml": "RUN: {seed: 1}\n", "experiment/two.yaml": "PHASES: {epochs: 1, samples: 2}\n"}
    )
    assert refused("experiment=mine", config_dir=own) == (
        "PHASES: one of epochs, updates, samples must be set, as in PHASES.epochs=10"
    )
    assert "are both set" in refused("experiment=two", config_dir=own)
    assert derived("experiment=two", "PHASES.updates=5", config_dir=own).config.PHASES.updates == 5


def test_all_problems_are_told_at_once() -> None:
    message = refused("PHASES.epochs=null", "OPTIMIZER.accumulate=3", "RUN.name=a/b")
    assert message.startswith("3 problems in the config:")


def test_overview_lists_what_is_no_default_with_its_layer() -> None:
    found = overview(compose(["OPTIMIZER.lr=0.1", "RUN.seed=4", "LOSS=label_smoothing"]), SCHEMA)
    assert ("RUN.seed", 4, "command line") in found
    assert ("LOSS.label_smoothing", 0.1, "LOSS/label_smoothing.yaml") in found
    assert ("MODEL.width", 32, "MODEL/small_cnn.yaml") in found
    assert "OPTIMIZER.lr" not in [path for path, _, _ in found]
