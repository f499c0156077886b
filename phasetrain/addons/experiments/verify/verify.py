"""Verify a run, or weights of a run (`phasetrain verify RUN_OR_WEIGHTS`)."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from phasetrain.addons.experiments.options import VerifyOptions
from phasetrain.addons.experiments.verify.evidence import (
    Evidence,
    Finding,
    count_updates,
    gather_evidence,
)
from phasetrain.addons.experiments.verify.retrain import Retrained, Retrainer
from phasetrain.addons.experiments.verify.segments import (
    Choice,
    Segment,
    choose_segments,
    list_segments,
)
from phasetrain.addons.experiments.verify.weights_file import (
    WeightsFile,
    compare_weights,
    find_run,
    is_weights_file,
    read_weights_file,
)
from phasetrain.app.train.resume import limit_to_checkpoint
from phasetrain.checkpoint.promised import read_promised
from phasetrain.runs.paths import check_run_folder
from phasetrain.runs.records import EnvironmentRecord
from phasetrain.runs.view import RunView
from phasetrain.runtime.format import format_count, join_first
from phasetrain.runtime.storage import open_storage

Verdict = Literal["bit-identical", "no difference", "different", "undecided"]

EXIT_CODES = {"bit-identical": 0, "no difference": 0, "different": 1, "undecided": 9}

NOT_CHECKED = (
    "metrics",
    "results of tests",
    "RUN.md",
    "overrides.yaml",
    "environment.json",
    "logs",
)
"""Parts of a run that are never verified."""

MAX_LISTED = 4
"""Maximum number of segments, findings and remarks of a kind in the text."""


@dataclass(frozen=True)
class Verification:
    """The outcome of a verification.

    Attributes:
        evidence: the files of the run.
        choice: the segments that were chosen.
        retrained: their outcomes, in the order of the updates.
        findings: everything that differs.
        weights: a sentence about exported or packed weights that are equal to the weights in their
            checkpoint; empty if there are none.
        unverified: requested parts that could not be compared.
        notes: parts that were not requested, and reasons why a difference would prove nothing.
        seed: of the choice.
        seconds: duration.
        is_finished: whether the run says that it has ended.
        not_checked: parts of the run and of a file that are never verified.
    """

    evidence: Evidence
    choice: Choice
    retrained: tuple[Retrained, ...]
    findings: tuple[Finding, ...]
    weights: str
    unverified: tuple[str, ...]
    notes: tuple[str, ...]
    seed: int
    seconds: float
    is_finished: bool
    not_checked: tuple[str, ...] = NOT_CHECKED

    @property
    def updates(self) -> int:
        """Number of updates that were trained again."""
        return sum(outcome.segment.updates for outcome in self.retrained if outcome.components)

    @property
    def share(self) -> float:
        """Share of the updates of the run that were trained again."""
        return self.updates / max(1, self.evidence.last)

    @property
    def verdict(self) -> Verdict:
        """`different` only if nothing but the run explains a difference, and `bit-identical` only
        of the whole run."""
        # By identity: two segments may have equal findings, and only one of them an excuse.
        excused = {
            id(finding) for each in self.retrained if each.excuses for finding in each.findings
        }
        if any(id(finding) not in excused for finding in self.findings):
            return "different"
        compares_bits = all(each.compares_bits for each in self.retrained)
        if self.findings or self.unverified or not self.retrained or not compares_bits:
            return "undecided"
        return "no difference" if self.list_gaps() else "bit-identical"

    def list_gaps(self) -> list[str]:
        """Return the parts of the run that the verdict does not cover."""
        gaps = []
        rest = self.evidence.last - self.updates
        if rest:
            gaps.append(f"{format_count(rest, 'update')} not compared")
        missing = self.updates - sum(outcome.records for outcome in self.retrained)
        if missing:
            gaps.append(f"{format_count(missing, 'update')} without a record to compare")
        if not all(outcome.segment.ends for outcome in self.retrained):
            gaps.append("where no checkpoint is kept, only samples of the weights were compared")
        if not self.is_finished:
            gaps.append("the run is not finished")
        return gaps

    @property
    def exit_code(self) -> int:
        """0 bit-identical or no difference, 1 different, 9 undecided."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        evidence = self.evidence
        return {
            "run": evidence.folder,
            "verdict": self.verdict,
            "updates": evidence.last,
            "verified_updates": self.updates,
            "share": self.share,
            "seed": self.seed,
            "seconds": self.seconds,
            "root": evidence.root,
            "checkpoints": [saved.name for saved in evidence.saved],
            "segments": [_describe_retrained(outcome) for outcome in self.retrained],
            "candidates": len(self.choice.candidates),
            "findings": [
                {
                    "subject": finding.subject,
                    "update": finding.update,
                    "components": list(finding.components),
                    "text": finding.text,
                }
                for finding in self.findings
            ],
            "unverified": list(self.unverified),
            "not_compared": self.list_gaps(),
            "not_checked": list(self.not_checked),
            "notes": list(self.notes),
        }

    def format_text(self) -> str:
        """Return a report of at most 25 lines."""
        evidence = self.evidence
        chain = "no chain (version 1)"
        if evidence.root:
            chain = f"root {evidence.root}"
        lines = [
            f"run          {evidence.folder}, {format_count(evidence.last, 'update')}",
            f"ledger       {format_count(len(evidence.ledger), 'record')}, {chain}",
            f"checkpoints  {len(evidence.saved)} intact: "
            f"{join_first([saved.name for saved in evidence.saved], 3)}",
            f"trained      {format_count(self.updates, 'update')} again "
            f"({100 * self.share:.1f} %), in {len(self.retrained)} of "
            f"{format_count(len(self.choice.candidates), 'segment')} (--seed {self.seed})",
            *_limit([_format_segment(outcome) for outcome in self.retrained], "more segments"),
        ]
        lines += _limit(
            [f"FOUND        {finding.text}" for finding in self.findings], "more differences"
        )
        lines += _limit(
            [f"unverified   {part}" for part in self.unverified], "more unverified parts"
        )
        lines += _limit([f"note         {note}" for note in self.notes], "more notes")
        return "\n".join([*lines, f"verdict      {self._explain()}"])

    def _explain(self) -> str:
        if self.exit_code == 0:
            return self._explain_equal()
        if self.verdict == "different":
            first = min(self.findings, key=lambda finding: finding.update)
            return f"DIFFERENT: {', '.join(first.components)} at update {first.update}"
        if self.findings:
            return (
                "undecided: this machine computes other bits, and the run was made on another one "
                "or in another way (see the notes); verify it on an equal machine"
            )
        if not self.retrained:
            reasons = "unverified" if self.unverified else "the notes"
            return f"undecided: no update could be trained again (see {reasons})"
        limits = []
        of_ranks = [outcome for outcome in self.retrained if not outcome.compares_bits]
        if of_ranks:
            updates = sum(outcome.segment.updates for outcome in of_ranks)
            names = " and ".join(of_ranks[0].components)
            limits.append(
                f"only {names} of {format_count(updates, 'update')} could be compared (see the "
                "notes)"
            )
        if self.unverified:
            limits.append(
                f"{format_count(len(self.unverified), 'part')} of what was asked for could not be "
                "compared (see unverified)"
            )
        return (
            f"undecided: {format_count(self.updates, 'update')} trained again without a "
            f"difference, but {', and '.join(limits)}"
        )

    def _explain_equal(self) -> str:
        gaps = self.list_gaps()
        parts = [
            f"{self.verdict} in {self.updates:,} of "
            f"{format_count(self.evidence.last, 'update')}, which were trained again",
            *gaps,
        ]
        if not gaps:
            total = format_count(self.evidence.last, "update")
            parts = [f"bit-identical: all {total}, and the state in all checkpoints"]
        if self.weights:
            parts.append(self.weights)
        return f"{'; '.join(parts)}; not checked: {', '.join(self.not_checked)}"


