from collections.abc import Mapping

from phasetrain.addons.experiments.sweep.prune.brackets import (
    FAILED,
    PENDING,
    Bracket,
    Outcome,
    decide,
    make_brackets,
)
from phasetrain.addons.experiments.sweep.prune.settings import PruneSettings


class Table:
    """Looks outcomes up; what is not in the table is pending."""

    def __init__(self, scores: Mapping[tuple[str, int], float | None]) -> None:
        self.scores = scores

    def __call__(self, name: str, rung: int) -> Outcome:
        if (name, rung) not in self.scores:
            return PENDING
        score = self.scores[name, rung]
        return FAILED if score is None else Outcome(is_known=True, score=score)


def at(rung: int, **scores: float | None) -> dict[tuple[str, int], float | None]:
    return {(name, rung): score for name, score in scores.items()}


BRACKET = Bracket(0, ("a", "b", "c", "d", "e", "f"))
FIRST = at(0, a=0.1, b=0.6, c=0.2, d=0.5, e=0.4, f=0.3)


def test_nothing_is_promoted_before_all_runs_have_reached_the_rung() -> None:
    standing = decide(BRACKET, 2, 2, Table(at(0, a=0.1, b=0.6, c=0.2, d=0.5, e=0.4)))
    assert (standing.decisions, standing.rung, standing.waiting) == ((), 0, ("f",))


def test_the_best_runs_are_promoted_from_rung_to_rung() -> None:
    second = at(1, b=0.7, d=0.8, e=0.9)
    standing = decide(BRACKET, 2, 2, Table({**FIRST, **second}))
    assert [one.promoted for one in standing.decisions] == [("b", "d", "e"), ("e",)]
    assert list(standing.decisions[0].scores) == ["b", "d", "e", "f", "c", "a"]
    assert (standing.rung, standing.waiting) == (2, ("e",))
    standing = decide(BRACKET, 2, 2, Table({**FIRST, **second, **at(2, e=1.0)}))
    assert standing.waiting == ()


def test_failed_runs_count_and_are_not_promoted() -> None:
    failed = {**FIRST, ("b", 0): None, ("d", 0): None}
    assert decide(BRACKET, 1, 3, Table(failed)).decisions[0].promoted == ("e", "f")
    almost_all = at(0, a=None, b=None, c=0.2, d=None, e=None, f=None)
    assert decide(BRACKET, 1, 2, Table(almost_all)).decisions[0].promoted == ("c",)
    standing = decide(BRACKET, 2, 2, Table(at(0, **dict.fromkeys("abcdef"))))
    assert [one.promoted for one in standing.decisions] == [(), ()]
    assert standing.waiting == ()


def test_equal_scores_are_ranked_by_name_whatever_the_order_of_the_runs() -> None:
    equal = Table(at(0, **dict.fromkeys("abcdef", 0.5)))
    for runs in ("abcdef", "fedcba", "cafebd"):
        assert decide(Bracket(0, tuple(runs)), 1, 3, equal).decisions[0].promoted == ("a", "b")


def test_one_run_is_promoted_if_there_are_fewer_than_eta() -> None:
    assert decide(Bracket(0, ("a", "b")), 1, 3, Table(FIRST)).decisions[0].promoted == ("b",)


def test_a_later_bracket_begins_at_its_first_rung() -> None:
    standing = decide(Bracket(1, ("a", "b")), 2, 2, Table(FIRST))
    assert (standing.decisions, standing.rung, standing.waiting) == ((), 1, ("a", "b"))


def test_runs_of_hyperband_stay_in_their_bracket_when_runs_are_added() -> None:
    names = [f"{number:02}" for number in range(34)]
    settings = PruneSettings("hyperband", 3)
    few = make_brackets(settings, 2, names[:17])
    assert [(one.first, len(one.runs)) for one in few] == [(0, 9), (1, 5), (2, 3)]
    more = make_brackets(settings, 2, names)
    for one, other in zip(few, more, strict=True):
        assert set(one.runs) < set(other.runs)
    assert make_brackets(PruneSettings("halving", 3), 2, names) == [Bracket(0, tuple(names))]
