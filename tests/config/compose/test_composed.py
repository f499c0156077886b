import pytest

from phasetrain.config.compose.composed import Composed, compose
from phasetrain.config.nested import leaves

FOCAL = "name: focal\ngamma: 2\n"


def composed(*overrides: str, **options) -> Composed:
    found = compose(overrides, **options)
    assert found.problems == ()
    return found


MODEL = {
    "weights": None,
    "inputs_by_name": False,
    "freeze": [],
    "freeze_updates": [],
    "ema": None,
    "swa": None,
    "schedule_free": None,
    "adapters": None,
}


def test_no_overrides_give_the_default_experiment() -> None:
    found = composed()
    assert found.experiment == "digits"
    assert found.config["MODEL"] == MODEL | {"name": "small_cnn", "width": 32, "dropout": 0.0}
    assert found.origins["MODEL.width"] == "MODEL/small_cnn.yaml"
    assert found.origins["RUN.seed"] == "defaults.yaml"
    assert found.layers[0] == "defaults.yaml"
    assert found.layers[-1] == "command line"
    assert found.notes == ()


@pytest.mark.parametrize(
    ("overrides", "train", "test"),
    [
        (["DATA.TRAIN.dataset=idx"], "idx", None),
        (["DATA.TRAIN.dataset=idx", "experiment=digits"], "idx", "digits"),
        (["DATA.TRAIN.dataset=idx", "DATA.TEST.dataset=digits"], "idx", "digits"),
        (["DATA.TRAIN.dataset=idx", "experiment=null"], "idx", None),
        (["DATA.TRAIN.dataset=digits"], "digits", "digits"),
        (["DATA.TEST.dataset=idx"], None, "idx"),
        (["DATA.TRAIN=null"], None, "digits"),
        (["DATA.TEST=null"], "digits", None),
        (["DATA.TEST.batch_size=8", "experiment=null"], None, None),
        (["DATA.TEST.batch_size=8"], "digits", "digits"),
    ],
)
def test_no_dataset_joins_one_that_was_chosen(
    overrides: list[str], train: str | None, test: str | None
) -> None:
    data = composed(*overrides).config["DATA"]
    assert data["TRAIN"]["dataset"] == train
    assert data.get("TEST", {}).get("dataset") == test
    assert ("TEST" in data) == (test is not None)


def test_every_leaf_has_an_origin() -> None:
    found = composed(
        "DATA.VAL={dataset: digits, split: test}", "METERS.loss=null", "~METERS.accuracy"
    )
    assert set(found.origins) == set(leaves(found.config))


def test_overrides_set_and_add_values_with_or_without_plus() -> None:
    found = composed(
        "OPTIMIZER.lr=1e-3", "+LOSS.a=1", "++LOSS.b=[1, x]", "METERS.top5={name: accuracy, top: 5}"
    )
    assert found.config["OPTIMIZER"]["lr"] == 0.001
    assert (found.config["LOSS"]["a"], found.config["LOSS"]["b"]) == (1, [1, "x"])
    assert found.config["METERS"]["top5"] == {"name": "accuracy", "top": 5}
    assert found.origins["METERS.top5.top"] == "command line"


def test_group_of_the_command_line_overrides_the_experiment(user_dir) -> None:
    own = user_dir(
        {"LOSS/focal.yaml": FOCAL, "experiment/mine.yaml": "LOSS:\n  name: focal\n  gamma: 5\n"}
    )
    assert composed("experiment=mine", config_dir=own).config["LOSS"] == {
        "name": "focal",
        "gamma": 5,
    }
    found = composed("experiment=mine", "LOSS=focal", config_dir=own)
    assert found.config["LOSS"] == {"name": "focal", "gamma": 2}
    assert found.origins["LOSS.gamma"] == f"{own}/LOSS/focal.yaml"
    found = composed("LOSS=focal", "LOSS.gamma=7", "experiment=mine", config_dir=own)
    assert found.config["LOSS"] == {"name": "focal", "gamma": 7}


def test_selected_group_replaces_that_of_the_defaults_list() -> None:
    found = composed("OPTIMIZER=adamw")
    assert "OPTIMIZER/sgd.yaml" not in found.layers
    assert found.notes == ()
    assert found.config["OPTIMIZER"]["lr"] == 0.001


