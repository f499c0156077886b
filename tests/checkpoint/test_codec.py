"""What is encoded comes back bit for bit; what cannot is refused by its path; hostile bytes do
nothing."""

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn
from torch.optim import lr_scheduler as schedulers

from phasetrain.checkpoint.codec import DEPTH, check_encodable, decode, encode
from phasetrain.errors import InvalidCheckpointError


def round_trip(state: Any) -> Any:
    return decode(*encode(state))


def same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal in types, order of keys and bits."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (
            other.dtype,
            other.shape,
        ):
            return False
        return bits(one) == bits(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (
            math.isnan(one) and math.isnan(other)
        )
    if isinstance(one, dict):
        keys = [(type(key), key) for key in one] == [(type(key), key) for key in other]
        return keys and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
TENSORS = st.sampled_from(
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.tensor([math.nan, -0.0, math.inf]),
        torch.arange(6).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(6.0)[1:3],
        torch.tensor([True, False]),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([1.0], dtype=torch.float16),
        torch.tensor([1.0], dtype=torch.float64),
        torch.tensor([255], dtype=torch.uint8),
        torch.tensor([-1], dtype=torch.int32),
        torch.tensor([complex(math.nan, -0.0), 1j]),
        torch.tensor([[1 + 2j, 3j]], dtype=torch.complex128).t(),
        torch.zeros(0, 3, dtype=torch.complex128),
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | TENSORS
DOLLARS = st.sampled_from(["$tensor", "$tuple", "$items", "$float", "$complex", "$", "a.b"])
KEYS = st.none() | st.booleans() | st.integers(2, 9) | TEXT | DOLLARS
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(STATES)
@settings(max_examples=200, deadline=None)
def test_any_state_comes_back_bit_for_bit(state: Any) -> None:
    assert same(round_trip(state), state)


def test_the_comparison_of_these_tests_sees_differences() -> None:
    pairs: list[tuple[Any, Any]] = [
        (0.0, -0.0), (1, 1.0), (1, True), ([1], (1,)), ({1: 0}, {"1": 0}), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.zeros(1), -torch.zeros(1)), (torch.zeros(1), torch.zeros(1, 1)), (torch.zeros(1), torch.zeros(1).int()),
    ]  # fmt: skip
    assert [same(one, other) for one, other in pairs] == [False] * len(pairs)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazy_conjugates_and_their_parts_are_saved_as_other_tensors(dtype: torch.dtype) -> None:
    numbers = torch.tensor([1 + 2j, -3j], dtype=dtype)
    state = {"own": numbers, "conjugate": numbers.conj(), "part": numbers.conj().imag}
    assert same(round_trip(state), {name: value.resolve_conj() for name, value in state.items()})


def test_the_form_on_disk() -> None:
    tree, tensors = encode({"a": torch.zeros(2), 1: (math.inf, None), "$x": [True]})
    assert json.loads(tree) == {
        "$items": [
            ["a", {"$tensor": "a"}],
            [1, {"$tuple": [{"$float": "inf"}, None]}],
            ["$x", [True]],
        ]
    }
    assert {name: tensor.tolist() for name, tensor in load_tensors(tensors).items()} == {
        "a": [0.0, 0.0]
    }


def test_a_view_is_written_without_the_rest_of_its_storage() -> None:
    _, tensors = encode(torch.zeros(1_000_000)[10:12])
    assert len(tensors) < 200
    assert round_trip(torch.arange(1000.0)[10:12]).untyped_storage().nbytes() == 8


def test_tied_tensors_are_written_once_and_stay_tied() -> None:
    weight = torch.ones(100)
    tree, tensors = encode({"one": weight, "two": weight, "part": weight[:50]})
    assert json.loads(tree)["two"] == {"$tensor": "one"}
    assert len(tensors) < 2 * 400
    back = decode(tree, tensors)
    assert back["one"] is back["two"]
    assert back["part"].tolist() == [1.0] * 50


def test_keys_with_dots_do_not_collide_with_nesting() -> None:
    state = {
        "a.b+": torch.tensor(0),
        "a": {"b": torch.tensor(1)},
        "a.b": torch.tensor(2),
        "a.b++": torch.tensor(3),
    }
    assert same(round_trip(state), state)


def test_encoding_is_a_snapshot() -> None:
    weight = torch.zeros(3)
    encoded = encode(weight)
    weight += 1
    assert decode(*encoded).tolist() == [0.0, 0.0, 0.0]


def test_parameters_and_subclasses_come_back_as_the_plain_kind() -> None:
    back = round_trip(
        {"p": nn.Parameter(torch.ones(2)), "o": OrderedDict(x=1), "s": torch.Size([2, 3])}
    )
    assert type(back["p"]) is torch.Tensor
    assert type(back["o"]) is dict
    assert back["s"] == (2, 3)


def test_counters_and_the_like_are_kept_as_plain_dicts_and_tuples() -> None:
    pair = namedtuple("pair", "one two")
    back = round_trip({"c": Counter("aab"), "d": defaultdict(int, x=1), "n": pair(1, 2)})
    assert same(back, {"c": {"a": 2, "b": 1}, "d": {"x": 1}, "n": (1, 2)})


def test_a_negated_view_is_written_as_it_reads_beside_what_it_is_a_view_of() -> None:
    number = torch.tensor([1 + 2j])
    view = number.conj().imag
    assert view.is_neg()
    back = round_trip({"plain": number.imag, "negated": view})
    assert (back["plain"].tolist(), back["negated"].tolist()) == ([2.0], [-2.0])


@pytest.mark.parametrize("number", [2**64, -(2**200), 2**8192 - 1, -(2**8192) + 1], ids="abcd")
def test_long_whole_numbers(number: int) -> None:
    assert round_trip({"n": number}) == {"n": number}


@pytest.mark.parametrize("number", [2**8192, 10**5000], ids="ab")
def test_endless_whole_numbers_are_refused_before_they_are_written(number: int) -> None:
    for look in (check_encodable, encode):
        with pytest.raises(TypeError, match=r"^n: .* 8192 "):
            look({"n": number})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    ],
    ids=["sgd", "adam", "adamw", "rmsprop", "adagrad", "lbfgs"],
)
def test_states_of_optimizers(make: Any) -> None:
    """They come back, and an optimizer that is given them makes the same step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    for _ in range(2):
        learn(model, optimizer)
    state, weights = optimizer.state_dict(), model.state_dict()
    assert state["state"]
    back = round_trip({"optimizer": state, "model": weights})
    assert same(back["optimizer"], state)
    other = nn.Linear(3, 2)
    other.load_state_dict(back["model"])
    again = make(other.parameters())
    again.load_state_dict(back["optimizer"])
    for one, its in ((model, optimizer), (other, again)):
        learn(one, its)
    assert torch.equal(model.weight, other.weight)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 12).view(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=9),
        lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.CosineAnnealingLR(o, 5)], milestones=[2]
        ),
        lambda o: schedulers.MultiStepLR(o, [1, 3, 3]),
    ],
    ids=["one cycle", "plateau", "sequential", "multi step"],
)
def test_states_of_schedulers(make: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9)
    scheduler = make(optimizer)
    for loss in (1.0, 2.0, 3.0):
        optimizer.step()
        scheduler.step(loss) if isinstance(
            scheduler, schedulers.ReduceLROnPlateau
        ) else scheduler.step()
    state = scheduler.state_dict()
    back = round_trip(plain(state))
    assert same(back, plain(state))
    other = make(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1, momentum=0.9))
    other.load_state_dict(back)
    assert other.state_dict().keys() == state.keys()
    assert other.get_last_lr() == scheduler.get_last_lr()


def plain(state: Any) -> Any:
    """Return a state with its Counters as dicts, as they are kept."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(item) for item in state] if isinstance(state, list) else state


