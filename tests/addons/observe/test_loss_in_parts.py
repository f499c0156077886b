"""A custom loss over the batch comes with a warning if the batch is computed in parts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset, TensorDataset

import phasetrain
from phasetrain.addons.observe.loss_in_parts import compare_means
from phasetrain.addons.observe.sample_rows import NoRowsError, take_rows
from phasetrain.engine.batch import Batch
from phasetrain.errors import NumericsError
from phasetrain.tasks.supervised import Supervised

INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, INPUTS.flip(1))


class Contrast(nn.Module):
    """Finds the target of each output among the targets of the batch."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output @ target.T, torch.arange(len(output)))


class Declared(Contrast):
    """Accepts another value over parts."""

    coupled = False


class Noisy(Contrast):
    """Draws random numbers, so no two values are equal."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output + torch.randn_like(output), target)


class Rows(nn.Module):
    """Is the mean over samples."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target)


def contrast(output: Tensor, target: Tensor) -> Tensor:
    return Contrast()(output, target)


def fit(folder: Path, loss: Any, **changes: Any) -> phasetrain.RunResult:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    arguments: dict[str, Any] = {"OPTIMIZER": {"name": "sgd", "lr": 0.1, "accumulate": 2}}
    return phasetrain.fit(
        changes.pop("model", model),
        train=changes.pop("train", DATA),
        loss=loss,
        epochs=1,
        batch_size=16,
        RUN={"dir": str(folder), "rehearse": changes.pop("rehearse", "auto")},
        **(arguments | changes),
    )


def list_warnings(folder: Path) -> list[str]:
    lines = (folder / "log.txt").read_text().splitlines()
    return [line for line in lines if " on average over " in line]


@pytest.mark.feature(
    "loss.in_parts",
    "a custom loss that compares samples of a batch is found if accumulation splits the batch, or a "
    "test has several batches",
    "`coupled`, `OPTIMIZER.accumulate`",
)
@pytest.mark.parametrize("loss", [Contrast(), contrast])
def test_loss_over_the_batch_is_reported_before_the_first_step(loss: Any, tmp_path: Path) -> None:
    fit(tmp_path / "run", loss)
    (line,) = list_warnings(tmp_path / "run")
    assert "for the first 8 samples" in line
    assert "OPTIMIZER.accumulate = 2" in line
    assert "coupled = True" in line


class Whole(Contrast):
    """Says that it compares samples."""

    coupled = True


class InTraining(Whole):
    """Compares samples in training, and takes other outputs in tests."""

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return super().forward(output, target) if self.training else mse_loss(output["y"], target)


class TwoForms(nn.Linear):
    """Returns a tensor in training and a mapping in tests."""

    def forward(self, inputs: Tensor) -> Any:
        output = super().forward(inputs)
        return output if self.training else {"y": output}


@pytest.mark.parametrize(
    ("loss", "size", "limit", "warnings"),
    [
        (Whole(), 32, None, 1),
        (InTraining(), 32, None, 0),
        (Whole(), 64, None, 0),
        (Whole(), 32, 1, 0),
        (Declared(), 32, None, 0),
    ],
)
def test_coupled_loss_of_a_test_in_several_batches_is_reported(
    loss: nn.Module, size: int, limit: int | None, warnings: int, tmp_path: Path
) -> None:
    fit(
        tmp_path,
        loss,
        **({"model": TwoForms(4, 4)} if isinstance(loss, InTraining) else {}),
        test=DATA,
        OPTIMIZER={"name": "sgd", "lr": 0.1},
        DATA={"TEST": {"batch_size": size}},
        PHASES={"limit": {"test": limit}},
    )
    log = (tmp_path / "log.txt").read_text()
    assert log.count("set DATA.TEST.batch_size=64") == warnings


class Weighted(nn.CrossEntropyLoss):
    """Is weighted by its targets, as losses of torch are."""

    def __init__(self) -> None:
        super().__init__(weight=torch.tensor([1.0, 9.0, 2.0, 4.0]), ignore_index=0)


def test_parts_are_weighted_as_in_a_run(tmp_path: Path) -> None:
    labels = torch.arange(64) % 5 % 4
    fit(tmp_path, Weighted(), train=TensorDataset(INPUTS, labels))
    assert list_warnings(tmp_path) == []


