from pathlib import Path

import pytest
import yaml

from phasetrain.config.compose.composed import compose
from phasetrain.config.compose.folders import find_config_dir
from phasetrain.config.compose.sources import ConfigFiles


def test_options_of_user_and_package_are_listed_together(user_dir) -> None:
    own = user_dir(
        {
            "LOSS/mine.yaml": "{}",
            "LOSS/deep/own.yaml": "{}",
            "LOSS/readme.txt": "",
            "DATA/a.yaml": "{}",
        }
    )
    files = ConfigFiles(own)
    assert files.groups() == ["experiment", "DATA", "LOSS", "MODEL", "OPTIMIZER"]
    assert files.options("LOSS") == ["cross_entropy", "deep/own", "label_smoothing", "mine"]
    assert files.is_group("LOSS/deep")
    assert not files.is_group("NOTHING")


def test_layer_is_embedded_at_its_package(user_dir) -> None:
    own = user_dir({"DATA/TRAIN/a.yaml": "b: 1\n", "LOSS/root.yaml": "# @package _global_\nc: 2\n"})
    files = ConfigFiles(own)
    assert files.select("DATA/TRAIN", "a")[0].values == {"DATA": {"TRAIN": {"b": 1}}}
    assert files.select("LOSS", "root")[0].values == {"c": 2}


def test_relative_config_dir_is_shown_as_given(user_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user_dir({"LOSS/mine.yaml": "name: focal\n"}).parent)
    found = compose(["LOSS=mine"], config_dir="own")
    assert found.problems == ()
    assert found.origins["LOSS.name"] == "own/LOSS/mine.yaml"


def test_missing_config_dir_is_reported(tmp_path: Path) -> None:
    (problem,) = compose([], config_dir=tmp_path / "none").problems
    assert (problem.code, problem.key) == ("config.invalid_file", f"--config-dir {tmp_path}/none")


def test_custom_file_that_hides_a_built_in_one_is_rejected(user_dir) -> None:
    own = user_dir({"LOSS/cross_entropy.yaml": "name: mine\n", "LOSS/mine.yaml": "name: mine\n"})
    (problem,) = compose([], config_dir=own).problems
    assert (problem.code, problem.key) == ("config.conflict", f"{own}/LOSS/cross_entropy.yaml")
    assert "options_for_tests/LOSS/cross_entropy.yaml" in problem.message


def test_each_missing_file_of_a_defaults_list_is_named(user_dir) -> None:
    text = "defaults:\n  - /LOSS: cross_entrpy\n  - /experiment/digts\n  - /NONE: x\n  - optional /MODEL: nothing\n"
    own = user_dir({"experiment/mine.yaml": text + "  - _self_\nRUN: {seed: 3}\n"})
    found = compose(["experiment=mine"], config_dir=own)
    for problem in found.problems:
        assert (problem.code, problem.key) == ("config.missing_file", f"{own}/experiment/mine.yaml")
    missing = {
        name: problem.suggestion
        for problem in found.problems
        for name in ("LOSS/cross_entrpy.yaml", "NONE/x.yaml", "experiment/digts.yaml")
        if name in problem.message
    }
    assert missing == {
        "LOSS/cross_entrpy.yaml": "cross_entropy",
        "NONE/x.yaml": "",
        "experiment/digts.yaml": "digits",
    }
    assert found.config["RUN"]["seed"] == 3, "the rest is still read"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: [a\n", "line 2 is not valid YAML: expected ',' or ']'"),
        ("name: a\nname: b\n", "line 2 is not valid YAML: found duplicate key name"),
        ("name: ${a\n", "cannot be read: "),
        ("- a\n- b\n", "expected a mapping of keys, found a list"),
        ("3\n", "cannot be read: "),
        ("defaults: LOSS\nname: a\n", "defaults: expected a list"),
        (
            "defaults:\n  - override /MODEL: mlp\nname: a\n",
            "no file before it has an entry of MODEL; remove the word `override`",
        ),
        ("defaults:\n  - override MODEL: mlp\nname: a\n", "`override /MODEL: ...`"),
        ("defaults: [{a: b, c: d}]\nname: a\n", "defaults: expected entries such as"),
        ("defaults: [3]\nname: a\n", "defaults: expected entries such as"),
        ("a:\n\tb: 1\n", "indent with spaces"),
        ("LOSS:\n  name: a\n", "leave out the line `LOSS:`"),
        ("a: " + "{a: " * 300 + "1" + "}" * 300, "nested too deeply"),
        ("a: &a\n  b: *a\n", "an alias (*) to itself"),
        ("name: a\n~: 3\n", "line 2: a key is null"),
        ("a: 1\nseed: 010\n", "line 2: YAML reads 010 as 8"),
        ("seed: 1:30\n", "line 1: YAML reads 1:30 as 90"),
        ("seed: 1:30.5\n", "line 1: YAML reads 1:30.5 as 90.5"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{n}: &{n} [{','.join(10 * ['*' + m])}]\n"
                for m, n in zip("abcdef", "bcdefg", strict=True)
            ),
            "line 5: more than 100,000 values",
        ),
        ("defaults:\n  - /LOSS/mine\nname: a\n", "its defaults list includes the file itself"),
    ],
)
def test_unusable_file_is_named(user_dir, text: str, problem: str) -> None:
    own = user_dir({"LOSS/mine.yaml": text})
    (found,) = compose(["LOSS=mine"], config_dir=own).problems
    assert (found.code, found.key) == ("config.invalid_file", f"{own}/LOSS/mine.yaml")
    assert problem in found.message


