"""Predictions of a task's model, outside of a run."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phasetrain.config.addons import require_service
from phasetrain.errors import SHAPE_ERRORS, ConfigError
from phasetrain.runtime.nested import map_tensors
from phasetrain.tasks.parts import Parts
from phasetrain.tasks.shape_errors import describe_failed_forward, raise_unless_shape_error

log = logging.getLogger(__name__)


class Predictor:
    """Predicts with the model of a task.

    Attributes:
        transform: transforms of the test split, for raw inputs, an `InputTransform` of the add-on
            deploy; None for a task that `phasetrain.load` has not made, of a run without a test
            split, or without the add-on.
        class_names: name of each class, if the dataset has names.
        reader: reads files as samples of the test split, an `InputReader` of the add-on deploy;
            None like `transform`.
        text_source: where the tokenizer is, a `TextSource` of the add-on text; None like `reader`.
    """

    parts: Parts
    transform: Any = None
    class_names: tuple[str, ...] = ()
    reader: Any = None
    text_source: Any = None

    def predict(
        self, inputs: Any, *, transform: bool | None = None, batch_size: int | None = None
    ) -> Any:
        """Return the model's output in test mode, without gradients, on its device.

        It uses the precision of tests (MACHINE.precision, MACHINE.test_precision), and restores the
        mode of every module.

        Args:
            inputs: a batch `(N, ...)` as the model takes it, after the transforms of a test split:
                a tensor or an array, or a mapping, list or tuple of them; with `transform`, raw
                samples as the dataset gives them, see `InputTransform`. A path of a file or folder,
                an image of Pillow, or a list of them: read and transformed as
                `phasetrain predict` does it.
            transform: apply the transforms of the test split. The default does not, and warns if
                there are any: outputs for raw inputs would be wrong.
            batch_size: maximum number of samples per forward pass; default: all.

        Raises:
            ConfigError: the model does not take them, a file cannot be read, `batch_size` is below
                1, or there are no transforms to apply.
        """
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size}: expected at least 1")
        if self.reader is not None and transform is not False:
            # A text that is to be transformed is a sample, as the dataset `lines` gives it.
            is_image = self.transform and self.transform.scales_bytes
            named = self.reader.read_named(inputs, are_texts_paths=not transform or bool(is_image))
            if named:
                inputs, transform = named, True
        if transform and self.transform is None:
            raise ConfigError(
                "transform = True: the transforms are those of a test split, and this task has "
                "none; load the task of a run with DATA.TEST, or transform the inputs yourself",
                code="predict.no_transform",
            )
        if transform and self.transform is not None:
            inputs = self.transform(inputs)
        elif transform is None and self.transform:
            log.warning(
                "predict: %s.transforms are not applied (%s); set transform=True for raw inputs, "
                "or transform=False for inputs that are transformed already",
                self.transform.split,
                ", ".join(self.transform.described),
            )
        tensors = map_tensors(inputs, torch.from_numpy, np.ndarray, any_mapping=True)
        size = _samples(tensors)
        each = max(1, size if batch_size is None else batch_size)
        with (
            torch.no_grad(),
            eval_mode(self.parts.model),
            self.parts.machine.autocast(train=False),
        ):
            outputs = [
                self._predict_slice(tensors, slice(at, at + each))
                # At least one pass, so that empty inputs give an empty output of the right shape.
                for at in range(0, max(1, size), each)
            ]
        if len(outputs) == 1:
            return outputs[0]
        return _concatenate(outputs)

    def generate(
        self,
        prompts: str | Sequence[str] = "",
        *,
        tokens: int = 100,
        samples: int = 1,
        sampling: Any = None,
        tokenizer: str | None = None,
        cache: bool = True,
    ) -> list[list[str]]:
        """Return `samples` continuations of each prompt by a language model, without the prompt.

        A text is a function of the prompt, the seed, its number among the samples, and the model:
        other prompts of the call do not change it. Beyond the context of the model, the last tokens
        that fit are continued.

        Args:
            prompts: texts to continue; an empty one begins a document.
            tokens: maximum number of tokens; a text ends earlier with its document.
            samples: texts per prompt.
            sampling: how tokens are drawn, a `Sampling` of the add-on text; by default with
                temperature 1 and seed 0.
            tokenizer: path of a `tokenizer.json`; by default the tokenizer of the run's data.
            cache: keep keys and values of earlier tokens, if the model can; the scores are the same
                up to rounding.

        Raises:
            ConfigError: there is no tokenizer, it is not the one of the training, a value is of a
                wrong type or outside its range, the model returns no scores of tokens, or the
                add-on text is not installed.
        """
        generate_text = require_service("generate_text", "text", "generate")
        texts: list[list[str]] = generate_text(
            self,
            prompts,
            tokens=tokens,
            samples=samples,
            sampling=sampling,
            tokenizer=tokenizer,
            cache=cache,
        )
        return texts

    def _predict_slice(self, tensors: Any, part: slice) -> Any:
        model = self.parts.model
        device = self.parts.machine.device
        try:
            return model(map_tensors(tensors, lambda one: one[part].to(device)))
        except SHAPE_ERRORS as error:
            raise_unless_shape_error(error)
            raise ConfigError(
                describe_failed_forward(model, error, tensors), code="config.misfit"
            ) from error


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and restore the mode of every module afterwards."""
    # Module by module: frozen parts may be in test mode while the rest trains.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _samples(value: Any) -> int:
    """Return the length of the first tensor in nested inputs."""
    if isinstance(value, Tensor):
        if value.ndim:
            return len(value)
        return 0
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    first = next(iter(items), None)
    if first is None:
        raise ConfigError(
            f"inputs of type {type(value).__name__}: expected a batch as the model takes it: a "
            "tensor or an array (N, ...), or a mapping or list of them",
            code="predict.wrong_type",
        )
    return _samples(first)


def _concatenate(parts: list[Any]) -> Any:
    """Return the outputs of successive batches as one output."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: _concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_concatenate(list(items)) for items in zip(*parts, strict=True))
    raise ConfigError(
        f"the model returns {type(first).__name__}, which cannot be concatenated; leave out "
        "batch_size"
    )
