"""A small tracking server: MLflow's REST calls that a run needs, answered by MLflow's own client on
a data base.

The server of MLflow itself needs several hundred MB of packages more. Takes the data base and a
port (0: any), and prints the port.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mlflow.entities import Metric, Param, RunStatus, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils.proto_json_utils import message_to_json

CLIENT = MlflowClient(f"sqlite:///{sys.argv[1]}")


def plain(entity: Any) -> Any:
    return json.loads(message_to_json(entity.to_proto()))


def answer(call: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return what the real server would."""
    if call == "experiments/get-by-name":
        found = CLIENT.get_experiment_by_name(given["experiment_name"])
        if found is None:
            raise MlflowException("no such experiment", 1001)
        return {"experiment": plain(found)}
    if call == "runs/search":
        runs = CLIENT.search_runs(given["experiment_ids"], given["filter"], max_results=1)
        return {"runs": [plain(run) for run in runs]}
    if call == "runs/create":
        tags = {tag["key"]: tag["value"] for tag in given["tags"]}
        return {
            "run": plain(
                CLIENT.create_run(given["experiment_id"], tags=tags, run_name=given.get("run_name"))
            )
        }
    if call == "runs/get":
        return {"run": plain(CLIENT.get_run(given["run_id"]))}
    if call == "runs/update":
        status = given["status"]
        CLIENT.update_run(
            given["run_id"], status if isinstance(status, str) else RunStatus.to_string(status)
        )
        return {"run_info": plain(CLIENT.get_run(given["run_id"]).info)}
    if call == "runs/log-batch":
        metrics = given.get("metrics", [])
        CLIENT.log_batch(
            given["run_id"],
            [Metric(m["key"], float(m["value"]), int(m["timestamp"]), int(m.get("step", 0))) for m in metrics],
            [Param(p["key"], p["value"]) for p in given.get("params", [])],
            [RunTag(t["key"], t["value"]) for t in given.get("tags", [])],
        )  # fmt: skip
        return {}
    raise MlflowException(f"{call} is not served")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply({key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()})

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, given: dict[str, Any]) -> None:
        try:
            code, content = 200, answer(urlsplit(self.path).path.partition("/mlflow/")[2], given)
        except MlflowException as error:
            code, content = (
                error.get_http_status_code(),
                {"error_code": error.error_code, "message": str(error)},
            )
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
