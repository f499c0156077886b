"""Runs that start from weights, and runs that take newer ones on the way: once, exactly, on all
processes."""

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
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

from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.models import SmallCNN
from phasetrain.testing import MemoryHandler

STILL = ("OPTIMIZER.lr=0", "PHASES.epochs=1")
PARTS = "RUN.imports=[weight_parts]"


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return SmallCNN(10, width=4).state_dict()


def parameters(state: Mapping[str, torch.Tensor]) -> str:
    """Return the digest that the hook `note_weights` writes."""
    digest = sha256()
    for name, _ in SmallCNN(10, width=4).named_parameters():
        digest.update(state[name].numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(weights(7), tmp_path / "start.safetensors")
    return tmp_path / "start.safetensors"


class TestStart:
    def test_weights_come_from_the_newest_checkpoint_of_a_run(self, tmp_path: Path) -> None:
        train(tmp_path / "first", "PHASES.epochs=1")
        train(tmp_path / "second", f"MODEL.weights={tmp_path}/first", *STILL)
        one, other = (
            newest(tmp_path / name).state["task"]["model"] for name in ("first", "second")
        )
        assert parameters(one) == parameters(other)
        train(tmp_path / "control", *STILL)
        assert parameters(newest(tmp_path / "control").state["task"]["model"]) != parameters(one)

    @pytest.mark.feature(
        "101",
        "pretrained weights from torch, safetensors, phasetrain, VISSL, timm and Hugging Face",
        "`MODEL.weights`",
    )
    def test_resume_needs_no_weights_file(self, tmp_path: Path, path: Path) -> None:
        words = (f"MODEL.weights={path}", "PHASES.epochs=1")
        train(tmp_path / "unbroken", *words)
        run_until_killed(
            tmp_path / "killed", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        plan = json.loads((tmp_path / "killed" / "plan.json").read_text())
        assert plan["weights"]["sources"][0]["path"] == str(path)
        path.unlink()
        train(tmp_path / "killed", *words)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
        assert json.loads((tmp_path / "killed" / "plan.json").read_text()) == plan

    def test_file_is_needed_until_the_first_save(self, tmp_path: Path, path: Path) -> None:
        words = (f"MODEL.weights={path}",)
        run_until_killed(tmp_path / "killed", *words, hooks={"kill": KillAfter(1)})
        path.unlink()
        with raises(ConfigError, key="MODEL.weights.path"):
            train(tmp_path / "killed", *words)

    def test_file_that_was_changed_before_the_first_save_is_reported(
        self, tmp_path: Path, path: Path
    ) -> None:
        words = (f"MODEL.weights={path}", "PHASES.epochs=1")
        run_until_killed(tmp_path / "killed", *words, hooks={"kill": KillAfter(1)})
        log = tmp_path / "killed" / "log.txt"
        assert "has changed since the last attempt" not in log.read_text()
        save_file(weights(8), path)
        train(tmp_path / "killed", *words)
        assert "has changed since the last attempt" in log.read_text()

    def test_other_start_weights_make_another_run(
        self, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train(tmp_path / "run", "PHASES.epochs=1", f"MODEL.weights={path}")
        with pytest.raises(ChangedError, match=r"MODEL\.weights: .* null \(forbidden\)"):
            train(tmp_path / "run", "PHASES.epochs=1")
        monkeypatch.chdir(tmp_path)
        from phasetrain.testing.build import resolve_overrides

        folders = {
            resolve_overrides([*SMALL, *words]).config.RUN.dir
            for words in ((), (f"MODEL.weights={path}",))
        }
        assert len(folders) == 2

    def test_plan_lists_loaded_and_reinitialized_weights(self, tmp_path: Path, path: Path) -> None:
        given = f"MODEL.weights={{path: {path}, reinit: ['head.*']}}"
        train(tmp_path / "run", given, "RUN.engine=plan")
        report = json.loads((tmp_path / "run" / "plan.json").read_text())["weights"]
        assert report["reinit"] == ["head.weight", "head.bias"]
        assert report["loaded"]["features.0.weight"] == {"source": 0, "name": "features.0.weight"}
        assert len(report["loaded"]) == 18

    @pytest.mark.addon("experiments")
    def test_replay_needs_start_weights_and_a_test_does_not(
        self, tmp_path: Path, path: Path
    ) -> None:
        words = (f"MODEL.weights={path}", "PHASES.epochs=1")
        train(tmp_path / "run", *words)
        assert train(tmp_path / "run", *words, "RUN.engine=replay", "RUN.step=2").exit_code == 0
        path.unlink()
        assert train(tmp_path / "run", *words, "RUN.engine=test").updates == 5

    @pytest.mark.addon("remote")
    def test_weights_come_from_an_object_store(self, tmp_path: Path, path: Path) -> None:
        MemoryHandler.objects["mem://weights/a.safetensors"] = path.read_bytes()
        try:
            words = (
                "RUN.imports=[phasetrain.testing]",
                "MODEL.weights=mem://weights/a.safetensors",
                *STILL,
            )
            train(tmp_path / "run", *words)
        finally:
            MemoryHandler.objects.clear()
        assert parameters(newest(tmp_path / "run").state["task"]["model"]) == parameters(weights(7))

    @pytest.mark.feature("101")
    def test_all_ranks_get_weights_that_rank_0_reads(
        self, launcher: Launcher, tmp_path: Path, path: Path
    ) -> None:
        words = (
            *SMALL,
            ONE,
            PARTS,
            "HOOKS.note_weights={}",
            "PHASES.epochs=1",
            "PHASES.limit.train=2",
        )
        ordered = (
            "DISTRIBUTED.reduction=ordered",
            "DISTRIBUTED.virtual_shards=4",
        )  # which brings no weights round
        given = f"MODEL.weights={{path: {path}, format: on_main}}"
        done = launcher.run(tmp_path / "run", 4, *words, *ordered, given)
        assert done.codes == [0, 0, 0, 0], done.outputs
        noted = [(tmp_path / f"run-start-{rank}").read_text() for rank in range(4)]
        assert noted == [parameters(weights(7))] * 4

    @pytest.mark.addon("sharding")
    @pytest.mark.slow
    def test_sharded_weights_are_loaded_and_saved(self, launcher: Launcher, tmp_path: Path) -> None:
        fsdp = (*SMALL, ONE, "DISTRIBUTED.strategy=fsdp", "PHASES.epochs=1")
        assert launcher.run(tmp_path / "first", 3, *fsdp).codes == [0, 0, 0]
        words = (*fsdp, "OPTIMIZER.lr=0", f"MODEL.weights={tmp_path}/first")
        assert launcher.run(tmp_path / "second", 3, *words).codes == [0, 0, 0]
        one, other = (
            newest(tmp_path / name).state["task"]["model"] for name in ("first", "second")
        )
        assert parameters(one) == parameters(other)

    def test_read_error_on_rank_0_ends_all_ranks(self, launcher: Launcher, tmp_path: Path) -> None:
        done = launcher.run(tmp_path / "run", 3, *SMALL, ONE, f"MODEL.weights={tmp_path}/absent")
        assert done.codes == [2, 2, 2]
        assert f"{tmp_path}/absent" in done.outputs[0]


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
            pytest.param(*(3, ("DISTRIBUTED.strategy=fsdp",)), marks=pytest.mark.addon("sharding")),
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
