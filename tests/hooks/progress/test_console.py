"""What a person sees of a small run."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from harness import SMALL, KillAfter, run_until_killed
from torch import Tensor
from torch.nn.functional import cross_entropy

from phasetrain.app.api import run
from phasetrain.hooks import ConsoleView
from phasetrain.hooks.progress.console import format_memory
from phasetrain.losses import LoggingLoss
from phasetrain.runtime.format import format_metric
from phasetrain.runtime.terminal import Terminal

WORDS = (*[word for word in SMALL if word != "HOOKS.console=null"], "PHASES.epochs=2")


def run_and_capture(folder: Path, *words: str, live: bool = False) -> str:
    stream = io.StringIO()
    run([*WORDS, f"RUN.dir={folder}", *words], terminal=Terminal(stream, live=live))
    return stream.getvalue()


def masked(text: str) -> list[str]:
    """Return the lines with times and measured values masked."""
    text = re.sub(r"\d\d:\d\d:\d\d ", "", text)
    text = re.sub(r"\d+\.\d s", "T", text)
    return [re.sub(r"\d+\.\d{4}", "N", line) for line in text.splitlines()]


def test_line_says_that_a_stage_begins(tmp_path: Path) -> None:
    stages = "PHASES.stages=[{epochs: 1}, {epochs: 1, OPTIMIZER: {lr: 0.01}}]"
    text = run_and_capture(tmp_path, "PHASES.epochs=null", stages)
    lines = [line for line in masked(text) if line.startswith(("stage", "epoch"))]
    assert [line[:30].strip() for line in lines] == [
        "stage   0, updates 0 to 5",
        "epoch 1/2  train accuracy N lo",
        "stage   1, updates 5 to 10",
        "epoch 2/2  train accuracy N lo",
    ]


@pytest.mark.addon("observe")  # or else a line says that it is missing
def test_plain_lines_and_those_of_the_log(tmp_path: Path) -> None:
    lines = masked(run_and_capture(tmp_path))
    first = next(at for at, line in enumerate(lines) if line.startswith("epoch"))
    assert lines[first - 1].startswith("plan")  # no estimate of a run that is so short
    assert lines[first : first + 3] == [
        "epoch 1/2  train accuracy N loss N  test accuracy N loss N  (T)",
        "epoch 2/2  train accuracy N loss N  test accuracy N loss N  (T)",
        "best    test/accuracy N (update 10), test/loss N (update 10)",
    ]
    assert re.fullmatch(r"time    T, \d+ % in steps; .*", lines[first + 3])
    assert lines[first + 4] == f"end     completed after 10 updates; everything is in {tmp_path}"
    assert re.fullmatch(r"weights sha256 [0-9a-f]{64}", lines[-1])
    logged = [
        line.split(" INFO ")[1]
        for line in (tmp_path / "log.txt").read_text().splitlines()
        if " INFO epoch" in line
    ]
    assert masked("\n".join(logged)) == [
        "epoch 1/2  train  accuracy N  loss N  (T)",
        "epoch 1/2  test   accuracy N  loss N  (T)",
        "epoch 2/2  train  accuracy N  loss N  (T)",
        "epoch 2/2  test   accuracy N  loss N  (T)",
    ]


def test_estimate_is_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasetrain.hooks.progress.console.ESTIMATE_AFTER", 1e-9)
    (line,) = [line for line in run_and_capture(tmp_path).splitlines() if "to go" in line]
    assert re.search(r"time    about 0 to \d+ s to go$", line)


@pytest.mark.addon("text")
@pytest.mark.parametrize("live", [False, True])
def test_speed_of_a_language_model_is_in_tokens(tmp_path: Path, live: bool) -> None:
    words = (
        *("experiment=text_tiny", "PHASES.limit.train=3", "PHASES.limit.test=1", "PHASES.epochs=1"),
        *(
            "MODEL.width=8",
            "MODEL.depth=1",
            "DATA.TRAIN.context=16",
            "DATA.TEST.context=16",
            "DATA.TRAIN.batch_size=4",
        ),
        *("HOOKS.metrics.every_updates=1", "HOOKS.console.every_seconds=0"),
    )
    stream = io.StringIO()
    run([*words, f"RUN.dir={tmp_path}"], terminal=Terminal(stream, live=live))
    assert "4 per update (64 tokens)" in stream.getvalue()
    if not live:
        assert "tokens/s" in stream.getvalue()
        assert "samples/s" not in stream.getvalue()
    step = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-3])
    spent = step["time"]
    assert spent["tokens_per_second"] == pytest.approx(16 * spent["samples_per_second"])


def test_a_run_without_meters_shows_its_last_training_loss(tmp_path: Path) -> None:
    text = run_and_capture(tmp_path, "METERS=null")
    losses = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = [one["loss"] for one in losses if one["kind"] == "step" and one["updates"] in (5, 10)]
    assert re.findall(r"epoch \d/2  train last loss (\S+)  test  \(", text) == [
        format_metric(one) for one in last
    ]
    assert "best" not in text


@pytest.mark.addon("metrics")
def test_values_per_class_are_not_in_the_line_of_a_phase(tmp_path: Path) -> None:
    text = run_and_capture(tmp_path, "METERS={loss: {}, confusion_matrix: {}}", "PHASES.epochs=1")
    assert re.search(r"test  ?.*loss \d", text)
    assert "confusion_matrix" not in text
    assert "confusion_matrix" in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.addon("metrics")
def test_monitored_value_of_a_class_is_in_the_line_of_a_phase_and_has_a_best(
    tmp_path: Path,
) -> None:
    tops = ", ".join(f"top{k}: {{name: accuracy, topk: {k}}}" for k in range(2, 8))
    meters = f"METERS={{{tops}, f1: {{per_class: true}}}}"
    monitor = "CHECKPOINT.best.monitor=test/f1_of_3"
    text = run_and_capture(tmp_path, meters, monitor, "PHASES.epochs=1")
    assert re.search(r"test  ?.*f1_of_3 \d", text)
    assert re.search(r"best +test/f1_of_3 \d", text)
    assert "f1_of_4" not in text


@pytest.mark.addon("metrics")
def test_counts_of_zero_are_not_in_the_line_of_a_phase_and_have_no_best(tmp_path: Path) -> None:
    text = run_and_capture(tmp_path, "METERS={f1: {}}", "PHASES.epochs=1")
    assert re.search(r"test  ?.*f1_macro \d", text)
    assert "f1_absent" not in text
    assert "f1_absent" in (tmp_path / "metrics.jsonl").read_text()


def test_progress_without_a_terminal_comes_every_so_many_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasetrain.hooks.progress.console.POLL_INTERVAL", 0.0)
    text = run_and_capture(
        tmp_path / "a", "HOOKS.console.every_seconds=0", "HOOKS.console.every_updates=4"
    )
    found = [line for line in masked(text) if line.startswith("update")]
    assert len(found) == 2
    pattern = r"update 4/10  epoch 1/2  loss N  lr [N\d.e-]+  [\d,]+ samples/s  data \d+ %  [\d,.]+ [MG]iB  .* left"
    assert re.fullmatch(pattern, found[0])
    assert "update 4/10" not in run_and_capture(tmp_path / "b", "HOOKS.console.every_updates=4")


def test_summary_shows_the_best_metric(tmp_path: Path) -> None:
    lines = run_and_capture(
        tmp_path, "PHASES.epochs=3", "OPTIMIZER.lr=3.0", "OPTIMIZER.SCHEDULES=null"
    )
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tests = [one for one in metrics if one["kind"] == "phase" and one["split"] == "test"]
    values = [(one["metrics"]["loss"], 5 * (one["epoch"] + 1)) for one in tests]
    assert min(values) != values[-1]  # else the test would say nothing
    value, at = min(values)
    assert f"test/loss {format_metric(value)} (update {at})" in lines


class Annealed(LoggingLoss):
    """Logs a weight next to the loss."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = cross_entropy(output, target)
        self.logs = {"term": loss.detach(), "weight": torch.tensor(0.5)}
        return loss


