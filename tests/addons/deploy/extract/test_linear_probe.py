import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises
from sklearn.linear_model import LogisticRegression

from phasetrain.addons.deploy.extract.feature_files import FeatureFolder
from phasetrain.addons.deploy.extract.linear_probe import (
    ProbeSettings,
    classify_by_neighbours,
    classify_linearly,
    fit_classifier,
    probe,
)
from phasetrain.cli import main
from phasetrain.errors import ConfigError

ROOT = Path(__file__).parents[4]
SETTINGS = ProbeSettings("trunk", penalties=(1e-2, 1e-1), device="cpu")


def clusters(samples: int, seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points `(N, 5)` around three corners, and which."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 3
    centres = 2.0 * torch.eye(5)[:3] + torch.tensor([0.0, 0.0, 0.0, 3.0, 0.0])
    return centres[labels] + spread * torch.randn(samples, 5, generator=random), labels


def folder(path: Path, features: torch.Tensor, labels: torch.Tensor, model: str = "one") -> str:
    made = FeatureFolder(str(path), "safetensors")
    made.begin({"format": "safetensors", "model": model})
    columns = {"id": torch.arange(len(labels)), "target": labels, "layer.trunk": features}
    made.finish([made.write(0, 0, columns)], {})
    return str(path)


class TestNearest:
    def test_votes_equal_a_computation_by_hand(self) -> None:
        keys = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 2.0], [-1.0, 0.0]])
        labels = torch.tensor([0, 1, 1, 0])
        query = torch.tensor([[5.0, 0.5]])
        found = classify_by_neighbours(keys, labels, query, [1, 2, 3, 9], 1.0, 2)
        # Similarities are 0.995, 0.856, 0.0995 and -0.995: exp gives 2.70, 2.35, 1.10 and 0.37.
        assert {k: int(votes) for k, votes in found.items()} == {1: 0, 2: 0, 3: 1, 9: 1}
        assert (
            int(classify_by_neighbours(keys, labels, query, [3], 0.05, 2)[3]) == 0
        )  # a low temperature makes the nearest one decide

    def test_chunks_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (keys, labels), (queries, _) = clusters(300, 0), clusters(50, 1)
        whole = classify_by_neighbours(keys, labels, queries, [1, 7, 50], 0.07, 3)
        monkeypatch.setattr(
            "phasetrain.addons.deploy.extract.linear_probe.CHUNK", 4
        )  # 64 keys at once
        parts = classify_by_neighbours(keys, labels, queries, [1, 7, 50], 0.07, 3)
        assert all(torch.equal(whole[k], parts[k]) for k in whole)

    def test_scale_does_not_matter_and_no_weight_overflows(self) -> None:
        (keys, labels), (queries, _) = clusters(60, 0), clusters(20, 1)
        one, other = (
            classify_by_neighbours(keys * s, labels, queries, [5], 1e-3, 3)[5] for s in (1.0, 1e6)
        )
        assert torch.equal(one, other)

    def test_dot_product_prefers_long_features(self) -> None:
        keys, labels = torch.tensor([[1.0, 0.0], [3.0, 3.0]]), torch.tensor([0, 1])
        query = torch.tensor([[1.0, 0.1]])
        votes = [
            int(classify_by_neighbours(keys, labels, query, [1], 1.0, 2, normalizes=normalizes)[1])
            for normalizes in (True, False)
        ]
        assert votes == [0, 1]

    def test_votes_equal_a_direct_computation(self) -> None:
        (keys, labels), (queries, _) = clusters(200, 2), clusters(40, 3)
        unit = [
            array / np.linalg.norm(array, axis=1, keepdims=True)
            for array in (queries.numpy(), keys.numpy())
        ]
        similarity = (unit[0] @ unit[1].T).astype(np.float64)
        expected = []
        for row in similarity:
            votes = np.zeros(3)
            for index in np.argsort(-row, kind="stable")[:20]:
                votes[labels[index]] += np.exp(row[index] / 0.07)
            expected.append(int(votes.argmax()))
        assert classify_by_neighbours(keys, labels, queries, [20], 0.07, 3)[20].tolist() == expected