def test_groups_are_below_self_and_the_experiment(user_dir) -> None:
    own = user_dir(
        {
            "LOSS/focal.yaml": FOCAL,
            "experiment/above.yaml": "defaults:\n  - /LOSS: focal\n  - _self_\nLOSS:\n  gamma: 1\n",
            "experiment/below.yaml": "defaults:\n  - _self_\n  - /LOSS: focal\nLOSS:\n  gamma: 1\n",
        }
    )
    assert composed("experiment=above", config_dir=own).config["LOSS"]["gamma"] == 1
    assert composed("experiment=below", config_dir=own).config["LOSS"]["gamma"] == 2


def test_experiment_extends_another_and_overrides_its_groups(user_dir) -> None:
    own = user_dir(
        {
            "experiment/deep/base.yaml": "defaults:\n  - /MODEL: mlp\n  - _self_\nOPTIMIZER:\n  lr: 2e-3\n",
            "experiment/deep/mine.yaml": "defaults:\n  - deep/base\n  - override /MODEL: resnet20\n  - _self_\n",
            "experiment/other.yaml": "defaults:\n  - /experiment/deep/base\n  - _self_\nRUN:\n  seed: 3\n",
        }
    )
    found = composed("experiment=deep/mine", config_dir=own)
    assert found.config["MODEL"] == MODEL | {"name": "resnet_cifar", "depth": 20}
    assert found.config["OPTIMIZER"]["lr"] == 0.002
    assert found.layers[1:] == (
        "MODEL/resnet20.yaml",
        f"{own}/experiment/deep/base.yaml",
        f"{own}/experiment/deep/mine.yaml",
        "command line",
    )
    found = composed("experiment=other", config_dir=own)
    assert (found.config["RUN"]["seed"], found.config["MODEL"]["name"]) == (3, "mlp")


@pytest.mark.parametrize("header", ["", "# @package _global_\n"])
def test_package_header_of_an_experiment_is_optional(user_dir, header: str) -> None:
    own = user_dir({"experiment/mine.yaml": f"{header}LOSS:\n  name: focal\n"})
    assert composed("experiment=mine", config_dir=own).config["LOSS"] == {"name": "focal"}


def test_groups_of_nested_sections_and_folders_are_found(user_dir) -> None:
    own = user_dir(
        {
            "DATA/TRAIN/big.yaml": "batch_size: 512\n",
            "MODEL/vision/wide.yaml": "name: mlp\nhidden: [9]\n",
        }
    )
    found = composed("DATA/TRAIN=big", "MODEL=vision/wide", config_dir=own)
    assert found.config["DATA"]["TRAIN"]["batch_size"] == 512
    assert found.config["MODEL"] == MODEL | {"name": "mlp", "hidden": [9]}


def test_several_options_of_one_group_are_merged(user_dir) -> None:
    own = user_dir(
        {"HOOKS/a.yaml": "console: {every_steps: 3}\n", "HOOKS/b.yaml": "extra: {name: console}\n"}
    )
    hooks = composed("HOOKS=[a,b]", config_dir=own).config["HOOKS"]
    assert hooks == composed().config["HOOKS"] | {
        "console": {"every_steps": 3},
        "extra": {"name": "console"},
    }


def test_options_that_name_a_part_each_are_rejected(user_dir) -> None:
    folder = user_dir({"OPTIMIZER/clip.yaml": "clip_norm: 1.0\n"})
    for word in ("OPTIMIZER=[sgd,adamw]", "LOSS=[cross_entropy,label_smoothing]"):
        (problem,) = compose([word], config_dir=folder).problems
        assert (problem.code, problem.key) == ("config.several_parts", word.partition("=")[0])
    found = composed("OPTIMIZER=[adamw,clip]", config_dir=folder).config["OPTIMIZER"]
    assert (found["name"], found["clip_norm"]) == ("adamw", 1.0)


def test_mappings_are_merged_lists_replaced_and_null_kept() -> None:
    found = composed(
        "OPTIMIZER=adamw",
        "OPTIMIZER.betas=[0.5, 0.6]",
        "DATA.TRAIN={workers: 2}",
        "OPTIMIZER.eps=null",
    )
    assert found.config["OPTIMIZER"]["betas"] == [0.5, 0.6]
    assert found.config["OPTIMIZER"]["eps"] is None
    assert (
        found.config["DATA"]["TRAIN"]["workers"],
        found.config["DATA"]["TRAIN"]["batch_size"],
    ) == (2, 64)


