"""Averages of weights equal those computed by hand and by torch, and stand still where an update
was not made."""

from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from phasetrain.distributed import buffer_lookup
from phasetrain.errors import ConfigError
from phasetrain.optim.averaging.average_settings import (
    EMASettings,
    ScheduleFreeSettings,
    SWASettings,
)
from phasetrain.optim.averaging.averages import (
    EMA,
    SWA,
    ScheduleFree,
    copy_model,
    record_statistics,
    set_statistics,
)
from phasetrain.optim.schedules.durations import RunLength
from phasetrain.optim.update.nonfinite import GuardSettings
from phasetrain.optim.update.updater import Updater

RUN = RunLength(updates=12, updates_per_epoch=3, batch_size=4)


class Scalar(nn.Module):
    """One weight."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value))


def ema(model: nn.Module, **settings: Any) -> EMA:
    return EMA(model, copy_model(model, "ema"), EMASettings(**settings))


def swa(model: nn.Module, **settings: Any) -> SWA:
    return SWA(model, copy_model(model, "swa"), SWASettings(**settings), RUN)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def moved(model: nn.Module, number: int) -> None:
    """Move weights and statistics as an update would."""
    torch.manual_seed(number)
    model(torch.randn(8, 3)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


class Aside(torch.optim.SGD):
    """A schedule-free optimizer in miniature: the weights for use are one higher."""

    def train(self) -> None:
        raise AssertionError("it would move the weights")

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight += 1
            group["train_mode"] = False


class TestScheduleFree:
    @pytest.mark.feature("optimizer.schedule_free")
    def test_copy_gets_the_weights_for_use_and_the_model_keeps_its_own(self) -> None:
        model = nn.Sequential(Scalar(0.1), Scalar(5.0))
        model[1].weight.requires_grad_(requires_grad=False)
        optimizer = Aside([model[0].weight], lr=0.1)
        average = ScheduleFree(
            model, copy_model(model, "schedule_free"), ScheduleFreeSettings(), [optimizer]
        )
        place = model[0].weight.data_ptr()
        average.update(1)
        model[0].weight.data.fill_(0.2)
        average.update(2)
        assert [float(one) for one in average.module.parameters()] == pytest.approx([1.2, 5.0])
        assert torch.equal(model[0].weight, torch.tensor(0.2))
        assert model[0].weight.data_ptr() == place
        assert optimizer.param_groups[0]["train_mode"] is True

    def test_running_statistics_are_taken_before_each_test(self) -> None:
        model = net()
        settings = ScheduleFreeSettings(batches=7)
        average = ScheduleFree(model, copy_model(model, "schedule_free"), settings, [])
        assert (average.settle(), len(average.norms), average.batches) == (True, 1, 7)
        assert ScheduleFree(model, copy_model(model, "x"), settings, [], ["1"]).settle() is False


class TestEMA:
    def test_average_is_in_eval_mode_before_its_first_test(self) -> None:
        model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
        modes = [module.training for module in ema(model).module.modules()]
        assert (modes, model.training) == ([False] * 3, True)

    def test_values_equal_hand_computed_ones(self) -> None:
        model = Scalar(1.0)
        average = ema(model, decay=0.5, warmup=False)
        found = []
        for updates, value in enumerate([2.0, 4.0, 4.0], 1):
            model.weight.data.fill_(value)
            average.update(updates)
            found.append(float(average.module.weight))
        assert found == [1.5, 2.75, 3.375]
        assert float(model.weight.detach()) == 4.0

    def test_warmup_lowers_the_decay_at_first(self) -> None:
        model = Scalar(0.0)
        average = ema(model, decay=0.15)
        model.weight.data.fill_(1.0)
        average.update(1)
        assert float(average.module.weight) == pytest.approx(1 - 0.1)  # decay 1 / 10
        average.update(2)
        assert float(average.module.weight) == pytest.approx(
            1 - 0.1 * 0.15
        )  # 2 / 11 is more than 0.15

    @pytest.mark.feature(
        "model.ema_match", "average of one of several networks", "`MODEL.ema.match`"
    )
    def test_match_selects_what_is_averaged(self) -> None:
        model = nn.ModuleDict({"generator": Scalar(1.0), "critic": Scalar(1.0)})
        average = ema(model, decay=0.5, warmup=False, match=("generator.*",))
        for part in model.values():
            part.weight.data.fill_(2.0)
        average.update(1)
        found = {name: float(one) for name, one in average.module.state_dict().items()}
        assert found == {"generator.weight": 1.5, "critic.weight": 2.0}

    def test_match_without_a_parameter_is_rejected(self) -> None:
        with raises(ConfigError, code="config.no_match", key="MODEL.ema.match"):
            ema(Scalar(), match=("wieght",))

    def test_average_is_updated_every_n_updates(self) -> None:
        model = Scalar(0.0)
        average = ema(model, decay=0.5, warmup=False, every=2)
        model.weight.data.fill_(1.0)
        found = []
        for updates in range(1, 5):
            average.update(updates)
            found.append(float(average.module.weight))
        assert found == [0.0, 0.5, 0.5, 0.75]

    def test_values_equal_those_of_torch(self) -> None:
        model = net()
        average, other = (
            ema(model, decay=0.9, warmup=False),
            AveragedModel(
                model,
                multi_avg_fn=get_ema_multi_avg_fn(0.9),
            ),
        )
        other.update_parameters(model)  # the first call of torch's copies
        for updates in range(1, 6):
            moved(model, updates)
            average.update(updates)
            other.update_parameters(model)
        for (name, own), torchs in zip(
            average.module.named_parameters(), other.module.parameters(), strict=True
        ):
            torch.testing.assert_close(own, torchs, msg=name)
        assert not torch.equal(average.module[0].weight, model[0].weight)

    def test_buffers_are_copied(self) -> None:
        model = net()
        model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        model.register_buffer("queue", torch.zeros(2))
        average = ema(model, decay=0.9, warmup=False, statistics="copy")
        moved(model, 0)
        model.queue += 5.0  # type: ignore[operator]
        average.update(1)
        assert int(average.module[1].num_batches_tracked) == 1
        assert torch.equal(average.module[1].running_mean, model[1].running_mean)
        assert average.module.mask.tolist() == [0.0, -torch.inf]
        assert average.module.queue.tolist() == [5.0, 5.0]

    @pytest.mark.feature(
        "model.ema_statistics", "EMA of batch-norm statistics", "`MODEL.ema.statistics`"
    )
    def test_statistics_are_averaged(self) -> None:
        model = net()
        model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        average = ema(model, decay=0.9, warmup=False)
        moved(model, 0)
        average.update(1)
        for name, before in (("running_mean", 0.0), ("running_var", 1.0)):
            own = average.module[1].get_buffer(name)
            torch.testing.assert_close(own, 0.9 * before + 0.1 * model[1].get_buffer(name))
        assert int(average.module[1].num_batches_tracked) == 1
        assert average.module.mask.tolist() == [0.0, -torch.inf]

    def test_statistics_of_copied_parameters_are_copied(self) -> None:
        model = nn.Sequential(net(), net())
        average = ema(model, decay=0.9, warmup=False, match=("0.*",))
        for part in model:
            moved(part, 0)
        average.update(1)
        same = [
            torch.equal(own[1].running_mean, now[1].running_mean)
            for own, now in zip(average.module, model, strict=True)
        ]
        assert same == [False, True]

    def test_replaced_buffer_is_copied(self) -> None:
        model = Scalar()
        model.register_buffer("seen", torch.zeros(1))
        average = ema(model)
        model.seen = torch.ones(3)
        average.update(1)
        assert average.module.seen.tolist() == [1.0, 1.0, 1.0]
        model.seen = None
        average.update(2)
        assert average.module.seen is None


class TestSkippedUpdate:
    @pytest.mark.parametrize("skipped", [True, torch.tensor(1.0), torch.tensor(data=True)])
    def test_average_is_unchanged(self, skipped: bool | Tensor) -> None:
        model = net()
        average = ema(model, decay=0.5)
        before = copy_model(average.module, "ema")
        moved(model, 0)
        average.update(1, skipped=skipped)
        assert equal(average.module, before)
        average.update(1, skipped=False)
        assert not equal(average.module, before)

    @pytest.mark.parametrize("made", [torch.tensor(0.0), torch.tensor(data=False)])
    def test_average_is_updated_if_the_flag_on_the_device_is_0(self, made: Tensor) -> None:
        model = net()
        one, other = ema(model, decay=0.9, warmup=False), ema(model, decay=0.9, warmup=False)
        moved(model, 0)
        one.update(1, skipped=made)
        other.update(1)
        for own, its in zip(
            one.module.state_dict().values(), other.module.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(own, its)

    @pytest.mark.parametrize(
        "how", ["at once", "on the device", "by the scaler", "by the scaler, late"]
    )
    def test_average_skips_what_the_updater_skips(self, how: str) -> None:
        model = net()
        scaled, late = "scaler" in how, how in ("on the device", "by the scaler, late")
        updater = Updater(
            torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
            scaler=GradScaler("cpu", init_scale=2.0**16) if scaled else None,
            guard=GuardSettings("skip", buffers=buffer_lookup(model), lag=int(late)),
        )
        average, moves = ema(model, decay=0.5, warmup=False), []
        for updates in range(1, 6):
            before = copy_model(average.module, "ema")
            loss = model(torch.randn(8, 3)).square().mean()
            updater.backward(
                loss * (1e38 if scaled and updates == 3 else torch.nan if updates == 3 else 1.0)
            )
            updater.step()
            average.update(updates, skipped=updater.skipped)
            moves.append(not equal(average.module, before))
        assert moves == [True, True, False, True, True]
        updater.resolve()
        assert updater.guard.skipped == 1

    def test_swa_includes_the_unchanged_weights(self) -> None:
        model = Scalar(3.0)
        average = swa(model, start=0.0, every="1 updates")
        average.update(1, skipped=True)
        assert average.taken == 1


class TestSWA:
    @pytest.mark.parametrize(
        ("start", "every", "moments"),
        [
            (0.75, "1 epochs", [9, 12]),
            ("6 updates", "2 updates", [6, 8, 10, 12]),
            ("50 %", 0.25, [6, 9, 12]),
            (0.0, "1 epochs", [3, 6, 9, 12]),
            (1.0, "1 epochs", [12]),
            ("10 samples", "4 updates", [3, 7, 11]),  # 2.5 updates
            (0.9, "1 samples", [11, 12]),
        ],
    )
    def test_weights_are_added_at_these_updates(
        self, start: float | str, every: float | str, moments: list[int]
    ) -> None:
        average, found = swa(Scalar(), start=start, every=every), []
        for updates in range(1, 13):
            before = average.taken
            average.update(updates)
            found += [updates] if average.taken > before else []
        assert found == moments

    def test_average_is_the_plain_mean(self) -> None:
        model = Scalar(0.0)
        average = swa(model, start="2 updates", every="1 updates")
        found = []
        for updates, value in enumerate([100.0, 1.0, 3.0, 8.0], 1):
            model.weight.data.fill_(value)
            average.update(updates)
            found.append(float(average.module.weight))
        assert found == [0.0, 1.0, 2.0, 4.0]

    def test_average_without_weights_is_the_model(self) -> None:
        model = net()
        average = swa(model)
        moved(model, 0)
        assert not equal(average.module, model)
        average.settle()
        assert equal(average.module, model)
        average.update(9)
        moved(model, 1)
        average.settle()
        assert not equal(average.module, model)

    def test_count_is_saved(self) -> None:
        one, other = swa(Scalar(), start=0.0), swa(Scalar(), start=0.0)
        one.update(3)
        other.load_state_dict(one.state_dict())
        assert other.taken == 1
        assert list(one.stateful()) == ["swa", "swa.taken"]

    @pytest.mark.parametrize("start", ["13 updates", "5 epochs"])
    def test_start_beyond_the_run_is_rejected(self, start: str) -> None:
        with pytest.raises(ConfigError, match=rf"^MODEL.swa.start = '{start}':"):
            swa(Scalar(), start=start)

    def test_bad_duration_is_rejected(self) -> None:
        with raises(ConfigError, key="MODEL.swa.every", given="'2 moons'"):
            swa(Scalar(), every="2 moons")

    def test_frozen_batch_norms_keep_their_statistics(self) -> None:
        model = net()
        assert len(swa(model).norms) == 1
        assert SWA(model, copy_model(model, "swa"), SWASettings(), RUN, frozen=["1"]).norms == []


def test_batch_norm_statistics_equal_those_of_torch() -> None:
    model, other = net().eval(), net()
    batches = [torch.randn(8, 3, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    norms, found = [model[1]], list[Tensor]()
    before = model(batches[0])
    for batch in batches:
        with record_statistics(norms, found), torch.no_grad():
            model(batch)
    set_statistics(norms, torch.stack(found).mean(0))
    update_bn(batches, other)
    torch.testing.assert_close(model[1].running_mean, other[1].running_mean)
    torch.testing.assert_close(model[1].running_var, other[1].running_var)
    assert (model[1].training, model[1].momentum) == (False, 0.1)
    assert model[1].num_batches_tracked == 0
    assert not torch.equal(model(batches[0]), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_rejected(dtype: torch.dtype) -> None:
    with raises(ConfigError, key="MODEL.ema"):
        ema(net().to(dtype))


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    average = ema(model, decay=0.5, warmup=False)
    with torch.no_grad():
        model[0].weight += 1.0
    before = average.module[0].weight.clone()
    average.update(1)
    assert average.module[0].weight is average.module[1].weight
    torch.testing.assert_close(average.module[0].weight, before + 0.5)


def test_model_that_cannot_be_copied_is_rejected() -> None:
    model = Scalar()
    model.computed = model.weight * 2  # no leaf, which torch does not copy
    with pytest.raises(
        ConfigError,
        match=r"^MODEL\.ema .*\bScalar\b",
    ):
        copy_model(model, "ema")


def test_average_requires_no_gradient() -> None:
    assert not any(one.requires_grad for one in ema(net()).module.parameters())
