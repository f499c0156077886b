"""Sends records to MLflow: a database in the run folder, or a tracking server."""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from phasetrain.addons.observe.trackers.base import Record
from phasetrain.addons.observe.trackers.spooled import Backend, Ending, SpooledTracker, Target
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS

COUNT_METRIC = "phasetrain/records"
"""Metric with the number of records that MLflow has, written in the same call as they are."""

RUN_TAG = "phasetrain.run"
"""Tag by which all attempts find their run."""

BATCH_METRICS = 900
"""Metrics sent in one call; MLflow accepts 1000."""

MAX_NAME = 250
"""Maximum length of a name in MLflow."""

log = logging.getLogger(__name__)

ENDINGS: Mapping[Ending, str] = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


@HOOKS.register("mlflow")
class MLflow(SpooledTracker):
    """One MLflow run for all attempts; needs the extra `mlflow`.

    Args:
        uri: address of the tracking server or database; None uses MLFLOW_TRACKING_URI, or else
            `mlflow.db` in the run folder.
        experiment: name of the experiment.
        run_name: name of the run; None uses the name of the run folder.
        every_updates, live, wait_seconds, hparams: see `SpooledTracker`.
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

    def make_backend(self, target: Target) -> Backend:
        """Return the MLflow run, not yet connected.

        Raises:
            ConfigError: the package is not installed, or the run folder cannot hold a database.
        """
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or _local_database(target.folder)
        try:
            import mlflow.tracking  # noqa: F401 - slow, so before data workers fork

            if "://" in uri and not uri.startswith(("http", "databricks")):
                import sqlalchemy  # noqa: F401 - only needed without a tracking server
        except ImportError as error:
            raise ConfigError(
                'HOOKS.mlflow needs MLflow: pip install "phasetrain[mlflow]", or '
                f"HOOKS.mlflow=null ({error})",
                code="config.missing_package",
            ) from error
        # It logs the creation of tables, and a traceback at every retry.
        logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)
        return MLflowRun(target, uri, self.experiment, self.run_name or target.folder.name)


class MLflowRun(Backend):
    """An MLflow run, identified by a tag.

    Args:
        target: the run.
        uri: address of the tracking server or database.
        experiment: name of the experiment.
        name: name of the run.
    """

    def __init__(self, target: Target, uri: str, experiment: str, name: str) -> None:
        self._target = target
        self._uri = uri
        self._experiment = experiment
        self._name = name
        self._client: Any = None
        self._id = ""
        self._rejected: set[str] = set()

    def connect(self) -> int:
        """Find the run, or create it."""
        from mlflow.tracking import MlflowClient

        path = Path(self._uri.removeprefix("sqlite:///"))
        # With options after "?" the address need not be a plain file that could be renamed.
        if self._uri.startswith("sqlite:///") and "?" not in self._uri and not path.exists():
            create_database(path)
        client = MlflowClient(self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            experiment_id = client.create_experiment(self._experiment)
        else:
            experiment_id = experiment.experiment_id
        # By tag, since names of runs are not unique in MLflow.
        runs = client.search_runs(
            [experiment_id], f"tags.`{RUN_TAG}` = '{self._target.identity}'", max_results=1
        )
        if runs:
            run = runs[0]
        else:
            run = client.create_run(
                experiment_id, tags={RUN_TAG: self._target.identity}, run_name=self._name
            )
        self._client = client
        self._id = run.info.run_id
        # An earlier attempt may have left the run as KILLED or FAILED.
        client.update_run(self._id, status="RUNNING")
        self._log_params(run.data.params)
        return int(run.data.metrics.get(COUNT_METRIC, 0))

    def send(self, first: int, records: Sequence[Record]) -> None:
        """Send the metrics of records, and the number of records."""
        from mlflow.entities import Metric

        batch: list[Any] = []
        for number, record in enumerate(records, first):
            at = round(record.at * 1000)  # milliseconds since 1970
            values = record.values_by_name()
            if record.item and "://" in self._uri and not self._uri.startswith("sqlite"):
                # Before the record is counted; a repeated upload replaces the file.
                self._client.log_artifact(
                    self._id, str(self._target.folder / record.item["file"]), "media"
                )
            batch += [
                Metric(name, values[raw], at, record.updates)
                for raw, name in sanitize_names(values).items()
            ]
            if len(batch) >= BATCH_METRICS or number == first + len(records) - 1:
                self._client.log_batch(
                    self._id, metrics=[*batch, Metric(COUNT_METRIC, number + 1, at, record.updates)]
                )
                batch.clear()

    def note(self, name: str, value: str) -> None:
        """Set a tag."""
        self._client.set_tag(self._id, f"phasetrain.{name}", value)

    def close(self, ending: Ending) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._id, ENDINGS[ending])

    def abandon(self) -> None:
        """Drop the client."""
        self._client = None

    def _log_params(self, logged: Mapping[str, str]) -> None:
        """Log the config; values that MLflow rejects are reported and left out.

        MLflow cannot change a parameter that an earlier attempt has logged.
        """
        from mlflow.entities import Param

        new = []
        for raw, key in sanitize_names(self._target.hparams).items():
            if key in logged or key in self._rejected:
                continue
            value = self._target.hparams[raw]
            if not isinstance(value, str):
                value = json.dumps(value, default=str)
            new.append(Param(key, value))
        # MLflow accepts 100 parameters in a call.
        for start in range(0, len(new), 100):
            batch = new[start : start + 100]
            # One invalid value rejects the whole call, so the values are then sent one by one.
            if not self._try_params(batch):
                self._rejected |= {param.key for param in batch if not self._try_params([param])}
        if self._rejected and not logged:
            log.warning(
                "HOOKS.mlflow: MLflow rejects these values of the config: %s",
                ", ".join(self._rejected),
            )

    def _try_params(self, params: Sequence[Any]) -> bool:
        """Log parameters in one call; return False if MLflow rejects them as invalid."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self._id, params=params)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            return False
        return True


