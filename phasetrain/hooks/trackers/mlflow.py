"""Sends records to MLflow, into one run over all attempts: a data base in the run folder, or a
tracking server."""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS
from phasetrain.hooks.trackers.base import Record
from phasetrain.hooks.trackers.spooled import Backend, Ending, Remote, Target

COUNT = "phasetrain/records"
"""The metric that counts the records that MLflow has; it is written together with them."""

TAG = "phasetrain.run"
"""The tag by which all attempts find their run."""

MOST = 900
"""Metrics sent in one call; MLflow takes 1000."""

LONGEST = 250
"""Characters of the longest name that MLflow takes."""

log = logging.getLogger(__name__)

ENDINGS: Mapping[Ending, str] = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


@HOOKS.register("mlflow")
class MLflow(Remote):
    """One run of MLflow for all attempts; needs the extra `mlflow`.

    Args:
        uri: of the tracking server or data base; None: MLFLOW_TRACKING_URI, or else `mlflow.db` in
            the run folder.
        experiment: its name.
        run_name: name of the run; None: that of the run folder.
        every_updates, live, wait_seconds, hparams: see `Remote`.
    """

    kind = "mlflow"

    def __init__(
        self,
        uri: str | None = None,
        experiment: str = "phasetrain",
        run_name: str | None = None,
        every_updates: int = 10,
        wait_seconds: float = 30.0,
        *,
        live: bool = False,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every_updates, wait_seconds, live=live, hparams=hparams)
        self.uri = uri
        self.experiment = experiment
        self.run_name = run_name

    def backend(self, target: Target) -> Backend:
        """Return MLflow's run; raises ConfigError where the package is missing, or no data base can
        be there."""
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or _own_base(target.folder)
        try:
            import mlflow.tracking  # noqa: F401 - slow, and better done before data workers start

            if "://" in uri and not uri.startswith(("http", "databricks")):
                import sqlalchemy  # noqa: F401 - a part of the extra that a client of a server does without
        except ImportError as error:
            raise ConfigError(
                f'HOOKS.mlflow needs MLflow: pip install "phasetrain[mlflow]", or HOOKS.mlflow=null ({error})'
            ) from error
        logging.getLogger("mlflow.store.db").setLevel(
            logging.CRITICAL
        )  # news of tables, and tracebacks at every retry
        return MLflowRun(target, uri, self.experiment, self.run_name or target.folder.name)


class MLflowRun(Backend):
    """A run of MLflow that is found by a tag of ours.

    Args:
        target: the run.
        uri: of the tracking server or data base.
        experiment, name: of the run.
    """

    def __init__(self, target: Target, uri: str, experiment: str, name: str) -> None:
        self._target = target
        self._uri = uri
        self._experiment = experiment
        self._name = name
        self._client: Any = None
        self._id = ""
        self._refused: set[str] = set()

    def connect(self) -> int:
        """Find the run or make it."""
        from mlflow.tracking import MlflowClient

        path = Path(self._uri.removeprefix("sqlite:///"))
        if self._uri.startswith("sqlite:///") and "?" not in self._uri and not path.exists():
            make_base(path)
        client = MlflowClient(self._uri)
        found = client.get_experiment_by_name(self._experiment)
        place = client.create_experiment(self._experiment) if found is None else found.experiment_id
        runs = client.search_runs(
            [place], f"tags.`{TAG}` = '{self._target.identity}'", max_results=1
        )
        if runs:
            run = runs[0]
        else:
            run = client.create_run(place, tags={TAG: self._target.identity}, run_name=self._name)
        self._client = client
        self._id = run.info.run_id
        client.update_run(self._id, status="RUNNING")
        self._log_params(run.data.params)
        return int(run.data.metrics.get(COUNT, 0))

    def send(self, first: int, records: Sequence[Record]) -> None:
        """Write the metrics of records, and how many records there are."""
        from mlflow.entities import Metric

        batch: list[Any] = []
        for number, record in enumerate(records, first):
            at = round(record.at * 1000)  # milliseconds since 1970
            values = record.named()
            batch += [
                Metric(name, values[raw], at, record.updates)
                for raw, name in plain_names(values).items()
            ]
            if len(batch) >= MOST or number == first + len(records) - 1:
                self._client.log_batch(
                    self._id, metrics=[*batch, Metric(COUNT, number + 1, at, record.updates)]
                )
                batch.clear()

    def note(self, name: str, value: str) -> None:
        """Set a tag."""
        self._client.set_tag(self._id, f"phasetrain.{name}", value)

    def close(self, ending: Ending) -> None:
        """Say how the run stands."""
        self._client.set_terminated(self._id, ENDINGS[ending])

    def abandon(self) -> None:
        """Forget the client."""
        self._client = None

    def _log_params(self, known: Mapping[str, str]) -> None:
        """Log the config; what MLflow has of an earlier attempt cannot be changed there.

        Values that MLflow does not take are said and left out: metrics shall come all the same.
        """
        from mlflow.entities import Param

        values = self._target.hparams
        new = [
            Param(
                key,
                values[raw]
                if isinstance(values[raw], str)
                else json.dumps(values[raw], default=str),
            )
            for raw, key in plain_names(values).items()
            if key not in known and key not in self._refused
        ]
        for start in range(0, len(new), 100):
            batch = new[start : start + 100]
            if not self._taken(batch):
                self._refused |= {one.key for one in batch if not self._taken([one])}
        if self._refused and not known:
            log.warning(
                "HOOKS.mlflow: it does not take these values of the config: %s",
                ", ".join(self._refused),
            )

    def _taken(self, params: Sequence[Any]) -> bool:
        """Log params at once; return whether MLflow has taken them, which another try would not
        change."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self._id, params=params)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            return False
        return True


def make_base(path: Path) -> None:
    """Make an empty data base, whole or not at all: MLflow takes seconds to do it, and never mends
    one half made."""
    from mlflow.tracking import MlflowClient

    half = path.with_name(f"{path.name}.tmp-{uuid4().hex[:8]}")
    MlflowClient(f"sqlite:///{half}").search_experiments(max_results=1)
    half.rename(path)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return each name as MLflow takes it: letters, digits and any of `_-. /:` in a path such as
    `test/accuracy`.

    No two get the same one: a name that is fine keeps it, others get `_2`, `_3` and so on at their
    end, in their order.
    """
    raw = list(names)
    found = {name: name for name in raw if _plain(name) == name}
    taken = set(found)
    for name in raw:
        if name not in found:
            plain = _plain(name)
            number = 1
            while plain in taken:
                number += 1
                plain = f"{_plain(name)[: LONGEST - 8]}_{number}"
            found[name] = plain
            taken.add(plain)
    return {name: found[name] for name in raw}


def _plain(name: str) -> str:
    """Return a name with `_` for what MLflow does not take."""
    clean = "".join(char if char.isalnum() or char in "_-. /:" else "_" for char in name)
    path = "/".join("_" if part in ("", ".", "..") else part for part in clean.split("/"))
    if len(path) <= LONGEST:
        return path
    return f"{path[: LONGEST - 1]}_"


def _own_base(folder: Path) -> str:
    """Return the address of the data base in a run folder; raises ConfigError where none can name
    it."""
    path = folder.absolute() / "mlflow.db"
    if "?" in str(path):
        raise ConfigError(
            f"HOOKS.mlflow keeps a data base in the run folder, and RUN.dir = {str(folder)!r} has a '?', which begins "
            "the options in an address of a data base; give the folder another path, or set HOOKS.mlflow.uri, or "
            "HOOKS.mlflow=null"
        )
    return f"sqlite:///{path}"
