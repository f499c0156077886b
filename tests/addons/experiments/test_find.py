"""The finders: numbers that follow from the config alone, a line to paste, and no trace of a run in
the folder."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import records, train

from phasetrain.addons.experiments.find.find_lr import geometric_range, smooth, suggest_lr
from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.errors import ConfigError
from phasetrain.runtime.terminal import Terminal

SHORT = ("FIND.updates=40", "FIND.lr_from=1e-4", "MODEL.dropout=0.0", "MACHINE.threads=1")


GREEDY = (
    "RUN.engine=find_batch_size",
    "MODEL.name=find_parts.Greedy",
    "FIND.batch_size_from=16",
    "FIND.batch_updates=2",
)


def tried(folder: Path, *words: str) -> RunResult:
    """Run the finder of batch sizes quietly."""
    return run([*GREEDY, f"RUN.dir={folder}", *words], terminal=Terminal(io.StringIO(), live=False))


def read_result(folder: Path, name: str) -> dict[str, Any]:
    content = json.loads((folder / "find" / f"{name}.json").read_text())
    assert isinstance(content, dict)
    return content


class TestLr:
    def test_the_numbers(self, tmp_path: Path) -> None:
        result = train(tmp_path, "RUN.engine=find_lr", *SHORT)
        content = read_result(tmp_path, "find_lr")
        assert (result.state, result.reason) == ("found", content["line"])
        assert [path.name for path in tmp_path.iterdir()] == ["find"]
        assert content["line"] == f"OPTIMIZER.lr={content['steepest']:.2g}"
        assert content["lr"][0] == pytest.approx(1e-4)
        assert content["lr"][-1] == pytest.approx(10.0)
        assert len(content["lr"]) == len(content["loss"]) == len(content["smoothed"]) == 40
        assert 0.01 < content["steepest"] <= content["lowest"] < 5
        assert (tmp_path / "find" / "find_lr.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    @pytest.mark.feature(
        "54",
        "learning rate and batch size finders",
        "`phasetrain find-lr`, `find-batch-size`, `FIND`",
    )
    def test_each_update_had_its_learning_rate_in_all_groups(self, tmp_path: Path) -> None:
        """The same losses as of a training with these learning rates, by a schedule."""
        groups = "OPTIMIZER.groups=[{match: 'head.*', lr_scale: 0.5}]"
        train(tmp_path / "find", "RUN.engine=find_lr", *SHORT, groups, "PHASES.limit.train=null")
        length = (
            "PHASES.epochs=null",
            "PHASES.updates=40",
            "PHASES.limit.train=null",
            "OPTIMIZER.lr=1.0",
        )
        schedule = "OPTIMIZER.SCHEDULES.lr={name: find_parts.rising}"
        train(tmp_path / "run", *SHORT, groups, *length, schedule)
        losses = [
            record["loss"] for record in records(tmp_path / "run") if record["kind"] == "step"
        ]
        assert read_result(tmp_path / "find", "find_lr")["loss"] == pytest.approx(losses, rel=1e-4)

    @pytest.mark.slow
    def test_equal_calls_give_equal_numbers_and_another_seed_others(self, tmp_path: Path) -> None:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            train(tmp_path / name, "RUN.engine=find_lr", *SHORT, f"RUN.seed={seed}")
        assert (
            read_result(tmp_path / "a", "find_lr")
            == read_result(tmp_path / "b", "find_lr")
            != read_result(tmp_path / "c", "find_lr")
        )

    @pytest.mark.slow
    def test_run_in_the_folder_starts_from_scratch(self, tmp_path: Path) -> None:
        train(tmp_path / "found", "RUN.engine=find_lr", *SHORT, "FIND.updates=10")
        assert [path.name for path in (tmp_path / "found").iterdir()] == ["find"]
        after = train(tmp_path / "found", "RUN.resume=never", "PHASES.epochs=1")
        assert after.digest == train(tmp_path / "other", "PHASES.epochs=1").digest

    def test_it_stops_where_the_loss_runs_away(self, tmp_path: Path) -> None:
        train(tmp_path, "RUN.engine=find_lr", *SHORT, "FIND.lr_to=1e12", "FIND.stop_at=2")
        content = read_result(tmp_path, "find_lr")
        assert content["stopped"] in (
            "the loss is 2 times its lowest value",
            "the loss is not finite",
        )
        assert 10 < len(content["loss"]) < 40

    @pytest.mark.slow
    def test_a_scaled_learning_rate_is_not_scaled_again(self, tmp_path: Path) -> None:
        scaled = "OPTIMIZER.auto_lr_scaling={base_batch_size: 12}"
        result = train(tmp_path, "RUN.engine=find_lr", *SHORT, scaled)
        assert result.reason.endswith(" OPTIMIZER.auto_lr_scaling=null")
        train(tmp_path / "plain", "RUN.engine=find_lr", *SHORT)
        ours, plain = read_result(tmp_path, "find_lr"), read_result(tmp_path / "plain", "find_lr")
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-3)

    def test_without_matplotlib_there_are_the_numbers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        train(tmp_path, "RUN.engine=find_lr", *SHORT, "FIND.updates=10")
        assert [path.name for path in (tmp_path / "find").iterdir()] == ["find_lr.json"]

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (
                ["FIND.lr_from=1.0", "FIND.lr_to=0.5"],
                r"FIND.lr_to = 0.5: expected more than FIND.lr_from = 1",
            ),
            (["OPTIMIZER.lr=0"], r"OPTIMIZER.lr = 0: expected another value"),
            (
                ["FIND.lr_from=1e30", "FIND.lr_to=1e35"],
                r"FIND.lr_from = 1e\+30: the loss was not finite after . updates",
            ),
            (["FIND.updates=5"], r"FIND.updates = 5 \(command line\): expected int >= 10"),
        ],
    )
    def test_what_makes_no_range_is_refused(
        self, tmp_path: Path, words: list[str], told: str
    ) -> None:
        with pytest.raises(ConfigError, match=told):
            train(tmp_path, "RUN.engine=find_lr", *SHORT, *words)

    def test_several_processes_are_rejected(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        for name, value in (
            ("WORLD_SIZE", "3"),
            ("RANK", "0"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "3"),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", "1")
        for engine in ("find_lr", "find_batch_size"):
            with pytest.raises(ConfigError) as caught:
                run([f"RUN.engine={engine}", "DATA.TRAIN.batch_size=24"])
            assert (caught.value.code, caught.value.key) == ("config.world_size", "RUN.engine")


class TestArithmetic:
    def test_the_same_factor_between_learning_rates(self) -> None:
        assert geometric_range(0.01, 1.0, 5) == pytest.approx(
            [0.01, 0.0316228, 0.1, 0.316228, 1.0], rel=1e-5
        )

    def test_smoothing_has_no_bias_to_zero(self) -> None:
        assert smooth([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0, 2.0, 2.0])
        assert smooth([1.0, 3.0], 0.5) == pytest.approx([1.0, 7 / 3])
        assert smooth([1.0, 3.0], 0.0) == [1.0, 3.0]

    def test_the_steepest_fall_before_the_lowest(self) -> None:
        losses = [5.0, 5.0, 4.9, 4.0, 3.5, 3.0, 9.0, 1e3, 2e3, 5.0, 9.0]
        made = suggest_lr(range(11), losses, 0.0)
        assert (made.steepest, made.lowest) == (2, 5)

    def test_where_the_loss_never_falls_nothing_is_suggested(self) -> None:
        assert suggest_lr([1.0, 2.0, 3.0], [1.0, 1.0, 2.0], 0.0).steepest is None


class TestBatchSize:
    @pytest.mark.feature("54")
    def test_as_large_as_memory_allows(self, tmp_path: Path) -> None:
        result = tried(tmp_path)
        content = read_result(tmp_path, "find_batch_size")
        assert (content["tried"], content["largest"]) == ([16, 32, 64], 64)
        assert content["stopped"] == "128 samples do not fit into the memory of cpu"
        assert result.reason == content["line"] == "DATA.TRAIN.batch_size=64"
        assert content["time"]["samples_per_second"].keys() == {"16", "32", "64"}
        assert sorted(path.name for path in (tmp_path / "find").iterdir()) == [
            "find_batch_size.json",
            "find_batch_size.png",
        ]

    def test_what_the_cpu_says_of_memory(self, tmp_path: Path) -> None:
        text = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
        tried(tmp_path, f'MODEL.text="{text}"', "MODEL.limit=32")
        assert read_result(tmp_path, "find_batch_size")["largest"] == 32

    def test_any_other_error_is_raised(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no such shape"):
            tried(tmp_path, "MODEL.text='no such shape'")

    def test_of_a_batch_that_does_not_fit_the_largest_piece_is_told(self, tmp_path: Path) -> None:
        result = tried(tmp_path, "DATA.TRAIN.batch_size=200")
        assert result.reason == "DATA.TRAIN.micro_batch_size=50 OPTIMIZER.accumulate=null"

    @pytest.mark.slow
    def test_no_larger_than_asked_for_or_than_there_is_data(self, tmp_path: Path) -> None:
        words = ("MODEL.limit=9999", "FIND.batch_size_from=256")
        tried(tmp_path, *words, "FIND.max_batch_size=600")
        content = read_result(tmp_path, "find_batch_size")
        assert (content["tried"], content["stopped"]) == ([256, 512], "FIND.max_batch_size = 600")
        tried(tmp_path, *words)
        content = read_result(tmp_path, "find_batch_size")
        assert (content["tried"], content["stopped"]) == (
            [256, 512, 1024],
            "DATA.TRAIN has 1442 samples",
        )

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["FIND.batch_size_from=128"], "128 samples do not fit into the memory of cpu"),
            (["FIND.batch_size_from=2048"], "DATA.TRAIN has 1442 samples"),
            (["FIND.max_batch_size=8"], "FIND.max_batch_size = 8"),
        ],
    )
    def test_where_not_even_the_first_fits(
        self, tmp_path: Path, words: list[str], told: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"FIND.batch_size_from = .*: too large, {told}"):
            tried(tmp_path, *words)
