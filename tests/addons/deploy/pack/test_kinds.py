"""Packed models of every kind of input and output predict as their runs do."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detection_parts import WORDS as DETECTION
from harness import SMALL
from packs import change_config, repack
from PIL import Image
from raising import raises
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import phasetrain
from phasetrain.addons.deploy.pack.archive import read_archive
from phasetrain.addons.deploy.predict.predict import PredictOptions, format_csv, predict
from phasetrain.cli import main
from phasetrain.errors import ConfigError
from phasetrain.models import MODELS, SmallCNN


@pytest.mark.feature("pack")
@pytest.mark.addon("text")
def test_language_model_continues_lines_of_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment=text_tiny", "PHASES={epochs: null, updates: 2}", "PHASES.limit.test=1"]
    words += ["RUN.rehearse=false"]
    context = ["DATA.TRAIN.context=16", "DATA.TEST.context=16"]
    phasetrain.run([*words, *context, f"RUN.dir={tmp_path}/run"])
    out = str(tmp_path / "lm.zip")
    phasetrain.pack(tmp_path / "run", out)
    (tmp_path / "start.txt").write_text("Alice was")
    found = phasetrain.load_pack(out)
    [one] = found.predict_files([tmp_path / "start.txt"])
    assert [one] == predict(str(tmp_path / "run"), [str(tmp_path / "start.txt")])
    assert found.predict("Alice was").shape == (1, 9, 257)
    # Lines of different lengths, which form no batch together.
    monkeypatch.setattr(sys, "stdin", io.StringIO("Alice was\n\nDown the\nAlice was\n"))
    capsys.readouterr()
    assert main(["predict", out, "-", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert [(row["file"], row["index"]) for row in rows] == [("-", 0), ("-", 1), ("-", 2)]
    names = [[pair["name"] for pair in row["classes"]] for row in rows]
    assert names[0] == names[2] == [name for name, _ in one.classes]


@pytest.mark.feature(
    "pack.tokenizer",
    "packed language models with their tokenizer",
    "`phasetrain generate MODEL.zip`",
)
@pytest.mark.addon("text")
def test_tokenizer_is_part_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from phasetrain.addons.text.tokenize.tokenize import TokenizeOptions, tokenize

    lines = [json.dumps({"text": f"the rabbit number {number} ran away"}) for number in range(9)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    tokens = tmp_path / "tokens"
    tokenize(str(tokens), [f"{tmp_path}/text.jsonl"], TokenizeOptions(train_bpe=270))
    data = f"{{dataset: tokens, path: {tokens}, context: 8, document_mask: true, batch_size: 4}}"
    words = ["experiment=text_tiny", f"DATA.TRAIN={data}", f"DATA.TEST={data}"]
    model = ["MODEL={width: 16, depth: 1, heads: 2}", "METERS={loss: {}}"]
    length = ["PHASES={epochs: null, updates: 2}", "RUN.rehearse=false"]
    phasetrain.run([*words, *model, *length, f"RUN.dir={tmp_path}/run"])
    out = str(tmp_path / "lm.zip")
    phasetrain.pack(tmp_path / "run", out)
    task = phasetrain.load(tmp_path / "run")
    (tmp_path / "start.txt").write_text("the rabbit")
    expected = predict(str(tmp_path / "run"), [str(tmp_path / "start.txt")])
    texts = task.generate("the rabbit", tokens=5)
    tokens.rename(tmp_path / "gone")
    found = phasetrain.load_pack(out)
    assert found.verification.identical
    assert found.predict_files([tmp_path / "start.txt"]) == expected
    assert found.generate("the rabbit", tokens=5) == texts
    assert len(found.classes) == 270
    assert len(read_archive(out).parse_json("card.json")["classes"]) == 0
    capsys.readouterr()
    assert main(["generate", out, "--prompt", "the rabbit", "--tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generated"][0]["texts"] == texts[0]
    assert main(["generate", out, "--checkpoint", "best"]) == 2


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Return the folder of a run on numbers without classes, of a model with one output."""
    data = "{dataset: synthetic, samples: 32, classes: 3, input_shape: [4], batch_size: 8}"
    words = [f"DATA.{split}={data}" for split in ("TRAIN", "TEST")]
    model = "MODEL={name: torch.nn.Linear, in_features: 4, out_features: 5}"
    length = ["PHASES={epochs: null, updates: 2}", "RUN.rehearse=false"]
    phasetrain.run([*words, model, "DATA.TRAIN.transforms=[]", *length, f"RUN.dir={tmp_path}/run"])
    return tmp_path / "run"


