"""The emulated CUDA device follows the rules of CUDA, and leaves torch as it was."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from emulated_cuda import emulate_cuda, why_not_emulated
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(why_not_emulated() is not None, reason=why_not_emulated() or "")


def ones() -> Tensor:
    return torch.ones(3, device="cuda")


def test_torch_is_as_before() -> None:
    before = torch.cuda.is_available(), torch.cuda.Stream, torch.Tensor.pin_memory
    with emulate_cuda():
        assert torch.cuda.is_available()
        assert ones().device == torch.device("cuda", 0)
    assert (torch.cuda.is_available(), torch.cuda.Stream, torch.Tensor.pin_memory) == before
    with pytest.raises((AssertionError, RuntimeError)):
        ones()


def test_module_trains_on_the_device_and_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    here = copy.deepcopy(layer)
    weight = layer.weight
    with emulate_cuda():
        layer.to("cuda")
        assert layer.weight is weight
        layer(ones()).sum().backward()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
        optimizer.step()
        values = layer.weight.detach().cpu()
    here(torch.ones(3)).sum().backward()
    torch.optim.SGD(here.parameters(), lr=0.1, fused=True).step()
    assert torch.equal(values, here.weight)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: ones() + torch.ones(3), "same device"),
        (lambda: torch.ones(3).add_(ones()), "same device"),
        (lambda: torch.zeros(()).add_(ones().sum()), "same device"),
        (lambda: torch.cat([ones(), torch.ones(3)]), "same device"),
        (lambda: ones().cumsum(0), "deterministic"),
    ],
)
def test_operator_is_rejected(compute: Callable[[], Tensor], message: str) -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        with emulate_cuda(), pytest.raises(RuntimeError, match=message):
            compute()
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda: ones() + torch.tensor(2.0), 0),  # a 0-d tensor is a number
        (lambda: ones().sum().item(), 1),
        (lambda: ones().tolist(), 1),
        (lambda: ones()[ones() > 0], 1),
        (lambda: ones()[torch.tensor([0])], 1),
        (lambda: torch.ones(3).cuda(), 1),
        (lambda: torch.ones(3).to("cuda", non_blocking=True), 0),
        (lambda: bool(ones().any()), 1),
    ],
)
def test_waits_are_recorded_with_their_line(read: Callable[[], object], waits: int) -> None:
    with emulate_cuda() as device:
        read()
    assert [wait.place for wait in device.waits] == ["test_emulated_rules.py <lambda>"] * waits


def test_copy_to_the_host_arrives_when_it_was_waited_for() -> None:
    with emulate_cuda():
        host = torch.empty(3, pin_memory=True).copy_(ones(), non_blocking=True)
        assert host.isnan().all()
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        assert host.tolist() == [1, 1, 1]


def change_source_of_a_copy() -> None:
    host = torch.ones(3).pin_memory()
    host.to("cuda", non_blocking=True)
    host.zero_()
    torch.cuda.synchronize()


def test_source_of_a_copy_must_not_change() -> None:
    with pytest.raises(AssertionError, match="memory was changed"), emulate_cuda():
        change_source_of_a_copy()


@pytest.mark.parametrize(
    ("waits", "records", "message"),
    [
        (True, True, None),
        (False, True, "without waiting"),
        (True, False, "without record_stream"),
    ],
)
def test_streams_are_not_ordered_by_themselves(
    message: str | None, *, waits: bool, records: bool
) -> None:
    found: Any = nullcontext() if message is None else pytest.raises(AssertionError, match=message)
    with found, emulate_cuda():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = ones()
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        if records:
            made.record_stream(torch.cuda.current_stream())
        made.add(1)
        del made


def test_pickled_tensor_is_reported() -> None:
    with pytest.raises(AssertionError, match="pickled"), emulate_cuda():
        pickle.dumps(ones())