def create_database(path: Path) -> None:
    """Create an empty database atomically."""
    from mlflow.tracking import MlflowClient

    # MLflow needs seconds to create the tables, and never repairs a database that a kill has left
    # incomplete; so it works on another file, which is renamed when it is complete.
    incomplete = path.with_name(f"{path.name}.tmp-{uuid4().hex[:8]}")
    MlflowClient(f"sqlite:///{incomplete}").search_experiments(max_results=1)
    incomplete.rename(path)


def sanitize_names(names: Iterable[str]) -> dict[str, str]:
    """Return name -> unique name that MLflow accepts.

    MLflow accepts letters, digits and `_-. /:` in a path such as `test/accuracy`. Valid names stay
    as they are; names that become equal get `_2`, `_3`, ... in their order.
    """
    raw = list(names)
    sanitized = {name: name for name in raw if _sanitize(name) == name}
    # Valid names are reserved first, so that no rewritten name can take one of them.
    used = set(sanitized)
    for name in raw:
        if name not in sanitized:
            candidate = _sanitize(name)
            number = 1
            while candidate in used:
                number += 1
                candidate = f"{_sanitize(name)[: MAX_NAME - 8]}_{number}"
            sanitized[name] = candidate
            used.add(candidate)
    return {name: sanitized[name] for name in raw}


def _sanitize(name: str) -> str:
    """Replace characters and path components that MLflow rejects by `_`."""
    clean = "".join(char if char.isalnum() or char in "_-. /:" else "_" for char in name)
    path = "/".join("_" if part in ("", ".", "..") else part for part in clean.split("/"))
    if len(path) <= MAX_NAME:
        return path
    return f"{path[: MAX_NAME - 1]}_"


def _local_database(folder: Path) -> str:
    """Return the address of the database in a run folder."""
    path = folder.absolute() / "mlflow.db"
    if "?" in str(path):
        raise ConfigError(
            f"RUN.dir = {str(folder)!r}: HOOKS.mlflow cannot keep its database there, because '?' "
            "starts the options of a database address; choose another run folder, set "
            "HOOKS.mlflow.uri, or HOOKS.mlflow=null",
            code="config.conflict",
        )
    return f"sqlite:///{path}"
