"""Features of every sample, once and in order, whatever interrupts it."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import newest, train
from raising import raises
from torch import Tensor, nn
from torch.utils.data import Dataset

from phasetrain.addons.deploy.extract.feature_files import FeatureFolder, read_columns, read_index
from phasetrain.app.api import run
from phasetrain.app.result import RunResult
from phasetrain.data import DATASETS, SampleError
from phasetrain.data.datasets.digits import load_digits
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.models import MODELS, SmallCNN
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.terminal import Terminal

LAYERS = "EXTRACT.layers=[features.1,features,dropout]"
SHARDS = "EXTRACT.rows_per_shard=500"
FEW = ("DATA.TRAIN.subset={samples: 150}", "EXTRACT.rows_per_shard=50")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(folder, "PHASES.epochs=1", "CHECKPOINT.best.monitor=test/accuracy")
    return folder


def extract(folder: Path, out: Path, *words: str) -> RunResult:
    return train(folder, "RUN.engine=extract", f"EXTRACT.dir={out}", *words)


@pytest.fixture(scope="module")
def features(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("features")
    result = extract(trained, out, LAYERS, SHARDS, "DATA.TRAIN.transforms=[]")
    assert (result.state, result.exit_code, result.folder, result.updates) == (
        "extracted",
        0,
        str(out),
        5,
    )
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class TestRows:
    def test_all_samples_once_in_order(self, features: Path) -> None:
        for split, samples in (("train", 1442), ("test", 355)):
            found = read_columns(f"{features}/{split}", ["id", "target"])
            assert found["id"].tolist() == list(range(samples))
            assert found["target"].tolist() == [
                load_digits(split=split)[index][1] for index in range(samples)
            ]
        assert [shard["rows"] for shard in read_index(f"{features}/train")["shards"]] == [
            500,
            500,
            442,
        ]
        assert read_index(f"{features}/test")["class_names"] == [
            str(number) for number in range(10)
        ]

    def test_they_are_what_the_model_of_the_checkpoint_computes(
        self, trained: Path, features: Path
    ) -> None:
        model = SmallCNN(10, 1, 4).eval()
        model.load_state_dict(newest(trained).state["task"]["model"])
        images = torch.stack([load_digits(split="test")[index][0] for index in range(355)])
        names = ["features.1", "features", "dropout", "scores", "label"]
        found = read_columns(f"{features}/test", names)
        with torch.no_grad():
            before, after, scores = (
                model.features[:2](images),
                model.features(images),
                model(images),
            )
        assert before.min() < 0  # of what the next layer, a ReLU in place, leaves nothing
        for name, expected in (("features.1", before), ("features", after), ("scores", scores)):
            assert torch.allclose(found[name], expected, atol=1e-5)
        assert torch.allclose(found["dropout"], after.mean((2, 3)), atol=1e-5)
        assert torch.equal(found["label"], found["scores"].argmax(1))

    def test_mean_pooling_averages_over_positions(
        self, trained: Path, features: Path, tmp_path: Path
    ) -> None:
        extract(
            trained,
            tmp_path,
            "EXTRACT.layers=[features]",
            "EXTRACT.pool=mean",
            "EXTRACT.splits=[test]",
        )
        pooled = read_columns(f"{tmp_path}/test", ["features"])["features"]
        assert torch.allclose(
            pooled, read_columns(f"{features}/test", ["dropout"])["dropout"], atol=1e-6
        )
        assert not (tmp_path / "train").exists()

    def test_npz_and_no_predictions(self, trained: Path, features: Path, tmp_path: Path) -> None:
        words = (
            "EXTRACT.format=npz",
            "EXTRACT.predictions=false",
            "EXTRACT.splits=[test]",
            "EXTRACT.layers=[dropout]",
        )
        extract(trained, tmp_path, *words)
        assert list(read_index(f"{tmp_path}/test")["columns"]) == ["id", "target", "layer.dropout"]
        mine, others = (
            read_columns(f"{path}/test", ["dropout"])["dropout"] for path in (tmp_path, features)
        )
        assert torch.equal(mine, others)


def test_nothing_else_of_the_run_is_touched_and_no_lock_is_needed(trained: Path) -> None:
    owner = RunFolder(str(trained))
    owner.open()
    try:
        before = {path: path.stat().st_mtime_ns for path in trained.rglob("*") if path.is_file()}
        train(trained, "RUN.engine=extract", "EXTRACT.splits=[test]")
        after = {path: path.stat().st_mtime_ns for path in trained.rglob("*") if path.is_file()}
    finally:
        owner.close()
    new = after.keys() - before.keys()
    assert {path: at for path, at in after.items() if path in before} == before
    name = newest(trained).path.rpartition("/")[2]
    assert {str(path.relative_to(f"{trained}/extract/{name}/test")) for path in new} == {
        "index.json",
        "shard-00000.safetensors",
    }


class Breaking:
    """Makes the write of the n-th shard of a process fail, as a kill would, after the shard or
    after its record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, *, torn: bool) -> None:
        self.left, whole = number, FeatureFolder.write

        def write(folder: FeatureFolder, at: int, first: int, columns: Any) -> Any:
            shard = whole(folder, at, first, columns)
            self.left -= 1
            if not self.left:
                if torn:
                    Path(f"{folder.path}/{shard.file}.json").unlink()
                raise KeyboardInterrupt
            return shard

        monkeypatch.setattr(FeatureFolder, "write", write)