class Wrapped(nn.Module):
    """Contains a loss of torch that ignores targets."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.loss(output, target)
        return value


class Masked(nn.Module):
    """Ignores targets by itself."""

    ignore_index = -100

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, ignore_index=self.ignore_index)


@pytest.mark.parametrize("loss", [Wrapped(), Masked()])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ignored_targets_have_one_warning(loss: nn.Module, accumulate: int, tmp_path: Path) -> None:
    labels = TensorDataset(INPUTS, torch.tensor([0, 1, 2, 3, -100] * 13)[:64])
    optimizer = {"name": "sgd", "lr": 0.1, "accumulate": accumulate}
    changes = {"DATA": {"TEST": {"batch_size": 16}}, "METERS": {"loss": {}}}
    fit(tmp_path, loss, train=labels, test=labels, OPTIMIZER=optimizer, **changes)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert len([line for line in lines if " WARNING LOSS: " in line]) == 1


class Weighing(nn.Module):
    """Weights the sides of zero by their losses, which it keeps; not in tests."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        losses = (output - target).square().mean(1)
        side = nn.functional.one_hot((target[:, 0] > 0).long(), 2).float()
        means = losses @ side / side.sum(0).clamp_min(1)
        if self.training:
            self.weights = (self.weights.log() + means.detach()).softmax(0)
        return (self.weights * means).sum()


class Averaging(Rows):
    """Keeps an average of its values."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value = super().forward(output, target)
        self.average = 0.9 * self.average + 0.1 * value.detach()
        return value


def test_loss_that_changes_with_each_call_is_compared_from_the_same_state(tmp_path: Path) -> None:
    fit(tmp_path, Weighing())
    (line,) = list_warnings(tmp_path)
    assert "OPTIMIZER.accumulate = 2" in line


@pytest.mark.parametrize("loss", [Declared(), Noisy(), Rows(), Averaging(), nn.MSELoss(), mse_loss])
def test_other_losses_are_accepted(loss: Any, tmp_path: Path) -> None:
    fit(tmp_path, loss)
    assert list_warnings(tmp_path) == []


def test_whole_batches_are_accepted(tmp_path: Path) -> None:
    fit(tmp_path, Contrast(), OPTIMIZER={"name": "sgd", "lr": 0.1})
    assert list_warnings(tmp_path) == []


class Undefined(Rows):
    """Is NaN for any batch."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) * torch.nan


def test_loss_that_is_not_a_number_is_left_to_the_check_of_the_step(tmp_path: Path) -> None:
    with pytest.raises(NumericsError):
        fit(tmp_path, Undefined())
    log = (tmp_path / "log.txt").read_text()
    assert "over parts of a batch" not in log
    assert " on average over " not in log


class OnlyInTests(Rows):
    """Compares samples with each other in tests only."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.training:
            return super().forward(output, target)
        return contrast(output, target)


class OnlyInTraining(Rows):
    """Compares samples with each other in training only."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return contrast(output, target) if self.training else super().forward(output, target)


class Nearly(Rows):
    """Is nearly the mean over samples, as losses of pairs are for small outputs."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target) * (1.0005 if len(output) == 16 else 1)


@pytest.mark.parametrize(
    ("loss", "batch_size", "lines"),
    [
        (Contrast(), 16, 1),
        (contrast, 16, 1),
        (OnlyInTests(), 16, 1),
        (Nearly(), 16, 1),
        (OnlyInTraining(), 16, 0),
        (Contrast(), 64, 0),  # a single batch
        (Declared(), 16, 0),
        (Rows(), 16, 0),
        (mse_loss, 16, 0),
    ],
)
def test_loss_of_a_test_that_depends_on_its_batches_is_reported(
    loss: Any, batch_size: int, lines: int, tmp_path: Path
) -> None:
    changes = {"DATA": {"TEST": {"batch_size": batch_size}}, "METERS": {"loss": {}}}
    fit(tmp_path, loss, test=DATA, OPTIMIZER={"name": "sgd", "lr": 0.1}, **changes)
    warnings = list_warnings(tmp_path)
    assert len(warnings) == lines
    assert all("depends on DATA.TEST.batch_size" in line for line in warnings)


def test_test_without_a_loss_is_accepted(tmp_path: Path) -> None:
    changes = {"DATA": {"TEST": {"batch_size": 16}}, "METERS": {"loss": None, "regression": {}}}
    fit(tmp_path, Contrast(), test=DATA, OPTIMIZER={"name": "sgd", "lr": 0.1}, **changes)
    assert list_warnings(tmp_path) == []


class Groups(Dataset[tuple[Tensor, Tensor]]):
    """Samples of 1 to 4 rows."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rows = INPUTS[index : index + 1 + index % 4]
        return rows, torch.full((len(rows),), index)


