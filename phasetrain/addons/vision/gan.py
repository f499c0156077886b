"""Generative adversarial networks for images of given classes, measured by a trained classifier."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from phasetrain.addons.vision.distillation import MakeModel, build_teacher
from phasetrain.engine.batch import Batch, GeneratedOutput, StepOutput
from phasetrain.engine.position import Position
from phasetrain.errors import ConfigError
from phasetrain.models.prepare import CompiledModel
from phasetrain.runtime.machine import mix_seed, seed_of
from phasetrain.tasks.base import TASKS, Task
from phasetrain.tasks.parts import Parts, StepEvents
from phasetrain.tasks.state import Stateful

JUDGE = "TASK.judge"


@TASKS.register("gan")
class GAN(Task):
    """Trains a generator of images against a critic (Goodfellow et al. 2014, arXiv:1406.2661), with
    the non-saturating loss; each has its own optimizer, the critic `OPTIMIZER.others.critic`.

    Tests generate an image for each sample of the split, of its class and from noise that is a
    function of the seed and the sample, so that every test and any number of ranks compare the same
    images. A classifier, the judge, sees real and generated images: the output is its scores of the
    generated ones, for meters such as `accuracy`, and its features of both are compared by
    `frechet_distance`. Its weights are not in a checkpoint: a digest is, and a resume with other
    weights is rejected.

    The model has a `generator`, called with noise `(N, generator.noise)` and classes `(N,)`, and a
    `critic`, called with images and classes, which returns scores `(N,)`.

    Args:
        parts: fact; parts of the task.
        make_model: fact; makes models.
        judge: `name` of a model, its parameters, and `weights` as MODEL.weights.
        layer: name of the layer of the judge whose input are the features.
        generator_every: updates of the critic per update of the generator.

    Raises:
        ConfigError: the model is compiled, it has no generator and critic, there is no optimizer
            for the critic, the judge has no weights, or it has no such layer.
    """

    separate_updaters = True
    uses_loss = False

    def __init__(
        self,
        parts: Parts,
        make_model: MakeModel,
        judge: Mapping[str, Any],
        layer: str = "head",
        generator_every: int = 1,
    ) -> None:
        super().__init__(parts)
        if not (hasattr(parts.model, "generator") and hasattr(parts.model, "critic")):
            raise ConfigError(
                f"MODEL: {type(parts.model).__name__} has no `generator` and `critic`, which "
                "TASK.name = 'gan' trains; use conditional_gan",
                code="config.misfit",
            )
        if isinstance(parts.train_model, CompiledModel):
            raise ConfigError(
                "MACHINE.compile: the task gan calls generator and critic by themselves, and only "
                "calls of the whole model are compiled; set MACHINE.compile=null",
                code="config.conflict",
            )
        if parts.updater is not None and "critic" not in parts.other_updaters:
            raise ConfigError(
                "OPTIMIZER.others: the critic needs an optimizer of its own; set "
                "OPTIMIZER.others.critic={name: adam, match: 'critic.*'}",
                code="config.missing_part",
            )
        if generator_every < 1:
            raise ConfigError(f"TASK.generator_every = {generator_every}: expected at least 1")
        self.generator_every = generator_every
        self.judge = build_teacher(parts, make_model, judge, JUDGE)
        self._layer = find_layer(self.judge.model, layer)
        self._noise_seed = seed_of(parts.seed, "test noise")

    def train_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        """Step the critic, and in every n-th update the generator."""
        self.begin_update(at)
        done = self.gradient_pass(batches, at, events, forward=self._critic_loss, updater="critic")
        self.step_updater(self.updaters["critic"], done, at, events)
        # By the number of the update and not by a counter, so that a resume needs no state.
        if (at.updates + 1) % self.generator_every == 0:
            done += self.gradient_pass(
                done.batches, at, events, forward=self._generator_loss, first=False, stream=1
            )
        return self.update(done, at, events)

    def forward(self, batch: Batch) -> StepOutput:
        """Generate an image for each sample, and let the judge compare it with the real one."""
        if self.model.training:
            return self._critic_loss(batch)
        images = self._networks.generator(self._noise_of(batch), batch.target)
        real, _ = self._judge(batch.input)
        generated, scores = self._judge(images)
        loss = self._compare(batch, images)
        return GeneratedOutput(
            loss,
            batch.size,
            batch.size,
            scores,
            batch.target,
            batch.mask,
            batch.ids,
            images=images,
            features=generated,
            real_features=real,
        )

    @property
    def _networks(self) -> Any:
        """The model under training or test, which may be an average of the trained one."""
        return self.model

    def stateful(self) -> dict[str, Stateful]:
        """Return every part that learns or accumulates, and the digest of the judge."""
        return {**super().stateful(), "judge": self.judge}

    def _critic_loss(self, batch: Batch) -> StepOutput:
        with torch.no_grad():
            # The critic's update has no use for the gradient of the generator.
            images = self._generate(batch)
        loss = self._compare(batch, images)
        return StepOutput(loss, batch.size, batch.size, logs={"critic": loss.detach()})

    def _generator_loss(self, batch: Batch) -> StepOutput:
        # Only the generator learns from it: a pass leaves gradients on the weights of its updater
        # alone.
        loss = softplus(-self._networks.critic(self._generate(batch), batch.target).float()).mean()
        return StepOutput(loss, batch.size, batch.size, logs={"generator": loss.detach()})

    def _compare(self, batch: Batch, images: Tensor) -> Tensor:
        """Return the loss of the critic."""
        real = self._networks.critic(batch.input, batch.target).float()
        generated = self._networks.critic(images, batch.target).float()
        return (softplus(-real) + softplus(generated)).mean()

    def _generate(self, batch: Batch) -> Tensor:
        noise = torch.randn(
            len(batch.input), self._networks.generator.noise, device=batch.input.device
        )
        images: Tensor = self._networks.generator(noise, batch.target)
        return images

    def _noise_of(self, batch: Batch) -> Tensor:
        """Return noise that is a function of the samples; zeros for those that do not count."""
        noise = torch.zeros(len(batch.input), self._networks.generator.noise)
        # On the CPU: each kind of device would draw other numbers from the same seed.
        generator = torch.Generator()
        counted = torch.ones(len(noise), dtype=torch.bool)
        if batch.mask is not None:
            counted = batch.mask.cpu()
        places = counted.nonzero()[:, 0].tolist()
        for row, number in zip(places, batch.ids.tolist(), strict=True):
            generator.manual_seed(mix_seed(self._noise_seed, number))
            noise[row] = torch.randn(noise.shape[1], generator=generator)
        return noise.to(batch.input.device)

    def _judge(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features `(N, D)` and scores `(N, classes)` of images."""
        seen: list[Tensor] = []
        hook = self._layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            scores: Tensor = self.judge(images)
        finally:
            hook.remove()
        return seen[0].flatten(1), scores


def find_layer(judge: nn.Module, name: str) -> nn.Module:
    """Return a layer of the judge.

    Raises:
        ConfigError: there is no such layer.
    """
    layers = dict(judge.named_modules())
    if name not in layers or not name:
        raise ConfigError(
            f"TASK.layer = {name!r}: {type(judge).__name__} has no such layer; it has "
            f"{', '.join(list(layers)[1:])}",
            code="config.no_match",
        )
    layer: nn.Module = layers[name]
    return layer