def test_numbers_and_aliases_that_are_not_ambiguous_are_read(user_dir) -> None:
    text = (
        "name: &n mine\nsame: [*n, *n]\nnested: " + "{a: " * 60 + "1" + "}" * 60 + "\n"
        "numbers: [0, -0, 0.5, 00.5, 1e3, 0x1F, 0b11, '010', '1:30', 10:30h]\n"
    )
    (layer,) = ConfigFiles(user_dir({"LOSS/mine.yaml": text})).select("LOSS", "mine")
    values = layer.values["LOSS"]
    assert values["same"] == ["mine", "mine"]
    assert values["numbers"] == [0, 0, 0.5, 0.5, 1000.0, 31, 3, "010", "1:30", "10:30h"]


def test_code_in_yaml_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    text = f'MODEL: !!python/object/apply:os.mkdir ["{mark}"]'
    (tmp_path / "hostile.yaml").write_text(text)
    assert compose([str(tmp_path / "hostile.yaml")]).problems
    assert not mark.exists()
    yaml.load(text, yaml.UnsafeLoader)  # the control: it is hostile
    assert mark.exists()


def test_file_in_another_encoding_is_named(user_dir) -> None:
    own = user_dir({})
    own.joinpath("LOSS").mkdir(parents=True)
    own.joinpath("LOSS/mine.yaml").write_bytes(b"name: \xe9\n")
    (found,) = compose(["LOSS=mine"], config_dir=own).problems
    assert "byte 7 (0xe9) is not UTF-8" in found.message


@pytest.mark.parametrize(
    ("entry", "suggestion"),
    [("/optimizer: adamw", "/OPTIMIZER: adamw"), ("DATA/TRAIN: a", "/DATA/TRAIN: a")],
)
def test_unknown_group_of_a_defaults_list_is_the_only_problem(
    user_dir, entry: str, suggestion: str
) -> None:
    own = user_dir({"experiment/mine.yaml": f"defaults: [{entry}]\n", "DATA/TRAIN/a.yaml": "{}"})
    found = compose(["experiment=mine"], config_dir=own)
    (problem,) = found.problems
    assert (problem.code, problem.suggestion) == ("config.missing_file", suggestion)
    assert "optimizer" not in found.config


def test_empty_file_is_an_empty_layer(user_dir) -> None:
    assert ConfigFiles(user_dir({"LOSS/mine.yaml": "# nothing\n"})).select("LOSS", "mine")[
        0
    ].values == {"LOSS": {}}


