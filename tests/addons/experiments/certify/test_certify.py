"""A certificate says yes for a sound run, and no for planted faults, with the step and the part."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import launch_fork

from phasetrain.addons.experiments.certify.certify import (
    NOT_EQUAL,
    CertifyOptions,
    certify,
    check,
)
from phasetrain.cli.output import Outcome
from phasetrain.errors import ConfigError
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing.kills import run_quietly

SMALL = ("DATA.TRAIN.batch_size=24", "DATA.TEST.batch_size=32")
FAULTY = ("MODEL.classes=10", "RUN.imports=[faults]")
HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import once what each fork would import again."""
    run_quietly([*SMALL, f"RUN.dir={tmp_path_factory.mktemp('warm')}", "PHASES.updates=1"])


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # for real processes


def run(
    *words: str, is_quick: bool = False, is_strict: bool = False, forks: bool = True
) -> Outcome:
    options = CertifyOptions(
        is_quick=is_quick, is_strict=is_strict, launch=launch_fork if forks else None
    )
    silent = Terminal(io.StringIO(), live=False)
    return certify([*SMALL, *words], options, terminal=silent)


@pytest.mark.feature(
    "certify",
    "the promise is proved on the user's machine for a config: kills, resumes, comparison of "
    "every bit, cost of deterministic kernels",
    "`phasetrain certify`",
)
@pytest.mark.addon("observe")
def test_sound_run_is_certified_and_leaves_only_the_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "phasetrain.addons.experiments.certify"):
        found = run("RUN.dir=runs/mine", is_quick=True)
    assert [line for line in caplog.messages if line.startswith("certify: ")] == [
        "certify: MACHINE.deterministic = true",
        "certify: a run without kills",
        "certify: attempt 1 of 2, killed between two saves, after step 3",
        "certify: attempt 2 of 2, to the end",
    ]
    assert (found.exit_code, found.content["verdict"]) == (0, "yes"), found.text
    assert found.content["complete"]
    [outcome] = found.content["combinations"]
    assert outcome["kills"] == ["between two saves, after step 3"]
    assert (outcome["workers"], outcome["updates"], outcome["steps"]) == ([0, 2, 1], 6, 10)
    assert outcome["resumes"] == [2]
    assert len(outcome["weights_sha256"]) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["certificate.json"]
    assert json.loads(Path("certificate.json").read_text()) == found.content
    same = check("certificate.json", SMALL)
    assert (same.exit_code, same.content["differences"]) == (0, {})


@pytest.mark.feature("certify")
def test_generator_that_is_not_restored_is_caught() -> None:
    found = run(*FAULTY, "MODEL.name=faults.OwnGenerator", is_quick=True)
    assert (found.exit_code, found.content["verdict"]) == (NOT_EQUAL, "no")
    [outcome] = found.content["combinations"]
    assert (outcome["update"], outcome["component"], outcome["path"]) == (3, "MODEL", "output.0.0")
    [folder] = Path().glob(".certify-*")
    assert f"phasetrain runs diff {folder.absolute()}/deterministic/reference" in found.text


@pytest.mark.addon("observe")
@pytest.mark.feature("certify")
@pytest.mark.parametrize(("first", "verdict"), [(0, "no"), (1000, "yes")])
def test_hidden_state_without_an_effect_is_a_no_and_later_state_is_named(
    first: int, verdict: str
) -> None:
    hook = f"+HOOKS.late={{name: faults.LateHook, first: {first}}}"
    found = run("RUN.imports=[faults]", hook, is_quick=True, is_strict=True)
    [outcome] = found.content["combinations"]
    assert outcome["verdict"] == verdict, found.text
    unchanged = ["late"] if verdict == "no" else ["count", "late"]
    assert outcome["unchanged"] == [
        f"`{name}` of faults.LateHook, which `on_update` may change" for name in unchanged
    ]
    assert found.exit_code == NOT_EQUAL  # with is_strict
    assert not found.content["complete"]
    assert "not covered" in found.text