@pytest.mark.feature("predict")
def test_rows_of_a_table_are_samples(
    numbers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    phasetrain.pack(numbers, tmp_path / "a.zip")
    (tmp_path / "rows.csv").write_text("a,b,c,d\n1,2,3,4\n5,6,7,8\n")
    np.save(tmp_path / "rows.npy", np.arange(1.0, 9.0).reshape(2, 4))
    found = phasetrain.load_pack(tmp_path / "a.zip")
    expected = found.predict(torch.arange(1.0, 9.0).view(2, 4)).tolist()
    for name in ("rows.csv", "rows.npy"):
        rows = found.predict_files([tmp_path / name])
        assert [row.output for row in rows] == expected
        assert rows == predict(str(numbers), [str(tmp_path / name)])
    assert found.predict(str(tmp_path / "rows.csv")).tolist() == expected
    assert found.classes == ()
    monkeypatch.setattr(sys, "stdin", io.StringIO("1,2,3,4\n5,6,7,8\n"))
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "a.zip"), "-", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert [row["output"] for row in rows] == expected
    for text in ("1,2,3,x\n1,2,3,x\n", "1,2,3,4\n1,2\n"):
        (tmp_path / "rows.csv").write_text(text)
        with raises(ConfigError, code="predict.unreadable"):
            found.predict_files([tmp_path / "rows.csv"])


