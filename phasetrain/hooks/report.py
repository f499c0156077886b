"""Writes report.html at the end of a run, with what the model predicts in tests (hook `report`)."""

import logging
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from phasetrain.data.datasets import Described
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.error_policy import OnException
from phasetrain.meters import ConfusionMatrix
from phasetrain.meters.classification.class_scores import (
    ClassScores,
    make_class_labels,
    read_scores,
    require_single_label,
)
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.report import write_report
from phasetrain.runs.report.images import make_data_url, normalize_pixels

log = logging.getLogger(__name__)

FILE = "predictions.json"
"""Name of the file in the run folder that a report takes predictions from."""

CLASSES = 200
"""Classes up to which confusions are counted."""

WRITE_SECONDS = 10.0
"""Between two writes of predictions.json while the run goes on; at its end it is written in any
case."""


@HOOKS.register("report")
class Report(Hook):
    """Writes `report.html` once everything else is done, whatever the end of the run, and never
    fails it.

    In tests of tasks that take samples for classes it counts which class is taken for which, over
    all processes, and keeps some samples of the first batch, with label and prediction, as small
    images where they are images. Train steps it leaves alone.

    Args:
        samples: samples of the first batch that are kept, and mistakes in it; 0 keeps none.
        pixels: of the longer side of an image; larger ones are made smaller.
        confusion: count confusions, for up to 200 classes.
    """

    observe_only = True
    main_only = False  # confusions are added up over all processes
    is_single_label = True
    policy: OnException = "ignore"

    def __init__(self, samples: int = 12, pixels: int = 64, *, confusion: bool = True) -> None:
        if samples < 0 or pixels < 8:
            raise ValueError(
                f"samples = {samples} and pixels = {pixels}: expected samples from 0 and pixels from 8"
            )
        self.samples = samples
        self.pixels = pixels
        self.confusion = confusion
        self._found: dict[str, dict[str, Any]] = {}
        self._written = -WRITE_SECONDS
        self._pending = False
        self._warned = set[str]()
        self._looks = False
        self._processes = 1
        self._batch: Batch | None = None
        self._names: tuple[str, ...] | None = None
        self._kept: dict[str, Any] | None = None
        self._counts: ConfusionMatrix | None = None
        self._loaded: dict[str, Any] = {}

    def on_start(self, run: Run) -> None:
        """Take over what an attempt before has kept, and have the report written when the folder is
        closed."""
        folder = run.folder
        self._processes = run.world.size
        if folder is None or not run.world.is_main:
            return
        before = folder.storage.read_json(folder.file(FILE))
        if isinstance(before, dict):
            self._found = {
                split: one for split, one in before.items() if _is_reached(one, run.state.updates)
            }
        folder.before_close.append(lambda: self._finish(folder))

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Begin to look at a test, or go on where a checkpoint was made in the midst of one."""
        self._looks = not phase.is_train
        self._kept = None
        self._counts = None
        loaded, self._loaded = self._loaded, {}
        if phase.is_train:
            return
        self._names = _class_names(run, phase)
        if run.state.step:
            self._looks = loaded.get("processes") == run.world.size
            self._kept = loaded.get("kept")
            if self._looks and loaded.get("counts") is not None:
                self._counts = self._matrix(len(loaded["counts"]))
                self._counts.load_state_dict(
                    {"counts": loaded["counts"], "outside": loaded["outside"]}
                )

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Hold the first batch of a test until the model has seen it."""
        if self._looks and self._kept is None:
            self._batch = batch

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Count confusions, and keep samples of the first batch."""
        if not self._looks:
            return
        batch, self._batch = self._batch, None
        self._looks = (
            False  # where the rest fails, what was found so far is no longer of the whole test
        )
        try:
            found = require_single_label("report", read_scores("report", out).as_two_classes(0.0))
            classes = found.scores.shape[1]
            if self.confusion and classes <= CLASSES:
                if self._counts is None:
                    self._counts = self._matrix(classes).to(found.scores.device)
                self._counts.update(out)
        except (ValueError, IndexError):  # it does not tell classes
            return
        if batch is not None and run.world.is_main:
            if self.samples:
                self._kept = self._chosen(batch, found, make_class_labels(classes, self._names))
            else:
                self._kept = {}
        self._looks = True

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Add the confusions of all processes up and write what was found, if that was not done
        just now."""
        if phase.is_train:
            return
        counts = self._counts
        looked = all(run.world.all_gather(self._looks))
        self._looks = False
        self._counts = None
        if not looked:
            return
        counted = all(run.world.all_gather(counts is not None))
        whole = counts.all_reduce(run.world) if counted and counts is not None else None
        if not run.world.is_main or run.folder is None:
            return
        found: dict[str, Any] = {"updates": run.state.updates, **(self._kept or {})}
        if isinstance(whole, ConfusionMatrix) and not int(whole.outside):
            found |= {"classes": list(whole.names), "confusion": whole.counts.tolist()}
        self._found[phase.split] = found
        self._pending = True
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self._write(run.folder)

    def state_dict(self) -> dict[str, Any]:
        """Return what was found in a test that is not complete."""
        if not self._looks:
            return {}
        counts = self._counts
        if counts is None:
            state = {}
        else:
            state = {"counts": counts.counts.cpu(), "outside": counts.outside.cpu()}
        return {"processes": self._processes, "kept": self._kept, **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was found; it is used when the test goes on."""
        self._loaded = dict(state)

    def _matrix(self, classes: int) -> ConfusionMatrix:
        return ConfusionMatrix(classes, class_names=self._names)

    def _chosen(self, batch: Batch, found: ClassScores, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the first samples of a batch that count, and the mistakes of which the model was
        most certain."""
        certain, predicted = found.scores.float().softmax(1).max(1)
        counted_mask = found.counted_mask().cpu()
        inside = (found.target >= 0) & (found.target < len(names))
        certain, predicted, target = certain.cpu(), predicted.cpu(), found.target.cpu()
        places = (counted_mask & inside.cpu()).nonzero()[:, 0]
        wrong = places[predicted[places] != target[places]]
        wrong = wrong[certain[wrong].argsort(descending=True, stable=True)]

        def told(place: int) -> dict[str, Any]:
            return {
                "index": int(batch.ids[place]) if place < len(batch.ids) else None,
                "label": names[int(target[place])],
                "prediction": names[int(predicted[place])],
                "confidence": round(float(certain[place]), 4),
                "image": self._image(batch.input, place),
            }

        first = places[: self.samples].tolist()
        mistakes = wrong[: self.samples].tolist()
        return {
            "first": [told(place) for place in first],
            "mistakes": [told(place) for place in mistakes],
        }

    def _image(self, inputs: Any, place: int) -> str | None:
        if not isinstance(inputs, Tensor) or inputs.ndim not in (3, 4) or inputs.is_complex():
            return None
        pixels = normalize_pixels(inputs[place].detach().float().cpu().numpy(), self.pixels)
        if pixels is None:
            return None
        return make_data_url(pixels)

    def _write(self, folder: RunFolder) -> None:
        self._written = time.monotonic()
        self._pending = False
        if not folder.space.has_spare():
            self._warn("%s: there is too little room, and it is not written", folder.file(FILE))
            return
        try:
            folder.storage.replace_json(folder.file(FILE), self._found, durable=False)
        except OSError as error:
            self._warn("%s could not be written: %s", folder.file(FILE), error)

    def _finish(self, folder: RunFolder) -> None:
        """Write what is left, and the report; what goes wrong here must not touch the run."""
        if self._pending:
            self._write(folder)
        if not folder.space.has_spare():
            self._warn(
                "there is too little room in %s, and report.html is not written", folder.path
            )
            return
        try:
            write_report([folder.path], storage=folder.storage)
        except Exception as error:  # noqa: BLE001 - the run is complete and must stay so
            self._warn(
                "there is no report.html of this run: %s; try phasetrain report %s",
                error,
                folder.path,
            )

    def _warn(self, text: str, *values: object) -> None:
        if text not in self._warned:
            log.warning("HOOKS.report: " + text, *values)
        self._warned.add(text)


def _class_names(run: Run, phase: Phase) -> tuple[str, ...] | None:
    """Return the names of classes where the data of a phase knows them."""
    loader = run.task.parts.loaders.get(phase.data)
    dataset = None if loader is None else loader.reader.dataset
    names = dataset.facts().get("class_names") if isinstance(dataset, Described) else None
    if names is None:
        return None
    return tuple(map(str, names))


def _is_reached(found: Any, updates: int) -> bool:
    return isinstance(found, dict) and isinstance(at := found.get("updates"), int) and at <= updates
