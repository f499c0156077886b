"""A packed model predicts as its run does, and says so when it cannot."""

import csv
import json
import os
import signal
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import SMALL
from packs import change_config, repack
from PIL import Image
from raising import raises

import phasetrain
from phasetrain.addons.deploy.pack.archive import read_archive
from phasetrain.addons.deploy.predict.predict import predict
from phasetrain.cli import main
from phasetrain.errors import ConfigError

NORMALIZE = "[{name: normalize, mean: [0.5], std: [0.25]}]"
INPUTS = torch.linspace(0, 1, 5 * 64).view(5, 1, 8, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "run"
    words = ["PHASES.epochs=1", f"DATA.TEST.transforms={NORMALIZE}", f"RUN.dir={folder}"]
    phasetrain.run([*SMALL, *words])
    return folder


@pytest.fixture(scope="module")
def packed(folder: Path) -> Path:
    """Return the path of the packed model."""
    out = folder.parent / "model.zip"
    phasetrain.pack(folder, out, license_name="CC0-1.0")
    return out


@pytest.fixture(scope="module")
def image(folder: Path) -> Path:
    path = folder.parent / "images" / "one.png"
    path.parent.mkdir()
    Image.fromarray((INPUTS[0, 0] * 255).byte().numpy()).save(path)
    return path


@pytest.mark.feature(
    "pack",
    "a model handed over as one file: weights, transforms, class names, card; equal bytes for "
    "equal runs",
    "`phasetrain pack`, `phasetrain predict MODEL.zip`, `phasetrain.load_pack`",
)
def test_outputs_are_those_of_the_run(folder: Path, packed: Path, image: Path) -> None:
    found = phasetrain.load_pack(packed)
    task = phasetrain.load(folder)
    assert found.verification.identical
    for inputs in (INPUTS, INPUTS.numpy(), list(INPUTS), (INPUTS * 255).byte()):
        assert found.predict(inputs).equal(task.predict(inputs, transform=True))
    assert found.predict(image).equal(task.predict(image))
    assert found.predict([str(image)]).equal(task.predict(image))
    assert found.predict(INPUTS, batch_size=5).shape == (5, 10)
    ready = task.transform(INPUTS) if task.transform is not None else INPUTS
    assert found.predict(ready, transform=False).equal(found.predict(INPUTS))
    assert found.predict_files([image]) == predict(str(folder), [str(image)])
    assert found.classes == tuple("0123456789")
    assert not any(module.training for module in found.model.modules())


@pytest.mark.feature("pack")
def test_same_run_gives_the_same_bytes(folder: Path, packed: Path, tmp_path: Path) -> None:
    made = phasetrain.pack(folder, tmp_path / "other-name.zip", license_name="CC0-1.0")
    content = (tmp_path / "other-name.zip").read_bytes()
    assert content == packed.read_bytes()
    assert (made.size, made.digest) == (len(content), sha256(content).hexdigest())


@pytest.mark.feature("pack")
def test_card_has_metrics_digests_and_versions(folder: Path, packed: Path) -> None:
    card = phasetrain.load_pack(packed).card
    status = json.loads((folder / "status.json").read_text())
    assert card["run_sha256"] == status["digest"]
    assert card["metrics"].keys() == {
        f"{s}/{m}" for s in ("train", "test") for m in ("accuracy", "loss")
    }
    assert card["model"] == {"name": "small_cnn", "parameters": 1030}
    assert card["data"]["test"]["facts"]["input_shape"] == [1, 8, 8]
    assert (card["license"], card["updates"], card["weights"]) == ("CC0-1.0", 5, "model")
    assert card["versions"]["torch"] == torch.__version__
    assert card["transforms"] == ["normalize(mean=[0.5], std=[0.25])"]
    weights = read_archive(str(packed)).members["weights.safetensors"]
    assert card["weights_sha256"] == sha256(weights).hexdigest()
    assert card["certificate"] is None
    page = bytes(read_archive(str(packed)).members["card.md"]).decode()
    assert all(text in page for text in ("CC0-1.0", status["digest"], "test/accuracy"))
    assert str(folder.parent / "model.zip") not in page


def test_page_of_the_card_names_digests_and_input_and_rounds_metrics(packed: Path) -> None:
    members = read_archive(str(packed)).members
    card = json.loads(bytes(members["card.json"]))
    page = bytes(members["card.md"]).decode()
    assert f"digest of the file weights.safetensors | sha256 {card['weights_sha256']}" in page
    assert f"digest of the tensors, as in status.json | sha256 {card['run_sha256']}" in page
    assert "| input | shape (1, 8, 8) after the transforms" in page
    assert f"| test/loss | {card['metrics']['test/loss']:.4f} |" in page
    assert ("| commit |" in page) == (card["commit"] is not None)


def test_certificate_is_part_of_the_card(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps({"format": 1, "verdict": "exact", "made": "2026-01-01"}))
    made = phasetrain.pack(folder, tmp_path / "a.zip", certificate=str(path))
    assert made.card["certificate"]["verdict"] == "exact"
    path.write_text("{}")
    with raises(ConfigError, code="pack.certificate"):
        phasetrain.pack(folder, tmp_path / "b.zip", certificate=str(path))
    assert not (tmp_path / "b.zip").exists()


def test_commands_pack_and_predict(
    folder: Path, packed: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "made.zip")
    assert main(["pack", str(folder), out, "--license", "CC0-1.0", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["sha256"] == sha256(packed.read_bytes()).hexdigest()
    assert main(["predict", out, str(image), "--digest", made["sha256"]]) == 0
    assert "example bit-identical" in capsys.readouterr().out
    assert main(["predict", out, str(image.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pack"]["identical"] is True
    assert len(found["predictions"][0]["classes"]) == 3
    assert main(["predict", out, str(image), "--csv", "--top", "1"]) == 0
    [row] = csv.DictReader(capsys.readouterr().out.splitlines())
    assert row["class"] == found["predictions"][0]["classes"][0]["name"]
    assert main(["pack", str(folder), out]) == 2
    for words in (["--checkpoint", "best"], ["--weights", "ema"], ["--trust"], ["DATA.TEST.x=1"]):
        assert main(["predict", out, str(image), *words, "--json"]) == 2
        captured = capsys.readouterr().out
        assert '"cli.conflict"' in captured or "file.exists" in captured
    assert main(["predict", str(folder), str(image), "--imports", "a.py"]) == 2


def test_digest_of_another_file_is_rejected(packed: Path) -> None:
    digest = sha256(packed.read_bytes()).hexdigest()
    assert phasetrain.load_pack(packed, digest=f"sha256:{digest[:16]}").digest == digest
    for wrong in ("0" * 64, digest[:4], ""):
        with raises(ConfigError, code="pack.other_file"):
            phasetrain.load_pack(packed, digest=wrong)


def test_flipped_bit_in_the_weights_is_rejected(packed: Path, tmp_path: Path) -> None:
    content = bytearray(packed.read_bytes())
    content[content.index(b"weights.safetensors") + 5000] ^= 1
    (tmp_path / "a.zip").write_bytes(content)
    with raises(ConfigError, code="pack.damaged"):
        phasetrain.load_pack(tmp_path / "a.zip")


def test_changed_class_list_is_rejected(packed: Path, tmp_path: Path) -> None:
    content = packed.read_bytes().replace(b'"class_names": [\n   "0"', b'"class_names": [\n   "9"')
    assert content != packed.read_bytes()
    (tmp_path / "a.zip").write_bytes(content)
    # The index has no digest of itself: only the digest of the whole file shows the change.
    with raises(ConfigError, code="pack.other_file"):
        digest = sha256(packed.read_bytes()).hexdigest()
        phasetrain.load_pack(tmp_path / "a.zip", digest=digest)


@pytest.mark.feature(
    "pack.example",
    "a packed model repeats its example before the first prediction",
    "`phasetrain pack --example`",
)
def test_example_reveals_changes_whose_digests_fit(packed: Path, tmp_path: Path) -> None:
    def change_transform(_index: dict[str, Any], members: dict[str, bytes]) -> None:
        test = json.loads(members["config.json"])["DATA"]["TEST"]
        other = {"name": "normalize", "mean": [0.5], "std": [0.5]}
        change_config(members, DATA={"TEST": test | {"transforms": [other]}})

    def remove_transform(_index: dict[str, Any], members: dict[str, bytes]) -> None:
        test = json.loads(members["config.json"])["DATA"]["TEST"]
        change_config(members, DATA={"TEST": test | {"transforms": []}})

    def change_weights(_index: dict[str, Any], members: dict[str, bytes]) -> None:
        weights = bytearray(members["weights.safetensors"])
        weights[-2] ^= 0x40  # a bit of an exponent
        members["weights.safetensors"] = bytes(weights)

    def change_scaling(index: dict[str, Any], _members: dict[str, bytes]) -> None:
        index["form"]["class_names"] = []

    for change in (change_transform, remove_transform, change_weights):
        with raises(ConfigError, code="pack.other_outputs"):
            phasetrain.load_pack(repack(packed, tmp_path / "a.zip", change))
    # The control: these changes are not due to packing again.
    assert phasetrain.load_pack(repack(packed, tmp_path / "a.zip", change_scaling)).classes == ()


MARK = Path("executed")
Members = dict[str, bytes]


def _name_model(_index: dict[str, Any], members: Members) -> None:
    change_config(members, MODEL={"name": "os.system", "command": f"touch {MARK}"})


def _name_transform(_index: dict[str, Any], members: Members) -> None:
    call = {"name": "subprocess.getoutput", "cmd": f"touch {MARK}"}
    change_config(members, DATA={"TEST": {"transforms": [call], "collate": "stack"}})


def _name_function_of_a_library(_index: dict[str, Any], members: Members) -> None:
    change_config(members, MODEL={"name": "torch.hub.load", "repo_or_dir": ".", "model": "x"})


def _name_remote_module(_index: dict[str, Any], members: Members) -> None:
    remote = {"remote_device": "worker0/cpu", "module_cls": "torch.nn.Linear"}
    change_config(members, MODEL={"name": "torch.distributed.nn.RemoteModule", **remote})


def _ask_for_memory(_index: dict[str, Any], members: Members) -> None:
    change_config(members, MODEL={"width": 10**13})  # no machine can address it


def _import_module(_index: dict[str, Any], members: Members) -> None:
    change_config(members, RUN={"imports": ["this"]})


def _read_environment(_index: dict[str, Any], members: Members) -> None:
    change_config(members, MODEL={"width": "${oc.env:HOME}"})


def _claim_header(_index: dict[str, Any], members: Members) -> None:
    members["weights.safetensors"] = b"\xff" * 7 + b"\x00" + b"{}"


def _claim_shape(_index: dict[str, Any], members: Members) -> None:
    place = {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}
    head = json.dumps({"a": place}).encode()
    members["weights.safetensors"] = len(head).to_bytes(8, "little") + head


def _pickle_weights(_index: dict[str, Any], members: Members) -> None:
    members["weights.safetensors"] = b"\x80\x04cos\nsystem\n(S'touch executed'\ntR."


def _drop_example(_index: dict[str, Any], members: Members) -> None:
    del members["example.json"]


def _break_example(_index: dict[str, Any], members: Members) -> None:
    members["example.json"] = b'{"samples": [{"kind": "pickle", "value": "x"}]}'


def _break_index(index: dict[str, Any], _members: Members) -> None:
    del index["form"]


@pytest.mark.feature(
    "pack.no_code",
    "a packed model executes no code from its file; custom parts are asked for by name",
    "`--imports`, `--digest`",
)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_name_model, "pack.code_needed"),
        (_name_transform, "pack.code_needed"),
        (_name_function_of_a_library, "pack.unsafe"),
        (_name_remote_module, "pack.code_needed"),
        (_ask_for_memory, "pack.not_built"),
        (_read_environment, "config.rejected_by_part"),
        (_claim_header, "pack.damaged"),
        (_claim_shape, "pack.damaged"),
        (_pickle_weights, "pack.damaged"),
        (_drop_example, "pack.damaged"),
        (_break_example, "pack.damaged"),
        (_break_index, "pack.damaged"),
    ],
)
def test_hostile_content_is_rejected_and_runs_nothing(
    change: Callable[[dict[str, Any], Members], None],
    code: str,
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(ConfigError, code=code):
        phasetrain.load_pack(repack(packed, tmp_path / "a.zip", change))
    assert not MARK.exists()


def test_imports_of_the_run_are_not_imported(packed: Path, tmp_path: Path) -> None:
    sys.modules.pop("this", None)
    assert phasetrain.load_pack(repack(packed, tmp_path / "a.zip", _import_module)).classes
    assert "this" not in sys.modules


@pytest.mark.feature("pack.example")
def test_other_example_is_taken_from_a_file(folder: Path, image: Path, tmp_path: Path) -> None:
    phasetrain.pack(folder, tmp_path / "a.zip", example=[str(image)])
    found = read_archive(str(tmp_path / "a.zip")).parse_json("example.json")
    assert len(found["samples"]) == 1
    assert phasetrain.load_pack(tmp_path / "a.zip").verification.identical
    with raises(ConfigError, code="predict.unreadable"):
        phasetrain.pack(folder, tmp_path / "b.zip", example=["missing.png"])
    assert [one.name for one in tmp_path.iterdir()] == ["a.zip"]


def test_wrong_target_is_rejected_before_the_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "there.zip").touch()
    for name, code in (("model.pt", "cli.usage"), ("there.zip", "file.exists")):
        with raises(ConfigError, code=code):
            phasetrain.pack(tmp_path / "no-run", tmp_path / name)


@pytest.mark.feature("pack")
def test_kill_while_the_file_is_written_leaves_no_half_file(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.zip"
    if (pid := os.fork()) == 0:
        try:
            torch.set_num_threads(1)  # a pool of threads does not live on in a fork
            os.fsync = lambda _file: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
            phasetrain.pack(folder, out)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert not out.exists()
    [left] = tmp_path.iterdir()  # the temporary file shows that it was killed in the middle
    assert left.name.startswith("a.zip.tmp-")
    phasetrain.pack(folder, out)
    assert [one.name for one in tmp_path.iterdir()] == ["a.zip"]


def test_file_that_does_not_exist_is_no_run_folder_and_no_import(
    packed: Path, image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*words: str) -> str:
        assert main([*words, "--json"]) == 2
        code: str = json.loads(capsys.readouterr().out)["errors"][0]["code"]
        return code

    missing = str(packed.parent / "nomodel.zip")
    assert fail("predict", missing, str(image)) == "pack.unreadable"
    assert fail("generate", missing) == "pack.unreadable"
    for given in ("nope.py", "nope"):
        words = ("predict", str(packed), str(image), "--imports", given)
        assert fail(*words) == "config.import_failed"


def test_picture_of_another_size_is_rejected(packed: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((20, 16), dtype=np.uint8)).save(tmp_path / "large.png")
    with raises(ConfigError, code="predict.wrong_shape"):
        phasetrain.load_pack(packed).predict_files([tmp_path / "large.png"])