class TestExperimentFile:
    def test_values_start_from_options_and_from_files_next_to_it(self, user_dir) -> None:
        own = user_dir(
            {
                "digits.yaml": "defaults: [digits, base.yaml, {debug: null}, {optional local: x}, "
                "override /LOSS: mine, _self_]\nRUN: {seed: 5}\n",
                "base.yaml": "RUN: {seed: 3, name: based}\n",
                "conf/LOSS/mine.yaml": "name: focal\n",
            }
        )
        given = str(own / "digits.yaml")
        found = compose([given, "MODEL=mlp"], config_dir=own / "conf")
        assert found.problems == ()
        assert found.experiment == "digits"
        assert found.config["RUN"] == {**found.config["RUN"], "seed": 5, "name": "based"}
        assert found.config["LOSS"]["name"] == "focal"
        assert found.origins["RUN.seed"] == given
        assert found.origins["RUN.name"] == str(own / "base.yaml")
        assert found.config["DATA"]["TRAIN"]["dataset"] == "digits"

    def test_file_of_the_config_folder_is_an_option(self, user_dir) -> None:
        own = user_dir({"experiment/deep/mine.yaml": "RUN: {seed: 5}\n"})
        given = f"{own}/experiment/deep/mine.yaml"
        assert find_config_dir(None, [given]) == str(own)
        found = compose([given], config_dir=own)
        assert (found.problems, found.experiment) == ((), "deep/mine")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("RUN:\n\tname: x\n", "line 2 is not valid YAML"),
            ("defaults: digits\n", "defaults: expected a list"),
            ("defaults: [mine]\n", "its defaults list includes the file itself"),
            ("defaults: [digts]\n", "experiment/digts.yaml"),
            ("defaults: [digts.yaml]\n", "did you mean 'digits'?"),
            ("defaults: [{data: mnist.yaml}]\n", "remove the entry `data: mnist`"),
            ("defaults: [{data: [mnist.yaml]}]\n", "; groups: /LOSS, "),
            ("defaults: [{MODEL: dense}]\n", "did you mean '/MODEL: dense'?"),
            ("defaults: [{model: dense}]\n", "did you mean '/MODEL: dense'?"),
            ("defaults: [{experiment: digits}]\n", "did you mean 'digits'?"),
            ("defaults: [{/experiment: digits}]\n", "`defaults: [digits, _self_]`"),
            ("defaults: [{hydra: default}]\n", "Hydra's own options"),
            ("defaults: [{override hydra/launcher: basic}]\n", "Hydra's own options"),
            ("defaults: [{override /hydra/launcher: basic}]\n", "Hydra's own options"),
            ("defaults: [{override data: mnist}]\n", "an entry of data; groups: experiment, LOSS"),
            ("defaults: [{override /LOSS: focal}, base]\n", "come after all others"),
        ],
    )
    @pytest.mark.parametrize("folder", ["", "experiment/"])
    def test_unusable_file_is_the_only_problem(
        self,
        user_dir,
        monkeypatch: pytest.MonkeyPatch,
        folder: str,
        text: str,
        problem: str,
    ) -> None:
        own = user_dir({f"{folder}mine.yaml": text})
        monkeypatch.chdir(own)  # without ./configs
        given = f"{own}/{folder}mine.yaml"
        found = compose([given], config_dir=find_config_dir(None, [given]))
        (only,) = found.problems
        assert only.key == given
        assert problem in only.message
        assert "experiment" not in found.config

    @pytest.mark.parametrize(
        ("word", "suggestion"), [("mne.yaml", "mine.yaml"), ("mine.yml", ""), ("x/y.yaml", "")]
    )
    def test_missing_file_is_named(
        self, user_dir, monkeypatch: pytest.MonkeyPatch, word: str, suggestion: str
    ) -> None:
        monkeypatch.chdir(user_dir({"mine.yaml": "{}"}))
        (problem,) = compose([word]).problems
        assert (problem.key, problem.suggestion) == ("experiment", suggestion)

    def test_experiment_that_is_a_path_is_rejected_with_the_right_command(self, user_dir) -> None:
        own = user_dir({"mine.yaml": "{}"})
        (problem,) = compose([f"experiment={own}/mine.yaml"]).problems
        assert problem.code == "config.unknown_file"
        assert f"phasetrain {own}/mine.yaml" in problem.message

    def test_unknown_experiment_names_the_flag(self) -> None:
        (problem,) = compose(["experiment=shop"]).problems
        assert "--config-dir" in problem.message


class TestFoundFolder:
    @pytest.mark.feature("1")
    def test_configs_come_before_conf_and_after_the_given_folder(
        self, user_dir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(user_dir({"conf/experiment/a.yaml": "{}"}))
        assert find_config_dir(None) == "conf"
        user_dir({"configs/notes/a.yaml": "{}"})
        assert find_config_dir(None) == "conf", "configs has no options"
        user_dir({"configs/LOSS/a.yaml": "{}"})
        assert find_config_dir(None) == "configs"
        assert find_config_dir(None, ["other/experiment/a.yaml"]) == "other"
        assert find_config_dir("given", ["other/experiment/a.yaml"]) == "given"

    def test_built_in_files_of_a_clone_do_not_count(
        self, user_dir, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(Path(__file__).parents[1])
        monkeypatch.setattr("phasetrain.config.compose.folders.FOUND_DIRS", ["options_for_tests"])
        assert find_config_dir(None) is None
        builtin = Path("options_for_tests/LOSS/cross_entropy.yaml").read_text()
        assert compose([], config_dir=user_dir({"LOSS/cross_entropy.yaml": builtin})).problems == ()
