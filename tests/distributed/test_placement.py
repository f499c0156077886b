"""Where a process stands, as torchrun and srun tell it."""

import pytest

from phasetrain.distributed import Placement, find_placement
from phasetrain.distributed.placement import first_host
from phasetrain.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "3",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_RESTART_COUNT": "1",
}


def test_alone() -> None:
    assert find_placement({}) == Placement(
        rank=0, size=1, local_rank=0, nodes=1, address="", port=0, hosted=False, attempt=0
    )


def test_of_torchrun() -> None:
    expected = Placement(
        rank=5, size=8, local_rank=1, nodes=2, address="node7", port=29500, hosted=True, attempt=3
    )  # fmt: skip
    assert find_placement(TORCHRUN) == expected
    assert find_placement({**SRUN, **TORCHRUN}) == expected  # torchrun that srun has started


def test_of_a_step_of_srun() -> None:
    expected = Placement(
        rank=5,
        size=8,
        local_rank=1,
        nodes=2,
        address="gpu007",
        port=22_979,
        hosted=False,
        attempt=1,
    )
    assert expected.port == 10_000 + (4711 * 7 + 2) % 20_000
    assert find_placement(SRUN) == expected
    assert find_placement({**SRUN, "MASTER_ADDR": "login", "MASTER_PORT": "1234"}) == Placement(
        rank=5, size=8, local_rank=1, nodes=2, address="login", port=1234, attempt=1
    )


def test_steps_and_jobs_meet_at_ports_of_their_own() -> None:
    others = [{**SRUN, "SLURM_STEP_ID": "3"}, {**SRUN, "SLURM_JOB_ID": "4712"}]
    assert [find_placement(one).port for one in others] == [22_980, 22_986]


def test_the_nodes_of_a_job_stand_for_those_of_a_step() -> None:
    job = {**SRUN, "SLURM_JOB_NODELIST": "cpu3,gpu[1-2]"}
    del job["SLURM_STEP_NODELIST"]
    assert find_placement(job).address == "cpu3"


def test_a_batch_script_is_no_step() -> None:
    assert (
        find_placement({"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
        == Placement()
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-009,012],cpu1", "gpu007"),
        ("rack[3,5]-ib", "rack3-ib"),
        ("", ""),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE = 2: RANK, MASTER_ADDR and MASTER_PORT are expected as well",
        ),
        (
            {**TORCHRUN, "RANK": "8"},
            "RANK = 8 and WORLD_SIZE = 8: RANK is expected to be from 0 to 7",
        ),
        ({**TORCHRUN, "RANK": "five"}, "RANK = 'five' in the environment: expected a whole number"),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "many"},
            "SLURM_STEP_NUM_TASKS = 'many' in the environment",
        ),
    ],
)
def test_what_cannot_be_is_refused(environment: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_placement(environment)
    assert told in str(caught.value)
