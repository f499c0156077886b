"""Decide by runs whether candidates are identical to a baseline, better, or worse."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from string import ascii_uppercase

from phasetrain.addons.experiments.judge.bits import compare_bits
from phasetrain.addons.experiments.judge.contenders import (
    Contender,
    add_facts,
    check_words,
    list_by_digest,
    parse_contenders,
)
from phasetrain.addons.experiments.judge.judgement import Judgement, Pair, Trial, format_pairs
from phasetrain.addons.experiments.judge.processes import (
    Launch,
    WorkingFolder,
    launch_process,
    stop_on_signals,
)
from phasetrain.addons.experiments.judge.revisions import open_revision
from phasetrain.addons.experiments.judge.sequential import Rule, Verdict, decide
from phasetrain.addons.experiments.judge.trained_runs import (
    RunStore,
    TrainedRun,
    check_metric,
    check_stored,
    list_config_changes,
    read_promise,
    read_value,
    resolve_objective,
)
from phasetrain.addons.experiments.options import JudgeOptions
from phasetrain.errors import ConfigError
from phasetrain.runs.direction import Objective
from phasetrain.runtime.format import join_first

log = logging.getLogger(__name__)

MAX_LISTED = 3
"""Number of changed keys that a line names."""

WORKING_TREE = "working tree"
"""Name of the files of a project as they are."""


def judge(
    words: Sequence[str],
    settings: JudgeOptions,
    *,
    launch: Launch = launch_process,
    say: Callable[[str], None] = log.info,
) -> Judgement:
    """Compare candidates with a baseline, and return the verdicts.

    Short runs with one seed come first: a candidate whose runs have the same bits is identical.
    For the others, pairs of runs with the same seed are added until each is decided. Finished runs
    are kept, so that the same call continues where it was stopped.

    Args:
        words: the contenders, see `parse_contenders`; with revisions the words of one run.
        settings: how to judge.
        launch: runs a process.
        say: gets a line for each comparison and each pair.

    Raises:
        ConfigError: the contenders cannot be compared; nothing has been trained unless their data
            or metrics turn out to differ.
        PhasetrainError: a run has failed.
        StoppedError: a signal came.
    """
    settings.check()
    with stop_on_signals(), _open_contenders(words, settings, launch) as contenders:
        session = _Session(settings, contenders, launch, say)
        session.check()
        session.compare_short_runs()
        session.add_pairs()
        return session.conclude()


@contextmanager
def _open_contenders(
    words: Sequence[str], settings: JudgeOptions, launch: Launch
) -> Iterator[list[Contender]]:
    """Yield the contenders with their facts, the baseline first."""
    with ExitStack() as stack:
        if settings.revisions:
            contenders = _open_revisions(words, settings.revisions, stack)
        else:
            contenders = parse_contenders(words, WorkingFolder(str(Path.cwd())))
        # Collected one after the other: each process imports torch and uses all cores for that.
        contenders = [
            add_facts(contender, launch, config_dir=settings.config_dir, trust=settings.trust)
            for contender in contenders
        ]
        list_by_digest(contenders)
        yield contenders


def _open_revisions(
    words: Sequence[str], revisions: Sequence[str], stack: ExitStack
) -> list[Contender]:
    here = str(Path.cwd())
    check_words(words)
    contenders = []
    for name in revisions:
        revision = stack.enter_context(open_revision(name, here))
        contenders.append(
            Contender(
                name,
                tuple(words),
                commit=revision.commit,
                working_folder=revision.working_folder,
            )
        )
    if len(contenders) == 1:
        contenders.append(Contender(WORKING_TREE, tuple(words), working_folder=WorkingFolder(here)))
    return contenders


def _list_letters() -> Iterator[str]:
    """Yield short names of candidates: B, C, ..., Z, and numbers after them."""
    yield from ascii_uppercase[1:]
    yield from map(str, count(len(ascii_uppercase) + 1))


class _Session:
    """One call of `judge`."""

    def __init__(
        self,
        settings: JudgeOptions,
        contenders: Sequence[Contender],
        launch: Launch,
        say: Callable[[str], None],
    ) -> None:
        self.metric = ""
        self.settings = settings
        self.baseline = contenders[0]
        self.say = say
        self.store = RunStore(
            launch,
            config_dir=settings.config_dir,
            trust=settings.trust,
            reuses=not settings.is_fresh,
        )
        self.trials = [
            Trial(contender, letter)
            for contender, letter in zip(contenders[1:], _list_letters(), strict=False)
        ]
        # Bonferroni: Holm's steps would need fewer pairs, and protect neither the sign of a
        # difference nor "no difference larger than d".
        self.rule = Rule(settings.error_rate / len(self.trials), settings.margin)
        self.objective: Objective | None = None
        self.runs: list[TrainedRun] = []

    @property
    def contenders(self) -> list[Contender]:
        """The baseline and the candidates."""
        return [self.baseline, *(trial.contender for trial in self.trials)]

    def check(self) -> None:
        """Name the contenders; reject those that cannot be compared, before anything is trained."""
        for contender in self.contenders:
            if contender.stored and not self.settings.is_fresh:
                check_stored(contender)
        self.metric = self.settings.metric or self._find_common_metric()
        split = Objective.parse(self.metric).split
        for contender in self.contenders:
            splits = [name.lower() for name in contender.facts.config["DATA"]]
            if split not in splits:
                raise ConfigError(
                    f"--metric {self.metric}: {contender.name} has no split {split!r}; it has "
                    f"{', '.join(splits)}",
                    code="judge.no_metric",
                )
            # With overrides, it may measure more than the folder has.
            if contender.stored and not contender.words and not self.settings.is_fresh:
                check_metric(contender.stored, Objective.parse(self.metric).metric)
        for trial in self.trials:
            trial.changes = list_config_changes(
                self.baseline.facts.config,
                trial.contender.facts.config,
                sorted({*self.baseline.facts.observers, *trial.contender.facts.observers}),
            )

        self.say(f"A {self.baseline.name}")
        for trial in self.trials:
            self.say(f"{trial.letter} {trial.contender.name}")

    def _find_common_metric(self) -> str:
        monitors = {contender.name: contender.facts.monitor for contender in self.contenders}
        if "" in monitors.values():
            name = next(name for name, monitor in monitors.items() if not monitor)
            raise ConfigError(
                f"{name}: nothing says by which metric its runs are compared; name one with "
                "--metric, such as test/accuracy, or -test/loss if smaller is better",
                code="judge.no_metric",
            )
        if len(set(monitors.values())) > 1:
            listed = ", ".join(f"{monitor} for {name}" for name, monitor in monitors.items())
            raise ConfigError(
                f"the metrics differ: {listed}; name one for all with --metric",
                code="judge.other_metric",
            )
        return self.baseline.facts.monitor

    def compare_short_runs(self) -> None:
        """Compare the first updates of each candidate with the baseline."""
        if not self.settings.short:
            return
        seed = self.baseline.facts.seed
        short = self.store.get_short_run(self.baseline, seed, self.settings.short)
        self.runs.append(short)
        for trial in self.trials:
            run = self.store.get_short_run(trial.contender, seed, self.settings.short)
            self.runs.append(run)
            trial.bits = compare_bits(short, run)
            self._check_data(trial.contender, short, run)
            # The name of a part is code, as in a refactoring; other keys may be schedules.
            later = [key for key in trial.changes if not key.endswith(".name")]
            text = trial.bits.sentence
            if trial.bits.is_identical:
                # Short runs are whole runs if the config asks for fewer updates.
                trial.is_whole = run.view.status.state == "finished"
                trial.is_identical = trial.is_whole or not (later or self.settings.is_full)
                if not trial.is_identical and later:
                    text += f"; {join_first(later, MAX_LISTED)} may act later, so whole runs follow"
            if not trial.is_identical:
                self.say(f"{trial.letter} is {text}")

    def add_pairs(self) -> None:
        """Add pairs of runs until each candidate is decided."""
        # Consecutive seeds, so that nobody can choose the ones that show a difference.
        first = self.baseline.facts.seed
        for seed in range(first, first + self.settings.most_pairs):
            trials = [trial for trial in self.trials if trial.verdict is Verdict.UNDECIDED]
            if not trials:
                return
            baseline = self.store.get_run(self.baseline, seed)
            self.runs.append(baseline)
            for trial in trials:
                candidate = self.store.get_run(trial.contender, seed)
                self.runs.append(candidate)
                self._add_pair(trial, baseline, candidate)
            measured = [trial for trial in trials if not trial.is_identical]
            if measured:
                self.say(format_pairs(seed, measured))

    def _add_pair(self, trial: Trial, baseline: TrainedRun, candidate: TrainedRun) -> None:
        self._check_data(trial.contender, baseline, candidate)
        # Only now is it known whether whole runs are identical, and once is enough.
        if not trial.pairs and (trial.bits is None or trial.bits.is_identical):
            trial.bits = compare_bits(baseline, candidate)
            trial.is_whole = True
            trial.is_identical = trial.bits.is_identical
            if trial.is_identical:
                return
            self.say(f"{trial.letter} is {trial.bits.sentence}")
        objective = resolve_objective(self.metric, baseline, candidate)
        self.objective = objective
        which = self.settings.which
        values = [read_value(run, objective, which) for run in (baseline, candidate)]
        pair = Pair(baseline, candidate, (values[0], values[1]))
        trial.pairs.append(pair)
        score = objective.direction.score
        scores = [(score(pair.values[0]), score(pair.values[1])) for pair in trial.pairs]
        trial.look = decide(scores, self.rule)

    def _check_data(self, contender: Contender, one: TrainedRun, other: TrainedRun) -> None:
        """Reject runs that were measured on different data."""
        split = Objective.parse(self.metric).split
        # Runs without checkpoints have no fingerprints, and are compared without this check.
        data_promises = [read_promise(run.folder).get("data", {}) for run in (one, other)]
        prints = [{key.lower(): value for key, value in each.items()} for each in data_promises]
        if split in prints[0] and split in prints[1] and prints[0][split] != prints[1][split]:
            raise ConfigError(
                f"{self.metric}: {self.baseline.name} and {contender.name} are measured on "
                f"different data ({prints[0][split]} and {prints[1][split]}), so their values "
                "cannot be compared; choose a metric of a split that both have",
                code="judge.other_data",
            )

    def conclude(self) -> Judgement:
        """Return the verdicts."""
        # By folder: the baseline of a pair is the baseline of every candidate.
        runs = {run.folder: run for run in self.runs}
        made = [run for run in runs.values() if not run.is_found]
        return Judgement(
            baseline=self.baseline,
            trials=self.trials,
            objective=self.objective,
            which=self.settings.which,
            rule=self.rule,
            error_rate=self.settings.error_rate,
            most_pairs=self.settings.most_pairs,
            folders=list(dict.fromkeys(str(Path(run.folder).parent) for run in made)),
            updates=sum(run.view.status.updates for run in made),
            trained=len(self.store.trained),
        )
