"""`exact: false` accepts a dataset with its own generator, and every record of the run says so."""

import json
from pathlib import Path

import pytest
from harness import KillAfter, SaveEachStep, run_until_killed, train
from raising import raises

from phasetrain.cli import main
from phasetrain.errors import ChangedError, ConfigError

WORDS = (
    "DATA.TRAIN.dataset=reading_parts.OwnGenerator",
    "MODEL.classes=10",
    "MODEL.channels=1",
    "PHASES.epochs=1",
)
INEXACT = (*WORDS, "DATA.TRAIN.exact=false")


def test_dataset_with_its_own_generator_is_rejected_by_default(tmp_path: Path) -> None:
    with raises(ConfigError, code="config.impure_sample") as caught:
        train(tmp_path / "run", *WORDS)
    assert "DATA.TRAIN.exact=false" in str(caught.value)


@pytest.mark.feature(
    "data.inexact",
    "datasets with a private generator, without the promise of equal bits",
    "`DATA.*.exact: false`",
)
@pytest.mark.addon("experiments", "report")
def test_inexact_run_says_so_everywhere_and_resumes_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    hooks = {"save": SaveEachStep(), "kill": KillAfter(3)}
    run_until_killed(folder, *INEXACT, "HOOKS.report={}", hooks=hooks)
    assert train(folder, *INEXACT, "HOOKS.report={}").updates == 5

    sentence = "from the start: DATA.TRAIN.exact = false"
    environment = json.loads((folder / "environment.json").read_text())
    (line,) = [one for one in environment["departures"] if "DATA.TRAIN.exact" in one["what"][0]]
    assert line["updates"] == 0
    for name in ("RUN.md", "reproduce.sh", "report.html"):
        assert sentence in (folder / name).read_text()
    assert "WARNING DATA.TRAIN.exact = false" in (folder / "log.txt").read_text()

    assert main(["rerun", str(folder), f"RUN.dir={tmp_path}/again", "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["bit_identical"] is False
    assert sentence in verdict["verdict"]


def test_promise_is_withdrawn_with_consent_only(tmp_path: Path) -> None:
    train(tmp_path, "PHASES.epochs=1")
    changed = ("PHASES.epochs=2", "RUN.allow=[PHASES.epochs]", "DATA.TRAIN.exact=false")
    with raises(ChangedError, key="DATA.TRAIN.exact"):
        train(tmp_path, *changed)