class TwoHeads(nn.Module):
    """A model with two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.layer(x.flatten(1))
        return {"score": found[:, :2], "size": found[:, 2]}


def _loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    scores = nn.functional.cross_entropy(output["score"], target % 2)
    return scores + (output["size"] - target).square().mean()


@pytest.mark.feature("pack")
def test_model_with_several_outputs_and_given_in_python(tmp_path: Path) -> None:
    model = TwoHeads()
    inputs = torch.arange(640.0).view(10, 1, 8, 8) / 640
    data = TensorDataset(inputs, torch.arange(10) % 3)
    folder = tmp_path / "run"
    phasetrain.fit(
        model, data, loss=_loss, optimizer="sgd", epochs=1, batch_size=5, RUN={"dir": str(folder)}
    )
    np.save(tmp_path / "one.npy", inputs[:1].numpy())
    example = [str(tmp_path / "one.npy")]
    phasetrain.pack(folder, tmp_path / "a.zip", example=example, model=TwoHeads())
    with raises(ConfigError, code="pack.code_needed"):
        phasetrain.load_pack(tmp_path / "a.zip")
    found = phasetrain.load_pack(tmp_path / "a.zip", model=TwoHeads())
    assert found.verification.identical
    outputs = found.predict(inputs)
    assert {key: value.shape for key, value in outputs.items()} == {"score": (10, 2), "size": (10,)}
    assert outputs["score"].equal(model.eval()(inputs)["score"])
    [row] = found.predict_files(example)
    one = found.predict(inputs[:1])
    assert row.output == {"score": one["score"][0].tolist(), "size": float(one["size"][0])}


@pytest.mark.feature("pack")
def test_average_of_the_weights_and_bf16(tmp_path: Path) -> None:
    words = ["PHASES.epochs=1", "MODEL.ema.decay=0.5", "MACHINE.precision=bf16"]
    words += ["MODEL.swa={start: 0.5 epochs, every: 1 updates}"]
    phasetrain.run([*SMALL, *words, f"RUN.dir={tmp_path}/run"])
    inputs = torch.linspace(0, 1, 128).view(2, 1, 8, 8)
    torch.save(inputs, tmp_path / "two.pt")
    digests = set()
    for weights in ("model", "ema", "swa"):
        out = tmp_path / f"{weights}.zip"
        made = phasetrain.pack(tmp_path / "run", out, weights=weights)  # type: ignore[arg-type]
        task = phasetrain.load(tmp_path / "run", weights=weights)  # type: ignore[arg-type]
        found = phasetrain.load_pack(out)
        assert found.predict(inputs).equal(task.predict(inputs))
        assert found.predict(inputs).dtype == torch.bfloat16
        options = PredictOptions(weights=weights)  # type: ignore[arg-type]
        rows = predict(str(tmp_path / "run"), [str(tmp_path / "two.pt")], options=options)
        classes = task.predict(inputs).argmax(1).tolist()
        assert [row.classes[0][0] for row in rows] == [str(k) for k in classes]
        assert made.card["weights"] == weights
        assert made.card["precision"]["precision"] == "bf16"
        assert read_archive(str(out)).index["tolerance"] == 0.05
        digests.add(made.card["weights_sha256"])
    assert len(digests) == 3
    with raises(ConfigError, code="checkpoint.no_average"):
        phasetrain.pack(tmp_path / "run", tmp_path / "b.zip", weights="schedule_free")


@pytest.mark.feature("optimizer.schedule_free")
@pytest.mark.addon("libraries")
def test_weights_for_use_of_a_schedule_free_optimizer_are_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("schedulefree")
    folder = str(tmp_path / "run")
    optimizer = "OPTIMIZER={name: schedulefree.AdamWScheduleFree, lr: 0.01, SCHEDULES: null}"
    kept = [word for word in SMALL if not word.startswith("OPTIMIZER")]
    phasetrain.run(
        [*kept, optimizer, "MODEL.schedule_free={}", "PHASES.epochs=1", f"RUN.dir={folder}"]
    )
    capsys.readouterr()
    inputs = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    np.save(tmp_path / "one.npy", inputs.numpy())
    files = [str(tmp_path / "one.npy")]
    used = phasetrain.load(folder, weights="schedule_free").predict(inputs)
    trained = phasetrain.load(folder, weights="model").predict(inputs)
    assert not used.equal(trained)
    assert phasetrain.load(folder).predict(inputs).equal(used)

    for weights, flags, expected in (("schedule_free", [], used), ("model", ["model"], trained)):
        out = str(tmp_path / f"{weights}.zip")
        assert main(["pack", folder, out, *("--weights" for _ in flags), *flags, "--json"]) == 0
        card = json.loads(capsys.readouterr().out)["card"]
        found = phasetrain.load_pack(out)
        assert (card["weights"], found.verification.identical) == (weights, True)
        assert found.predict(inputs).equal(expected)
        options = PredictOptions(weights="model" if flags else None)
        assert found.predict_files(files) == predict(folder, files, options=options)
        for form, name in (("safetensors", f"{weights}.safetensors"), ("huggingface", weights)):
            out = str(tmp_path / name)
            words = ["export", folder, out, "--format", form, *("--which" for _ in flags), *flags]
            assert main([*words, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["weights"] == weights
            state = load_file(out if form == "safetensors" else f"{out}/model.safetensors")
            model = SmallCNN(10, width=4)
            model.load_state_dict(state)
            assert model.eval()(inputs).allclose(expected)


@pytest.mark.addon("libraries", "vision")
def test_detector_collates_inputs_without_boxes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "run")
    phasetrain.run([*DETECTION, "PHASES.epochs=1", f"RUN.dir={folder}"])
    out = str(tmp_path / "a.zip")
    assert main(["pack", folder, out]) == 0
    images = torch.linspace(0, 1, 3 * 256).view(3, 1, 16, 16)
    np.save(tmp_path / "box.npy", images.numpy())
    expected = phasetrain.load(folder).predict(images, transform=False)
    found = phasetrain.load_pack(out)
    assert found.verification.identical
    for output in (found.predict(images), phasetrain.load(folder).predict(images, transform=True)):
        assert output.keys() == expected.keys() == {"logits", "boxes", "scores", "labels"}
        assert all(output[name].equal(expected[name]) for name in expected)
    capsys.readouterr()
    for source in (folder, out):
        assert main(["predict", source, str(tmp_path / "box.npy"), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["predictions"]
        assert [row["output"]["labels"] for row in rows] == expected["labels"].tolist()


@pytest.mark.addon("adapters")
@pytest.mark.feature("pack")
def test_adapters_are_merged_and_their_base_is_inside(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    torch.manual_seed(7)
    save_file(SmallCNN(10, width=4).state_dict(), base)
    lora = "MODEL.adapters={match: 'features.*', rank: 2, train: [head]}"
    words = [lora, f"MODEL.weights={base}", "PHASES.epochs=1", f"RUN.dir={tmp_path}/run"]
    phasetrain.run([*SMALL, *words])
    phasetrain.pack(tmp_path / "run", tmp_path / "a.zip")
    inputs = torch.linspace(0, 1, 128).view(2, 1, 8, 8)
    expected = phasetrain.load(tmp_path / "run").predict(inputs)
    base.unlink()
    found = phasetrain.load_pack(tmp_path / "a.zip")
    assert found.verification.identical
    assert torch.allclose(found.predict(inputs), expected, atol=1e-5)
    assert sorted(found.model.state_dict()) == sorted(SmallCNN(10, width=4).state_dict())


@pytest.mark.feature("pack")
@pytest.mark.addon("text")
def test_task_that_decodes_is_part_of_the_prediction(tmp_path: Path) -> None:
    data = "{dataset: reversed_tokens, collate: pad, batch_size: 12, transforms: []}"
    words = ["RUN.imports=[sequence_parts]", "TASK={name: sequence_to_sequence, max_length: 6}"]
    splits = [f"DATA.TRAIN={data}", f"DATA.TEST={data}", "METERS={loss: {}}"]
    length = ["PHASES={epochs: null, updates: 1}", "RUN.rehearse=false"]
    model = "MODEL={name: seq2seq_gru, width: 8}"
    phasetrain.run([*words, *splits, *length, model, f"RUN.dir={tmp_path}/run"])
    phasetrain.pack(tmp_path / "run", tmp_path / "a.zip")
    found = phasetrain.load_pack(tmp_path / "a.zip")
    samples = [torch.tensor([1, 2, 3]), torch.tensor([2, 1])]
    expected = phasetrain.load(tmp_path / "run").predict(samples, transform=True)
    assert found.predict(samples).equal(expected)
    assert (expected.dtype, found.card["code"]) == (torch.int64, [])
    torch.save(samples[0], tmp_path / "one.pt")
    [row] = predict(str(tmp_path / "run"), [str(tmp_path / "one.pt")])
    assert row.output == [token for token in expected[0].tolist() if token >= 0]
    assert format_csv([row]).splitlines()[0] == "file,index,output"
    with raises(ConfigError, code="config.misfit"):
        phasetrain.run([*words, *splits, model, "RUN.engine=extract", f"RUN.dir={tmp_path}/run"])


@pytest.mark.addon("adapters", "text")
@pytest.mark.slow
def test_adapters_of_a_model_that_reads_targets_are_merged(tmp_path: Path) -> None:
    data = "{dataset: reversed_tokens, collate: pad, batch_size: 12, transforms: []}"
    words = ["RUN.imports=[sequence_parts]", "TASK={name: sequence_to_sequence, max_length: 6}"]
    splits = [f"DATA.TRAIN={data}", f"DATA.TEST={data}", "METERS={loss: {}}"]
    length = ["PHASES={epochs: null, updates: 1}", "RUN.rehearse=false"]
    lora = "adapters: {match: ['*linear*'], rank: 2}"
    model = f"MODEL={{name: seq2seq_transformer, width: 8, heads: 2, depth: 1, {lora}}}"
    phasetrain.run([*words, *splits, *length, model, f"RUN.dir={tmp_path}/run"])
    phasetrain.pack(tmp_path / "run", tmp_path / "a.zip")
    samples = [torch.tensor([1, 2, 3]), torch.tensor([2, 1])]
    expected = phasetrain.load(tmp_path / "run").predict(samples, transform=True)
    found = phasetrain.load_pack(tmp_path / "a.zip")
    assert found.predict(samples).equal(expected)
    assert not any("adapter" in name for name in found.model.state_dict())


BLOBS = """
import torch
from phasetrain.data import DATASETS


