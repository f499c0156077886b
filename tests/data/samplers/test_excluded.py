"""Excluded samples: how they are named, and which draws are left."""

from pathlib import Path

import numpy as np
import pytest
from raising import raises

from phasetrain.data.samplers.excluded import ExcludedSamples, read_excluded
from phasetrain.data.samplers.permutation import Indices
from phasetrain.data.samplers.phase_sampler import SAMPLERS, Draw, PhaseSampler
from phasetrain.distributed import World
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError

KEY = "DATA.TRAIN.exclude"
PHASE = Phase(0, "train", 0, 0, 5, 0, 18, 4, 0)


def read(given: object, total: int = 10, fingerprint: str = "digits:1") -> Indices:
    return read_excluded(given, KEY, total, fingerprint).ids  # type: ignore[arg-type]


def make_sampler(
    ids: list[int], *, world: World | None = None, micro: int = 2, fixed: bool = False
) -> PhaseSampler:
    order = SAMPLERS["sequential"]()
    made = PhaseSampler(
        order, 18, seed=0, micro_batch_size=micro, world=world or World(), fixed=fixed
    )
    made.excluded = ExcludedSamples(np.array(ids, dtype=np.int64)) if ids else None
    return made


def plain(draws: list[Draw]) -> list[list[int]]:
    return [draw.ordinals.tolist() for draw in draws]


class TestIds:
    def test_list(self) -> None:
        assert read([7, 3]).tolist() == [3, 7]

    def test_files_and_lists_add_up(self, tmp_path: Path) -> None:
        text = tmp_path / "ids.txt"
        text.write_text("# blurred\n4\n\n 2  # twice the same face\n")
        np.save(tmp_path / "ids.npy", np.array([9]))
        assert read(str(text)).tolist() == [2, 4]
        assert read([0, str(text), f"{tmp_path}/ids.npy"]).tolist() == [0, 2, 4, 9]

    def test_file_for_a_dataset_is_read_back(self, tmp_path: Path) -> None:
        path = tmp_path / "ids.txt"
        path.write_text("# dataset: digits:1\n5\n8\n")
        assert read(str(path)).tolist() == [5, 8]
        with raises(ConfigError, key=KEY, code="data.other_dataset"):
            read(str(path), fingerprint="digits:2")

    @pytest.mark.parametrize(
        ("given", "code"),
        [
            ([1, 10], "data.unknown_id"),
            ([-1], "data.unknown_id"),
            ([1, 2, 1], "data.duplicate_id"),
            ([1.0], "data.invalid_id"),
            ([True], "data.invalid_id"),
            ([[1]], "data.invalid_id"),
            ("nowhere.txt", "data.unreadable_ids"),
            (list(range(10)), "data.nothing_left"),
        ],
    )
    def test_wrong_ids_are_rejected(self, given: object, code: str) -> None:
        with raises(ConfigError, key=KEY, code=code):
            read(given)

    @pytest.mark.parametrize("line", ["x", "1.5", "1_0", "3 4"])
    def test_lines_that_are_no_numbers_are_rejected(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "ids.txt"
        path.write_text(f"1\n{line}\n")
        with raises(ConfigError, key=KEY, code="data.unreadable_ids"):
            read(str(path))

    def test_arrays_of_other_numbers_are_rejected(self, tmp_path: Path) -> None:
        np.save(tmp_path / "ids.npy", np.array([0.5]))
        with raises(ConfigError, key=KEY, code="data.unreadable_ids"):
            read(f"{tmp_path}/ids.npy")

    def test_digest_depends_on_the_ids_alone(self) -> None:
        one = read_excluded([7, 3], KEY, 10, "a").digest()
        assert one == read_excluded([3, 7], KEY, 99, "b").digest()
        assert one != read_excluded([3, 8], KEY, 10, "a").digest()


class TestDraws:
    def test_positions_of_the_others_stay(self) -> None:
        found = [plain(draws) for draws in make_sampler([1, 6]).steps(PHASE)]
        assert found == [
            [[0], [2, 3]],
            [[4, 5], [7]],
            [[8, 9], [10, 11]],
            [[12, 13], [14, 15]],
            [[16, 17]],
        ]

    def test_empty_micro_batches_are_left_out_and_empty_steps_have_none(self) -> None:
        found = [plain(draws) for draws in make_sampler([0, 1, 4, 5, 6, 7]).steps(PHASE, 0)]
        assert found[:2] == [[[2, 3]], []]

    def test_a_rank_without_samples_gets_padding_of_samples_that_are_left(self) -> None:
        ranks = [make_sampler([2, 3, 4, 5, 6, 7], world=World(rank, 2)) for rank in range(2)]
        (first, empty), (other, other_empty) = (list(one.steps(PHASE))[:2] for one in ranks)
        assert (empty, other_empty) == ([], [])
        assert [(draw.indices.tolist(), draw.counts) for draw in first] == [([0, 1], True)]
        assert [(draw.indices.tolist(), draw.counts) for draw in other] == [([0, 1], False)]

    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("fixed", [False, True])
    def test_ranks_share_what_is_left(self, size: int, fixed: bool) -> None:
        ids = [0, 2, 3, 9, 13, 16]
        if fixed and size == 3:
            pytest.skip("ordered reduction needs a divisor of the batch")
        ranks = [
            list(make_sampler(ids, world=World(rank, size), micro=1, fixed=fixed).steps(PHASE))
            for rank in range(size)
        ]
        for step in range(PHASE.steps):
            draws = [rank[step] for rank in ranks]
            assert len({len(one) for one in draws}) == 1 or size == 1
            left = [i for i in range(4 * step, min(4 * step + 4, 18)) if i not in ids]
            counted = [i for one in draws for draw in one if draw.counts for i in draw.indices]
            assert counted == left
            assert not {i for one in draws for draw in one for i in draw.indices} & set(ids)