def test_the_state_of_a_gradient_scaler() -> None:
    state = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    assert state["scale"] == 8.0
    assert same(round_trip(state), state)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "builtins.object cannot be saved"),
        (np.zeros(2), "numpy.ndarray cannot be saved"),
        (Path("x"), r"pathlib\.\w*Path cannot be saved"),
        ({1, 2}, "builtins.set cannot be saved"),
        (b"bytes", "builtins.bytes cannot be saved"),
        (1j, "builtins.complex cannot be saved"),
        (torch.float32, "torch.dtype cannot be saved"),
        (lambda: None, "builtins.function cannot be saved"),
        (
            torch.eye(2).to_sparse(),
            "a tensor of layout torch.sparse_coo cannot be saved; make it dense",
        ),
        (
            torch.zeros(2, dtype=torch.float8_e4m3fnuz),
            "a tensor of type torch.float8_e4m3fnuz cannot be saved",
        ),
        ({1.5: 0}, "builtins.dict cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"^model\.0\.queue: {message}"):
        encode({"model": [{"queue": value}]})


def test_nesting_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match=f" {DEPTH} "):
        encode(endless)


NOTHING = save_tensors({})


@pytest.mark.parametrize(
    ("tree", "tensors"),
    [
        (b"", NOTHING),
        (b"{", NOTHING),
        (b"\x80\x04\x95", NOTHING),
        (b"[" * 100_000, NOTHING),
        (b"[" * 500 + b"]" * 500, NOTHING),
        (b"\xff", NOTHING),
        (b"1" * 5000, NOTHING),
        (b'{"$tensor": "absent"}', NOTHING),
        (b'{"$tensor": []}', NOTHING),
        (b'{"$tensor": {}}', NOTHING),
        (b'{"$tuple": 3}', NOTHING),
        (b'{"$items": [[[1], 2]]}', NOTHING),
        (b'{"$items": [[1, 2, 3]]}', NOTHING),
        (b'{"$items": 1}', NOTHING),
        (b'{"$float": "1.0"}', NOTHING),
        (b'{"$float": []}', NOTHING),
        (b'{"$float": 1' + b"0" * 400 + b"}", NOTHING),
        (b"{}", b""),
        (b"{}", b"\xff" * 64),
        (b"{}", b"\x80\x04\x95pickle"),
        (b"{}", struct.pack("<Q", 2**60) + b"{}"),
        (b"{}", NOTHING[:4]),
        (b"{}", save_tensors({"a": torch.zeros(4)})[:-1]),
    ],
)
def test_hostile_bytes_are_refused(tree: bytes, tensors: bytes) -> None:
    with raises(InvalidCheckpointError, code="checkpoint.invalid"):
        decode(tree, tensors)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read_as_json(data: bytes) -> None:
    try:
        decode(data, NOTHING)
    except InvalidCheckpointError:
        return
    json.loads(data)