def verify(path: str, options: VerifyOptions | None = None) -> Verification:
    """Verify a run: its ledger's chain, the roots and digests in its checkpoints, and random
    segments between kept checkpoints, which are trained again and compared bit for bit.

    Takes no lock and writes nothing.

    Args:
        path: a run folder, or a file from `phasetrain export` (safetensors) or `phasetrain pack`.
        options: how much to train again.

    Raises:
        ConfigError: there is no such run, or it cannot be verified (codes `verify.*`).
        ChangedError: the data, the user's code or the config has changed since the run.
    """
    options = options or VerifyOptions()
    began = time.perf_counter()
    weights = None
    folder = path
    if is_weights_file(path):
        weights = read_weights_file(path)
        folder = options.run or find_run(path)
    folder = folder.rstrip("/") or "/"
    storage = open_storage(folder)
    check_run_folder(folder, storage)
    evidence = gather_evidence(folder, storage)
    if not any("promise" in finding.components for finding in evidence.findings):
        limit_to_checkpoint(storage, folder)
    findings = list(evidence.findings)
    unverified: list[str] = []
    if weights is not None:
        differing, unverified = compare_weights(weights, evidence)
        findings += differing
    are_weights_equal = weights is not None and not findings and not unverified
    run = RunView(folder, storage)
    environment = run.environment
    segments = list_segments(evidence.saved, evidence.last, _list_changes(evidence, environment))
    if run.status.state == "failed":
        segments = _leave_out_failure(segments)
    seed = options.seed
    if seed is None:
        # Not from the clock or the run: whoever forged it could have foreseen the choice.
        seed = secrets.randbits(32)
    choice = choose_segments(segments, options.fraction, options.segments, seed)
    is_finished = run.status.state == "finished"
    retrainer = Retrainer(evidence, options.trust, is_finished)
    unverified += filter(None, [retrainer.compare_config()])
    findings += retrainer.compare_status(run.status)
    retrained = tuple(
        retrainer.retrain(segment) for segment in choice.chosen if not segment.obstacle
    )
    findings += [finding for outcome in retrained for finding in outcome.findings]
    unverified += [_format_obstacle(segment) for segment in choice.chosen if segment.obstacle]
    unverified += [
        f"the state of checkpoint {name} was not compared: trained again, the run does not reach "
        f"its place after update {outcome.segment.last}"
        for outcome in retrained
        for name in outcome.missed
    ]
    notes = [*evidence.notes, *(excuse for outcome in retrained for excuse in outcome.excuses)]
    notes += _list_remarks(segments, choice, retrained)
    notes += [
        f"the run differs from a run of its command alone: {deviation}"
        for deviation in environment.deviations
    ]
    return Verification(
        evidence,
        choice,
        retrained,
        tuple(findings),
        _describe_weights(weights, retrained) if are_weights_equal else "",
        tuple(unverified),
        tuple(dict.fromkeys(notes)),
        seed,
        time.perf_counter() - began,
        is_finished,
        (*NOT_CHECKED, *([f"metrics, classes and example in {path}"] if weights else ())),
    )


