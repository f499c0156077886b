"""Weights are loaded from sources by name; the rest is kept, reported or rejected with advice."""

import errno
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import save_file
from torch import Tensor, nn

from phasetrain.distributed import World
from phasetrain.errors import ConfigError
from phasetrain.models import MLP, SmallCNN
from phasetrain.models.sources import parse_sources
from phasetrain.models.weights import LoadReport, load_pretrained

NAMES = ["layers.1.weight", "layers.1.bias", "layers.3.weight", "layers.3.bias"]


def mlp(seed: int, classes: int = 3) -> MLP:
    torch.manual_seed(seed)
    return MLP(classes, (4,), hidden=(5,))


def start(model: nn.Module, weights: Any) -> LoadReport:
    return load_pretrained(model, parse_sources(weights), World())


def reject(model: nn.Module, weights: Any, code: str) -> str:
    """Return the error of weights that cannot be used, which leave the model untouched."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with raises(ConfigError, code=code) as caught:
        start(model, weights)
    assert all(
        torch.equal(before[name], value) for name, value in model.state_dict().items()
    )  # untouched
    return str(caught.value)


def saved(path: Path, state: dict[str, Tensor]) -> str:
    save_file({name: value.detach().clone() for name, value in state.items()}, path)
    return str(path)


@pytest.fixture
def trained() -> MLP:
    return mlp(1)


@pytest.fixture
def path(tmp_path: Path, trained: MLP) -> str:
    return saved(tmp_path / "trained.safetensors", trained.state_dict())


@pytest.mark.parametrize(("classes", "rows"), [(3, 0), (7, 2)])
def test_only_tensors_that_were_not_loaded_have_a_row(
    path: str, caplog: pytest.LogCaptureFixture, classes: int, rows: int
) -> None:
    caplog.set_level("INFO", "phasetrain")
    start(mlp(2, classes), [{"path": path, "skip_mismatched": True}] if rows else path)
    assert sum("layers." in line for line in caplog.text.splitlines()) == rows
    assert ("all 4 tensors of the model are loaded" in caplog.text) == (rows == 0)


class TestNames:
    def test_equal_names_are_loaded(self, path: str, trained: MLP) -> None:
        model = mlp(2)
        report = start(model, path)
        assert list(report.loaded) == NAMES
        assert (report.missing, report.unexpected, report.mismatched, report.reinit) == (
            [],
            {},
            {},
            [],
        )
        batch = torch.randn(7, 4)
        assert torch.equal(model(batch), trained(batch))

    @pytest.mark.parametrize(
        ("there", "options"),
        [
            ("trunk.{}", {"prefix_remove": "trunk."}),
            ("module.{}", {}),
            ("module._orig_mod.{}", {}),
            ("net.{}", {"rename": [["^net[.]", ""]]}),
            ("net.{}", {"rename": {"^net[.](.*)": r"\1"}}),
            ("{}_old", {"rename": [["_old$", "_new"], ["_new$", ""]]}),
            # Without `strict`, a rule for tensors that this file lacks has no effect.
            ("net.{}", {"rename": [["^head[.]", ""], ["^net[.]", ""]], "strict": False}),
        ],
    )
    def test_names_are_changed_by_rules(
        self, tmp_path: Path, trained: MLP, there: str, options: dict[str, Any]
    ) -> None:
        state = {there.format(name): value for name, value in trained.state_dict().items()}
        model = mlp(2)
        report = start(model, {"path": saved(tmp_path / "a", state), **options})
        assert report.loaded["layers.3.bias"].name == there.format("layers.3.bias")
        assert torch.equal(model.layers[3].weight, trained.layers[3].weight)

    def test_prefix_is_added(self, tmp_path: Path, trained: MLP) -> None:
        state = {
            name.removeprefix("layers."): value for name, value in trained.state_dict().items()
        }
        assert (
            list(
                start(
                    mlp(2), {"path": saved(tmp_path / "a", state), "prefix_add": "layers."}
                ).loaded
            )
            == NAMES
        )

    def test_rules_that_give_two_tensors_one_name_are_rejected(self, path: str) -> None:
        rules = {"path": path, "rename": [["[13]", "0"]]}
        message = reject(mlp(2), rules, "weights.duplicate_name")
        assert re.search("'layers.1.bias' .*'layers.3.bias' .*'layers.0.bias'", message)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"prefix_remove": "trunk."}, "MODEL.weights.prefix_remove = 'trunk.':"),
            (
                {"rename": [["^x", ""]]},
                "MODEL.weights.rename[0] = ['^x', '']:",
            ),
            (
                {"rename": [["lay", r"\2"]]},
                "MODEL.weights.rename[0] = ['lay', '\\\\2']:",
            ),
            ({"include": ["layer.*"]}, "MODEL.weights.include[0] = 'layer.*':"),
            ({"exclude": ["head.*"]}, "MODEL.weights.exclude[0] = 'head.*':"),
            (
                {"reinit": ["layer.3.*"]},
                "MODEL.weights.reinit[0] = 'layer.3.*':",
            ),
        ],
    )
    def test_rule_without_a_match_is_rejected(
        self, path: str, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            start(mlp(2), {"path": path, **options})
        assert str(caught.value).startswith(message)


class TestUnmatchedTensors:
    def test_reinit_keeps_the_initial_values(self, path: str, trained: MLP) -> None:
        model = mlp(2, classes=7)
        before = model.layers[3].weight.clone()
        report = start(model, {"path": path, "reinit": ["layers.3.*"]})
        assert report.reinit == ["layers.3.weight", "layers.3.bias"]
        assert torch.equal(model.layers[3].weight, before)
        assert torch.equal(model.layers[1].weight, trained.layers[1].weight)

    def test_missing_tensor_is_rejected_with_a_suggestion(
        self, tmp_path: Path, trained: MLP
    ) -> None:
        state = dict(trained.state_dict())
        state["layer3.weight"] = state.pop("layers.3.weight")
        state["something"] = torch.ones(1)
        message = reject(mlp(2), saved(tmp_path / "a", state), "weights.missing_tensors")
        assert message.startswith("MODEL.weights: 1 of 4 ")
        assert re.search(r"layers\.3\.weight \(3, 5\) float32 \(.*'layer3\.weight'\)", message)
        assert "MODEL.weights.reinit=[layers.3.*]" in message

    def test_common_prefix_is_suggested(self, tmp_path: Path, trained: MLP) -> None:
        state = {f"encoder.{name}": value for name, value in trained.state_dict().items()}
        message = reject(mlp(2), saved(tmp_path / "a", state), "weights.no_fit")
        assert re.search(r"MODEL\.weights\.prefix_remove=encoder\. .*\b4\b", message)

    def test_strict_false_keeps_missing_and_reports_unexpected_tensors(
        self, tmp_path: Path, trained: MLP
    ) -> None:
        state = {
            name: value for name, value in trained.state_dict().items() if name != "layers.3.bias"
        }
        state["head"] = torch.ones(1)
        report = start(mlp(2), {"path": saved(tmp_path / "a", state), "strict": False})
        assert (report.missing, report.unexpected) == (["layers.3.bias"], {"head": 0})

    def test_excluded_tensors_are_missing(self, path: str) -> None:
        for rules in ({"exclude": ["*.3.*"]}, {"include": ["*.1.*"]}):
            message = reject(mlp(2), {"path": path, **rules}, "weights.missing_tensors")
            assert "2 of 4 " in message

    def test_source_without_any_match_is_rejected_even_if_not_strict(self, tmp_path: Path) -> None:
        source = {"path": saved(tmp_path / "a", {"x": torch.ones(1)}), "strict": False}
        message = reject(mlp(2), source, "weights.no_fit")
        assert "layers.1.weight, layers.1.bias" in message


class TestShapes:
    def test_other_shapes_are_rejected(self, path: str) -> None:
        message = reject(mlp(2, classes=7), path, "weights.shape_mismatch")
        assert message.startswith(f"MODEL.weights.path = {path!r}: ")
        assert re.search(r"layers\.3\.weight: \(3, 5\) float32 .*\(7, 5\) float32 ", message)
        assert "MODEL.weights.reinit=[layers.3.*]" in message
        assert "MODEL.weights.skip_mismatched=true" in message

    def test_other_shapes_can_be_skipped(self, path: str, trained: MLP) -> None:
        model = mlp(2, classes=7)
        before = model.layers[3].weight.clone()
        report = start(model, {"path": path, "skip_mismatched": True})
        assert report.mismatched == {
            "layers.3.weight": "(3, 5) float32",
            "layers.3.bias": "(3) float32",
        }
        assert torch.equal(model.layers[3].weight, before)
        assert torch.equal(model.layers[1].bias, trained.layers[1].bias)

    def test_floats_are_converted_and_integers_are_rejected(
        self, tmp_path: Path, trained: MLP
    ) -> None:
        half = {name: value.half() for name, value in trained.state_dict().items()}
        model = mlp(2)
        start(model, saved(tmp_path / "half", half))
        assert model.layers[1].weight.dtype == torch.float32
        assert torch.equal(model.layers[1].weight, trained.layers[1].weight.half().float())
        half["layers.1.bias"] = torch.ones(5, dtype=torch.int8)
        message = reject(mlp(2), saved(tmp_path / "whole", half), "weights.shape_mismatch")
        assert re.search(r"layers\.1\.bias: \(5\) int8 .*\(5\) float32 ", message)

    def test_integers_are_no_complex_weights(self, tmp_path: Path) -> None:
        model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.cfloat)})
        state = {"a": torch.zeros(2), "b": torch.ones(2, dtype=torch.int64)}
        reject(model, saved(tmp_path / "whole", state), "weights.shape_mismatch")


class TestBank:
    @pytest.mark.feature(
        "102", "several sources of weights, renamed and filtered", "`MODEL.weights: [...]`"
    )
    def test_later_sources_override_earlier_ones(self, tmp_path: Path, trained: MLP) -> None:
        other, model = mlp(3), mlp(2)
        first = saved(tmp_path / "first", trained.state_dict())
        second = saved(
            tmp_path / "second",
            {f"net.{name}": value for name, value in other.state_dict().items()},
        )
        bank = [first, {"path": second, "prefix_remove": "net.", "include": ["layers.3.*"]}]
        report = start(model, bank)
        assert [report.loaded[name].source for name in NAMES] == [0, 0, 1, 1]
        assert torch.equal(model.layers[1].weight, trained.layers[1].weight)
        assert torch.equal(model.layers[3].weight, other.layers[3].weight)

    def test_mismatched_tensors_can_come_from_another_source(
        self, tmp_path: Path, path: str
    ) -> None:
        model = mlp(2, classes=7)
        head = saved(
            tmp_path / "head",
            {name: value for name, value in mlp(3, 7).state_dict().items() if ".3." in name},
        )
        report = start(model, [{"path": path, "skip_mismatched": True}, head])
        assert (report.mismatched, report.missing, list(report.loaded)) == ({}, [], NAMES)

    @pytest.mark.feature("102")
    def test_missing_file_is_rejected_before_any_source_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "damaged.pt").write_bytes(b"no weights")
        paths = [str(tmp_path / "damaged.pt"), str(tmp_path / "damage.pt")]
        message = reject(mlp(2), paths, "weights.unusable")
        assert message.startswith(f"MODEL.weights[1].path = '{tmp_path}/damage.pt':")

    def test_file_that_exhausts_the_memory_is_not_called_unusable(
        self, path: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def exhaust(*args: object) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        monkeypatch.setattr("phasetrain.runtime.storage.Storage.read_hashed", exhaust)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            start(mlp(2), path)

    def test_text_file_and_empty_folder_are_named_as_such(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("just text")
        (tmp_path / "empty").mkdir()
        text = reject(mlp(2), str(tmp_path / "notes.txt"), "weights.unusable")
        assert "neither a safetensors file nor written by torch.save" in text
        assert "Error" not in text, "what an unpickler says"
        folder = reject(mlp(2), f"{tmp_path}/empty/", "weights.unusable")
        assert "it is empty" in folder


class TestState:
    def test_buffers_are_loaded_and_counters_may_be_missing(self, tmp_path: Path) -> None:
        trained, model = SmallCNN(3, width=2), SmallCNN(3, width=2)
        trained(torch.randn(4, 1, 8, 8))
        state = {
            name: one
            for name, one in trained.state_dict().items()
            if not name.endswith("num_batches_tracked")
        }
        report = start(model, saved(tmp_path / "a", state))
        assert report.missing == []
        assert torch.equal(model.features[1].running_mean, trained.features[1].running_mean)
        assert model.features[1].num_batches_tracked == 0

    def test_tied_weights_need_one_name_in_the_source(self, tmp_path: Path) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
                self.head.weight = self.embed.weight

        model = Tied()
        report = start(model, saved(tmp_path / "a", {"embed.weight": torch.ones(5, 2)}))
        assert report.missing == []
        assert model.head.weight.tolist() == [[1.0, 1.0]] * 5

    def test_state_dict_hooks_of_modules_are_used(self, tmp_path: Path) -> None:
        class Packed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(2))
                self.register_state_dict_post_hook(
                    lambda module, state, prefix, _: self.doubled(state, prefix)
                )
                self.register_load_state_dict_pre_hook(
                    lambda module, state, prefix, *_: self.halved(state, prefix)
                )

            def doubled(self, state: dict[str, Tensor], prefix: str) -> None:
                state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]

            def halved(self, state: dict[str, Tensor], prefix: str) -> None:
                state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2

        model = Packed()
        start(model, saved(tmp_path / "a", {"weight": torch.tensor([2.0, 4.0])}))
        assert model.weight.tolist() == [1.0, 2.0]


def test_report_is_plain_data_and_a_table(path: str) -> None:
    report = start(mlp(2, classes=7), {"path": path, "skip_mismatched": True})
    [source] = report.to_dict()["sources"]
    assert source == {
        "path": path,
        "read": path,
        "format": "safetensors",
        "digest": source["digest"],
        "tensors": 4,
    }
    assert report.to_dict()["loaded"] == {name: {"source": 0, "name": name} for name in NAMES[:2]}
    assert report.to_rows()[:1] == [
        ("layers.3.weight", "(7, 5) float32", "mismatched: the source has (3, 5) float32")
    ]
    assert report.to_rows()[2:] == [
        ("layers.1.weight", "(5, 4) float32", "loaded from source 0: layers.1.weight"),
        ("layers.1.bias", "(5) float32", "loaded from source 0: layers.1.bias"),
    ]
