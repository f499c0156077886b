"""Runs that load newer weights on the way: once, exactly, on all ranks."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    train,
)
from processes import Launcher
from raising import raises
from safetensors.torch import save_file
from test_processes import ONE
from test_weights import PARTS, STILL, parameters, weights

from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook, Run


class Put(Hook):
    """Puts files into a folder after updates, as somebody else would."""

    def __init__(self, source: Path, folder: Path, at: Mapping[int, str]) -> None:
        self.source, self.folder, self.at = source, folder, at

    def on_update(self, run: Run, phase: Phase) -> None:
        name = self.at.get(run.state.updates + 1)
        if name is not None:
            shutil.copy(self.source / name, self.folder / name)


AT = {2: "w-9.safetensors", 7: "w-10.safetensors", 10: "w-11.safetensors"}


class Watched:
    """A folder that gets files while a run goes on.

    Attributes:
        folder: of the run.
        words: of the run.
    """

    def __init__(self, root: Path, every: str = "every_updates: 4") -> None:
        self.store, self.watched, self.folder = root / "store", root / "watched", root / "run"
        for one in (self.store, self.watched):
            one.mkdir(parents=True)
        for seed, name in enumerate(AT.values()):
            save_file(weights(seed), self.store / name)
        self.words = (
            f"HOOKS.reload_weights={{folder: {self.watched}, {every}}}",
            "CHECKPOINT.every_updates=6",
            "CHECKPOINT.every_epochs=null",
        )

    def hooks(self, **more: Hook) -> dict[str, Hook]:
        return {"put": Put(self.store, self.watched, AT), **more}

    def loads(self) -> list[tuple[int, str]]:
        return [(entry["updates"], entry["file"]) for entry in self.history()["loads"]]

    def history(self) -> dict[str, Any]:
        found = json.loads((self.folder / "reloads.json").read_text())
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    made = Watched(tmp_path_factory.mktemp("unbroken"))
    train(made.folder, *made.words, hooks=made.hooks())
    return made


class TestReload:
    def test_newest_file_is_chosen_by_the_number_in_its_name(self, unbroken: Watched) -> None:
        assert unbroken.loads() == [
            (4, "w-9.safetensors"),
            (8, "w-10.safetensors"),
            (12, "w-11.safetensors"),
        ]
        reloads = [record for record in records(unbroken.folder) if record["kind"] == "reload"]
        assert [(record["updates"], record["file"]) for record in reloads] == unbroken.loads()
        assert reloads[0]["digest"] == unbroken.history()["loads"][0]["digest"]

    @pytest.mark.slow
    def test_reloaded_weights_equal_the_file(self, tmp_path: Path) -> None:
        made = Watched(tmp_path)
        train(made.folder, *made.words, "OPTIMIZER.lr=0", hooks=made.hooks())
        assert parameters(newest(made.folder).state["task"]["model"]) == parameters(weights(2))

    @pytest.mark.feature(
        "103", "weights reloaded from a folder during training", "`HOOKS.reload_weights`"
    )
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize("step", [12, 1, 5, 11, 13, 15, 19])
    def test_killed_and_resumed_with_newer_files_in_the_folder(
        self, unbroken: Watched, tmp_path: Path, step: int
    ) -> None:
        made = Watched(tmp_path)
        run_until_killed(made.folder, *made.words, hooks=made.hooks(kill=KillAfter(step)))
        train(made.folder, *made.words, hooks=made.hooks())
        assert differences_of_runs(unbroken.folder, made.folder) == []
        assert made.history() == unbroken.history()

    @pytest.mark.slow
    def test_resume_without_the_record_is_detected(self, unbroken: Watched, tmp_path: Path) -> None:
        made = Watched(tmp_path)
        run_until_killed(made.folder, *made.words, hooks=made.hooks(kill=KillAfter(14)))
        (made.folder / "reloads.json").unlink()
        train(made.folder, *made.words, hooks=made.hooks())
        assert made.loads() == [(8, "w-11.safetensors")]
        assert differences_of_runs(unbroken.folder, made.folder) != []

    def test_file_changed_since_is_rejected(self, tmp_path: Path) -> None:
        made = Watched(tmp_path)
        run_until_killed(made.folder, *made.words, hooks=made.hooks(kill=KillAfter(12)))
        save_file(weights(5), made.watched / "w-10.safetensors")
        made.store = made.watched  # so that nobody puts the old one back
        with pytest.raises(
            ChangedError,
            match=r"w-10\.safetensors .* update 8 ",
        ):
            train(made.folder, *made.words)
        (made.watched / "w-10.safetensors").unlink()
        with raises(ChangedError, key="HOOKS.reload_weights"):
            train(made.folder, *made.words)

    def test_unusable_files_are_skipped(self, tmp_path: Path) -> None:
        made = Watched(tmp_path)
        (made.watched / "w-8.safetensors").write_bytes(
            (made.store / "w-9.safetensors").read_bytes()
        )
        (made.watched / "w-12.safetensors").write_bytes(b"half of it")
        (made.watched / "w-13.safetensors.tmp-0123abcd").write_bytes(b"on its way")
        save_file({"other": torch.ones(2)}, made.watched / "w-14.safetensors")
        train(made.folder, *made.words)
        assert made.loads() == [(4, "w-8.safetensors")]
        log = (made.folder / "log.txt").read_text()
        assert log.count("w-12.safetensors was skipped: ") == 1
        assert "w-14.safetensors was skipped: " in log
        assert "w-13" not in log

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        ("every", "updates"),
        [
            ("every_phases: 1", [5, 5, 10, 10, 15]),
            ("every_epochs: 2", [10]),
            ("every_phases: 4", [10]),
        ],
    )
    def test_weights_are_reloaded_after_epochs_or_phases(
        self, tmp_path: Path, every: str, updates: list[int]
    ) -> None:
        made = Watched(tmp_path, every)
        seen: list[int] = []

        class Look(Hook):
            def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
                save_file(
                    weights(run.state.phase), made.watched / f"{run.state.phase}"
                )  # closing events go backwards
                seen.append(run.state.updates)

        train(made.folder, *made.words, hooks={"look": Look()})
        assert [at for at, _ in made.loads()] == updates
        assert seen == [5, 5, 10, 10, 15, 15]

    def test_checkpoints_of_another_run_are_reloaded(self, tmp_path: Path) -> None:
        train(tmp_path / "teacher", "PHASES.epochs=1", "RUN.seed=5")
        words = (f"HOOKS.reload_weights={{folder: {tmp_path}/teacher, every_updates: 4}}", *STILL)
        train(tmp_path / "run", *words)
        one, other = (newest(tmp_path / name).state["task"]["model"] for name in ("teacher", "run"))
        assert parameters(one) == parameters(other)

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ("{folder: a}", "every_updates, every_epochs, every_phases"),
            (
                "{folder: a, every_updates: 1, every_phases: 1}",
                "every_updates = 1, every_phases = 1: ",
            ),
            ("{folder: a, every_updates: 0}", "every_updates = 0: "),
            (
                "{folder: a, every_updates: 1, source: {strickt: false}}",
                r"HOOKS\.reload_weights\.source\.strickt: ",
            ),
        ],
    )
    def test_invalid_settings_are_rejected(self, tmp_path: Path, given: str, named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            train(tmp_path / "run", f"HOOKS.reload_weights={given}")

    @pytest.mark.by_default("ddp")
    @pytest.mark.parametrize(
        ("size", "words"),
        [
            (4, ("DISTRIBUTED.reduction=ordered", "DISTRIBUTED.virtual_shards=4")),
            (3, ()),
            (3, ("DISTRIBUTED.strategy=fsdp",)),
        ],
        ids=["ordered", "ddp", "fsdp"],
    )
    def test_all_ranks_reload_the_same_weights(
        self, launcher: Launcher, tmp_path: Path, size: int, words: tuple[str, ...]
    ) -> None:
        made = Watched(tmp_path)
        save_file(weights(7), made.watched / "w-1.safetensors")
        noted = "note_weights" if words != ("DISTRIBUTED.strategy=fsdp",) else "console"
        done = launcher.run(
            made.folder,
            size,
            *SMALL,
            ONE,
            PARTS,
            *STILL,
            *words,
            *made.words,
            f"HOOKS.{noted}={{}}",
        )
        assert done.codes == [0] * size, done.outputs
        expected = parameters(weights(7))
        assert parameters(newest(made.folder).state["task"]["model"]) == expected
        if noted == "note_weights":  # under fsdp each has a piece of them
            assert [(tmp_path / f"run-end-{rank}").read_text() for rank in range(size)] == [
                expected
            ] * size
