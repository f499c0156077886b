"""A skipped update leaves buffers as they were."""

import math

import torch

from phasetrain.optim.update.restore_point import RestorePoint


class TestRestorePoint:
    def test_tensors_are_restored(self) -> None:
        mean, count = torch.tensor([1.0, 2.0]), torch.tensor(3)
        buffers = RestorePoint(lambda: [mean, count])
        mean.fill_(5.0)
        buffers.save()
        mean.fill_(math.nan)
        count += 1
        buffers.restore()
        assert (mean.tolist(), count.item()) == ([5.0, 5.0], 3)

    def test_tensors_are_restored_if_the_flag_is_set(self) -> None:
        mean = torch.tensor([1.0, 2.0])
        buffers = RestorePoint(lambda: [mean])
        buffers.save()
        mean.fill_(math.nan)
        buffers.restore_where(torch.tensor(1.0))
        assert mean.tolist() == [1.0, 2.0]
        mean.fill_(7.0)
        buffers.restore_where(torch.tensor(0.0))
        assert mean.tolist() == [7.0, 7.0]

    def test_replaced_tensor_is_restored(self) -> None:
        now = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
        buffers = RestorePoint(lambda: now)
        buffers.save()
        now[0] = torch.full((2,), math.nan)
        now[1] = torch.full((4,), math.nan)  # of another shape even
        buffers.restore()
        assert [tensor.tolist() for tensor in now] == [[1.0, 2.0], 3.0]
