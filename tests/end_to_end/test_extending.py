"""Parts from outside of the package: file and command of docs/extending.md, and the other ways to
name a part."""

import json
import re
import shlex
from pathlib import Path

import pytest
from faulty import Starter
from harness import train

from phasetrain.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
SHORT = ("PHASES.epochs=1", "PHASES.limit.train=2", "PHASES.limit.test=1")


def block(kind: str) -> str:
    """Return the only block of the page of that kind."""
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return str(found)


def metrics_of(folder: Path) -> dict[str, float]:
    """Return the metrics of the last test in a run folder."""
    records = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    metrics: dict[str, float] = [record for record in records if record.get("split") == "test"][-1][
        "metrics"
    ]
    return metrics


def test_page_fits_on_a_screen() -> None:
    assert len(PAGE.splitlines()) < 40


def test_file_and_command_of_the_page_train(starter: Starter, tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(block("python"), encoding="utf-8")
    program, *words = shlex.split(block("bash"))
    assert program == "phasetrain"
    # The installed script does not have the current folder in its search path; `path=[]` neither.
    ended = starter.run(tmp_path / "mine", *words, path=[])
    assert ended.code == 0, ended.output
    metrics = metrics_of(tmp_path / "mine")
    assert metrics["error_rate"] == pytest.approx(1 - metrics["accuracy"])
    config = (tmp_path / "mine" / "config.yaml").read_text("utf-8")
    assert "LOSS:\n  name: focal\n  gamma: 3\n" in config


def test_part_is_unknown_without_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["LOSS.name=focal", *SHORT]) == 2
    assert "LOSS.name = 'focal'" in capsys.readouterr().err


def test_custom_experiment_trains_with_custom_parts(starter: Starter, tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(block("python"), encoding="utf-8")
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [digits, _self_]\n"
        "RUN: {imports: [my_parts]}\n"
        "LOSS: {name: my_parts.focal, gamma: 3}\n"
        "METERS: {error_rate: {}, accuracy: null}\n",
        encoding="utf-8",
    )
    ended = starter.run(
        tmp_path / "run", "--config-dir", "configs", "experiment=mine", *SHORT, path=[]
    )
    assert ended.code == 0, ended.output
    assert metrics_of(tmp_path / "run").keys() == {"loss", "error_rate"}


def test_entry_point_of_an_installed_package_registers_parts(
    starter: Starter, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    (site / "mine-1.0.dist-info").mkdir(parents=True)
    (site / "mine_parts.py").write_text(block("python"), encoding="utf-8")
    (site / "mine-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n"
    )
    (site / "mine-1.0.dist-info" / "entry_points.txt").write_text(
        "[phasetrain]\nmine = mine_parts\n"
    )
    words = ("LOSS.name=focal", "METERS.error_rate={}", *SHORT)
    ended = starter.run(tmp_path / "run", *words, path=[str(site)])
    assert ended.code == 0, ended.output
    assert "error_rate" in metrics_of(tmp_path / "run")


@pytest.mark.feature("3", "parts by name or dotted path", "`name`, `dataset`")
def test_dotted_path_builds_the_same_part_as_its_name(tmp_path: Path) -> None:
    own = train(tmp_path / "own", "LOSS.name=cross_entropy", *SHORT)
    same = train(tmp_path / "same", "LOSS.name=torch.nn.CrossEntropyLoss", *SHORT)
    other = train(tmp_path / "other", "LOSS.name=torch.nn.NLLLoss", *SHORT)
    assert same.last == own.last
    assert same.digest == own.digest
    assert other.digest != own.digest