@DATASETS.register("packed_blobs")
class Blobs:
    field_kinds = {"image": "image", "mask": "mask"}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        mask = torch.zeros(6, 6, dtype=torch.int64)
        mask[: index % 5 + 1, :3] = 1
        return {"image": 0.5 * mask[None].float(), "mask": mask}

    def facts(self):
        return {"classes": 2, "class_names": ["back", "blob"], "channels": 1}
"""


@pytest.mark.feature(
    "pack.masks",
    "masks of a model of segmentation for new images",
    "`phasetrain predict --masks FOLDER`",
)
def test_masks_of_a_dataset_with_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "packed_blobs.py").write_text(BLOBS)
    normalize = (
        "{name: on_fields, fields: [image], transforms: [{name: normalize, mean: 0.0, std: 0.1}]}"
    )
    data = f"{{dataset: packed_blobs, batch_size: 4, transforms: [{normalize}]}}"
    model = "MODEL={name: torch.nn.Conv2d, in_channels: 1, out_channels: 2, kernel_size: 1}"
    words = ["experiment=null", f"DATA.TRAIN={data}", f"DATA.TEST={data}", model]
    parts = ["RUN.imports=[packed_blobs]", "LOSS.name=CrossEntropyLoss", "METERS.loss={}"]
    length = ["PHASES.epochs=1", "RUN.rehearse=false"]
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        phasetrain.run([*words, *parts, *length, f"RUN.dir={tmp_path}/run"])
        phasetrain.pack(tmp_path / "run", tmp_path / "a.zip")
    sys.modules.pop("packed_blobs")
    datasets = phasetrain.data.DATASETS._own  # type: ignore[attr-defined]
    factory = datasets.pop("packed_blobs")
    found = phasetrain.load_pack(tmp_path / "a.zip")
    assert found.card["code"] == []  # of the data, which predictions do not need
    assert "on_fields" in found.card["transforms"][0]
    image = factory()[2]["image"]
    expected = found.model(image[None] / 0.1)
    assert found.predict(image[None]).equal(expected)
    np.save(tmp_path / "one.npy", image[None].numpy())
    words = ["predict", str(tmp_path / "a.zip"), str(tmp_path / "one.npy")]
    capsys.readouterr()
    assert main([*words, "--masks", str(tmp_path / "masks"), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["predictions"]
    assert row["mask"] == expected[0].argmax(0).tolist()
    assert sum(one["share"] for one in row["classes"]) == 1
    assert {one["name"] for one in row["classes"]} <= {"back", "blob"}
    [path] = (tmp_path / "masks").iterdir()
    assert np.array(Image.open(path)).tolist() == row["mask"]


PARTS = """
import torch
from torch import nn
from phasetrain.data import TRANSFORMS
from phasetrain.models import MODELS


