"""`phasetrain rerun --recipe`: verdicts, packages, resuming."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import SMALL
from raising import raises

from phasetrain.addons.experiments.recipes.recipe import Measurement, Variant, find_variant
from phasetrain.addons.experiments.recipes.run_recipe import (
    Repetition,
    choose_folder,
    limit_to_measured,
    run_variant,
)
from phasetrain.addons.experiments.recipes.verdict import compare
from phasetrain.app.engines import run_engine
from phasetrain.app.result import RunResult
from phasetrain.cli import main
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.runs.view import read_status
from phasetrain.testing import KillAfter, Killed

PLATFORM = {
    "torch": "2",
    "numpy": "2",
    "device": "cpu",
    "threads": 1,
    "cpu": "c",
    "capability": "AVX2",
}
WORDS = [*SMALL, "PHASES.epochs=1", "MACHINE.threads=1", "HOOKS.report=null"]


def variant_of(folder: Path, **changes: Any) -> Path:
    """Write a recipe `tiny` of a short run on digits, and return the folder of configs."""
    (folder / "recipes").mkdir(parents=True, exist_ok=True)
    run = " ".join(f"'{word}'" for word in WORDS)
    one = {"title": "v", "run": run, "metrics": {"test/accuracy": None}}
    content = {"title": "t", "data": "d", "status": "run", "variants": {"one": one}, **changes}
    (folder / "recipes" / "tiny.yaml").write_text(yaml.safe_dump(content))
    return folder


def rerun(
    folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["rerun", "--recipe", "tiny", "--config-dir", str(folder), "--json", *words])
    content = json.loads(capsys.readouterr().out)
    assert isinstance(content, dict)
    return code, content


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.feature(
    "recipes",
    "recipes: results on real data, repeated and checked by one command, over kills",
    "`phasetrain recipes list`, `phasetrain rerun --recipe NAME`, [recipes](recipes/index.md)",
)
def test_repetition_is_bit_identical_or_not_reproduced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = variant_of(tmp_path / "mine")
    code, first = rerun(configs, capsys)
    assert (code, first["outcome"]) == (0, "not_measured")
    entry = {
        "date": "2026-01-01",
        "values": {"test/accuracy": [first["metrics"]["test/accuracy"]]},
        "minutes": 0.1,
        "digests": [first["digest"]],
        "first_epochs": [first["first_epoch"]],
        "platform": first["platform"],
    }
    variant_of(configs, measured={"variants": {"one": entry}})
    code, again = rerun(configs, capsys, "--first-epoch")
    assert (code, again["outcome"]) == (0, "bit_identical")
    # A fresh run, since the first one has finished.
    code, again = rerun(configs, capsys)
    assert (code, again["outcome"], again["same_platform"]) == (0, "bit_identical", True)
    assert again["folder"] == "runs/recipes/tiny-one-seed0-2"
    # Negative controls: other digests, in the folders of the finished runs.
    entry |= {"digests": ["ab"], "first_epochs": ["cd"]}
    variant_of(configs, measured={"variants": {"one": entry}})
    code, again = rerun(configs, capsys, f"RUN.dir={again['folder']}")
    assert (code, again["outcome"]) == (1, "not_reproduced")
    assert "ab" in again["verdict"]
    assert again["digest"] in again["verdict"]
    code, again = rerun(configs, capsys, "--first-epoch")
    assert (code, again["outcome"]) == (1, "not_reproduced")


@pytest.mark.feature("recipes")
def test_killed_repetition_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    variant = find_variant("tiny", str(variant_of(tmp_path / "mine")))[1]

    def run(kill: Hook | None) -> Repetition:
        hooks = {} if kill is None else {"kill": kill}
        return run_variant(
            variant,
            seed=1,
            overrides=["RUN.verbosity=quiet", "CHECKPOINT.every_updates=2"],
            run=lambda words, own: run_engine(words, hooks={**own, **hooks}),
        )

    whole = run(None)
    with pytest.raises(Killed):
        run(KillAfter(4))
    folder = choose_folder(variant, 1)
    assert folder == "runs/recipes/tiny-one-seed1-2"
    assert read_status(folder).state != "finished"
    resumed = run(None)
    assert resumed.folder == folder
    assert (resumed.digest, resumed.first_epoch) == (whole.digest, whole.first_epoch)
    assert resumed.metrics["test/accuracy"] == whole.metrics["test/accuracy"]


@pytest.mark.addon("vision")
def test_stages_run_in_their_order_and_finished_ones_are_kept(tmp_path: Path) -> None:
    small = "RUN.rehearse=false RUN.verbosity=quiet MACHINE.threads=1 HOOKS.report=null"
    limits = "PHASES.epochs=1 PHASES.limit.train=2 PHASES.limit.test=1"
    weights = "{path: {pretrain}, prefix_remove: trunk., include: [features.*], reinit: [head.*]}"
    stages = {
        "pretrain": f"experiment=digits_simclr {small} {limits}",
        "probe": f"experiment=digits MODEL.width=6 {small} {limits} 'MODEL.weights={weights}'",
    }
    one = {"title": "v", "run": stages, "metrics": {"test/accuracy": None}}
    configs = variant_of(tmp_path / "mine", variants={"one": one})
    variant = find_variant("tiny", str(configs))[1]
    started: list[str] = []

    def run(words: Sequence[str], hooks: Mapping[str, Hook]) -> RunResult:
        result = run_engine(words, hooks=hooks)
        started.append(f"{result.folder}: {result.updates} updates, {len(result.last)} metrics")
        if result.folder.endswith("pretrain") and len(started) == 1:
            raise KeyboardInterrupt
        return result

    with pytest.raises(KeyboardInterrupt):
        run_variant(variant, seed=0, overrides=[], run=run)
    found = run_variant(variant, seed=0, overrides=[], run=run)
    assert found.folder == "runs/recipes/tiny-one-seed0/probe"
    assert found.state == "finished"
    assert 0 <= found.metrics["test/accuracy"] <= 1
    # The finished stage is not trained again.
    assert started[1].startswith("runs/recipes/tiny-one-seed0/pretrain: 2 updates, 0")
    assert len(started) == 3


def test_missing_packages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packages = [
        {"debian": "dataset-x", "file": "/nowhere/x.gz"},
        {"pypi": "some-pack", "module": "no_such_module_here"},
        {"pypi": "torch", "module": "torch"},
        {"data": "the tokens", "file": "no/tokens.json", "command": "python make_tokens.py"},
    ]
    code, content = rerun(variant_of(tmp_path / "mine", packages=packages), capsys)
    (error,) = content["errors"]
    assert (code, error["code"]) == (2, "recipe.missing_package")
    advice = "apt-get install dataset-x, and pip install some-pack, and python make_tokens.py"
    assert advice in error["message"]
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["nothing", "digits/nothing"])
def test_unknown_recipe_is_rejected(name: str) -> None:
    with raises(ConfigError, code="recipe.unknown"):
        find_variant(name)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["rerun"], "cli.usage"),
        (["rerun", "runs/x", "--recipe", "digits"], "cli.conflict"),
    ],
)
def test_wrong_calls_are_rejected(
    words: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == code


def test_config_of_a_recipe_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rerun", "--recipe", "digits", "OPTIMIZER.lr=0.25", "--seed", "3", "--cfg"]) == 0
    out = capsys.readouterr().out
    assert "\n  lr: 0.25\n" in out
    assert "\n  seed: 3\n" in out


class TestVerdict:
    """Five seeds around 0.9 with a standard deviation of 0.01."""

    measured = Measurement(
        "2026-01-01",
        {"test/accuracy": [0.89, 0.9, 0.9, 0.9, 0.91]},
        1.0,
        ["a", "b", "c", "d", "e"],
        ["f", "g", "h", "i", "j"],
        PLATFORM,
    )

    @pytest.mark.parametrize(
        ("measured", "here", "words"),
        [
            ("AVX2", "AVX2", ["MACHINE.cpu_capability=AVX2"]),
            ("AVX2", "AVX512", []),  # the limit came too late
            ("AVX512", "AVX2", []),
        ],
    )
    def test_repetition_is_limited_to_the_instructions_of_the_measurement(
        self, monkeypatch: pytest.MonkeyPatch, measured: str, here: str, words: list[str]
    ) -> None:
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: here)
        monkeypatch.setattr("phasetrain.runtime.machine.read_cpu_flags", lambda: set())
        found = replace(self.measured, platform=PLATFORM | {"capability": measured})
        assert limit_to_measured(Variant("r", "v", "t", {"": []}, {}, measured=found)) == words

    def verdict(
        self, value: float, digest: str = "x", *, tolerance: float = 0.0, **changes: Any
    ) -> tuple[str, int]:
        variant = Variant(
            "r",
            "v",
            "t",
            {"": []},
            {"test/accuracy": None},
            tolerance=tolerance,  # type: ignore[dict-item]
            measured=self.measured,
        )
        done = Repetition(
            0,
            "runs/x",
            "finished",
            0,
            "completed",
            {"test/accuracy": value},
            digest,
            "f",
            PLATFORM,
            is_changed=False,
            is_first_epoch=False,
            seconds=1.0,
        )
        found = compare(variant, replace(done, **changes))
        return found.outcome, found.exit_code

    def test_equal_weights(self) -> None:
        assert self.verdict(0.9, "a") == ("bit_identical", 0)

    def test_equal_weights_on_another_platform(self) -> None:
        assert self.verdict(0.9, "a", platform={}) == ("bit_identical", 0)

    def test_other_weights_on_the_same_platform(self) -> None:
        assert self.verdict(0.9) == ("not_reproduced", 1)

    def test_weights_of_another_seed_do_not_count(self) -> None:
        assert self.verdict(0.9, "b") == ("not_reproduced", 1)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (0.92, ("within_spread", 0)),
            (0.925, ("not_reproduced", 1)),
            (0.875, ("not_reproduced", 1)),
            (float("nan"), ("not_reproduced", 1)),
        ],
    )
    def test_another_platform(self, value: float, expected: tuple[str, int]) -> None:
        assert self.verdict(value, platform={**PLATFORM, "cpu": "other"}) == expected

    def test_tolerance(self) -> None:
        assert self.verdict(0.8, tolerance=0.2, is_changed=True) == ("within_spread", 0)

    def test_seed_that_was_not_measured(self) -> None:
        assert self.verdict(0.9, seed=7) == ("within_spread", 0)

    def test_run_that_has_not_finished(self) -> None:
        stopped = self.verdict(0.9, "a", state="preempted", exit_code=143)
        assert stopped == ("unfinished", 143)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, ("bit_identical", 0)),
            ({"first_epoch": "k"}, ("not_reproduced", 1)),
            ({"first_epoch": "k", "platform": {}}, ("not_measured", 0)),
            ({"first_epoch": "", "exit_code": 0}, ("unfinished", 1)),
        ],
    )
    def test_first_epoch(self, changes: dict[str, Any], expected: tuple[str, int]) -> None:
        assert self.verdict(0.9, is_first_epoch=True, **changes) == expected
