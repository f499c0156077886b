"""What a command imports: a training what it uses, and a command about configs no torch."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest

import phasetrain

MOST_MODULES = 348
"""Maximum number of modules of the package that a training may load, of about 660."""

PROGRAM = """
import gc, json, sys
from phasetrain.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words, owns_process=True) == 0, words
    assert gc.isenabled()
with open("modules.json", "w") as file:
    json.dump([gc.get_freeze_count(), sorted(sys.modules)], file)
"""


CALL = "from phasetrain.cli import main; sys.exit(main(sys.argv[1:]))"


def run_process(folder: Path, *lines: str) -> tuple[int, list[str]]:
    """Return the number of frozen objects and the modules of a process after some commands."""
    words = json.dumps([line.split() for line in lines])
    subprocess.run(
        [sys.executable, "-c", PROGRAM, words], cwd=folder, capture_output=True, check=True
    )
    frozen, modules = json.loads((folder / "modules.json").read_text())
    return frozen, modules


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


@pytest.mark.parametrize("words", ["LOSS=null LOSS.name=nearby.Loss", "../nearby.yaml"])
def test_module_of_a_dotted_path_is_found_without_imports(tmp_path: Path, words: str) -> None:
    """As by the installed command, for which Python does not search the current folder."""
    folder = tmp_path / "folder" if ".." in words else tmp_path
    folder.mkdir(exist_ok=True)
    (tmp_path / "nearby.py").write_text(
        "from torch import nn\n\n\nclass Loss(nn.CrossEntropyLoss): pass\n"
    )
    (tmp_path / "nearby.yaml").write_text("defaults: [digits, _self_]\nLOSS: {name: nearby.Loss}\n")
    call = ["plan", *words.split(), "PHASES.epochs=1", "RUN.rehearse=false"]
    command = [sys.executable, "-P", "-c", "import sys; " + CALL, *call]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_flags_of_all_commands_are_declared_without_torch() -> None:
    """Completion asks for them."""
    program = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from phasetrain.cli.parsing import make_parser
from phasetrain.cli.table import list_commands
parsers = {command.name: make_parser(command) for command in list_commands()}
assert {"train", "runs list"} <= parsers.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_training_loads_only_what_it_uses(tmp_path: Path) -> None:
    words = "train PHASES.epochs=1 PHASES.limit.train=1 PHASES.limit.test=1 RUN.dir=run"
    frozen, modules = run_process(tmp_path, words)
    # Objects of imported modules, which garbage collections would traverse.
    assert frozen > 200_000
    own = [name for name in modules if f"{name}.".startswith("phasetrain.")]
    assert 250 < len(own) <= MOST_MODULES
    # Used, and features that are off.
    assert "phasetrain.models.small_cnn" in own
    assert {
        "phasetrain.app.test",
        "phasetrain.addons.text.lines",
        "phasetrain.data.loading.worker_stream",
        "phasetrain.addons.sampling.mixture",
        "phasetrain.data.transforms.resize",
        "phasetrain.addons.optimizers.plateau",
        "phasetrain.addons.vision.soft_targets",
        "phasetrain.addons.metrics.auroc",
        "phasetrain.models.resnet",
        "phasetrain.models.weights",
        "phasetrain.optim.muon",
        "phasetrain.tasks.generation",
    }.isdisjoint(own)
    # torch's compiler, which takes as long to import as torch.
    assert {"torch._dynamo", "torch._inductor"}.isdisjoint(modules)


@pytest.mark.slow  # two new processes; test_code_cache.py has the rules
@pytest.mark.addon("authoring")
def test_commands_about_parts_need_torch_only_after_a_change_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASETRAIN_CACHE", str(tmp_path / "cache"))
    lines = ["help OPTIMIZER", "help cosine", "help RAdam", "schema", "completion bash"]
    assert "torch" in run_process(tmp_path, *lines)[1], "nothing would be tested"
    assert "torch" not in run_process(tmp_path, *lines)[1]


def test_run_in_python_does_not_freeze_the_garbage_of_other_code(tmp_path: Path) -> None:
    before = gc.get_freeze_count()
    phasetrain.run(["PHASES.updates=1", "DATA.TEST=null", f"RUN.dir={tmp_path}"])
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before
