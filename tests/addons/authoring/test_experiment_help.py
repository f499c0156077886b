"""`phasetrain help NAME` explains experiments, of the package and of the user."""

from pathlib import Path

import pytest
from raising import raises

from phasetrain.addons.authoring.commands import explain_topic
from phasetrain.addons.authoring.experiment_help import experiment_help
from phasetrain.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("tabular", ["experiment tabular", "  Classify the rows of a table that scikit-learn ships, with a small multilayer perceptron.", "  use: phasetrain experiment=tabular"]),
        ("mine/small", ["experiment mine/small", "  My purpose.", "    phasetrain x=1", "  use: phasetrain experiment=mine/small"]),
        ("bare", ["experiment bare", "  use: phasetrain experiment=bare"]),
        ("cosine", []),
    ],
)  # fmt: skip
def test_comment_command_and_file(tmp_path: Path, name: str, lines: list[str]) -> None:
    folder = tmp_path / "configs" / "experiment"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "small.yaml").write_text(
        "# @package _global_\n# My purpose.\n#   phasetrain x=1\nRUN: {}\n# of RUN\n"
    )
    (folder / "bare.yaml").write_text("RUN: {}\n")
    text = experiment_help(name, f"{tmp_path}/configs")
    assert text.splitlines()[:-1] == lines
    if text:
        assert Path(text.rpartition("  file: ")[2]).is_file()


@pytest.mark.parametrize(
    ("topic", "first", "last"),
    [
        ("tabular", "experiment tabular", "tabular.yaml"),
        ("digits", "dataset for DATA.*.dataset", "digits.yaml"),  # a part has the name as well
        ("cosine", "schedule for OPTIMIZER.SCHEDULES.*.name", ""),
    ],
)
def test_experiments_follow_parts_of_the_same_name(topic: str, first: str, last: str) -> None:
    lines = explain_topic(topic).splitlines()
    assert lines[0] == first
    assert lines[-1].endswith(last)


def test_known_in_one_folder_and_unknown_in_another(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "only_here.yaml").write_text("# Here.\n")
    assert explain_topic("only_here", str(tmp_path)).splitlines()[1] == "  Here."
    with raises(ConfigError, code="config.unknown_section"):
        explain_topic("only_here")


def test_suggestion() -> None:
    with raises(ConfigError, code="config.unknown_section", suggestion="tabular"):
        explain_topic("tabluar")