def _describe_weights(weights: WeightsFile | None, retrained: Sequence[Retrained]) -> str:
    if weights is None:
        return ""
    text = f"{weights.path} has the weights of checkpoint {weights.checkpoint}"
    if all(weights.checkpoint not in outcome.weights for outcome in retrained):
        return f"{text}, up to which the run was not trained again"
    return text


def _list_changes(evidence: Evidence, environment: EnvironmentRecord) -> list[tuple[int, str]]:
    """Return after which updates the run says that config, data, code or machine changed."""
    if not evidence.saved:
        return environment.changes
    newest = evidence.saved[-1]
    promised = read_promised(evidence.folder, newest.name, evidence.storage)
    # From the checkpoint, whose digests cover it: environment.json can be edited alone. Only that
    # file has the changes since the newest checkpoint.
    covered = EnvironmentRecord.from_json(promised).changes
    last = count_updates(newest)
    return [*covered, *(change for change in environment.changes if change[0] >= last)]


def _leave_out_failure(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments of a run that failed: its last updates would fail again."""
    return [
        segment if segment.ends else replace(segment, obstacle="the run failed after them")
        for segment in segments
    ]


def _list_remarks(
    segments: Sequence[Segment], choice: Choice, retrained: Sequence[Retrained]
) -> list[str]:
    notes = [
        _format_obstacle(segment)
        for segment in segments
        if segment.obstacle and segment not in choice.chosen
    ]
    left_out = [segment for segment in choice.too_long if segment not in choice.chosen]
    if left_out:
        updates = sum(segment.updates for segment in left_out)
        notes.append(
            f"{format_count(updates, 'update')} lie in segments that are longer than the share "
            f"asked for, the longest of {max(segment.updates for segment in left_out)}: choose "
            "--segments N or a larger --fraction, or keep more checkpoints "
            "(CHECKPOINT.keep_every.epochs=1 or keep_every.updates)"
        )
    notes += [
        f"no checkpoint is kept after update {outcome.segment.last}: its weights were compared by "
        "the ledger's samples of them only"
        for outcome in retrained
        if outcome.compares_bits and not outcome.segment.ends
    ]
    return notes


def _format_obstacle(segment: Segment) -> str:
    return f"updates {segment.first} to {segment.last} cannot be trained again: {segment.obstacle}"


def _describe_retrained(outcome: Retrained) -> dict[str, Any]:
    return {
        "first": outcome.segment.first,
        "last": outcome.segment.last,
        "from": outcome.segment.begin and outcome.segment.begin.name,
        "records": outcome.records,
        "components": list(outcome.components),
        "checkpoints": list(outcome.weights),
        "equal": not outcome.findings,
        "excuses": list(outcome.excuses),
    }


def _format_segment(outcome: Retrained) -> str:
    begin = "the start"
    if outcome.segment.begin:
        begin = outcome.segment.begin.name
    result = f"equal: {format_count(outcome.records, 'record')}"
    if not outcome.compares_bits:
        result += f", in {' and '.join(outcome.components)} only"
    if outcome.weights:
        result += f", and the state of {', '.join(outcome.weights)}"
    if outcome.findings:
        result = "DIFFERENT"
    return f"  updates {outcome.segment.first} to {outcome.segment.last} from {begin}: {result}"


def _limit(lines: list[str], rest: str) -> list[str]:
    if len(lines) <= MAX_LISTED:
        return lines
    return [*lines[:MAX_LISTED], f"  {len(lines) - MAX_LISTED} {rest} (--json has all)"]
