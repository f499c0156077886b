"""Writes report.html at the end of a run, with predictions of its tests (hook `report`)."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from phasetrain.addons.report.dense_samples import (
    encode_image,
    find_dense_kind,
    select_dense_samples,
    select_evenly,
)
from phasetrain.addons.report.page import write_report
from phasetrain.addons.report.page.reading import RunReport
from phasetrain.config.checks import check_at_least
from phasetrain.data.protocols import read_facts
from phasetrain.engine.batch import Batch, GeneratedOutput, StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.hooks.base import HOOKS, Hook, Run
from phasetrain.hooks.error_policy import OnException
from phasetrain.losses import CrossEntropy, find_ignore_index
from phasetrain.meters import METERS, Meter
from phasetrain.meters.class_scores import (
    ClassMeter,
    ClassScores,
    make_class_labels,
    read_scores,
    require_single_label,
)
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.records import PREDICTIONS
from phasetrain.tasks.build.data_builder import read_class_attributes

log = logging.getLogger(__name__)

MAX_CLASSES = 200
"""Maximum number of classes for which confusions are counted."""

WRITE_SECONDS = 10.0
"""Minimum interval between two writes of predictions.json; it is always written at the end."""

_TRIED_AGAIN = "it is tried again after later tests and at the end of the run"


@HOOKS.register("report")
class Report(Hook):
    """Writes `report.html` after everything else is done, however the run ends, and never fails it.

    In tests of classifiers it counts confusions over all ranks, and keeps some samples, evenly
    spaced over the test, with label and prediction, as small images if their inputs are images.
    None are kept if the rows of the scores are not samples, but tokens for example. In tests of
    segmentation and detection it keeps samples with the masks or boxes of target and
    prediction. It does nothing in train steps.

    Args:
        samples: number of samples that are kept, and of mistakes in the first batch; 0 for none.
        pixels: longer side of a kept image; larger ones are subsampled.
        confusion: whether to count confusions, for up to 200 classes, with the meter
            `confusion_matrix` of the add-on `metrics`.
    """

    observe_only = True
    main_only = False  # confusions are summed over all ranks
    single = True
    policy: OnException = "ignore"
    last_files = ("report.html",)

    @classmethod
    def complete_folder(cls, folder: RunFolder) -> None:
        """Write the report of a finished run that was killed before it was written."""
        write_last_report(folder)

    def __init__(self, samples: int = 12, pixels: int = 64, *, confusion: bool = True) -> None:
        check_at_least(0, samples=samples)
        check_at_least(8, pixels=pixels)
        self.samples = samples
        self.pixels = pixels
        self.confusion = confusion and "confusion_matrix" in METERS
        self._by_split: dict[str, Any] = {}
        self._written_at = -WRITE_SECONDS
        self._is_pending = False
        self._warned = set[str]()
        self._is_watching = False
        self._world_size = 1
        self._batch: Batch | None = None
        self._names: tuple[str, ...] | None = None
        self._kept: dict[str, Any] | None = None
        self._counts: Meter | None = None
        self._loaded: dict[str, Any] = {}

    def on_start(self, run: Run) -> None:
        """Load the predictions of earlier attempts, and have the report written at the end."""
        folder = run.folder
        self._world_size = run.world.size
        if folder is None or not run.world.is_main:
            return
        report = RunReport(folder.root, folder.storage)
        reached = {
            split
            for split, predictions in report.predictions.items()
            if predictions.updates <= run.state.updates  # later ones will be made again
        }
        content = report.read_mapping(PREDICTIONS)
        self._by_split = {split: content[split] for split in content if split in reached}
        # Not in `close`: the report reads files that other hooks complete when they are closed.
        folder.before_close.append(lambda: self._finish(folder))

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        """Begin to watch a test, or resume in the middle of one."""
        self._is_watching = not phase.is_train
        self._kept = None
        self._counts = None
        loaded, self._loaded = self._loaded, {}
        if phase.is_train:
            return
        self._names = _find_class_names(run, phase)
        if not run.state.step:
            return
        # Counts are those of one rank: with another world size they belong to other samples.
        self._is_watching = loaded.get("processes") == run.world.size
        self._kept = loaded.get("kept")
        if self._is_watching and loaded.get("counts") is not None:
            self._counts = self._make_matrix(run, len(loaded["counts"]))
            self._counts.load_state_dict({name: loaded[name] for name in ("counts", "outside")})

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> None:
        """Hold a batch of a test with samples to show until its predictions are known."""
        if self._is_watching and (self._kept is None or self._count_shown(run, phase)):
            self._batch = batch

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        """Count confusions, and keep samples."""
        if not self._is_watching:
            return
        batch, self._batch = self._batch, None
        # If the rest fails, the counts are not those of the whole test.
        self._is_watching = False
        try:
            scores = require_single_label("report", read_scores("report", out).as_two_classes(0.0))
            classes = scores.scores.shape[1]
            if isinstance(out.output, Tensor) and not _has_scores(run, phase, classes):
                raise ValueError("the output is not a score for each class")
            if self.confusion and classes <= MAX_CLASSES:
                if self._counts is None:
                    matrix = self._make_matrix(run, classes)
                    self._counts = matrix.to(scores.scores.device)
                self._counts.update(out)
        except (ValueError, IndexError):  # not a classifier
            self._is_watching = self._watch_dense(run, phase, batch, out)
            return
        if batch is not None and run.world.is_main:
            if isinstance(out, GeneratedOutput) and out.images is not None:
                batch = replace(batch, input=out.images)
            self._keep_samples(batch, scores, self._count_shown(run, phase))
        self._is_watching = True

    def _make_matrix(self, run: Run, classes: int) -> Meter:
        parts = run.task.parts
        params = {
            "classes": classes,
            "class_names": self._names,
            "ignore_index": find_ignore_index(parts.losses or [parts.loss]),
        }
        return METERS.build("confusion_matrix", params)

    def _watch_dense(self, run: Run, phase: Phase, batch: Batch | None, out: StepOutput) -> bool:
        """Keep samples with masks or boxes; return whether the model predicts them."""
        dense_kind = find_dense_kind(out)
        if dense_kind is None or not self.samples:
            return False
        if batch is not None and run.world.is_main:
            kept = self._kept or {dense_kind: [], "classes": list(self._names or ())}
            shown = self._count_shown(run, phase)
            samples = select_dense_samples(dense_kind, batch, out, shown, self.pixels)
            self._kept = {**kept, dense_kind: [*kept[dense_kind], *samples][: self.samples]}
        return True

    def _keep_samples(self, batch: Batch, scores: ClassScores, shown: int) -> None:
        # Rows of a model of sequences are tokens, which have neither an index nor an image.
        is_of_samples = batch.size in (0, len(scores.target))
        if not self.samples or not is_of_samples:
            self._kept = {}
            return
        labels = make_class_labels(scores.scores.shape[1], self._names)
        if not self._kept:
            self._kept = self._select_samples(batch, scores, labels, shown, self.samples)
            return
        selected = self._select_samples(batch, scores, labels, shown, 0)
        together = [*self._kept["first"], *selected["first"]]
        # A checkpoint of an older version may have all of them already.
        self._kept = {**self._kept, "first": together[: self.samples]}

    def _count_shown(self, run: Run, phase: Phase) -> int:
        """Return how many samples of the current batch are shown, if they are spread evenly over
        the batches of a test; at least one of the first."""
        step = run.state.step
        return -(-(step + 1) * self.samples // phase.steps) + (-step * self.samples // phase.steps)

    def on_phase_end(self, run: Run, phase: Phase, metrics: Mapping[str, float]) -> None:
        """Sum the confusions of all ranks, and write predictions.json if it is due."""
        if phase.is_train:
            return
        counts = self._counts
        has_watched = all(run.world.all_gather(self._is_watching))
        self._is_watching = False
        self._counts = None
        if not has_watched:
            return
        # A rank without a batch has no counts; then the others must not wait for it in the sum.
        has_counts = all(run.world.all_gather(counts is not None))
        total: Meter | None = None
        if has_counts and counts is not None:
            total = counts.all_reduce(run.world)
        if not run.world.is_main or run.folder is None:
            return
        content: dict[str, Any] = {"updates": run.state.updates, **(self._kept or {})}
        if total is not None and not int(total.get_buffer("outside")):
            counted = total.get_buffer("counts")
            labels = make_class_labels(len(counted), self._names)
            content |= {"classes": list(labels), "confusion": counted.tolist()}
        self._by_split[phase.split] = content
        self._is_pending = True
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._write_predictions(run.folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and samples of an incomplete test."""
        if not self._is_watching:
            return {}
        state: dict[str, Any] = {"processes": self._world_size, "kept": self._kept}
        if self._counts is not None:
            for name in ("counts", "outside"):
                state[name] = self._counts.get_buffer(name).cpu()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; it is used when the test is resumed."""
        self._loaded = dict(state)

    def _select_samples(
        self,
        batch: Batch,
        scores: ClassScores,
        names: tuple[str, ...],
        shown: int,
        mistakes: int,
    ) -> dict[str, Any]:
        """Return evenly spaced samples of a batch, and the mistakes with the highest confidence."""
        confidence, prediction = scores.scores.float().softmax(1).max(1)
        has_class = (scores.target >= 0) & (scores.target < len(names))
        is_counted = scores.counted_mask().cpu() & has_class.cpu()
        confidence, prediction, target = confidence.cpu(), prediction.cpu(), scores.target.cpu()
        places = is_counted.nonzero()[:, 0]
        wrong = places[prediction[places] != target[places]]
        # A stable order: equal runs have to show the same mistakes, also with equal confidences.
        wrong = wrong[confidence[wrong].argsort(descending=True, stable=True)]

        def describe_sample(index: int) -> dict[str, Any]:
            return {
                "index": int(batch.ids[index]) if index < len(batch.ids) else None,
                "label": names[int(target[index])],
                "prediction": names[int(prediction[index])],
                "confidence": round(float(confidence[index]), 4),
                "image": encode_image(batch.input, index, self.pixels),
            }

        return {
            "first": [describe_sample(index) for index in select_evenly(places.tolist(), shown)],
            "mistakes": [describe_sample(index) for index in wrong[:mistakes].tolist()],
        }

    def _write_predictions(self, folder: RunFolder) -> None:
        """Write predictions.json; if it cannot be written, it stays pending."""
        self._written_at = time.monotonic()
        path = folder.file(PREDICTIONS)
        if not folder.space.has_spare():
            self._warn("%s is not written: too little disk space is left; %s", path, _TRIED_AGAIN)
            return
        try:
            folder.storage.replace_json(path, self._by_split, durable=False)
            self._is_pending = False
        except OSError as error:
            self._warn("%s could not be written: %s; %s", path, error, _TRIED_AGAIN)

    def _finish(self, folder: RunFolder) -> None:
        """Write pending predictions and the report."""
        if self._is_pending:
            self._write_predictions(folder)
        write_last_report(folder)

    def _warn(self, text: str, *values: object) -> None:
        if text not in self._warned:
            log.warning("HOOKS.report: " + text, *values)
        self._warned.add(text)


def write_last_report(folder: RunFolder) -> None:
    """Write the report of a run that has ended, or log why it could not be written."""
    if not folder.space.has_spare():
        log.warning(
            "HOOKS.report: report.html is not written to %s: too little disk space is left",
            folder.path,
        )
        return
    try:
        write_report([folder.root], storage=folder.storage)
    except Exception as error:  # noqa: BLE001 - the run is complete and must stay so
        log.warning(
            "HOOKS.report: report.html of this run could not be written: %s; try phasetrain "
            "report %s",
            error,
            folder.path,
        )


def _find_class_names(run: Run, phase: Phase) -> tuple[str, ...] | None:
    """Return the class names of the dataset of a phase; None if it has none."""
    names = _find_fact(run, phase, "class_names")
    return None if names is None else tuple(map(str, names))


def _has_scores(run: Run, phase: Phase, count: int) -> bool:
    """Return whether a test has a score for each class: neither an ordinal model, nor a regression
    or an embedding of samples with whole numbers as targets."""
    classes = _find_fact(run, phase, "classes")
    if classes is not None:
        return bool(count == max(2, classes))
    # Without a word of the dataset, the loss or a meter has to be one of classes.
    losses = (CrossEntropy, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss)
    meters = run.task.meters.values()
    return isinstance(run.task.parts.loss, losses) or any(
        isinstance(meter, ClassMeter) for meter in meters
    )


def _find_fact(run: Run, phase: Phase, name: str) -> Any:
    """Return a fact of the dataset of a phase; None if it does not report it."""
    loader = run.task.parts.loaders.get(phase.data)
    if loader is None:
        return None
    dataset = loader.reader.dataset
    return {**read_class_attributes(dataset), **read_facts(dataset)}.get(name)
