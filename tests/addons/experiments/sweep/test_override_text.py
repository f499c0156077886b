import pytest
from raising import raises

from phasetrain.addons.experiments.sweep.override_text import SweepOverrides, hash_overrides
from phasetrain.config.compose.override_text import quote_value
from phasetrain.errors import ConfigError


def test_each_word_goes_where_it_belongs() -> None:
    words = SweepOverrides.read(
        [
            "A.x=1,2",
            "B.y=3",
            "~C.z",
            "hydra/launcher=basic",
            "hydra.sweep.dir=out",
            "hydra/sweeper=optuna",
            "A.x=[1",
        ]
    )
    assert (words.fixed, words.hydra) == (["B.y=3", "~C.z", "A.x=[1"], ["hydra/launcher=basic"])
    assert ([o.input_line for o in words.swept], words.sweeper, words.resolve_folder()) == (
        ["A.x=1,2"],
        "optuna",
        "out",
    )


def test_combinations_are_those_of_hydra_the_last_key_first() -> None:
    words = SweepOverrides.read(["A.x=1,2", "LOSS=a,b", "C.z=3"])
    assert words.list_combinations() == [
        ["A.x=1", "LOSS=a"],
        ["A.x=1", "LOSS=b"],
        ["A.x=2", "LOSS=a"],
        ["A.x=2", "LOSS=b"],
    ]
    assert SweepOverrides.read(["C.z=3"]).list_combinations() == [[]]


def test_seeds_are_numbers_from_a_first_one_on() -> None:
    words = SweepOverrides.read(["A.x=1,2", "RUN.seed=seeds(3,start=100)"])
    assert words.list_combinations() == [
        [f"A.x={x}", f"RUN.seed={seed}"] for x in (1, 2) for seed in (100, 101, 102)
    ]
    assert words.list_configs() == [["A.x=1"], ["A.x=2"]]
    assert words.list_repetitions() == [["RUN.seed=100"], ["RUN.seed=101"], ["RUN.seed=102"]]


def test_more_seeds_are_the_same_sweep() -> None:
    folders = {
        SweepOverrides.read(["A.x=1,2", f"RUN.seed={seeds}"]).resolve_folder()
        for seeds in ("seeds(2)", "seeds(5)", "seeds(3, start=7)")
    }
    assert folders == {f"runs/sweep-{hash_overrides(['A.x=1,2', 'RUN.seed=seeds'])}"}


def test_seeds_of_another_key_are_rejected() -> None:
    with raises(ConfigError, code="sweep.no_seed"):
        SweepOverrides.read(["PHASES.epochs=seeds(3)"])


@pytest.mark.parametrize(
    "value", ["seeds(0)", "seeds(a)", "seeds()", "seeds(2,start=-1)", "seeds(1e9)"]
)
def test_seeds_that_cannot_be_read_are_left_to_the_check(value: str) -> None:
    words = SweepOverrides.read([f"RUN.seed={value}"])
    assert (words.fixed, words.swept) == ([f"RUN.seed={value}"], [])


def test_other_sweepers_get_seeds_as_numbers() -> None:
    words = SweepOverrides.read(["RUN.seed=seeds(2)", "hydra/sweeper=ax"])
    assert words.list_sweeper_arguments() == ["hydra/sweeper=ax", "++RUN.seed=0,1"]


def test_an_interval_needs_a_sampler() -> None:
    with raises(ConfigError, code="sweep.interval"):
        SweepOverrides.read(["A.x=interval(0,1)"]).list_combinations()


def test_another_sweeper_gets_what_is_swept_and_its_parameters() -> None:
    words = SweepOverrides.read(
        ["LOSS=a,b", "LOSS.gamma=1,2", "hydra/sweeper=ax", "hydra.sweeper.max=3"]
    )
    assert words.list_sweeper_arguments() == [
        "hydra/sweeper=ax",
        "hydra.sweeper.max=3",
        "++select.LOSS=a,b",
        "++LOSS.gamma=1,2",
    ]


def test_a_digest_does_not_depend_on_the_order() -> None:
    assert (
        hash_overrides(["a=1", "b=2"])
        == hash_overrides(["b=2", "a=1"])
        != hash_overrides(["a=1", "b=3"])
    )


@pytest.mark.parametrize("import_fails", [False, True])
def test_a_launcher_that_is_not_installed_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, import_fails: bool
) -> None:
    def missing(name: str) -> None:
        if import_fails:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr("phasetrain.addons.experiments.sweep.override_text.find_spec", missing)
    for launcher, extra in (("joblib", "sweep"), ("submitit_slurm", "cluster")):
        with pytest.raises(ConfigError) as caught:
            SweepOverrides.read([f"hydra/launcher={launcher}"])
        assert f'pip install "phasetrain[{extra}]"' in str(caught.value)
    assert SweepOverrides.read(["hydra/launcher=basic"]).hydra == ["hydra/launcher=basic"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("runs/a-1/2", "runs/a-1/2"),
        ("/tmp/x.y", "/tmp/x.y"),
        ("12", "'12'"),
        ("a b/c", "'a b/c'"),
        ("it's/x", r"'it\'s/x'"),
    ],
)
def test_only_what_needs_it_is_quoted(text: str, word: str) -> None:
    assert quote_value(text) == word
