"""What one process asks for holds on all of them at the same boundary."""

from typing import Any

from forked import together

from phasetrain.distributed import Consensus, World


def of(world: World, boundaries: int, ask: Any) -> list[tuple[str, bool, bool, bool]]:
    """Return what holds after each boundary: reason, for now, a save by signal, a save by
    minutes."""
    consensus, found = Consensus(world), []
    for number in range(boundaries):
        ask(consensus, world, number)
        consensus.agree(wait=number == boundaries - 1)
        wishes = (consensus.take("signal"), consensus.take("minutes"))
        found.append((consensus.stopping, consensus.interrupted, *wishes))
    return found


class TestAlone:
    def test_a_wish_holds_at_once_and_is_fulfilled_once(self) -> None:
        consensus = Consensus(World())
        consensus.ask("signal")
        assert [consensus.take("signal"), consensus.take("signal"), consensus.take("minutes")] == [
            True,
            False,
            False,
        ]

    def test_the_first_reason_to_stop_stands(self) -> None:
        consensus = Consensus(World())
        assert not consensus.agree()
        consensus.ask_stop("SIGTERM", interrupted=True)
        consensus.ask_stop("target reached", interrupted=False)
        assert consensus.agree()
        assert (consensus.stopping, consensus.interrupted) == ("SIGTERM", True)

    def test_a_request_to_end_for_good_is_pending_even_behind_an_interruption(self) -> None:
        consensus = Consensus(World())
        consensus.ask_stop("SIGTERM", interrupted=True)
        assert consensus.pending_end(at_phase_end=False) == ("", 0)
        consensus.ask_stop("target reached", interrupted=False)
        assert consensus.pending_end(at_phase_end=False) == ("target reached", 0)

    def test_a_restored_request_takes_effect_at_its_step(self) -> None:
        found = []
        for steps in (0, 1):
            consensus = Consensus(World())
            consensus.restore_end("target reached", steps)
            found.append((consensus.stopping, consensus.agree(), consensus.stopping))
        assert found == [
            ("target reached", True, "target reached"),
            ("", True, "target reached"),
        ]

    def test_last_tests_may_be_interrupted_but_not_ended_again(self) -> None:
        consensus = Consensus(World())
        consensus.ask_stop("target reached", interrupted=False)
        assert consensus.agree()
        consensus.begin_ending()
        consensus.ask_stop("another reason", interrupted=False)
        assert (consensus.agree(), consensus.ending) == (False, "target reached")
        consensus.ask_stop("SIGTERM", interrupted=True)
        assert consensus.agree()
        assert (consensus.stopping, consensus.interrupted) == ("SIGTERM", True)
        assert consensus.pending_end(at_phase_end=False) == ("target reached", 0)


class TestThree:
    def test_a_wish_to_stop_holds_one_boundary_later(self) -> None:
        def ask(consensus: Consensus, world: World, number: int) -> None:
            if (world.rank, number) == (2, 1):
                consensus.ask_stop("SIGTERM", interrupted=True)

        no, yes = ("", False, False, False), ("SIGTERM", True, False, False)
        assert together(3, lambda world: of(world, 5, ask)) == [[no, no, yes, yes, yes]] * 3

    def test_at_the_end_of_a_phase_it_holds_at_once(self) -> None:
        def ask(consensus: Consensus, world: World, number: int) -> None:
            if (world.rank, number) == (1, 2):
                consensus.ask_stop("SIGINT", interrupted=True)

        no, yes = ("", False, False, False), ("SIGINT", True, False, False)
        assert together(3, lambda world: of(world, 3, ask)) == [[no, no, yes]] * 3

    def test_a_checkpoint_is_asked_for_under_one_name(self) -> None:
        def named(world: World) -> list[str]:
            consensus, found = Consensus(world), []
            for number in range(4):
                if (world.rank, number) == (2, 1):
                    consensus.ask_save("mine")
                consensus.agree(wait=number == 3)
                found.append(consensus.take_save())
            return found

        assert together(3, named) == [["", "", "mine", ""]] * 3

    def test_of_two_reasons_that_of_the_lower_number_stands_on_all(self) -> None:
        def ask(consensus: Consensus, world: World, number: int) -> None:
            if number == 0 and world.rank:
                consensus.ask_stop(f"reason {world.rank}", interrupted=world.rank == 2)

        assert [found[-1] for found in together(3, lambda world: of(world, 3, ask))] == [
            ("reason 1", False, False, False)
        ] * 3

    def test_interruption_at_the_step_of_an_end_for_good_stops_the_last_tests(self) -> None:
        def end(world: World) -> list[tuple[str, bool]]:
            consensus = Consensus(world)
            found = []
            for number in range(4):
                if number == 0:
                    consensus.ask_stop(f"reason {world.rank}", interrupted=world.rank == 2)
                if consensus.agree() and not consensus.interrupted:
                    consensus.begin_ending()
                found.append((consensus.stopping, consensus.interrupted))
            return found

        no, yes = ("", False), ("reason 2", True)
        assert together(3, end) == [[no, no, no, yes]] * 3

    def test_saves_are_asked_for_beside_each_other_and_made_once(self) -> None:
        def ask(consensus: Consensus, world: World, number: int) -> None:
            if number == 0 and world.rank == 1:
                consensus.ask("signal")
            if number == 1 and world.rank == 2:
                consensus.ask("minutes")

        signal, minutes, no = (
            ("", False, True, False),
            ("", False, False, True),
            ("", False, False, False),
        )
        assert together(3, lambda world: of(world, 4, ask)) == [[no, signal, minutes, no]] * 3

    def test_a_pending_request_to_end_takes_effect_at_the_same_step_after_a_resume(self) -> None:
        def ask(world: World) -> list[tuple[str, int]]:
            consensus = Consensus(world)
            found = []
            for number in range(3):
                if (world.rank, number) == (2, 1):
                    consensus.ask_stop("target reached", interrupted=False)
                found.append(consensus.pending_end(at_phase_end=False))
                consensus.agree()
            return found

        def resume(world: World) -> list[bool]:
            consensus = Consensus(world)
            consensus.restore_end("target reached", 1)
            return [bool(consensus.stopping), consensus.agree()]

        asked = [("", 0), ("target reached", 1), ("target reached", 0)]
        assert together(3, ask) == [asked] * 3
        assert together(3, resume) == [[False, True]] * 3