def test_another_name_drops_parameters_of_lower_layers() -> None:
    found = composed("OPTIMIZER.name=adamw", "OPTIMIZER.betas=[0.8, 0.9]", "OPTIMIZER.lr=0.01")
    assert found.config["OPTIMIZER"]["betas"] == [0.8, 0.9]
    assert "momentum" not in found.config["OPTIMIZER"]
    assert "SCHEDULES" in found.config["OPTIMIZER"], "keys of defaults.yaml belong to the section"
    assert found.notes == (
        "OPTIMIZER.momentum = 0.9 (OPTIMIZER/sgd.yaml) dropped: OPTIMIZER.name is now 'adamw' (command line)",
        "OPTIMIZER.nesterov = True (OPTIMIZER/sgd.yaml) dropped: OPTIMIZER.name is now 'adamw' (command line)",
        "OPTIMIZER.weight_decay = 0.0 (OPTIMIZER/sgd.yaml) dropped: OPTIMIZER.name is now 'adamw' (command line)",
    )


def test_same_name_keeps_parameters() -> None:
    found = composed("OPTIMIZER.name=sgd", "DATA.TRAIN.dataset=digits")
    assert found.config["OPTIMIZER"]["momentum"] == 0.9
    assert found.config["DATA"]["TRAIN"]["split"] == "train"
    assert found.notes == ()


def test_parameters_of_the_same_layer_stay_in_any_order() -> None:
    assert composed("LOSS.gamma=3", "LOSS.name=focal").config["LOSS"] == {
        "name": "focal",
        "gamma": 3,
    }


def test_another_name_drops_parameters_in_every_section(user_dir) -> None:
    own = user_dir(
        {
            "experiment/mine.yaml": "METERS: {accuracy: {top: 5}}\nHOOKS: {console: {every_steps: 3}}\n"
            "OPTIMIZER: {SCHEDULES: {lr: {name: cosine, warmup: 0.1}}}\nDATA: {TRAIN: {dataset: digits, split: train}}\n"
        }
    )
    found = composed(
        "experiment=mine",
        "METERS.accuracy.name=loss",
        "HOOKS.console.name=quiet",
        "OPTIMIZER.SCHEDULES.lr=linear",
        "DATA.TRAIN.dataset=idx",
        config_dir=own,
    )
    assert found.config["METERS"]["accuracy"] == {"name": "loss"}
    assert found.config["HOOKS"]["console"] == {"name": "quiet"}
    assert found.config["OPTIMIZER"]["SCHEDULES"]["lr"] == {"name": "linear"}
    assert "split" not in found.config["DATA"]["TRAIN"]
    assert found.config["DATA"]["TRAIN"]["batch_size"] == 64
    assert [note.partition(" =")[0] for note in found.notes] == [
        "METERS.accuracy.top",
        "HOOKS.console.every_steps",
        "OPTIMIZER.SCHEDULES.lr.warmup",
        "DATA.TRAIN.split",
    ]


def test_name_alone_equals_the_mapping_with_the_name() -> None:
    assert composed("DATA.TRAIN.collate.pad=1").config["DATA"]["TRAIN"]["collate"] == {
        "name": "stack",
        "pad": 1,
    }
    schedule = composed("OPTIMIZER.SCHEDULES.lr=cosine").config["OPTIMIZER"]["SCHEDULES"]["lr"]
    assert schedule == {"name": "cosine", "warmup": 0.1}
    found = composed("OPTIMIZER.SCHEDULES.momentum=linear", "OPTIMIZER.SCHEDULES.momentum.end=0.5")
    assert found.config["OPTIMIZER"]["SCHEDULES"]["momentum"] == {"name": "linear", "end": 0.5}


def test_null_removes_labels_and_splits() -> None:
    found = composed(
        "METERS.loss=null", "HOOKS.console=null", "DATA.TEST=null", "OPTIMIZER.SCHEDULES.lr=null"
    )
    assert list(found.config["METERS"]) == ["accuracy"]
    assert found.config["HOOKS"].keys() == composed().config["HOOKS"].keys() - {"console"}
    assert list(found.config["DATA"]) == ["TRAIN"]
    assert found.config["OPTIMIZER"]["SCHEDULES"] == {}


def test_null_empties_sections_of_labels() -> None:
    found = composed("HOOKS=null", "METERS=null", "METERS.accuracy={}")
    assert found.config["HOOKS"] == {}
    assert composed("METERS=null").config["METERS"] == {}
    assert found.config["METERS"] == {"accuracy": {}, "loss": {}}, (
        "one layer's later override beats its earlier one"
    )


def test_removed_label_can_be_set_in_a_higher_layer(user_dir) -> None:
    own = user_dir({"experiment/mine.yaml": "HOOKS:\n  console: null\n"})
    assert "console" not in composed("experiment=mine", config_dir=own).config["HOOKS"]
    assert (
        "console" in composed("experiment=mine", "HOOKS.console={}", config_dir=own).config["HOOKS"]
    )


