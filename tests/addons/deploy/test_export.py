"""What is exported and loaded again returns the same bits."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, newest, train
from raising import raises
from safetensors import safe_open
from torch import Tensor, nn

from phasetrain import load
from phasetrain.addons.deploy.export import FORMATS, choose_format, export
from phasetrain.checkpoint import Checkpointer
from phasetrain.cli import main
from phasetrain.distributed import World
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.models import MODELS, SmallCNN
from phasetrain.models.sources import parse_sources
from phasetrain.models.weights import load_pretrained
from phasetrain.runtime.storage import Storage

ROOT = Path(__file__).parents[3]
BATCH = torch.linspace(-1, 1, 3 * 64).reshape(3, 1, 8, 8)
WORDS = (*SMALL, "PHASES.epochs=1", "CHECKPOINT.best.monitor=test/accuracy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, "PHASES.epochs=1", "CHECKPOINT.best.monitor=test/accuracy")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Tensor:
    """Return what the trained model says of `BATCH`."""
    return scores(newest(folder).state["task"]["model"])


def scores(state: dict[str, Tensor] | None = None, weights: Any = None) -> Tensor:
    """Return what a model with this state, or with weights as MODEL.weights takes them, says of
    `BATCH`."""
    model = SmallCNN(10, width=4, dropout=0.3)
    if state is not None:
        model.load_state_dict(state)
    else:
        load_pretrained(model, parse_sources(weights), World())
    with torch.no_grad():
        found: Tensor = model.eval()(BATCH)
    return found


@pytest.mark.feature("104")
@pytest.mark.by_default(2)
@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
@pytest.mark.parametrize("part", ["run", "checkpoints", "checkpoint"])
def test_weights_loaded_again_give_equal_bits(
    folder: Path, expected: Tensor, tmp_path: Path, form: str, part: str
) -> None:
    paths = {
        "run": str(folder),
        "checkpoints": f"{folder}/checkpoints",
        "checkpoint": newest(folder).path,
    }
    made = export(paths[part], str(tmp_path / "out"), form)
    written = [path for path in (tmp_path / "out", *tmp_path.glob("out/*")) if path.is_file()]
    size = sum(path.stat().st_size for path in written)
    assert (made.count, made.size, made.weights) == (20, size, "model")
    assert torch.equal(scores(weights=str(tmp_path / "out")), expected)
    assert not torch.equal(scores(SmallCNN(10, width=4).state_dict()), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_known_of_the_weights_goes_with_them(folder: Path, tmp_path: Path) -> None:
    export(str(folder), str(tmp_path / "a.safetensors"), source={"checkpoint": "best"})
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        facts = file.metadata()
    assert {key: facts[key] for key in ("format", "updates", "model")} == {
        "format": "pt",
        "updates": "5",
        "model": "small_cnn",
    }
    assert facts["checkpoint"].startswith("p0002-s00000000")
    assert json.loads(facts["metrics"]) == newest(folder).manifest.facts.metrics
    export(str(folder), str(tmp_path / "hf"), "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["architectures"], config["model"]["width"]) == (["small_cnn"], 4)
    assert (config["config"], len(facts["config"])) == (facts["config"], 8)
    assert (config["weights"], facts["weights"]) == ("model", "model")


@pytest.mark.feature(
    "104", "export of weights, filtered by pattern", "`phasetrain export --include --exclude`"
)
def test_tensors_are_selected_by_patterns(folder: Path, tmp_path: Path) -> None:
    patterns = {"include": ("features.*",), "exclude": ("*.num_batches_tracked", "features.6.*")}
    assert export(str(folder), str(tmp_path / "a"), source=patterns).count == 14
    with raises(ConfigError, code="export.unknown_tensor"):
        export(str(folder), str(tmp_path / "b"), source={"exclude": ("feature.9",)})
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
def test_remains_of_a_killed_export_are_removed(folder: Path, tmp_path: Path, form: str) -> None:
    (tmp_path / "out.tmp-0123abcd").mkdir()
    (tmp_path / "out.tmp-0123abcd" / "config.json").touch()
    for name in ("out.tmp-89abcdef", "other.tmp-89abcdef"):
        (tmp_path / name).touch()
    export(str(folder), str(tmp_path / "out"), form)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.tmp-89abcdef", "out"]


@pytest.mark.parametrize(
    ("out", "form", "expected"),
    [
        ("a", None, "safetensors"),
        ("a.safetensors", None, "safetensors"),
        ("runs/a.b/a", None, "safetensors"),
        ("a.onnx", None, "onnx"),
        ("a.pt2", None, "torch_export"),
        ("a.v2", "huggingface", "huggingface"),
        ("a.onnx", "onnx", "onnx"),
    ],
)
def test_the_suffix_selects_the_format(out: str, form: str | None, expected: str) -> None:
    assert choose_format(out, form) == expected


@pytest.mark.parametrize(
    ("out", "form", "code"),
    [
        ("a.onnx", "safetensors", "cli.conflict"),
        ("a.safetensors", "huggingface", "cli.conflict"),
        ("a.pt", None, "export.unknown_format"),
        ("a", "onxn", "export.unknown_format"),
    ],
)
def test_a_suffix_of_another_format_is_rejected(
    folder: Path, tmp_path: Path, out: str, form: str | None, code: str
) -> None:
    with raises(ConfigError, code=code):
        export(str(folder), str(tmp_path / out), form)
    assert not list(tmp_path.iterdir())


def test_torchscript_is_rejected_with_the_formats_to_use(folder: Path, tmp_path: Path) -> None:
    with raises(ConfigError, code="export.removed_format"):
        export(str(folder), str(tmp_path / "a.pt"), "torchscript", overrides=WORDS)
    assert not (tmp_path / "a.pt").exists()


def test_torch_export_gives_the_same_outputs(
    folder: Path, expected: Tensor, tmp_path: Path
) -> None:
    export(str(folder), str(tmp_path / "a.pt2"), "torch_export", overrides=WORDS)
    with torch.no_grad():
        assert torch.equal(torch.export.load(tmp_path / "a.pt2").module()(BATCH), expected)


@MODELS.register("scores_and_balance")
class ScoresAndBalance(SmallCNN):
    """Returns a mapping with a scalar of the batch."""

    def forward(self, images: Tensor) -> Any:
        scores = super().forward(images)
        return {"scores": scores, "balance": scores.mean()}


def test_torch_export_compares_mappings(tmp_path: Path) -> None:
    loss = "LOSS={name: weighted_sum, losses: {cross_entropy: {output: scores}}}"
    words = (
        "MODEL.name=scores_and_balance",
        loss,
        "METERS.accuracy.output=scores",
        "PHASES.updates=1",
    )
    train(tmp_path / "run", *words, "PHASES.epochs=null")
    export(str(tmp_path / "run"), str(tmp_path / "a.pt2"))
    own = load(tmp_path / "run").predict(BATCH, transform=False)
    with torch.no_grad():
        exported = torch.export.load(tmp_path / "a.pt2").module()(BATCH)
    assert torch.equal(exported["scores"], own["scores"])
    assert torch.allclose(exported["balance"], own["balance"], rtol=1e-5)


NORMALIZE = "DATA.TEST.transforms=[{name: normalize, mean: [0.5], std: [0.25]}]"


@pytest.fixture(scope="module")
def normalized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """Return the folder of a run with a transform, and its scores of `BATCH` as a raw input."""
    folder = tmp_path_factory.mktemp("normalized") / "run"
    train(folder, "PHASES.epochs=1", NORMALIZE)
    task = load(folder)
    by_hand = task.predict((BATCH - 0.5) / 0.25, transform=False)
    assert torch.equal(task.predict(BATCH, transform=True), by_hand)
    assert not torch.allclose(task.predict(BATCH, transform=False), by_hand, atol=1e-3)
    return folder, by_hand


class TestTransforms:
    INSIDE = ("normalize(mean=[0.5], std=[0.25])",)

    @pytest.mark.feature(
        "predict.transforms",
        "raw inputs: transforms of the test split in predictions and exported models",
        "`task.predict(x, transform=True)`, `--with-transforms`",
    )
    def test_they_are_in_the_file_on_request(
        self, normalized: tuple[Path, Tensor], tmp_path: Path
    ) -> None:
        folder, expected = normalized
        out = str(tmp_path / "a.pt2")
        made = export(str(folder), out, "torch_export", with_transforms=True)
        assert (tuple(made.inside), tuple(made.outside)) == (self.INSIDE, ())
        files = {"transforms": "", "transforms_inside": ""}
        program = torch.export.load(out, extra_files=files)
        with torch.no_grad():
            assert torch.allclose(program.module()(BATCH), expected, rtol=1e-5, atol=1e-6)
        assert json.loads(files["transforms_inside"]) == list(self.INSIDE)

    @pytest.mark.parametrize("form", ["safetensors", "torch_export"])
    def test_they_are_listed_where_they_are_not_in_the_file(
        self, normalized: tuple[Path, Tensor], tmp_path: Path, form: str
    ) -> None:
        made = export(str(normalized[0]), str(tmp_path / "a"), form)
        assert (tuple(made.inside), tuple(made.outside)) == ((), self.INSIDE)

    def test_command_prints_them(
        self, normalized: tuple[Path, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["export", str(normalized[0]), str(tmp_path / "a"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["transforms"]
        assert found == {"inside": [], "outside": list(self.INSIDE)}
        assert main(["export", str(normalized[0]), str(tmp_path / "b")]) == 0
        assert self.INSIDE[0] in capsys.readouterr().out

    def test_weights_alone_cannot_hold_them(self, folder: Path, tmp_path: Path) -> None:
        with raises(ConfigError, code="cli.conflict"):
            export(str(folder), str(tmp_path / "a"), with_transforms=True)

    @pytest.mark.feature("predict.transforms")
    @pytest.mark.slow
    def test_they_are_in_the_onnx_model(
        self, normalized: tuple[Path, Tensor], tmp_path: Path
    ) -> None:
        runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
        folder, expected = normalized
        export(str(folder), str(tmp_path / "a.onnx"), "onnx", with_transforms=True)
        session = runtime.InferenceSession(str(tmp_path / "a.onnx"))
        [found] = session.run(None, {session.get_inputs()[0].name: BATCH.numpy()})
        assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)
        facts = session.get_modelmeta().custom_metadata_map
        assert json.loads(facts["transforms_inside"]) == list(self.INSIDE)


@pytest.mark.slow
def test_onnx(folder: Path, expected: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    export(str(folder), str(tmp_path / "a.onnx"), "onnx", overrides=WORDS)
    session = runtime.InferenceSession(str(tmp_path / "a.onnx"))
    [found] = session.run(None, {session.get_inputs()[0].name: BATCH.numpy()})
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


def test_onnx_without_its_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with raises(ConfigError, code="export.missing_package"):
        export(str(folder), str(tmp_path / "a.onnx"), "onnx", overrides=WORDS)
    assert not (tmp_path / "a.onnx").exists()


def test_tied_weights_are_written_once_and_tied_again(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
            self.head.weight = self.embed.weight

    trained, model = Tied(), Tied()
    promised = {"config": {"MODEL": {"name": "tied"}}}
    checkpointer = Checkpointer(f"{tmp_path}/checkpoints", Storage())
    checkpointer.save(RunState(), {"task": {"model": trained.state_dict()}}, promised)
    assert export(str(tmp_path), str(tmp_path / "a.safetensors")).count == 2
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert list(file.keys()) == ["embed.weight"]
    load_pretrained(model, parse_sources(str(tmp_path / "a.safetensors")), World())
    assert torch.equal(model.head.weight, trained.head.weight)


@pytest.mark.parametrize(
    ("arguments", "options", "code"),
    [
        (
            ("run", "a", "safetensor"),
            {},
            "export.unknown_format",
        ),
        (("run", "here", "safetensors"), {}, "file.exists"),
        (("rum", "a", "safetensors"), {}, "weights.unusable"),
        (
            ("run", "a", "safetensors"),
            {"source": {"which": "ema"}},
            "weights.unusable",
        ),
        (
            ("run", "a", "torch_export"),
            {"overrides": ("MODEL.name=mlp",)},
            "checkpoint.other_model",
        ),
    ],
)
def test_invalid_export_is_rejected(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, str, str],
    options: dict[str, Any],
    code: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(folder)
    Path("here").touch()
    with raises(ConfigError, code=code):
        export(*arguments, **options)
    assert not Path("a").exists()


def test_command_prints_the_file_or_the_error(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = f"{tmp_path}/a.safetensors"
    for words, code, told in (
        (
            [str(folder), out, "--include", "head.*"],
            0,
            f"{out}: 2 tensors, 880 bytes (safetensors)\n",
        ),
        ([str(folder), out], 2, f"{out!r} exists; name a file or folder that does not\n"),
        ([str(folder), f"{out}.pt2", "--format", "torch_export", *WORDS], 0, f"{out}.pt2: "),
    ):
        assert main(["export", *words]) == code
        printed = capsys.readouterr()
        assert (printed.err if code else printed.out).startswith(told)


@pytest.mark.feature("predict.transforms")
def test_command_prints_what_goes_in_and_out(
    normalized: tuple[Path, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(normalized[0]), f"{tmp_path}/a.pt2", "--with-transforms", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["input"], found["output"]) == ("float32 (N, 1, 8, 8)", "float32 (N, 10)")
    assert found["class_names"] == list("0123456789")
    assert main(["export", str(normalized[0]), f"{tmp_path}/b.pt2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "input: float32 (N, 1, 8, 8)" in lines[1]


def test_the_page_names_all_formats() -> None:
    page = (ROOT / "docs" / "model.md").read_text("utf-8")
    assert [form for form in FORMATS if f"\n| `{form}` | " not in page] == []
