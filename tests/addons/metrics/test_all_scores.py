import math

import torch

from phasetrain.addons.metrics.all_scores import compute_log_odds


def test_log_odds_are_exact_also_near_1():
    logits = torch.tensor([[0.0, 1.0, 3.0], [0.0, 0.0, 60.0], [2.0, -70.0, 1.0]])
    found = compute_log_odds(logits).tolist()
    for row, odds in zip(logits.tolist(), found, strict=True):
        for number, one in enumerate(odds):
            others = sum(
                math.exp(value - row[number]) for place, value in enumerate(row) if place != number
            )
            assert abs(one + math.log(others)) < 1e-12
    near_one = logits.softmax(1)[1, 2]
    assert near_one == 1.0  # what probabilities in float32 make of it


def test_log_odds_rank_like_probabilities():
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(compute_log_odds(logits).T, logits.double().softmax(1).T, strict=True):
        assert torch.equal(ours.argsort(), theirs.argsort())
