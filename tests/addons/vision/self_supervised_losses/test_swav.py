"""SwAV against the algorithm of the paper in float64, its queue, and when its prototypes learn."""

import pytest
import torch
from torch import Tensor

from phasetrain.addons.vision.self_supervised_losses.swav import balance_codes, build_swav
from phasetrain.distributed import World


def rows(count: int, seed: int, size: int = 3) -> Tensor:
    return torch.randn(
        count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def unit(view: Tensor) -> Tensor:
    return torch.stack([row / row.norm() for row in view])


def paper_codes(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Return the codes by the listing in appendix A of the paper: K x B, sums brought to 1/K and
    1/B in turn."""
    q = torch.exp(scores / epsilon).T
    q = q / q.sum()
    prototypes, batch = q.shape
    for _ in range(iterations):
        q = q / q.sum(dim=1, keepdim=True) / prototypes
        q = q / q.sum(dim=0, keepdim=True) / batch
    return (q / q.sum(dim=0, keepdim=True)).T


def direct(
    views: list[Tensor], prototypes: Tensor, queues: list[Tensor], temperature: float = 0.1
) -> float:
    centers = unit(prototypes)
    scores = [unit(view) @ centers.T for view in views]
    total, pairs = 0.0, 0
    for a in range(2):
        codes = paper_codes(torch.cat([scores[a], queues[a] @ centers.T]), 0.05, 3)
        for b in range(len(views)):
            if a != b:
                pairs += 1
                for i in range(len(views[0])):
                    exponents = torch.exp(scores[b][i] / temperature)
                    total += float(
                        -(codes[i] * torch.log(exponents / exponents.sum())).sum()
                    ) / len(views[0])
    return total / pairs


NO_QUEUE = [torch.zeros(0, 3, dtype=torch.float64)] * 2


@pytest.mark.parametrize("count", [2, 4])
def test_loss_equals_the_formula(count: int) -> None:
    loss = build_swav(3, prototypes=5).double()
    views = [rows(6, seed) for seed in range(count)]
    assert loss(views).item() == pytest.approx(
        direct(views, loss.prototypes.detach(), NO_QUEUE), abs=1e-12
    )


def test_codes_use_all_prototypes_equally() -> None:
    scores = unit(rows(8, 1, 4)) @ unit(rows(4, 2, 4)).T
    codes = balance_codes(
        World(), scores, torch.ones(8, 1, dtype=torch.float64), epsilon=0.5, iterations=50
    )
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(codes.sum(dim=0), torch.full((4,), 2.0, dtype=torch.float64))


def test_queue_is_used_after_its_start_and_only_filled_rows_count() -> None:
    loss = build_swav(3, batch_size=2, prototypes=4, queue=5, queue_updates=1).double()
    prototypes, batches = (
        loss.prototypes.detach(),
        [[rows(2, 10 * n), rows(2, 10 * n + 1)] for n in range(4)],
    )
    queues = [torch.zeros(0, 3, dtype=torch.float64)] * 2
    for updates, views in enumerate(batches):
        loss.advance(updates / 4, updates)
        used = NO_QUEUE if updates < 1 else queues
        assert loss(views).item() == pytest.approx(direct(views, prototypes, used), abs=1e-12)
        queues = [
            torch.cat([queue, unit(view)])[-5:] for queue, view in zip(queues, views, strict=True)
        ]
    assert (loss.filled.item(), loss.place.item()) == (5, 3)


def test_prototypes_are_frozen_for_the_first_updates() -> None:
    loss = build_swav(3, prototypes=4, frozen_updates=2)
    frozen = []
    for updates in range(4):
        loss.advance(0.0, updates)
        frozen.append(len(loss.frozen_parameters()))
    assert frozen == [1, 1, 0, 0]


def test_projected_prototypes_are_unit_vectors_before_a_step_and_have_their_own_gradient() -> None:
    loss = build_swav(3, prototypes=5, projected=True).double()
    with torch.no_grad():
        loss.prototypes.mul_(7)
    views = [rows(6, seed) for seed in range(2)]
    # A test normalizes in the loss, and leaves the prototypes as they are.
    expected = direct(views, loss.prototypes.detach(), NO_QUEUE)
    assert loss.eval()(views).item() == pytest.approx(expected, abs=1e-12)
    assert loss.prototypes.norm(dim=1).min().item() == pytest.approx(7)
    loss.train().advance(0.5, 3)
    assert loss.prototypes.norm(dim=1).tolist() == pytest.approx([1] * 5)
    value = loss(views)
    assert value.item() == pytest.approx(expected, abs=1e-12)
    value.backward()
    radial = (loss.prototypes.grad * loss.prototypes).sum(1).abs().min()
    assert radial > 1e-4
    free = build_swav(3, prototypes=5).double()
    free(views).backward()
    assert (free.prototypes.grad * free.prototypes).sum(1).abs().max() < 1e-12


def test_state_has_queue_and_invalid_sizes_are_rejected() -> None:
    assert set(build_swav(3, prototypes=4, queue=5).state_dict()) == {
        "prototypes",
        "queue",
        "place",
        "filled",
    }
    with pytest.raises(ValueError, match=r"queue = 5: .* 8"):
        build_swav(3, batch_size=8, queue=5)
    with pytest.raises(ValueError, match="iterations = 0:"):
        build_swav(3, iterations=0)


def test_queue_is_unchanged_in_eval_mode() -> None:
    loss = build_swav(3, prototypes=4, queue=5).double().eval()
    loss([rows(2, 1), rows(2, 2)])
    assert loss.filled.item() == 0
    assert loss([rows(0, 1), rows(0, 2)]).item() == 0
