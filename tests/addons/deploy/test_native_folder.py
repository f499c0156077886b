"""Models of transformers and timm go back to their libraries."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import phasetrain
from phasetrain.addons.deploy.export import export
from phasetrain.cli import main
from phasetrain.testing.kills import run_quietly

transformers = pytest.importorskip("transformers", reason="`transformers` is not installed")

GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 257, "n_positions": 32}
TEXT = {
    "DATA": {
        "TRAIN": {"dataset": "alice", "context": 16, "batch_size": 4, "transforms": []},
        "TEST": {"dataset": "alice", "context": 16, "batch_size": 4, "transforms": []},
    },
    "TASK": {"name": "language_model"},
    "METERS": {"loss": {}},
    "PHASES": {"epochs": 1, "limit": {"train": 2, "test": 1}},
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a tiny GPT-2, next to the tokenizer that its data names."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer())
    tokenizer.save_pretrained(folder / "start")
    model: dict[str, Any] = {"name": "transformers.GPT2LMHeadModel", "config": GPT2}
    start = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    start.save_pretrained(folder / "start")
    model["weights"] = {"path": str(folder / "start")}
    phasetrain.run(["experiment=null", {**TEXT, "MODEL": model, "RUN.dir": str(folder / "run")}])
    return folder / "run"


def make_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"rabbit": 0, "?": 1}, unk_token="?"))


@pytest.mark.feature(
    "export.native",
    "export to the formats of transformers and timm; `generate`",
    "`phasetrain export RUN OUT --format huggingface`",
)
@pytest.mark.addon("libraries", "text")
def test_transformers_reads_its_model_and_tokenizer_with_equal_outputs(
    gpt2: Path, tmp_path: Path
) -> None:
    export(str(gpt2), str(tmp_path / "hf"), "huggingface")
    ids = torch.arange(12).reshape(2, 6)
    expected = phasetrain.load(gpt2, device="cpu").predict(ids, transform=False)
    for kind in (transformers.GPT2LMHeadModel, transformers.AutoModelForCausalLM):
        model, report = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
        assert not report["missing_keys"]
        assert type(model) is transformers.GPT2LMHeadModel
        assert torch.equal(model.eval()(input_ids=ids).logits, expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("rabbit")["input_ids"] == [0]
    facts = json.loads((tmp_path / "hf" / "phasetrain.json").read_text())
    assert facts["updates"] == "2"


@pytest.mark.addon("libraries", "text")
def test_command_writes_the_folder_of_the_library(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(gpt2), f"{tmp_path}/hf", "--format", "huggingface"]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "gpt2"
    words = ["--format", "huggingface", "--exclude", "*.bias"]
    assert main(["export", str(gpt2), f"{tmp_path}/part", *words]) == 0
    assert json.loads((tmp_path / "part" / "config.json").read_text())["model_type"] == "phasetrain"
    capsys.readouterr()


@pytest.mark.addon("libraries", "text")
@pytest.mark.slow
def test_exported_folder_is_a_source_of_weights(gpt2: Path, tmp_path: Path) -> None:
    export(str(gpt2), str(tmp_path / "hf"), "huggingface")
    model = {"name": "transformers.GPT2LMHeadModel", "config": GPT2}
    again = phasetrain.run(
        [
            "experiment=null",
            {**TEXT, "MODEL": {**model, "weights": str(tmp_path / "hf")}},
            {"RUN.dir": str(tmp_path / "run"), "OPTIMIZER.lr": 0.0, "PHASES.epochs": 1},
        ]
    )
    before = phasetrain.load(gpt2, device="cpu").model.state_dict()
    after = again.load(device="cpu").model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.addon("libraries", "text")
def test_loaded_model_generates(gpt2: Path) -> None:
    model: Any = phasetrain.load(gpt2, device="cpu").model
    start = torch.tensor([[1, 2, 3]])
    made = model.generate(start, max_new_tokens=4, do_sample=False, pad_token_id=256)
    assert made.shape == (1, 7)
    assert model(input_ids=start, labels=start).loss.ndim == 0
    assert model(start).shape == (1, 3, 257)


@pytest.mark.feature("generate")
@pytest.mark.addon("libraries", "text")
def test_texts_of_a_model_of_transformers_are_those_of_its_library(gpt2: Path) -> None:
    from phasetrain.addons.text.generation import Sampling

    task = phasetrain.load(gpt2, device="cpu")
    model: Any = task.model.double()
    start = torch.tensor([list(b"Alice")])
    theirs = model.generate(start, max_new_tokens=5, do_sample=False, pad_token_id=256)
    [[greedy]] = task.generate("Alice", tokens=5, sampling=Sampling(temperature=0))
    assert greedy == bytes(theirs[0, 5:].tolist()).decode(errors="replace")
    # The first prompt reaches the context of 32 tokens, the second does not.
    prompts = ["Alice was beginning to get very", "a"]
    drawn = task.generate(prompts, tokens=4)
    assert drawn == task.generate(prompts, tokens=4, cache=False)
    assert drawn[1] == task.generate("a", tokens=4)[0]


@pytest.mark.feature("export.native")
@pytest.mark.addon("libraries")
def test_timm_reads_its_model_with_equal_outputs(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="`timm` is not installed")
    split = "{dataset: synthetic, samples: 16, classes: 3, input_shape: [1, 32, 32]}"
    words = [
        "experiment=null",
        f"DATA={{TRAIN: {split}, TEST: {split}}}",
        "DATA.TRAIN.batch_size=8",
        "MODEL={name: timm.test_resnet}",
        "PHASES.epochs=1",
        f"RUN.dir={tmp_path}/run",
    ]
    run_quietly(words)
    images = torch.randn(2, 1, 32, 32)
    task = phasetrain.load(tmp_path / "run", device="cpu")
    expected = task.predict(images, transform=False)
    export(f"{tmp_path}/run", f"{tmp_path}/weights.safetensors")
    export(f"{tmp_path}/run", f"{tmp_path}/folder", "huggingface")
    shape = {"num_classes": 3, "in_chans": 1}
    from_file = timm.create_model(
        "test_resnet", checkpoint_path=f"{tmp_path}/weights.safetensors", **shape
    )
    from_folder = timm.create_model(f"local-dir:{tmp_path}/folder", pretrained=True, **shape)
    for model in (from_file, from_folder):
        with torch.no_grad():
            assert torch.equal(model.eval()(images), expected)
