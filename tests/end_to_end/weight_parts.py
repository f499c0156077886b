"""Parts of runs of several ranks: weights that only rank 0 can read, and a hook that records the
parameters of each rank."""

import os
from hashlib import sha256
from pathlib import Path

from phasetrain.hooks import HOOKS, Hook, Run
from phasetrain.models.sources import FORMATS, SourceContent, WeightSource, read_source
from phasetrain.runtime.storage import Storage


@FORMATS.register("on_main")
def read_on_main(source: WeightSource, storage: Storage) -> SourceContent:
    """Return the content of a file; raise on other ranks than 0, whose machines do not have it."""
    assert os.environ["RANK"] == "0"
    return read_source(WeightSource(source.path))


@HOOKS.register("note_weights")
class NoteWeights(Hook):
    """Writes a digest of the parameters of each rank to `EVENT-RANK` next to the run folder."""

    main_only = False
    observe_only = True

    def on_start(self, run: Run) -> None:
        self._note(run, "start")

    def on_end(self, run: Run) -> None:
        self._note(run, "end")

    def _note(self, run: Run, event: str) -> None:
        assert run.folder is not None
        digest = sha256()
        for parameter in run.task.parts.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        Path(f"{run.folder.path}-{event}-{run.world.rank}").write_text(digest.hexdigest())