def concatenate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([rows for rows, _ in samples]), torch.cat([number for _, number in samples])


def group_mean(output: Tensor, target: Tensor) -> Tensor:
    """Is the mean over samples, whose rows are weighted by their number."""
    groups = [output[target == number].square().mean() for number in set(target.tolist())]
    return torch.stack(groups).mean()


def test_rows_of_a_collate_function_that_concatenates_are_not_cut(tmp_path: Path) -> None:
    batches = {"batch_size": 8, "collate": f"{__name__}.concatenate"}
    fit(tmp_path, group_mean, train=Groups(), DATA={"TRAIN": batches})
    assert list_warnings(tmp_path) == []
    (line,) = [
        line
        for line in (tmp_path / "log.txt").read_text().splitlines()
        if "INFO LOSS: group_mean cannot be compared over parts" in line
    ]
    assert "OPTIMIZER.accumulate = 2 changes the loss" in line


class WeightedByRows(Supervised):
    """Weights batches by something other than samples."""

    def weight_of(self, batch: Batch) -> float:
        return 2.0 * batch.size


class Objects(Dataset[tuple[Tensor, Tensor]]):
    """Samples with 1, 3, 3, 1, ... numbers, so that halves of 4 samples have as many."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index], INPUTS[index, :1] + torch.arange((1, 3, 3, 1)[index % 4])


def collate_lists(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    return torch.stack([inputs for inputs, _ in samples]), [numbers for _, numbers in samples]


def object_mean(output: Tensor, target: list[Tensor]) -> Tensor:
    """Is the mean over the numbers of all samples."""
    pairs = zip(output[:, :1], target, strict=True)
    return torch.cat([(row - numbers).abs() for row, numbers in pairs]).mean()


def mean_of_samples(output: Tensor, target: list[Tensor]) -> Tensor:
    """Is the mean over samples of the mean over their numbers."""
    pairs = zip(output[:, :1], target, strict=True)
    return torch.stack([(row - numbers).abs().mean() for row, numbers in pairs]).mean()


@pytest.mark.parametrize(("loss", "warnings"), [(object_mean, 1), (mean_of_samples, 0)])
def test_lists_with_an_entry_per_sample_are_cut_by_entries_into_unequal_parts_too(
    loss: Any, warnings: int, tmp_path: Path
) -> None:
    batches = {"batch_size": 8, "collate": f"{__name__}.collate_lists"}
    batches["sampler"] = {"name": "sequential"}
    fit(tmp_path, loss, train=Objects(), DATA={"TRAIN": batches})
    lines = list_warnings(tmp_path)
    assert len(lines) == warnings
    assert all("over parts of 1 and 3 of them" in line for line in lines)
    assert "cannot be compared" not in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("value", "first"),
    [
        ({"a": torch.arange(3), "b": None}, {"a": torch.arange(1), "b": None}),
        ([torch.zeros(2), torch.zeros(1), torch.zeros(0)], [torch.zeros(2)]),
        (({"n": torch.zeros(2, 4)}, {"n": torch.zeros(0, 4)}, {}), ({"n": torch.zeros(2, 4)},)),
        ([1, 2, 3], [1]),
        ([torch.zeros(3, 2)] * 3, [torch.zeros(1, 2)] * 3),  # three heads
    ],
)
def test_rows_of_nested_values(value: Any, first: Any) -> None:
    torch.testing.assert_close(take_rows(value, slice(0, 1), 3), first)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ({"scores": torch.zeros(4, 2), "kl": torch.zeros(())}, "the model's output['kl'] is one number"),
        ([torch.zeros(4, 2), {"kl": torch.zeros(3, 2)}], "the model's output[1]['kl'] has shape (3, 2)"),
    ],
)  # fmt: skip
def test_output_without_rows_is_named(output: Any, reason: str) -> None:
    with pytest.raises(NoRowsError) as caught:
        compare_means(lambda *_: torch.zeros(()), output, None, samples=4)
    assert str(caught.value) == f"{reason}, without a row for each of the 4 samples"


def scaled(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    return output["scale"] * mse_loss(output["scores"], target)


class Scaled(nn.Linear):
    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        scores = super().forward(inputs)
        return {"scores": scores, "scale": scores.detach().square().mean()}


def test_reason_of_no_comparison_is_in_words(tmp_path: Path) -> None:
    fit(tmp_path, scaled, model=Scaled(4, 4))
    line = (
        "LOSS: scaled cannot be compared over parts of a batch: the model's output['scale'] is one"
    )
    assert f"{line} number, without a row" in (tmp_path / "log.txt").read_text()


SIDES = (INPUTS[:, 0] > 0).long()
"""Two classes, in a random order."""


class ZeroHead(nn.Module):
    """Has the same scores for all samples at the start, per token or per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(inputs)
        return scores


