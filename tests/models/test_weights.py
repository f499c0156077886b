"""What a model takes from sources of weights, what becomes of the rest, and what is refused with
which advice."""

from pathlib import Path
from typing import Any

import pytest
import torch
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


def refused(model: nn.Module, weights: Any) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
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


class TestNames:
    def test_equal_ones(self, path: str, trained: MLP) -> None:
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
        ],
    )
    def test_changed_ones(
        self, tmp_path: Path, trained: MLP, there: str, options: dict[str, Any]
    ) -> None:
        state = {there.format(name): value for name, value in trained.state_dict().items()}
        model = mlp(2)
        report = start(model, {"path": saved(tmp_path / "a", state), **options})
        assert report.loaded["layers.3.bias"].name == there.format("layers.3.bias")
        assert torch.equal(model.layers[3].weight, trained.layers[3].weight)

    def test_a_prefix_that_is_added(self, tmp_path: Path, trained: MLP) -> None:
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

    def test_two_that_would_be_named_alike(self, path: str) -> None:
        told = refused(mlp(2), {"path": path, "rename": [["[13]", "0"]]})
        assert "'layers.1.bias' and 'layers.3.bias' would both be named 'layers.0.bias'" in told

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
    def test_a_rule_that_matches_nothing(
        self, path: str, options: dict[str, Any], message: str
    ) -> None:
        assert refused(mlp(2), {"path": path, **options}).startswith(message)


class TestWhatIsLeft:
    def test_a_head_that_is_replaced(self, path: str, trained: MLP) -> None:
        model = mlp(2, classes=7)
        before = model.layers[3].weight.clone()
        report = start(model, {"path": path, "reinit": ["layers.3.*"]})
        assert report.reinit == ["layers.3.weight", "layers.3.bias"]
        assert torch.equal(model.layers[3].weight, before)
        assert torch.equal(model.layers[1].weight, trained.layers[1].weight)

    def test_what_has_no_source_is_refused_with_near_misses(
        self, tmp_path: Path, trained: MLP
    ) -> None:
        state = dict(trained.state_dict())
        state["layer3.weight"] = state.pop("layers.3.weight")
        state["something"] = torch.ones(1)
        told = refused(mlp(2), saved(tmp_path / "a", state))
        assert told == (
            "MODEL.weights: 1 of 4 tensors of the model have no source: layers.3.weight (3, 5) float32 (the source has "
            "'layer3.weight'). To keep the initial values of these tensors, set "
            "MODEL.weights.reinit=[layers.3.*]; to keep them for all tensors without a source, set "
            "MODEL.weights.strict=false"
        )

    def test_a_prefix_is_found(self, tmp_path: Path, trained: MLP) -> None:
        state = {f"encoder.{name}": value for name, value in trained.state_dict().items()}
        told = refused(mlp(2), saved(tmp_path / "a", state))
        assert "no tensor of the source fits" in told
        assert "MODEL.weights.prefix_remove=encoder. would fit 4 of them" in told

    def test_it_may_be_left_without(self, tmp_path: Path, trained: MLP) -> None:
        state = {
            name: value for name, value in trained.state_dict().items() if name != "layers.3.bias"
        }
        state["head"] = torch.ones(1)
        report = start(mlp(2), {"path": saved(tmp_path / "a", state), "strict": False})
        assert (report.missing, report.unexpected) == (["layers.3.bias"], {"head": 0})

    def test_excluded_is_not_meant_to_be_forgotten(self, path: str) -> None:
        assert "2 of 4 tensors of the model have no source" in refused(
            mlp(2), {"path": path, "exclude": ["*.3.*"]}
        )
        assert "2 of 4 tensors of the model have no source" in refused(
            mlp(2), {"path": path, "include": ["*.1.*"]}
        )

    def test_nothing_that_fits_is_refused_even_if_it_need_not_be_strict(
        self, tmp_path: Path
    ) -> None:
        told = refused(
            mlp(2), {"path": saved(tmp_path / "a", {"x": torch.ones(1)}), "strict": False}
        )
        assert "no tensor of the source fits: the model has layers.1.weight, layers.1.bias" in told


class TestShapes:
    def test_other_ones_are_refused_with_both(self, path: str) -> None:
        told = refused(mlp(2, classes=7), path)
        assert told.startswith(f"MODEL.weights.path = {path!r}: layers.3.")
        assert "layers.3.weight: (3, 5) float32 in the source, (7, 5) float32 in the model" in told
        assert "MODEL.weights.reinit=[layers.3.*]" in told
        assert told.endswith("tensors whose shapes differ, set MODEL.weights.skip_mismatched=true")

    def test_or_skipped(self, path: str, trained: MLP) -> None:
        model = mlp(2, classes=7)
        before = model.layers[3].weight.clone()
        report = start(model, {"path": path, "skip_mismatched": True})
        assert report.mismatched == {
            "layers.3.weight": "(3, 5) float32",
            "layers.3.bias": "(3) float32",
        }
        assert torch.equal(model.layers[3].weight, before)
        assert torch.equal(model.layers[1].bias, trained.layers[1].bias)

    def test_types_are_the_models_and_integers_are_no_weights(
        self, tmp_path: Path, trained: MLP
    ) -> None:
        half = {name: value.half() for name, value in trained.state_dict().items()}
        model = mlp(2)
        start(model, saved(tmp_path / "half", half))
        assert model.layers[1].weight.dtype == torch.float32
        assert torch.equal(model.layers[1].weight, trained.layers[1].weight.half().float())
        half["layers.1.bias"] = torch.ones(5, dtype=torch.int8)
        told = refused(mlp(2), saved(tmp_path / "whole", half))
        assert "layers.1.bias: (5) int8 in the source, (5) float32 in the model" in told


class TestBank:
    def test_the_last_one_wins(self, tmp_path: Path, trained: MLP) -> None:
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

    def test_one_may_complete_what_another_has_in_another_shape(
        self, tmp_path: Path, path: str
    ) -> None:
        model = mlp(2, classes=7)
        head = saved(
            tmp_path / "head",
            {name: value for name, value in mlp(3, 7).state_dict().items() if ".3." in name},
        )
        report = start(model, [{"path": path, "skip_mismatched": True}, head])
        assert (report.mismatched, report.missing, list(report.loaded)) == ({}, [], NAMES)

    def test_a_missing_file_is_told_with_its_position_before_any_is_read(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "damaged.pt").write_bytes(b"no weights")
        told = refused(mlp(2), [str(tmp_path / "damaged.pt"), str(tmp_path / "damage.pt")])
        assert told.startswith(f"MODEL.weights[1].path = '{tmp_path}/damage.pt':")


class TestState:
    def test_buffers_come_too_and_counters_may_be_missing(self, tmp_path: Path) -> None:
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

    def test_tied_weights_may_have_one_name_in_the_source(self, tmp_path: Path) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
                self.head.weight = self.embed.weight

        model = Tied()
        report = start(model, saved(tmp_path / "a", {"embed.weight": torch.ones(5, 2)}))
        assert report.missing == []
        assert model.head.weight.tolist() == [[1.0, 1.0]] * 5

    def test_a_module_that_writes_its_state_in_a_way_of_its_own(self, tmp_path: Path) -> None:
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


def test_the_report_is_plain_data_and_a_table(path: str) -> None:
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