@pytest.mark.feature("certify")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "update", "component", "path"),
    [
        (["MODEL.name=faults.OwnGenerator"], 3, "MODEL", "output.0.0"),
        (["MODEL.name=faults.OtherBits"], 1, "MODEL", "gradient.0.body.1.weight"),
        (
            ["OPTIMIZER.name=faults.DroppedMomentum", "OPTIMIZER.momentum=0.9"],
            3,
            "OPTIMIZER",
            "state.model",
        ),
        (
            ["OPTIMIZER.name=faults.DeafMomentum", "OPTIMIZER.momentum=0.9"],
            2,
            "OPTIMIZER",
            "state.updater",
        ),
        (["DATA.TRAIN.dataset=faults.Counting"], 2, "DATA.TRAIN", "batch.0.input"),
    ],
    ids=lambda value: value[0].rpartition(".")[2] if isinstance(value, list) else "",
)
def test_planted_fault_is_caught_at_its_step(
    words: list[str], update: int, component: str, path: str
) -> None:
    found = run(*FAULTY, *words)
    assert (found.exit_code, found.content["verdict"]) == (NOT_EQUAL, "no"), found.text
    for outcome in found.content["combinations"]:
        assert (outcome["verdict"], outcome["update"]) == ("no", update)
        assert outcome["component"] == component
        assert outcome["path"].startswith(path)


@pytest.mark.slow
def test_a_run_that_fails_without_a_kill_has_no_verdict() -> None:
    found = run(*FAULTY, "LOSS.name=faults.Failing")
    assert (found.exit_code, found.content["verdict"]) == (1, "not tried")
    assert "this loss fails" in found.text


@pytest.mark.feature("certify")
@pytest.mark.slow
def test_both_settings_are_tried_with_all_kills_and_the_cost_is_measured() -> None:
    found = run("MODEL.dropout=0.3", "MODEL.width=4")
    assert found.exit_code == 0, found.text
    for outcome in found.content["combinations"]:
        assert outcome["verdict"] == "yes", found.text
        assert [kill.partition(",")[0] for kill in outcome["kills"]] == [
            "before the first save",
            "between two saves",
            "right after a save",
            "during a save",
        ]
        # The third is a resume in the middle of the first test.
        assert outcome["resumes"] == [2, 3, 3]
    assert found.content["determinism"]["deterministic_ms"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words",
    [
        ["LAUNCH.processes=2", "DATA.TRAIN.batch_size=24"],
        pytest.param(
            ["LAUNCH.processes=2", "DISTRIBUTED.strategy=fsdp", "MODEL.name=mlp"],
            marks=pytest.mark.addon("sharding"),
        ),
        ["MACHINE.precision=bf16", "DATA.TEST=null"],
        ["MACHINE.compile={backend: aot_eager}", "DATA.TRAIN.drop_last=true"],
        ["CHECKPOINT.background=false", "OPTIMIZER=adamw", "OPTIMIZER.accumulate=2"],
    ],
    ids=lambda words: words[-1].partition("=")[2],
)
def test_other_settings_are_certified_in_processes_of_their_own(words: list[str]) -> None:
    found = run(*words, is_quick=True, forks=False)
    assert found.exit_code == 0, found.text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_command_prints_the_certificate_and_kills_real_processes(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "phasetrain", "certify", *SMALL, "--json", "--out", "mine.json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    printed: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, printed["verdict"]) == (0, "yes"), done.stderr
    assert [one["verdict"] for one in printed["combinations"]] == ["yes", "yes"]
    assert printed.items() >= json.loads((tmp_path / "mine.json").read_text()).items()


def test_another_machine_than_the_certified_one_is_named(tmp_path: Path) -> None:
    content = {"format": 1, "verdict": "yes", "machine": {"cpu": "other"}, "versions": {}}
    Path("other.json").write_text(json.dumps(content))
    found = check("other.json", SMALL)
    assert found.exit_code == NOT_EQUAL
    assert found.content["differences"]["machine.cpu"][0] == "other"


def test_a_file_that_is_no_certificate_is_rejected() -> None:
    Path("other.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        check("other.json", SMALL)
    assert caught.value.code == "certify.unreadable"


def test_several_processes_are_started_by_the_command_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as caught:
        run()
    assert caught.value.code == "config.world_size"
    assert os.environ["WORLD_SIZE"] == "2"