def test_additional_split_gets_the_defaults_of_test() -> None:
    found = composed("DATA.VAL={dataset: digits, split: test, batch_size: 32}")
    assert found.config["DATA"]["VAL"]["sampler"] == "sequential"
    assert found.config["DATA"]["VAL"]["batch_size"] == 32
    assert found.origins["DATA.VAL.sampler"] == "defaults.yaml"


def test_tilde_undoes_values_of_lower_layers() -> None:
    found = composed(
        "~OPTIMIZER.momentum",
        "~OPTIMIZER.lr",
        "~METERS.loss",
        "~PHASES.epochs=12",
        "PHASES.updates=3",
    )
    assert "momentum" not in found.config["OPTIMIZER"]
    assert found.config["OPTIMIZER"]["lr"] == 0.1
    assert found.origins["OPTIMIZER.lr"] == "defaults.yaml"
    assert list(found.config["METERS"]) == ["accuracy"]
    assert (found.config["PHASES"]["epochs"], found.config["PHASES"]["updates"]) == (None, 3)


def test_tilde_resets_a_section_to_its_defaults() -> None:
    assert composed("~MODEL").config["MODEL"] == MODEL | {"name": "mlp"}
    assert composed("~METERS").config["METERS"] == {}
    assert composed("~DATA.TRAIN").config["DATA"]["TRAIN"]["dataset"] is None
    assert "TEST" not in composed("~DATA.TEST").config["DATA"]


def test_imports_are_the_union_over_layers(user_dir) -> None:
    own = user_dir(
        {
            "LOSS/mine.yaml": "# @package _global_\nRUN:\n  imports: [a, b]\n",
            "experiment/mine.yaml": "defaults:\n  - /LOSS: mine\n  - _self_\nRUN:\n  imports: [b, c]\n",
        }
    )
    found = composed("experiment=mine", "RUN.imports=[a, d]", config_dir=own)
    assert found.config["RUN"]["imports"] == ["a", "b", "c", "d"]
    assert composed("experiment=mine", "RUN.imports=[]", config_dir=own).config["RUN"][
        "imports"
    ] == ["a", "b", "c"]


def test_interpolations_are_resolved_and_keep_their_layer(user_dir) -> None:
    own = user_dir(
        {
            "experiment/mine.yaml": "DATA:\n  TEST: {dataset: digits, batch_size: '${DATA.TRAIN.batch_size}'}\n"
        }
    )
    found = composed(
        "experiment=mine",
        "DATA.TRAIN.batch_size=7",
        "RUN.name=n${RUN.seed}",
        "METERS=${HOOKS}",
        config_dir=own,
    )
    assert found.config["DATA"]["TEST"]["batch_size"] == 7
    assert found.origins["DATA.TEST.batch_size"] == f"{own}/experiment/mine.yaml"
    assert found.config["RUN"]["name"] == "n0"
    assert found.config["METERS"] == composed().config["HOOKS"] != {}


def test_numbers_of_text_keys_stay_as_typed() -> None:
    assert composed("RUN.name=007").config["RUN"]["name"] == "007"
    assert composed("RUN.checkpoint=1e5").config["RUN"]["checkpoint"] == "1e5"


def test_files_are_read_like_by_omegaconf(user_dir) -> None:
    own = user_dir({"OPTIMIZER/mine.yaml": "lr: 1e-3\n"})
    assert composed("OPTIMIZER=mine", config_dir=own).config["OPTIMIZER"]["lr"] == 0.001


def test_no_experiment_gives_the_defaults() -> None:
    found = composed("experiment=null")
    assert found.experiment == ""
    assert found.layers == ("defaults.yaml", "command line")