@pytest.mark.feature(
    "107", "checkpoints are data: no pickle, nothing is executed", "`phasetrain.checkpoint`"
)
def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    pickle = b"cos\nsystem\n(S'touch " + str(trap).encode() + b"'\ntR."
    for tree, tensors in (
        (pickle, NOTHING),
        (b"{}", pickle),
        (b"{}", struct.pack("<Q", len(pickle)) + pickle),
    ):
        with pytest.raises(InvalidCheckpointError):
            decode(tree, tensors)
    assert not trap.exists()


def test_numbers_of_numpy_come_back_as_plain_ones() -> None:
    state = decode(*encode({"a": np.float64(0.5), "b": np.int64(3), "c": np.bool_(True)}))
    assert state == {"a": 0.5, "b": 3, "c": True}
    assert [type(value) for value in state.values()] == [float, int, bool]


def test_check_refuses_what_encode_refuses_and_copies_nothing() -> None:
    check_encodable({"a": [torch.zeros(2), torch.ones(2, dtype=torch.cdouble), (None, 1, "x")]})
    for bad in (object(), torch.zeros(2, dtype=torch.float8_e4m3fnuz), torch.eye(2).to_sparse()):
        with pytest.raises(TypeError, match=r"^a\.0: "):
            check_encodable({"a": [bad]})
