"""Tokens are drawn from the distribution that temperature, top-k and top-p leave."""

from typing import Any

import pytest
import torch
from raising import raises
from torch import Generator

from phasetrain.addons.text.generation import Sampling, draw_token
from phasetrain.errors import ConfigError

SCORES = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def count(sampling: Sampling, draws: int = 1000) -> list[float]:
    generator = Generator().manual_seed(0)
    found = [draw_token(SCORES, sampling, generator) for _ in range(draws)]
    return [found.count(token) / draws for token in range(4)]


@pytest.mark.feature("generate")
@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(temperature=0), [0, 1, 0, 0]),
        (Sampling(temperature=0.5), [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        (Sampling(top_k=1), [0, 1, 0, 0]),
        (Sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.5), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(top_p=0.71), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(top_p=0.01), [0, 1, 0, 0]),
        (Sampling(top_k=3, top_p=1.0), [0, 4 / 9, 2 / 9, 3 / 9]),
    ],
    ids=str,
)
def test_frequencies(sampling: Sampling, expected: list[float]) -> None:
    draws = 200 if 1 in expected else 1000
    assert count(sampling, draws) == pytest.approx(expected, abs=0.05)


def test_greedy_draws_no_number_and_takes_the_first_of_equal_scores() -> None:
    generator = Generator().manual_seed(0)
    before = generator.get_state()
    assert draw_token(torch.tensor([0.0, 2.0, 2.0]), Sampling(temperature=0), generator) == 1
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": None},
    ],
    ids=str,
)
def test_values_of_a_wrong_type_or_outside_their_range_are_rejected(values: dict[str, Any]) -> None:
    with raises(ConfigError, code="generate.range"):
        Sampling(**values)


def test_numbers_are_accepted_as_their_types() -> None:
    assert Sampling(temperature=1, top_k=3, top_p=1, seed=-1).top_p == 1