@pytest.mark.parametrize(
    ("override", "code", "key", "suggestion"),
    [
        ("OPTIMIZER.lr=0.1,0.2", "config.override", "OPTIMIZER.lr", ""),
        ("LOSS=choice(a,b)", "config.override", "LOSS", ""),
        ("OPTIMIZER.lr=range(1,3)", "config.override", "OPTIMIZER.lr", ""),
        ("experiment=digts", "config.unknown_file", "experiment", "digits"),
        ("experiment=", "config.unknown_file", "experiment", ""),
        ("LOSS=", "config.unknown_file", "LOSS", ""),
        ("OPTIMIZER=adam", "config.unknown_file", "OPTIMIZER", "adamw"),
        ("MODEL=nothing", "config.unknown_file", "MODEL", ""),
        ("PHASES=short", "config.unknown_file", "PHASES", ""),
        ("foo/bar=3", "config.override", "foo/bar", ""),
        ("LOSS@X=cross_entropy", "config.override", "LOSS", ""),
        ("hydra.verbose=true", "config.override", "hydra.verbose", ""),
        ("~LOSS.gama", "config.unknown_key", "LOSS.gama", "LOSS.name"),
        ("~OPTIMIZER.momentm", "config.unknown_key", "OPTIMIZER.momentm", "OPTIMIZER.momentum"),
        ("~OPTIMIZER.lr=3", "config.override", "OPTIMIZER.lr", ""),
        ("A.b=[1,2", "config.override", "A.b", ""),
        ("A.b=a=b", "config.override", "A.b", ""),
        ("OPTIMIZER", "config.override", "", ""),
        ("=3", "config.override", "", ""),
        ("RUN.name=${RUN.nmae}", "config.interpolation", "RUN.name", "RUN.name"),
        ("RUN.name='n${RUN'", "config.interpolation", "RUN.name", ""),
        ("RUN.name=${", "config.override", "RUN.name", ""),
        ("RUN.name=???", "config.missing_value", "RUN.name", ""),
    ],
)
def test_bad_overrides_are_reported(override: str, code: str, key: str, suggestion: str) -> None:
    (found,) = compose([override]).problems
    assert (found.code, found.key, found.suggestion) == (code, key, suggestion)
    assert override.lstrip("~").partition("=")[0] in found.message


def test_text_with_special_characters_shows_how_to_quote_it() -> None:
    (found,) = compose(["A.b=a=b"]).problems
    assert "\"A.b='a=b'\"" in found.message


def test_all_problems_are_collected() -> None:
    assert len(compose(["A.b=1,2", "LOSS=nothing", "~X.y", "RUN.name=${no.such}"]).problems) == 4


def test_key_below_a_value_is_rejected() -> None:
    (problem,) = compose(["RUN.seed=1", "RUN.seed.x=2"]).problems
    assert (problem.code, problem.key) == ("config.conflict", "RUN.seed.x")
    assert "RUN.seed is set to 1" in problem.message


def test_keys_with_dots_in_files_are_rejected(user_dir) -> None:
    own = user_dir({"experiment/mine.yaml": "OPTIMIZER.lr: 0.1\n"})
    (problem,) = compose(["experiment=mine"], config_dir=own).problems
    assert (problem.code, problem.key) == ("config.dotted_key", "OPTIMIZER.lr")
    assert f"({own}/experiment/mine.yaml)" in problem.message
    assert "`OPTIMIZER: {lr: ...}`" in problem.message


def test_derived_name_of_the_run_can_be_referred_to() -> None:
    found = compose(["RUN.dir=odd/${RUN.name}x"])
    assert found.problems == ()
    assert found.config["RUN"]["dir"] == "odd/digitsx"
    assert found.config["RUN"]["name"] is None
    given = compose(["RUN.dir=odd/${RUN.name}x", "RUN.name=mine"])
    assert given.config["RUN"]["dir"] == "odd/minex"


def test_text_that_embeds_a_null_key_is_rejected() -> None:
    (problem,) = compose(["RUN.name=a${RUN.dir}"]).problems
    assert (problem.code, problem.key) == ("config.interpolation", "RUN.name")
    assert compose(["RUN.name=${RUN.dir}"]).problems == ()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("RUN.name=n${oc.env:NO_SUCH_VARIABLE}", "NO_SUCH_VARIABLE is not set"),
        ("RUN.name=n${RUN.name}", "it refers to itself"),
        ("RUN.name=n${nowhere:x}", "there is no resolver 'nowhere'"),
        ("RUN.name=n${oc.envv:HOME}", "did you mean 'oc.env'?"),
    ],
)
def test_interpolation_that_cannot_be_resolved_says_why(override: str, says: str) -> None:
    (problem,) = compose([override]).problems
    assert (problem.code, problem.key) == ("config.interpolation", "RUN.name")
    assert says in problem.message


@pytest.mark.parametrize("word", ["off", "false"])
def test_off_in_a_file_is_the_word_of_a_key_without_booleans(user_dir, word: str) -> None:
    own = user_dir({"experiment/mine.yaml": f"CHECKPOINT: {{verify: {word}, background: off}}\n"})
    found = composed("experiment=mine", config_dir=own).config["CHECKPOINT"]
    assert (found["verify"], found["background"]) == ("off", False)
