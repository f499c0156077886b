"""Verifies the files of sharded checkpoints before a resume, by all ranks together."""

from itertools import takewhile

from phasetrain.checkpoint import CheckpointReader, Saved
from phasetrain.checkpoint.commit import INDEX, read_file
from phasetrain.checkpoint.reader import order_candidates
from phasetrain.distributed import World
from phasetrain.errors import InvalidCheckpointError


def verify_shards(reader: CheckpointReader, world: World) -> None:
    """Verify the newest sharded checkpoints, each rank some of the files; a collective call.

    Stops at the first valid one; `load_newest` does not verify the examined ones again.
    """
    if world.is_single_process:
        return

    def list_newest_sharded() -> list[Saved]:
        """Return the sharded checkpoints that `load_newest` would try before any other."""
        candidates = order_candidates(reader.list_checkpoints())
        return list(takewhile(lambda saved: INDEX in saved.manifest.files, candidates))

    # Rank 0 lists for all: on a network file system, listings of the ranks may differ.
    for saved in world.run_on_main(list_newest_sharded):
        problems = world.all_gather(_find_problem(reader, saved, world))
        problem = next(filter(None, problems), "")
        reader.examined[f"{reader.root}/{saved.name}"] = problem
        if not problem:
            return


def _find_problem(reader: CheckpointReader, saved: Saved, world: World) -> str:
    """Return the first problem in this rank's part of the files of a checkpoint, or ""."""
    path = f"{reader.root}/{saved.name}"
    for name, record in list(saved.manifest.files.items())[world.rank :: world.size]:
        try:
            read_file(reader.storage, path, name, record, reader.verify)
        except InvalidCheckpointError as error:
            return str(error)
    return ""
