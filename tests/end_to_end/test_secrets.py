"""Secrets of a config are in config.yaml alone, and a resume has them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import (
    REPORT_FILES,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    run_until_killed,
    train,
)

from phasetrain import load
from phasetrain.app.stored.stored_config import read_checkpoint_config
from phasetrain.cli import main
from phasetrain.hooks import HOOKS, Hook

SECRETS = ("k3y-of-a-mapping", "t0ken-of-a-word", "hunter22-in-a-url")
WORDS = (
    f"HOOKS.uploads={{api_key: {SECRETS[0]}, project: mine}}",
    f"HOOKS.uploads.hub_token={SECRETS[1]}",
    f"HOOKS.uploads.server='https://me:{SECRETS[2]}@host/x'",
)
GIVEN: list[tuple[str, str, str]] = []


@pytest.fixture(autouse=True)
def _hook() -> Iterator[None]:
    @HOOKS.register("uploads")
    class Uploads(Hook):
        """Keeps what it was given."""

        observe_only = True

        def __init__(
            self, api_key: str, project: str, hub_token: str, server: str, pad_token: str = "<pad>"
        ) -> None:
            GIVEN.append((api_key, hub_token, server))

    GIVEN.clear()
    yield
    del HOOKS._own["uploads"]


def files_with_secrets(folder: Path) -> dict[str, list[str]]:
    """Return file -> the secrets in it."""
    found = {}
    for path in folder.rglob("*"):
        # The diffs have this file as long as it is not committed.
        content = path.read_bytes() if path.is_file() and path.suffix != ".diff" else b""
        if secrets := [one for one in SECRETS if one.encode() in content]:
            found[str(path.relative_to(folder))] = secrets
    return found


@pytest.mark.feature(
    "secrets", "secrets of a config are in `config.yaml` alone", "[runs.md](runs.md#the-run-folder)"
)
def test_killed_run_resumes_with_its_secrets_and_leaves_them_in_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_until_killed(folder, *WORDS, hooks={"save": SaveEachStep(), "kill": KillAfter(6)})
    assert main(["resume", str(folder)]) == 0
    assert set(GIVEN) == {(*SECRETS[:2], f"https://me:{SECRETS[2]}@host/x")}
    if REPORT_FILES:
        assert main(["report", str(folder)]) == 0
        assert (folder / "report.html").is_file()
    assert files_with_secrets(folder) == {"config.yaml": list(SECRETS)}
    assert (folder / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert not [one for one in SECRETS if one in capsys.readouterr().out]
    assert "'(redacted)'" in (folder / "reproduce.sh").read_text()
    promised = next(folder.glob("checkpoints/*/promised.json"))
    hook = json.loads(promised.read_text())["config"]["HOOKS"]["uploads"]
    assert hook == {
        "api_key": "(redacted)",
        "project": "mine",
        "hub_token": "(redacted)",
        "server": "https://(redacted)@host/x",
    }
    train(tmp_path / "unbroken", *WORDS)
    assert differences_of_runs(folder, tmp_path / "unbroken") == []


def test_another_secret_is_no_change_and_is_in_no_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run_until_killed(folder, *WORDS, hooks={"save": SaveEachStep(), "kill": KillAfter(6)})
    assert main(["resume", str(folder), "HOOKS.uploads.api_key=an0ther-k3y"]) == 0
    assert GIVEN[-1][0] == "an0ther-k3y"
    assert "an0ther-k3y" not in capsys.readouterr().out


@pytest.mark.addon("experiments")
def test_repeated_run_has_the_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *WORDS, "PHASES.epochs=1")
    GIVEN.clear()
    assert main(["rerun", str(folder), f"RUN.dir={tmp_path / 'again'}"]) == 0
    assert GIVEN[-1][0] == SECRETS[0]


def test_checkpoint_has_the_secrets_of_its_folder_as_long_as_it_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *WORDS, "PHASES.epochs=1")
    key = read_checkpoint_config(str(folder)).values["HOOKS"]["uploads"]["api_key"]
    assert key == SECRETS[0]
    shutil.copytree(folder / "checkpoints", tmp_path / "copy" / "checkpoints")
    found = read_checkpoint_config(str(tmp_path / "copy")).values["HOOKS"]["uploads"]
    assert (found["api_key"], found["project"]) == ("(redacted)", "mine")
    load(tmp_path / "copy")
