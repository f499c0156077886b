"""MoCo against its formula in float64, and its queue."""

import pytest
import torch
from torch import Tensor

from phasetrain.addons.vision.self_supervised_losses.moco import MoCo


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit(row: Tensor) -> Tensor:
    return row / row.norm()


def direct(query: Tensor, key: Tensor, queue: Tensor, temperature: float) -> Tensor:
    terms = []
    for q, k in zip(query, key, strict=True):
        alike = torch.exp(unit(q) @ unit(k) / temperature)
        others = sum(torch.exp(unit(q) @ negative / temperature) for negative in queue)
        terms.append(-torch.log(alike / (alike + others)))
    return torch.stack(terms).mean()


def test_loss_equals_the_formula_and_keys_get_no_gradient() -> None:
    loss = MoCo(3, queue=7, temperature=0.3).double()
    queue = loss.queue.clone()
    views = [rows(4, seed).requires_grad_() for seed in (1, 2)]
    keys = [rows(4, seed).requires_grad_() for seed in (3, 4)]
    expected = (direct(views[0], keys[1], queue, 0.3) + direct(views[1], keys[0], queue, 0.3)) / 2
    found = loss(views, keys)
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    mine = torch.autograd.grad(found, views)
    for one, other in zip(mine, torch.autograd.grad(expected, views), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
    assert torch.autograd.grad(loss(views, keys), keys, allow_unused=True) == (None, None)


def test_one_direction_has_one_query_and_enqueues_one_key() -> None:
    loss = MoCo(3, queue=7, temperature=0.3, symmetric=False).double()
    queue = loss.queue.clone()
    views = [rows(4, seed) for seed in (1, 2)]
    keys = [rows(4, seed) for seed in (3, 4)]
    # VISSL: the query of the first view, the key of the second one
    assert loss(views, keys).item() == pytest.approx(
        direct(views[0], keys[1], queue, 0.3).item(), abs=1e-12
    )
    torch.testing.assert_close(loss.queue[:4], torch.stack([unit(key) for key in keys[1]]))
    assert torch.equal(loss.queue[4:], queue[4:])
    assert loss.place.item() == 4
    with pytest.raises(ValueError, match=r"TASK\.teacher_views"):
        loss(views, keys[:1])


def test_oldest_keys_are_replaced_first() -> None:
    loss = MoCo(3, queue=5).double()
    before = loss.queue.clone()
    keys = [rows(2, 3), rows(2, 4)]
    loss([rows(2, 1), rows(2, 2)], keys)
    normal = [torch.nn.functional.normalize(key, dim=1) for key in keys]
    torch.testing.assert_close(loss.queue, torch.cat([*normal, before[4:]]))
    assert loss.place.item() == 4
    loss([rows(2, 1), rows(2, 2)], keys)
    torch.testing.assert_close(
        loss.queue, torch.cat([normal[0][1:], normal[1], normal[1][1:], normal[0][:1]])
    )
    assert loss.place.item() == 3


def test_batch_longer_than_the_queue_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"LOSS\.queue = 3: .* 4 rows"):
        MoCo(3, queue=3).double()([rows(4, 1), rows(4, 2)], [rows(4, 3), rows(4, 4)])


def test_queue_is_unchanged_in_eval_mode() -> None:
    loss = MoCo(3, queue=5).double().eval()
    before = loss.queue.clone()
    loss([rows(2, 1), rows(2, 2)], [rows(2, 3), rows(2, 4)])
    assert torch.equal(loss.queue, before)


def test_queue_is_state_and_depends_on_the_seed() -> None:
    torch.manual_seed(0)
    one = MoCo(3, queue=5)
    torch.manual_seed(0)
    assert torch.equal(one.queue, MoCo(3, queue=5).queue)
    assert set(one.state_dict()) == {"queue", "place"}
    torch.testing.assert_close(one.queue.norm(dim=1), torch.ones(5))


def test_short_queue_and_missing_teacher_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"queue = 5: .* 8"):
        MoCo(3, batch_size=8, queue=5)
    with pytest.raises(ValueError, match=r"TASK\.name=self_supervised"):
        MoCo(3, queue=5)([rows(2, 1), rows(2, 2)], None)
