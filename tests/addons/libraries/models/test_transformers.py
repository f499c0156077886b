"""Models of transformers are built from a config."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import newest
from raising import raises

from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.errors import ConfigError
from phasetrain.losses import CrossEntropy
from phasetrain.models import MODELS
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.kills import run_quietly

datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}
CLASSIFIER = "transformers.AutoModelForSequenceClassification"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 24 texts of 6 tokens; the class says which token comes first."""
    folder = tmp_path_factory.mktemp("data") / "texts"
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 50, (24, 6), generator=numbers)
    ids[:, 0] = torch.arange(24) % 3 + 1
    mask = torch.ones_like(ids)
    mask[::2, -1] = 0
    rows = {
        "input_ids": ids.tolist(),
        "attention_mask": mask.tolist(),
        "label": (ids[:, 0] - 1).tolist(),
    }
    rows_of_classes = datasets.Dataset.from_dict(rows).cast_column(
        "label", datasets.ClassLabel(names=["a", "b", "c"])
    )
    rows_of_classes.save_to_disk(str(folder))
    return folder


def words(folder: Path) -> list[str]:
    """Return the overrides of a tiny BERT on the texts."""
    split = f"{{dataset: huggingface, path: {folder}, batch_size: 8, transforms: []}}"
    config = ", ".join(f"{key}: {value}" for key, value in BERT.items())
    return [
        f"DATA.TRAIN={split}",
        f"DATA.TEST={split}",
        f"MODEL={{name: {CLASSIFIER}, config: {{{config}}}}}",
        "METERS={accuracy: {}}",
        "OPTIMIZER={name: adamw, lr: 0.001}",
    ]


def test_run_trains_a_text_classifier_and_saves_it(folder: Path, tmp_path: Path) -> None:
    run_quietly([*words(folder), "PHASES.epochs=1", f"RUN.dir={tmp_path}/run"])
    loaded = newest(tmp_path / "run")
    learned = loaded.state["task"]["model"]
    assert loaded.manifest.state["updates"] == 3
    assert learned["classifier.weight"].shape == (3, 16)
    assert set(learned) == set(MODELS.build(CLASSIFIER, {"config": BERT}).state_dict())


@pytest.mark.slow
def test_run_with_dropout_resumes_exactly(folder: Path) -> None:
    assert_exact_resume(words(folder), steps=[2, 5])


def test_mapping_is_passed_as_keywords() -> None:
    model = MODELS.build(CLASSIFIER, {"config": BERT}, facts={"classes": 3}).eval()
    ids = torch.arange(12).reshape(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    masked = model({"input_ids": ids, "attention_mask": mask})
    assert masked.shape == (2, 3)
    assert torch.equal(masked, model(input_ids=ids, attention_mask=mask).logits)
    assert torch.equal(model(ids), model({"input_ids": ids}))
    assert not torch.equal(model(ids)[1], masked[1])
    assert torch.equal(deepcopy(model)(ids), model(ids))


@pytest.mark.feature(
    "model.transformers_inputs",
    "inputs that a model of transformers would ignore are rejected; padding values per input",
    "[model.md](model.md#models-from-other-libraries), `DATA.*.collate.value`",
)
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mask", {}),
        ("atention_mask", {"suggestion": "attention_mask"}),
    ],
)
def test_input_that_the_model_would_ignore_is_rejected(name: str, problem: Any) -> None:
    model = MODELS.build(CLASSIFIER, {"config": BERT}, facts={"classes": 3})
    ids = torch.arange(12).reshape(2, 6)
    with raises(ConfigError, code="config.misfit", key="DATA.*.inputs", **problem):
        model({"input_ids": ids, name: torch.ones_like(ids)})
    model({"input_ids": ids, "output_attentions": True})


def test_model_class_without_auto_gives_all_outputs_by_name() -> None:
    config = {key: value for key, value in BERT.items() if key != "model_type"}
    model = MODELS.build("transformers.BertModel", {"config": config, "output": None})
    found = model(torch.arange(6)[None])
    assert type(found) is dict
    assert {name: tuple(one.shape) for name, one in found.items()} == {
        "last_hidden_state": (1, 6, 16),
        "pooler_output": (1, 16),
    }
    with raises(ConfigError, key="MODEL.output", given="'logits'"):
        MODELS.build("transformers.BertModel", {"config": config})(torch.arange(6)[None])


@pytest.mark.parametrize(
    ("name", "params", "problem"),
    [
        (
            "AutoModelForSequenceClasification",
            {},
            {
                "code": "config.unknown_part",
                "key": "MODEL.name",
                "suggestion": "AutoModelForSequenceClassification",
            },
        ),
        ("Trainer", {}, {"code": "config.unknown_part", "key": "MODEL.name"}),
        (
            "AutoModel",
            {"config": {"model_type": "bertt"}},
            {"key": "MODEL.config.model_type", "given": "'bertt'", "suggestion": "bert"},
        ),
        (
            "AutoModel",
            {},
            {"key": "MODEL.config.model_type", "given": "None"},
        ),
        (
            "AutoModel",
            {"config": BERT | {"hiden_size": 3}},
            {"key": "MODEL.config.hiden_size", "suggestion": "hidden_size"},
        ),
        (
            "AutoModel",
            {"config": BERT | {"hidden_size": "a"}},
            {"key": "MODEL.config"},
        ),
        (
            "AutoModel",
            {"config": BERT, "pretrained": True},
            {"key": "MODEL.pretrained"},
        ),
    ],
)
def test_bad_parameters_are_rejected(
    name: str, params: dict[str, Any], problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        MODELS.build(f"transformers.{name}", params)


@pytest.mark.parametrize("given", ["owner/kernel", {"text": "owner/kernel@v1:name"}])
def test_code_of_a_hub_is_rejected(given: Any) -> None:
    with raises(ConfigError, code="config.download"):
        MODELS.build(CLASSIFIER, {"config": BERT | {"attn_implementation": given}})
    MODELS.build(CLASSIFIER, {"config": BERT | {"attn_implementation": "eager"}})


@pytest.mark.feature("data.document_mask")
@pytest.mark.addon("text")
def test_positions_that_begin_again_keep_documents_apart() -> None:
    from phasetrain.addons.text.language_model import LanguageModel

    config = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    torch.manual_seed(0)
    model = MODELS.build("transformers.GPT2LMHeadModel", {"config": config}).double().eval()
    machine = Machine(torch.device("cpu"))
    task = LanguageModel(Parts(model, CrossEntropy(), {}, None, {}, machine, World(), 0))
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    inputs = {"input_ids": tokens, "position_ids": positions}
    with torch.no_grad():
        packed = task.output_of(Batch(inputs, tokens, torch.tensor([0]), 1))
        alone = torch.cat([model(tokens[:, :3]), model(tokens[:, 3:])], dim=1)
        # Called as it is, the model keeps a cache, and lets the second document see the first.
        mixed = model(inputs)
    assert float((packed - alone).abs().max()) < 1e-10
    assert float((mixed - alone).abs().max()) > 1e-4