class TestResume:
    @pytest.mark.feature("25")
    @pytest.mark.by_default("True")
    @pytest.mark.parametrize("torn", [False, True])
    def test_killed_extraction_resumes(
        self,
        trained: Path,
        features: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        torn: bool,
    ) -> None:
        words = (LAYERS, SHARDS, "DATA.TRAIN.transforms=[]")
        with monkeypatch.context() as patch:
            Breaking(patch, 2, torn=torn)
            with pytest.raises(KeyboardInterrupt):
                extract(trained, tmp_path, *words)
        with pytest.raises(ConfigError):
            read_index(f"{tmp_path}/train")
        kept = tmp_path / "train/shard-00000.safetensors"
        at = kept.stat().st_mtime_ns
        extract(trained, tmp_path, *words)
        assert kept.stat().st_mtime_ns == at
        assert content(tmp_path) == content(features)

    def test_random_transforms_are_a_function_of_the_place(
        self, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = ("EXTRACT.splits=[train]", *FEW)
        extract(trained, tmp_path / "whole", *words)
        with monkeypatch.context() as patch:
            Breaking(patch, 1, torn=False)
            with pytest.raises(KeyboardInterrupt):
                extract(trained, tmp_path / "broken", *words)
        extract(trained, tmp_path / "broken", *words, "DATA.TRAIN.workers=1")
        assert content(tmp_path / "broken") == content(tmp_path / "whole")
        extract(trained, tmp_path / "plain", *words, "DATA.TRAIN.transforms=[]")
        assert content(tmp_path / "plain") != content(tmp_path / "whole")

    def test_only_what_is_damaged_is_made_again(self, trained: Path, tmp_path: Path) -> None:
        words = ("EXTRACT.splits=[train]", *FEW)
        extract(trained, tmp_path, *words)
        before = content(tmp_path)
        damaged = tmp_path / "train/shard-00001.safetensors"
        damaged.write_bytes(before["train/shard-00001.safetensors"][:-8] + bytes(8))
        times = {
            path: path.stat().st_mtime_ns for path in tmp_path.rglob("shard-*") if path != damaged
        }
        extract(trained, tmp_path, *words)
        assert content(tmp_path) == before
        assert {
            path: path.stat().st_mtime_ns for path in tmp_path.rglob("shard-*") if path != damaged
        } == times

    def test_changed_layers_are_rejected(self, trained: Path, features: Path) -> None:
        with pytest.raises(
            ChangedError,
            match=r"EXTRACT.layers = \['features.1', .*\['head'\]",
        ):
            extract(trained, features, "EXTRACT.layers=[head]", SHARDS, "DATA.TRAIN.transforms=[]")


@MODELS.register("takes_no_loss")
class TakesNoLoss(nn.Module):
    """Gives several outputs, which no loss here takes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Flatten()

    def forward(self, batch: Tensor) -> dict[str, Any]:
        features = self.trunk(batch)
        more = [features[:, 0], batch.flatten(1).half()]
        return {"coarse": features[:, :2], "more": more, "balance": features.mean()}


def list_boxes(samples: list[tuple[Tensor, Any]]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Keep the targets of samples in a list; the label is the number of boxes."""
    boxes = [{"boxes": torch.zeros(int(label), 4)} for _, label in samples]
    return torch.stack([image for image, _ in samples]), boxes


def join_boxes(samples: list[tuple[Tensor, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Join the boxes of all samples."""
    images, boxes = list_boxes(samples)
    labels = torch.tensor([int(label) for _, label in samples])
    return images, {"boxes": torch.cat([target["boxes"] for target in boxes]), "label": labels}


class TestWithoutARun:
    def test_no_loss_no_length_no_checkpoint(self, tmp_path: Path) -> None:
        screen = io.StringIO()
        words = (
            "LOSS.name=BCELoss",
            "EXTRACT.layers=[trunk]",
            "RUN.checkpoint=none",
            "MODEL.name=takes_no_loss",
        )
        run_plainly(tmp_path / "run", *words, "EXTRACT.splits=[test]", screen=screen)
        found = read_columns(
            f"{tmp_path}/run/extract/none/test",
            ["scores.coarse", "label.coarse", "scores.more.0", "scores.more.1"],
        )
        assert "scores.balance" not in read_index(f"{tmp_path}/run/extract/none/test")["columns"]
        assert screen.getvalue().count("no row for each sample: balance") == 1
        assert found["scores.coarse"].shape == (355, 2)
        assert torch.equal(found["label.coarse"], found["scores.coarse"].argmax(1))
        assert found["scores.more.0"].shape == (355,)
        assert found["scores.more.1"].dtype == torch.float32

    @pytest.mark.parametrize("collate", ["list_boxes", "join_boxes"])
    def test_targets_without_a_row_per_sample_are_left_out(
        self, collate: str, tmp_path: Path
    ) -> None:
        screen = io.StringIO()
        words = (
            "RUN.checkpoint=none",
            "EXTRACT.layers=[head]",
            "EXTRACT.splits=[test]",
            f"DATA.TEST.collate={__name__}.{collate}",
            "DATA.TEST.batch_size=100",
        )
        run_plainly(tmp_path / "run", *words, screen=screen)
        folder = f"{tmp_path}/run/extract/none/test"
        kept = ["target.label"] if collate == "join_boxes" else []
        columns = read_index(folder)["columns"]
        assert [name for name in columns if name.startswith("target")] == kept
        assert read_columns(folder, ["scores"])["scores"].shape == (355, 10)
        name = "target.*.boxes" if collate == "list_boxes" else "target.boxes"
        assert screen.getvalue().count(f"no row for each sample: {name}. DATA.TEST.targets=[]") == 1

    def test_a_random_model_and_one_from_weights(
        self, trained: Path, features: Path, tmp_path: Path
    ) -> None:
        random, loaded = tmp_path / "random", tmp_path / "loaded"
        words = ("RUN.checkpoint=none", "EXTRACT.layers=[dropout]", "EXTRACT.splits=[test]")
        extract(tmp_path / "run", random, *words)
        extract(tmp_path / "run", loaded, *words, f"MODEL.weights={trained}")
        rows = [
            read_columns(f"{path}/test", ["dropout"])["dropout"]
            for path in (random, loaded, features)
        ]
        assert torch.equal(rows[1], rows[2])
        assert not torch.equal(rows[0], rows[2])


def run_plainly(folder: Path, *words: str, screen: io.StringIO | None = None) -> RunResult:
    """Extract without the words of a training, which are those of another model."""
    words = ("RUN.engine=extract", f"RUN.dir={folder}", *words)
    return run(words, terminal=Terminal(screen or io.StringIO(), live=False))


class Noisy(SmallCNN):
    """Draws random numbers in test mode."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = super().forward(images)
        return scores * (1 + random.random()) + torch.randn_like(scores)


@pytest.mark.parametrize("micro", [None, 25])
def test_random_numbers_of_a_model_are_those_of_the_test(tmp_path: Path, micro: int | None) -> None:
    folder = tmp_path / "run"
    words = (
        f"MODEL.name={__name__}.Noisy",
        "MODEL.ema={decay: 0.5}",
        "DATA.TEST.batch_size=50",
        f"DATA.TEST.micro_batch_size={'null' if micro is None else micro}",
    )
    result = train(folder, "PHASES.epochs=1", "PHASES.limit={train: 2, test: null}", *words)
    for which, split in (("model", "test"), ("ema", "test@ema")):
        out = tmp_path / which
        more = ("EXTRACT.splits=[test]", "EXTRACT.rows_per_shard=150", f"EXTRACT.weights={which}")
        extract(folder, out, *words, *more)
        columns = read_columns(f"{out}/test", ["scores", "target"])
        loss = torch.nn.functional.cross_entropy(columns["scores"], columns["target"])
        assert float(loss) == pytest.approx(result.last[f"{split}/loss"], rel=1e-6)


def test_averaged_weights_give_other_features(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, "PHASES.epochs=1", "MODEL.ema={decay: 0.5}", "PHASES.limit.train=3")
    for which in ("model", "ema"):
        extract(
            folder,
            tmp_path / which,
            "MODEL.ema={decay: 0.5}",
            f"EXTRACT.weights={which}",
            "EXTRACT.splits=[test]",
        )
    own, averaged = (
        read_columns(f"{tmp_path}/{which}/test", ["scores"])["scores"] for which in ("model", "ema")
    )
    assert not torch.equal(own, averaged)


@DATASETS.register("spoilt_digits")
class SpoiltDigits(Dataset[Any]):
    """Digits of which two cannot be read."""

    def __init__(self, split: str) -> None:
        self.inner = load_digits(split=split)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        if index in (7, 100):
            raise OSError("a bad sector")
        return self.inner[index]

    def facts(self) -> Any:
        return self.inner.facts()

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


@pytest.mark.by_default("drop")
@pytest.mark.parametrize("policy", ["substitute", "drop"])
def test_samples_that_cannot_be_read_are_left_out(
    trained: Path, tmp_path: Path, policy: str
) -> None:
    words = ("DATA.TEST.dataset=spoilt_digits", "EXTRACT.splits=[test]")
    extract(
        trained,
        tmp_path / "rest",
        *words,
        f"DATA.TEST.on_bad_sample={policy}",
        "EXTRACT.rows_per_shard=100",
    )
    ids = read_columns(f"{tmp_path}/rest/test", ["id"])["id"].tolist()
    assert ids == [index for index in range(355) if index not in (7, 100)]
    assert [shard["rows"] for shard in read_index(f"{tmp_path}/rest/test")["shards"]] == [
        99,
        99,
        100,
        55,
    ]
    with pytest.raises(SampleError, match="sample 7 cannot be read"):
        extract(trained, tmp_path / "none", *words)


def test_a_subset_is_taken_as_such(trained: Path, tmp_path: Path) -> None:
    words = (
        "EXTRACT.splits=[test]",
        "DATA.TEST.subset={samples: 50, seed: 3}",
        "EXTRACT.rows_per_shard=20",
    )
    extract(trained, tmp_path, *words)
    ids = read_columns(f"{tmp_path}/test", ["id"])["id"].tolist()
    assert len(set(ids)) == 50
    assert ids == sorted(ids) != list(range(50))
    with pytest.raises(ChangedError, match=r"DATA.TEST.subset = \{.*'seed': 3.*\{.*'seed': 4"):
        extract(trained, tmp_path, *words, "DATA.TEST.subset.seed=4")


def repeat_all(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    twice = [sample for sample in samples for _ in range(2)]
    targets = torch.tensor([int(target) for _, target in twice])
    return torch.stack([image for image, _ in twice]), targets


class TestErrors:
    @pytest.mark.parametrize("layers", ["[]", "[features]"])
    def test_outputs_without_a_row_per_sample_are_named(
        self, trained: Path, tmp_path: Path, layers: str
    ) -> None:
        words = [f"EXTRACT.layers={layers}", "EXTRACT.splits=[test]"]
        with raises(ConfigError, key="EXTRACT.predictions"):
            extract(trained, tmp_path, *words, f"DATA.TEST.collate={__name__}.repeat_all")

    @pytest.mark.parametrize(
        ("word", "problem"),
        [
            (
                "EXTRACT.layers=[fetures]",
                {"key": "EXTRACT.layers[0]", "given": "'fetures'", "suggestion": "features"},
            ),
            (
                "EXTRACT.splits=[tset]",
                {"key": "EXTRACT.splits", "suggestion": "test"},
            ),
            (
                "EXTRACT.weights=emma",
                {"key": "EXTRACT.weights", "given": "'emma'"},
            ),
            (
                "EXTRACT.pool=max",
                {"code": "config.wrong_type", "key": "EXTRACT.pool", "given": "'max'"},
            ),
            (
                "EXTRACT.dir=/dev/null/x",
                {"key": "EXTRACT.dir"},
            ),
            (
                "EXTRACT.layer=[x]",
                {
                    "code": "config.unknown_key",
                    "key": "EXTRACT.layer",
                    "suggestion": "EXTRACT.layers",
                },
            ),
            (
                "RUN.checkpoint=elsewhere",
                {"code": "checkpoint.unusable", "key": "RUN.checkpoint"},
            ),
        ],
    )
    def test_invalid_settings_are_rejected(
        self, trained: Path, tmp_path: Path, word: str, problem: dict[str, str]
    ) -> None:
        with raises(ConfigError, **problem):
            extract(trained, tmp_path, word)
        assert not list(tmp_path.rglob("shard-*"))

    def test_checkpoint_of_another_model_is_rejected(self, trained: Path, tmp_path: Path) -> None:
        with pytest.raises(ChangedError, match=r"/p0002-s00000000.* MODEL"):
            extract(trained, tmp_path, "MODEL.width=8")

    def test_input_that_does_not_fit(self, trained: Path, tmp_path: Path) -> None:
        with raises(ConfigError, key="MODEL"):
            extract(trained, tmp_path, "EXTRACT.splits=[test]", "DATA.TEST.transforms=[flatten]")


class Lengths(Dataset[tuple[Tensor, int]]):
    """Sequences of 1 to 8 numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(index + 1), index % 2


class PerElement(nn.Module):
    """Has an output for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["input"] * self.scale


@pytest.mark.parametrize("rows_per_shard", [2, 8])
def test_rows_of_different_lengths_are_rejected(tmp_path: Path, rows_per_shard: int) -> None:
    words = [
        "experiment=null",
        f"DATA.TEST.dataset={__name__}.Lengths",
        "DATA.TEST.collate=pad",
        "DATA.TEST.batch_size=2",
        f"MODEL.name={__name__}.PerElement",
        "LOSS.name=cross_entropy",
        "RUN.engine=extract",
        "RUN.checkpoint=none",
        f"EXTRACT.rows_per_shard={rows_per_shard}",
        f"EXTRACT.dir={tmp_path}/features",
        f"RUN.dir={tmp_path}/run",
    ]
    with raises(ConfigError, code="extract.shapes", key="EXTRACT.splits"):
        run(words, terminal=Terminal(io.StringIO(), live=False))


def test_exhausted_memory_is_no_config_error(tmp_path: Path) -> None:
    words = [
        "RUN.engine=extract",
        "RUN.checkpoint=none",
        "MODEL.name=find_parts.Greedy",
        "MODEL.limit=4",
    ]
    with pytest.raises(torch.OutOfMemoryError):
        run([*words, f"RUN.dir={tmp_path}"], terminal=Terminal(io.StringIO(), live=False))
