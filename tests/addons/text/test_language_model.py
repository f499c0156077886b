"""Tokens are what counts: in the loss, in meters, and in the share of a micro-batch in an
update."""

import math
import re
from dataclasses import replace

import pytest
import torch
from raising import raises
from torch import Tensor, nn

from phasetrain.addons.text.blocks import IGNORED
from phasetrain.addons.text.language_model import LanguageModel
from phasetrain.addons.text.transformer import Transformer
from phasetrain.data import SampleError
from phasetrain.distributed import World
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.losses import CrossEntropy
from phasetrain.meters import METERS
from phasetrain.optim import Updater
from phasetrain.runtime.machine import Machine
from phasetrain.tasks import Parts, Position, Supervised
from phasetrain.tasks.parts import StepEvents

AT = Position("train", updates=3, step=1, where=0.25)
TRAIN = Phase(0, "train", 0, 0, 2, 0, 8, 4)
LENGTHS = (6, 1, 4, 2, 5, 3, 6)
"""Tokens that count in each of seven samples; every other place is to be ignored."""


def batch(begin: int = 0, end: int = len(LENGTHS)) -> Batch:
    """Return some of seven samples of six places."""
    tokens = torch.randint(9, (len(LENGTHS), 7), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for row, length in enumerate(LENGTHS):
        targets[row, length:] = IGNORED
    ids = torch.arange(begin, end)
    return Batch(tokens[begin:end, :-1].contiguous(), targets[begin:end], ids, end - begin)


def task(kind: type[Supervised] = LanguageModel) -> Supervised:
    torch.manual_seed(0)
    model = Transformer(vocabulary=9, context=6, width=8, depth=1, heads=2).double()
    meters = {
        "loss": METERS.build("loss"),
        "perplexity": METERS.build("perplexity"),
        "accuracy": METERS.build("accuracy"),
    }
    updater = Updater(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    return kind(
        Parts(model, CrossEntropy(), meters, updater, {}, Machine(torch.device("cpu")), World(), 0)
    )


def weights(made: Supervised) -> Tensor:
    return torch.cat([value.detach().flatten() for value in made.model.state_dict().values()])


def trained(
    pieces: list[tuple[int, int]], kind: type[Supervised] = LanguageModel
) -> tuple[Tensor, float, dict[str, float]]:
    made = task(kind)
    made.begin(TRAIN, fresh=True)
    for _ in range(3):
        out = made.train_step([batch(*piece) for piece in pieces], AT, StepEvents())
    return weights(made), float(out.loss), made.measure(TRAIN)


@pytest.mark.feature("hooks.on_output")
def test_hook_replaces_the_scores_before_the_loss() -> None:
    made = task()
    made.begin(TRAIN, fresh=True)
    events = StepEvents({"on_output": [lambda batch, scores: scores * 0]})
    out = made.train_step([batch(0, 7)], AT, events)
    assert float(out.loss) == pytest.approx(math.log(9))  # every token is as likely


class TestMicroBatches:
    @pytest.mark.feature(
        "43",
        "gradient accumulation weighted by samples or tokens",
        "`OPTIMIZER.accumulate`, `Task.weight_of`",
    )
    @pytest.mark.parametrize(
        "pieces",
        [
            [(0, 2), (2, 4), (4, 6), (6, 7)],
            [(0, 1), (1, 2), (2, 3), (3, 7)],
            [(0, 6), (6, 7)],
            [(at, at + 1) for at in range(7)],
        ],
        ids=str,
    )
    def test_micro_batches_give_the_update_of_the_whole_batch(
        self, pieces: list[tuple[int, int]]
    ) -> None:
        whole, loss, metrics = trained([(0, 7)])
        found, other, measured = trained(pieces)
        assert float((whole - found).abs().max()) < 1e-12
        assert other == pytest.approx(loss, rel=1e-12)
        assert measured == pytest.approx(metrics, rel=1e-12)

    @pytest.mark.feature("43")
    def test_mean_of_means_gives_another_update(self) -> None:
        class BySamples(LanguageModel):
            def weight_of(self, batch: Batch) -> int:
                return batch.size

        whole, _, _ = trained([(0, 7)])
        found, _, _ = trained([(0, 2), (2, 4), (4, 6), (6, 7)], BySamples)
        assert float((whole - found).abs().max()) > 1e-3

    def test_micro_batch_without_targets_is_skipped(self) -> None:
        def step(*others: Batch) -> tuple[Tensor, float]:
            made = task()
            made.begin(TRAIN, fresh=True)
            out = made.train_step([batch(0, 3), *others], AT, StepEvents())
            return weights(made), float(out.loss)

        nothing = batch(3, 5)
        nothing.target = torch.full_like(nothing.target, IGNORED)
        whole, loss = step()
        for others in ([nothing], [batch(3, 5).as_padding()]):
            found, other = step(*others)
            assert torch.equal(found, whole)
            assert other == loss

    def test_step_without_targets_is_rejected(self) -> None:
        nothing = batch()
        nothing.target = torch.full_like(nothing.target, IGNORED)
        with pytest.raises(SampleError, match=r"^DATA\.TRAIN: .*\bstep 2\b"):
            task().train_step([nothing], AT, StepEvents())


class TestForward:
    def test_loss_and_outputs_are_per_token(self) -> None:
        made, given = task(), batch()
        out = made.forward(given)
        counted = given.target != IGNORED
        logs = made.model(given.input).log_softmax(-1)
        each = -logs.gather(2, given.target.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(out.loss, each[counted].mean())
        assert (out.weight, out.samples, out.output.shape, out.target.shape) == (
            27,
            7,
            (42, 9),
            (42,),
        )
        assert torch.equal(out.mask, counted.flatten())
        assert int(out.target.min()) >= 0

    def test_batch_without_padding_has_no_mask(self) -> None:
        assert task().forward(batch(0, 1)).mask is None

    def test_perplexity_and_accuracy_are_over_tokens(self) -> None:
        made = task()
        made.begin(TRAIN, fresh=True)
        made.model.eval()
        for begin, end in ((0, 1), (1, 7)):
            made.test_step([batch(begin, end)], AT, StepEvents())
        found, out = made.measure(TRAIN), made.forward(batch())
        assert found["perplexity"] == pytest.approx(math.exp(float(out.loss.detach())), rel=1e-12)
        right = (out.output.argmax(1) == out.target) & out.mask
        assert found["accuracy"] == pytest.approx(int(right.sum()) / 27)


class TestMisfits:
    def message(self, made: Supervised, given: Batch) -> str:
        with pytest.raises(ConfigError) as caught:
            made.forward(given)
        return str(caught.value)

    def test_token_outside_the_vocabulary_is_named_with_its_sample(self) -> None:
        given = batch()
        given.ids, given.target[4, 1] = torch.arange(40, 47), 9
        assert re.search(r"^DATA: sample 44 .*token 9 .*9 tokens", self.message(task(), given))

    def test_targets_other_than_tokens_are_rejected(self) -> None:
        for target, told in (
            (torch.zeros(7, 6), "float32 (7, 6)"),
            (torch.zeros(7).long(), "int64 (7,)"),
            (None, "NoneType"),
        ):
            given = batch()
            given.target = target
            message = self.message(task(), given).replace("torch.", "")
            assert "int64 (N, T)" in message
            assert told in message

    def test_model_with_one_row_per_sample_is_rejected(self) -> None:
        made = task()
        made.model = made.parts.model.__class__(9, 6, 8, 1, 2).double()
        made.model.forward = lambda tokens: torch.zeros(7, 9)  # type: ignore[method-assign]
        assert re.search(r"Transformer .*\(7, 9\) .*\(7, 6\)", self.message(made, batch()))

    def test_loss_without_scores_is_rejected(self) -> None:
        made = task()
        made.loss = nn.MSELoss()
        assert self.message(made, batch()).startswith("LOSS: ")

    def test_perplexity_of_a_smoothed_loss_is_rejected(self) -> None:
        made = task()
        with pytest.raises(
            ConfigError,
            match=r"METERS\.perplexity and LOSS\.label_smoothing = 0\.1:",
        ):
            LanguageModel(replace(made.parts, loss=CrossEntropy(0.1)))
        LanguageModel(replace(made.parts, loss=CrossEntropy(0.1), meters={}))

    def test_bits_per_byte_of_tokens_without_a_number_of_bytes_are_rejected(self) -> None:
        made = task()
        meters = {"bits": METERS.build("bits_per_byte")}
        with raises(ConfigError, code="meters.no_token_bytes", key="METERS.bits"):
            LanguageModel(replace(made.parts, meters=meters))
        counted = {"bits": METERS.build("bits_per_byte", facts={"token_bytes": [1] * 9})}
        LanguageModel(replace(made.parts, meters=counted))

    @pytest.mark.parametrize("vocabulary", [9, 10])
    def test_model_with_fewer_tokens_than_the_data_is_rejected(self, vocabulary: int) -> None:
        parts = replace(task().parts, known_facts={"vocabulary": vocabulary})
        if vocabulary == 9:
            LanguageModel(parts)
            return
        with raises(ConfigError, code="tokens.outside_vocabulary", key="MODEL"):
            LanguageModel(parts)
