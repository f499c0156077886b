"""What a command imports: a training what it uses, and a command about configs no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST_MODULES = 347
"""Maximum number of modules of the package that a training may load, of about 650."""

PROGRAM = """
import json, sys
from phasetrain.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
with open("modules.json", "w") as file:
    json.dump(sorted(sys.modules), file)
"""


CALL = "from phasetrain.cli import main; sys.exit(main(sys.argv[1:]))"


def list_modules(folder: Path, *lines: str) -> list[str]:
    """Return the modules that a process has loaded after some commands."""
    words = json.dumps([line.split() for line in lines])
    subprocess.run(
        [sys.executable, "-c", PROGRAM, words], cwd=folder, capture_output=True, check=True
    )
    modules: list[str] = json.loads((folder / "modules.json").read_text())
    return modules


@pytest.mark.addon("authoring")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train OPTIMIZER.momentun=0.5", "did you mean OPTIMIZER.momentum?"),
        ("plan MODLE.name=mlp", "did you mean MODEL.name?"),
        ("PHASES.epochs=many DATA.TRAIN.batchsize=3", "did you mean DATA.TRAIN.batch_size?"),
    ],
)
def test_mistake_in_a_config_is_reported_without_torch(
    tmp_path: Path, words: str, message: str
) -> None:
    program = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; " + CALL
    command = [sys.executable, "-c", program, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_training_loads_only_what_it_uses(tmp_path: Path) -> None:
    words = "train PHASES.epochs=1 PHASES.limit.train=1 PHASES.limit.test=1 RUN.dir=run"
    modules = list_modules(tmp_path, words)
    own = [name for name in modules if f"{name}.".startswith("phasetrain.")]
    assert 250 < len(own) <= MOST_MODULES
    # Used, and features that are off.
    assert "phasetrain.models.small_cnn" in own
    assert {
        "phasetrain.app.test",
        "phasetrain.data.datasets.lines",
        "phasetrain.data.loading.worker_stream",
        "phasetrain.data.mixture",
        "phasetrain.data.transforms.resize",
        "phasetrain.hooks.monitors.plateau",
        "phasetrain.addons.vision.soft_targets",
        "phasetrain.addons.metrics.auroc",
        "phasetrain.models.resnet",
        "phasetrain.models.weights",
        "phasetrain.optim.muon",
        "phasetrain.tasks.generation",
    }.isdisjoint(own)


@pytest.mark.slow  # two new processes; test_code_cache.py has the rules
@pytest.mark.addon("authoring")
def test_commands_about_parts_need_torch_only_after_a_change_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASETRAIN_CACHE", str(tmp_path / "cache"))
    lines = ["help OPTIMIZER", "help cosine", "help RAdam", "schema", "completion bash"]
    assert "torch" in list_modules(tmp_path, *lines), "nothing would be tested"
    assert "torch" not in list_modules(tmp_path, *lines)
