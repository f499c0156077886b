"""What `phasetrain help TOPIC` prints."""

import pytest
from raising import raises

from phasetrain.addons.authoring.topic_help import topic_help
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError


@pytest.mark.parametrize("section", default_schema().sections)
def test_every_key_of_every_section(section: str) -> None:
    text = topic_help(section)
    for path, key in default_schema().keys.items():
        if path.split(".")[0] == section:
            assert f"  {path} = " in text
            assert key.meaning in text


def test_parts_with_the_parameters_that_a_config_sets() -> None:
    text = topic_help("OPTIMIZER")
    assert "optimizers (OPTIMIZER, OPTIMIZER.others.*)\n  OPTIMIZER.others.*.lr = 0.1" in text
    assert "  adam(betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, fused=true)" in text
    assert "  none()\n      No scaler" in text
    assert "params" not in text


def test_each_part_of_a_section_is_listed_once_without_facts() -> None:
    lines = topic_help("OPTIMIZER").splitlines()
    assert lines.count("  cosine(end=0.0, warmup=0.0, warmup_start=0.0)") == 1
    sections = ["", ".groups[]", ".others.*", ".others.*.groups[]"]
    places = [f"OPTIMIZER{section}.SCHEDULES.*" for section in sections]
    each = ", ".join(f"{place}, {place}.parts[]" for place in places)
    assert f"schedules ({each})" in lines


@pytest.mark.feature("help", "help on sections, keys and parts", "`phasetrain help`")
@pytest.mark.parametrize(
    ("topic", "first", "second"),
    [
        ("OPTIMIZER.lr", "  OPTIMIZER.lr = 0.1", "learning rate"),
        ("clip_norm", "  OPTIMIZER.clip_norm = null", "L2 norm"),
        ("CHECKPOINT.best", "  CHECKPOINT.best.monitor = null", "lower is better"),
        ("DATA.VALID.batch_size", "  DATA.VALID.batch_size = 256", "per step"),
        (
            "MODEL.width",
            "MODEL.width is a parameter of",
            "small_cnn(width=32, dropout=0.0, grid=1)",
        ),
        ("METERS.x.topk", "METERS.x.topk is a parameter of", "  accuracy("),
        ("OPTIMIZER.others.b.match", "  OPTIMIZER.others.*.match = []", "patterns"),
        (
            "idx",
            "dataset for DATA.*.dataset",
            "  idx(images, labels, classes=null, class_names=null, groupings=null)",
        ),
        ("cosine", "schedule for OPTIMIZER.SCHEDULES.*.name", "  cosine(end=0.0, "),
        ("RAdam", "optimizer for OPTIMIZER.name", "  RAdam(betas="),
        ("METERS.accuracy", "meter for METERS.*.name", "  accuracy(topk="),
        ("HOOKS.early_stopping", "hook for HOOKS.*.name", "  early_stopping("),
        ("LOSS.losses.soft_targets", "loss for LOSS.losses.*.name", "  soft_targets("),
        ("dropout", "MODEL.dropout of", "small_cnn"),
        ("scheduler", "scheduler: here OPTIMIZER.SCHEDULES", "  OPTIMIZER.SCHEDULES = {}"),
        ("early stopping", "hook for HOOKS.*.name", "  early_stopping("),
        ("gradient norm", "hook for HOOKS.*.name", "  gradient_norm("),
        ("grad_norm", "grad_norm: here HOOKS.gradient_norm", "  gradient_norm("),
        ("gradient clipping", "in the docs", "  Clip gradients: docs/cookbook/training.md"),
        ("unfreeze", "in the docs", "  Fine-tune a new head, then everything: docs/cookbook"),
        pytest.param(
            "lora",
            "adapter for MODEL.adapters.name",
            "  lora(rank=8, alpha=16.0, ",
            marks=pytest.mark.addon("adapters"),
        ),
    ],
)
def test_key_or_part(topic: str, first: str, second: str) -> None:
    lines = topic_help(topic).splitlines()
    assert lines[0].startswith(first)
    assert second in "\n".join(lines[1:])


def test_help_on_a_part_separates_what_the_program_fills_in() -> None:
    text = topic_help("mlp")
    assert "mlp(hidden=(128,), dropout=0.0, batch_norm=false, input_norm=false, activation=" in text
    assert "filled in by phasetrain: classes, input_shape" in text


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("loss", ("meter for METERS.*.name", "keys of LOSS", "losses (LOSS, ")),
        ("optimizer", ("keys of OPTIMIZER", "optimizers (")),
        ("models", ("keys of MODEL", "models (MODEL")),
        ("losses", ("keys of LOSS",)),
        ("parts", ("losses, for LOSS.name\n  ", "cross_entropy", "schedules, for ")),
    ],
)
def test_sections_and_kinds_are_found_in_any_case(topic: str, expected: tuple[str, ...]) -> None:
    text = topic_help(topic)
    assert all(one in text for one in expected)


def test_each_key_is_listed_once() -> None:
    lines = topic_help("MODEL").splitlines() + topic_help("OPTIMIZER").splitlines()
    keys = [line.partition(" = ")[0] for line in lines if line.startswith("  ") and " = " in line]
    assert [key for key in keys if keys.count(key) > 1 and "." in key] == []


def test_unknown_topic() -> None:
    with raises(ConfigError, code="config.unknown_section", suggestion="cosine"):
        topic_help("cosne")


def test_an_unknown_section() -> None:
    with raises(ConfigError, code="config.unknown_section", suggestion="LOSS"):
        topic_help("LOS")