class TestLinear:
    @pytest.mark.feature("probe", "kNN and linear probes", "`phasetrain probe`")
    @pytest.mark.parametrize("penalty", [1e-3, 0.1])
    def test_it_is_the_minimum_that_scikit_learn_finds(self, penalty: float) -> None:
        features, labels = clusters(120, 0)
        found = fit_classifier(features, labels, 3, penalty)
        scaled = ((features.double() - found.mean) / found.scale).numpy()
        other = LogisticRegression(C=1 / (120 * penalty), tol=1e-10, max_iter=5000).fit(
            scaled, labels.numpy()
        )
        assert np.abs(found.weight.numpy() - other.coef_).max() < 1e-4
        centred = other.intercept_ - other.intercept_.mean()
        assert np.abs((found.bias - found.bias.mean()).numpy() - centred).max() < 1e-4

    def test_chunks_change_last_bits_only_and_equal_calls_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        features, labels = clusters(100, 0)
        one = fit_classifier(features, labels, 3, 1e-2)
        assert torch.equal(one.weight, fit_classifier(features, labels, 3, 1e-2).weight)
        monkeypatch.setattr("phasetrain.addons.deploy.extract.linear_probe.CHUNK", 97)
        assert torch.allclose(
            one.weight, fit_classifier(features, labels, 3, 1e-2).weight, atol=1e-6
        )

    def test_a_constant_number_does_no_harm(self) -> None:
        features, labels = clusters(100, 0)
        features[:, 4] = 5.0
        assert fit_classifier(features, labels, 3, 1e-3).weight[:, 4].tolist() == [0, 0, 0]

    def test_the_penalty_is_chosen_on_what_was_held_out(self) -> None:
        random = torch.Generator().manual_seed(0)
        features, labels = clusters(200, 0, spread=0.7)
        features = torch.cat(
            [features, torch.randn(200, 40, generator=random)], 1
        )  # noise to be overfitted
        settings = replace(SETTINGS, penalties=(1e-4, 0.3, 1e6), held_out=0.5, seed=1)
        chosen, scores, _ = classify_linearly(features, labels, features, 3, settings)
        assert chosen == 0.3
        assert scores[0.3] > max(scores[1e-4], scores[1e6])
        assert classify_linearly(features, labels, features, 3, settings)[1] == scores
        assert (
            classify_linearly(features, labels, features, 3, replace(settings, seed=0))[1] != scores
        )


class TestProbe:
    def test_accuracies_are_returned_and_written(self, tmp_path: Path) -> None:
        train, test = (
            folder(tmp_path / "train", *clusters(300, 0)),
            folder(tmp_path / "test", *clusters(90, 1)),
        )
        found = probe(train, test, SETTINGS)
        assert (found.samples, found.dimensions, found.classes) == ((300, 90), 5, 3)
        assert found.linear > 0.85
        assert all(accuracy > 0.7 for accuracy in found.neighbours.values())
        written = json.loads((tmp_path / "probe.json").read_text())
        assert written["linear"] == found.linear
        assert written["neighbours"] == {
            str(k): accuracy for k, accuracy in found.neighbours.items()
        }
        assert written["settings"]["temperature"] == 0.07

    def test_noise_gives_accuracies_of_chance(self, tmp_path: Path) -> None:
        noise = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(300) % 3
        paths = [folder(tmp_path / name, noise[part], labels[part]) for name, part in PARTS.items()]
        found = probe(*paths, SETTINGS)
        assert found.linear < 0.5
        assert found.neighbours[20] < 0.5

    def test_samples_without_a_class_do_not_count(self, tmp_path: Path) -> None:
        features, labels = clusters(300, 0)
        labels[::2] = -1
        train, test = (
            folder(tmp_path / "train", features, labels),
            folder(tmp_path / "test", *clusters(90, 1)),
        )
        assert probe(train, test, SETTINGS).samples == (150, 90)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (replace(SETTINGS, layer="turnk"), "'turnk'.*'trunk'"),
            (replace(SETTINGS, neighbours=(0,)), r"neighbours = \[0\]"),
            (replace(SETTINGS, temperature=0.0), r"temperature = 0\.0"),
            (replace(SETTINGS, penalties=()), r"l2 = \[\]"),
            (replace(SETTINGS, held_out=1.0), r"held_out = 1\.0 of 30"),
        ],
    )
    def test_invalid_settings_are_rejected(
        self, tmp_path: Path, settings: ProbeSettings, message: str
    ) -> None:
        path = folder(tmp_path / "train", *clusters(30, 0))
        with pytest.raises(ConfigError, match=message):
            probe(path, path, settings)

    def test_features_of_different_models_are_rejected(self, tmp_path: Path) -> None:
        features, labels = clusters(30, 0)
        one, other = (
            folder(tmp_path / "one", features, labels),
            folder(tmp_path / "other", features[:, :4], labels),
        )
        with raises(ConfigError, code="probe.other_width"):
            probe(one, other, SETTINGS)
        with raises(ConfigError, code="probe.other_weights"):
            probe(one, folder(tmp_path / "of another", features, labels, "another"), SETTINGS)
        with raises(ConfigError, code="probe.no_classes"):
            probe(one, folder(tmp_path / "third", features, labels.float()), SETTINGS)


PARTS = {"train": slice(0, 200), "test": slice(200, 300)}


def test_command_prints_a_table_or_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test = (
        folder(tmp_path / "train", *clusters(60, 0)),
        folder(tmp_path / "test", *clusters(30, 1)),
    )
    words = [
        "probe",
        "--train",
        train,
        "--test",
        test,
        "--neighbours",
        "3",
        "--l2",
        "0.01",
        "--device",
        "cpu",
    ]
    assert main([*words, "--layer", "trunk", "--out", f"{tmp_path}/it.json"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("trunk: 5 numbers, 60 training samples, 30 test samples\n")
    assert "linear classifier (l2 = 0.01)" in printed
    assert (tmp_path / "it.json").exists()
    assert main([*words, "--layer", "turnk"]) == 2
    assert "'trunk'" in capsys.readouterr().err