@MODELS.register("packed_net")
class PackedNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


@TRANSFORMS.register("packed_double")
def make_double():
    return lambda sample: 2 * sample


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""


def forget_parts() -> None:
    """Forget the module of `PARTS`, as another process has not imported it."""
    sys.modules.pop("packed_parts", None)
    MODELS._own.pop("packed_net", None)
    phasetrain.data.TRANSFORMS._own.pop("packed_double", None)  # type: ignore[attr-defined]


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return the function that packs a run with custom parts, and forgets them."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "packed_parts.py").write_text(PARTS)

    def make(model: str) -> Path:
        words = [f"MODEL={{name: {model}}}", "RUN.imports=[packed_parts]", "PHASES.epochs=1"]
        data = "DATA.TEST.transforms=[packed_double]"
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / "code")
            kept = [word for word in SMALL if not word.startswith("MODEL")]
            phasetrain.run([*kept, *words, data, f"RUN.dir={tmp_path}/run"])
            phasetrain.pack(tmp_path / "run", tmp_path / "a.zip", trust=True)
        forget_parts()
        return tmp_path / "a.zip"

    yield make
    forget_parts()


@pytest.mark.feature("pack.no_code")
@pytest.mark.parametrize("model", ["packed_net", "packed_parts.Plain"])
def test_custom_code_is_named_and_needed_but_not_inside(
    model: str, own_code: Callable[..., Path], tmp_path: Path
) -> None:
    out = own_code(model)
    assert b"class PackedNet" not in out.read_bytes()
    [code] = read_archive(str(out)).index["code"]
    assert (code["module"], code["file"], len(code["sha256"])) == (
        "packed_parts",
        "packed_parts.py",
        64,
    )
    assert set(code["parts"]) == {model, "packed_double"}
    with raises(ConfigError, code="pack.code_needed"):
        phasetrain.load_pack(out)
    assert "packed_parts" not in sys.modules
    other = tmp_path / "renamed.py"  # recognized by its digest
    other.write_text(PARTS)
    found = phasetrain.load_pack(out, imports=[other])
    assert found.verification.identical
    # The process has the registered parts now; a dotted path is asked for each time.
    if model == "packed_net":
        assert phasetrain.load_pack(out).verification.identical
    else:
        with raises(ConfigError, code="pack.code_needed"):
            phasetrain.load_pack(out)