class ZeroTokens(ZeroHead):
    """The same for three tokens."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs)[..., None].expand(-1, -1, 3)


class ZeroProbabilities(ZeroHead):
    """The same with probabilities."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).softmax(1)


TOKENS = torch.where(
    torch.arange(3) <= torch.arange(64)[:, None].square() % 7 % 3, SIDES[:, None], -100
)
"""Of one to three tokens, padded."""


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """Is the mean over the tokens of all samples."""
    return cross_entropy(output, target, reduction="sum") / (target != -100).sum()


def mean_of_masked(output: Tensor, target: Tensor) -> Tensor:
    """Is the mean over samples of the mean over their tokens."""
    losses = cross_entropy(output, target, reduction="none")
    return (losses.sum(1) / (target != -100).sum(1)).mean()


def find_gap(output: Tensor, target: Tensor) -> Tensor:
    """Return the difference of the mean scores of two classes."""
    probabilities = output.softmax(1)[:, 0]
    gap = probabilities[target == 0].mean() - probabilities[target == 1].mean()
    return gap.nan_to_num().abs()


class Dual(nn.Module):
    """Has a multiplier that starts at 0, and is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplier = nn.Parameter(torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + self.multiplier * find_gap(output, target)


class Ascent(nn.Module):
    """Has a multiplier that starts at 0, and changes it itself."""

    multiplier: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("multiplier", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        gap = find_gap(output, target)
        loss = cross_entropy(output, target) + self.multiplier * gap
        if self.training:
            self.multiplier = self.multiplier + gap.detach()
        return loss


class Rising(nn.Module):
    """Has a term that compares samples, whose weight rises from 0."""

    weight = 0.0

    def advance(self, where: float, updates: int) -> None:
        self.weight = where

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + self.weight * find_gap(output, target)


class SampleDual(Dual):
    """Has a multiplier of a mean over samples."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + self.multiplier * output.square().mean()


def probability_loss(output: Tensor, target: Tensor) -> Tensor:
    """Rejects what is not a probability."""
    return nn.functional.binary_cross_entropy(output[:, 0], target.float())