def test_logged_terms_of_a_loss_have_no_best(tmp_path: Path) -> None:
    words = ["LOSS=null", f"LOSS.name={__name__}.Annealed"]
    declared = "METERS.loss_term={name: logged, of: loss_term}"
    text = run_and_capture(tmp_path, "PHASES.epochs=1", *words, declared)
    assert "loss_weight 0.5" in text
    (best,) = [line for line in masked(text) if line.startswith("best")]
    assert re.findall(r"test/(\w+)", best) == ["accuracy", "loss", "loss_term"]


def test_the_closing_lines_are_whole_after_a_resume(tmp_path: Path) -> None:
    whole = run_and_capture(tmp_path / "whole")
    run_until_killed(
        tmp_path / "killed", "PHASES.epochs=2", "HOOKS.console={}", hooks={"kill": KillAfter(13)}
    )
    again = run_and_capture(tmp_path / "killed")
    assert "resume  from " in again

    def best(text: str) -> list[str]:
        return [line[9:] for line in text.splitlines() if line[9:].startswith("best")]

    assert best(again) == best(whole)
    assert len(best(whole)) == 1


def test_a_state_of_before_the_best_was_kept() -> None:
    view = ConsoleView(Terminal(io.StringIO(), live=False))
    view.load_state_dict({"results": [["test", "accuracy", 0.5, 10]]})
    assert view.state_dict() == {
        "results": [["test", "accuracy", 0.5, 10]],
        "best": [["test", "accuracy", 0.5, 10]],
    }


def test_terminal_shows_updates_and_metrics(tmp_path: Path) -> None:
    text = run_and_capture(tmp_path, live=True)
    assert "2/2" in text
    assert "test/accuracy" in text


def test_memory_of_cpu_is_formatted() -> None:
    # Between 10 MiB and 9 GiB: how much depends on the tests that this process has run before.
    assert re.fullmatch(
        r"(\d\d|\d\d\d|1,0\d\d)\.\d MiB|\d\.\d GiB", format_memory(torch.device("cpu"))
    )


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every_updates = 0"):
        ConsoleView(Terminal(io.StringIO()), every_updates=0)