@pytest.mark.feature("pack.example")
def test_other_code_is_revealed_by_the_example(
    own_code: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = own_code("packed_net")
    other = tmp_path / "packed_parts.py"
    other.write_text(PARTS.replace("2 * sample", "3 * sample"))
    with raises(ConfigError, code="pack.other_outputs"):
        phasetrain.load_pack(out, imports=[other])
    assert "not the source" in caplog.text
    forget_parts()
    other.write_text(PARTS + "# a remark\n")
    assert phasetrain.load_pack(out, imports=[other]).verification.identical
    for wrong in (tmp_path / "missing" / "packed_parts.py", tmp_path / "packed_parts.py"):
        forget_parts()
        other.write_text("raise RuntimeError('broken')")
        with raises(ConfigError, code="config.import_failed"):
            phasetrain.load_pack(out, imports=[wrong])


def test_file_for_one_module_is_no_consent_to_others(
    own_code: Callable[..., Path], tmp_path: Path
) -> None:
    out = own_code("packed_net")

    def name_other(_index: dict[str, Any], members: dict[str, bytes]) -> None:
        change_config(members, MODEL={"name": "subprocess.Popen"})

    with raises(ConfigError, code="pack.code_needed"):
        changed = repack(out, tmp_path / "b.zip", name_other)
        phasetrain.load_pack(changed, imports=[tmp_path / "code" / "packed_parts.py"])


def test_data_that_is_gone_needs_another_example(tmp_path: Path) -> None:
    for label in "01":
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(4):
            picture = torch.full((1, 8, 8), 30 * number + int(label), dtype=torch.uint8)
            np.save(tmp_path / "images" / label / f"{number}.npy", picture.numpy())
    for path in (tmp_path / "images").rglob("*.npy"):
        Image.fromarray(np.load(path)[0]).save(path.with_suffix(".png"))
        path.unlink()
    data = f"{{dataset: image_folder, path: {tmp_path}/images, mode: L, batch_size: 4}}"
    words = [f"DATA.TRAIN={data}", f"DATA.TEST={data}", "MODEL={name: small_cnn, width: 4}"]
    phasetrain.run([*words, "PHASES.epochs=1", f"RUN.dir={tmp_path}/run"])
    phasetrain.pack(tmp_path / "run", tmp_path / "a.zip")
    (tmp_path / "images").rename(tmp_path / "moved")
    with raises(ConfigError, code="pack.no_example"):
        phasetrain.pack(tmp_path / "run", tmp_path / "b.zip")
    example = [str(tmp_path / "moved" / "0" / "0.png")]
    phasetrain.pack(tmp_path / "run", tmp_path / "b.zip", example=example)
    [one, other] = (phasetrain.load_pack(tmp_path / name) for name in ("a.zip", "b.zip"))
    assert one.predict(example).equal(other.predict(example))