def sample_loss(output: Tensor, target: Tensor) -> Tensor:
    """Is the mean over samples."""
    return cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss", "model", "target", "warnings"),
    [
        (masked_mean, ZeroTokens, TOKENS, 1),
        (Dual(), ZeroHead, SIDES, 1),
        (Ascent(), ZeroHead, SIDES, 1),
        (Rising(), ZeroHead, SIDES, 1),
        (mean_of_masked, ZeroTokens, TOKENS, 0),
        (SampleDual(), ZeroHead, SIDES, 0),
        (probability_loss, ZeroProbabilities, SIDES, 0),
        (sample_loss, ZeroHead, SIDES, 0),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_is_compared_where_all_samples_have_the_same_loss_at_the_start(
    loss: Any,
    model: type[nn.Module],
    target: Tensor,
    warnings: int,
    accumulate: int,
    tmp_path: Path,
) -> None:
    data = TensorDataset(INPUTS, target)
    optimizer = {"name": "sgd", "lr": 0.1, "accumulate": accumulate}
    tested = {"test": data, "DATA": {"TEST": {"batch_size": 32}}} if accumulate == 1 else {}
    fit(tmp_path, loss, model=model(), train=data, OPTIMIZER=optimizer, **tested)
    lines = list_warnings(tmp_path)
    assert len(lines) == warnings
    assert all("samples with perturbed outputs" in line for line in lines)


def test_perturbed_outputs_and_losses_leave_no_trace_in_the_run(tmp_path: Path) -> None:
    data = TensorDataset(INPUTS, SIDES)
    checked = fit(tmp_path / "checked", Dual(), model=ZeroHead(), train=data)
    assert len(list_warnings(tmp_path / "checked")) == 1
    other = fit(tmp_path / "other", Dual(), model=ZeroHead(), train=data, rehearse=False)
    assert other.digest == checked.digest


def by_class(output: Tensor, target: Tensor) -> Tensor:
    """Is the mean over two classes of the mean over their samples."""
    losses = (output[:, 0] - target).square()
    means = [losses[target == side].mean().nan_to_num() for side in (0, 1)]
    return torch.stack(means).mean()


def test_tests_are_compared_with_their_own_samples(tmp_path: Path) -> None:
    # Halves of the training batches have as many samples of each class, those of the test have not.
    train = TensorDataset(INPUTS, torch.arange(64) % 2)
    test = TensorDataset(INPUTS, torch.arange(64) // 32)
    data = {"TRAIN": {"sampler": {"name": "sequential"}}, "TEST": {"batch_size": 48}}
    optimizer = {"name": "sgd", "lr": 0.1}
    fit(tmp_path, by_class, train=train, test=test, DATA=data, OPTIMIZER=optimizer)
    (line,) = list_warnings(tmp_path)
    assert "for the first 48 samples" in line


def test_losses_of_tasks_with_weights_are_not_compared(tmp_path: Path) -> None:
    fit(tmp_path, Contrast(), TASK={"name": f"{__name__}.WeightedByRows"})
    assert list_warnings(tmp_path) == []


def test_check_leaves_no_trace_in_the_run(tmp_path: Path) -> None:
    checked = fit(tmp_path / "checked", Contrast())
    assert fit(tmp_path / "other", Contrast(), rehearse=False).digest == checked.digest


class Balanced(nn.Module):
    """Returns outputs, and a scalar over the batch: `square`, or the mean over samples."""

    def __init__(self, kind: str = "square") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
        self.kind = kind

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        output = self.layers(inputs)
        outputs = {"output": output, "count": torch.tensor(float(len(inputs)))}
        if self.kind == "train" and not self.training:
            return outputs
        mean = output.square().mean()
        if self.kind == "branch":  # linear in the samples unless they take different branches
            share = (inputs.square().sum(1) < 30).float().mean()
            return {**outputs, "aux": (share * output.mean(0)).sum()}
        return {**outputs, "aux": mean if self.kind == "mean" else output.mean(0).square().sum()}


def take_aux(output: Tensor, target: Any) -> Tensor:
    return output


def fit_balanced(folder: Path, kind: str, weight: float | None, accumulate: int) -> list[str]:
    losses: dict[str, Any] = {"main": {"name": "MSELoss", "output": "output"}}
    if weight is not None:
        name = f"{__name__}.take_aux"
        losses["aux"] = {"name": name, "output": "aux", "weight": weight, "splits": ["TRAIN"]}
    torch.manual_seed(1)
    phasetrain.fit(
        Balanced(kind),
        train=DATA,
        loss={"name": "weighted_sum", "losses": losses},
        epochs=1,
        batch_size=16,
        RUN={"dir": str(folder)},
        OPTIMIZER={"name": "sgd", "lr": 0.1, "accumulate": accumulate},
    )
    lines = (folder / "log.txt").read_text().splitlines()
    return [line for line in lines if "LOSS uses the scalar" in line]


@pytest.mark.feature(
    "loss.scalar_output",
    "a warning if the loss uses a scalar that the model computes over a batch that is split",
    "`OPTIMIZER.accumulate`",
)
@pytest.mark.parametrize(
    ("kind", "weight", "accumulate", "is_found"),
    [
        ("square", 0.1, 2, True),
        ("train", 0.1, 2, True),
        ("branch", 0.1, 2, True),
        ("square", 0.1, 1, False),
        ("square", None, 2, False),
        ("mean", 0.1, 2, False),
    ],
)
def test_scalar_outputs_of_the_model_are_reported(
    kind: str, weight: float | None, accumulate: int, *, is_found: bool, tmp_path: Path
) -> None:
    lines = fit_balanced(tmp_path / "run", kind, weight, accumulate)
    assert len(lines) == is_found
    assert all("'aux'" in line and "OPTIMIZER.accumulate = 2" in line for line in lines)


def test_means_of_a_batch_and_of_its_halves() -> None:
    output, target = torch.tensor([[1.0], [2.0], [6.0]]), torch.zeros(3, 1)
    assert compare_means(mse_loss, output, target) == pytest.approx((41 / 3, 41 / 3))
    # The first half is one sample, the second one has two: (1 * 1 + 2 * 6) / 3.
    largest = compare_means(lambda output, target: output.max(), output, target)
    assert largest == pytest.approx((6.0, 13 / 3))
    halved = compare_means(mse_loss, output.bfloat16(), target)
    assert halved == pytest.approx((41 / 3, 41 / 3))
    assert compare_means(mse_loss, output[:1], target[:1]) is None
    with pytest.raises(ValueError, match="each of the 3 samples"):
        compare_means(mse_loss, output, target[:2])
