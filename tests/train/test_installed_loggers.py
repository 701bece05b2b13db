"""Real runs that log to the real packages of Weights & Biases and MLflow, where they are installed.

`make test` does not install them, since they bring large packages along, so these tests are skipped
there; test_loggers.py tests the same with fakes. `pip install -e '.[wandb,mlflow]'` adds them.
Nothing is sent: Weights & Biases runs offline, and MLflow writes to a file.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gridformer.train.metrics import grouped

pytestmark = pytest.mark.full

STEPS = 20
REPRODUCED = ("loss", "grad_norm", "lr", "tokens", "val_loss")  # equal whenever a step is run
# The first rank of a run of two processes tells itself to stop after a step, or is killed.
SCRIPT = """
import os, sys
from pathlib import Path

from gridformer.launch.run import train
from gridformer.train import Callback


class EndsAfter(Callback):
    def __init__(self, step, signum):
        self.step, self.signum = step, signum

    def on_step(self, metrics):
        if metrics["step"] == self.step:
            os.kill(os.getpid(), self.signum)


if __name__ == "__main__":
    file, out, step, signum = sys.argv[1:]
    train(file, out=Path(out), callbacks=[EndsAfter(int(step), int(signum))])
"""


def installed(package: str) -> Any:
    extra = f"pip install 'gridformer[{package}]'"
    return pytest.importorskip(package, reason=f"{package} is not installed: {extra}")


@pytest.fixture
def start(token_folder: Path, tmp_path: Path) -> Any:
    """Return a function that starts or resumes a run, which ends after a step by a signal."""
    (tmp_path / "run.py").write_text(SCRIPT)
    hidden = ("WANDB_", "MLFLOW_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}

    def started(logger: str, step: int = 0, signum: int = 0) -> Path:
        sections = {
            "name": "mine",
            "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
            "data": {"path": str(token_folder)},
            "layout": {"scheme": "megatron", "cols": 2},
            "train": {
                **{"steps": STEPS, "global_batch": 4, "eval_every": 4, "eval_batches": 1},
                **{"save_every": 2, "loggers": [logger], "device": "cpu"},
            },
        }
        file, out = tmp_path / "mine.yaml", tmp_path / "runs" / "mine"
        file.write_text(json.dumps(sections))
        words = [file, out, step, signum]
        done = subprocess.run(
            [sys.executable, tmp_path / "run.py", *map(str, words)],
            env={**env, "WANDB_MODE": "offline"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert "nothing more is sent" not in done.stdout + done.stderr, done.stdout + done.stderr
        assert (done.returncode == 0) == (not step), done.stderr
        return out

    return started


def recorded(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers of metrics.jsonl by name: steps and values."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        for name, value in metrics.items():
            if name != "step":
                found.setdefault(name, []).append((metrics["step"], value))
    assert [step for step, _ in found["tokens"]] == [*range(STEPS + 1)]
    return found


def mlflow_runs(out: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the metrics of each run in the file, and check that it is finished."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{out.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("gridformer")
    assert experiment is not None
    found = {}
    for run in client.search_runs([experiment.experiment_id]):
        assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
        assert run.data.params["train.steps"] == str(STEPS)
        assert run.data.tags["gridformer.layout"] == "megatron 1x2"
        histories = {
            name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics
        }
        found[run.info.run_id] = {
            name: sorted((one.step, one.value) for one in history)
            for name, history in histories.items()
        }
    return found


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_mlflow_has_one_run_with_every_step_once(start: Any, signum: int) -> None:
    installed("mlflow")
    # A checkpoint is complete when the one after it begins.
    start("mlflow", 7, signum)
    out = start("mlflow")
    [metrics] = mlflow_runs(out).values()
    wanted = recorded(out)
    # Steps that were sent before the kill keep what was measured then, such as their seconds.
    names = REPRODUCED if signum == signal.SIGKILL else {*wanted}
    assert {name: metrics[name] for name in names} == {name: wanted[name] for name in names}
    for history in metrics.values():
        assert len(history) == len({step for step, _ in history})


def stored(path: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file, which is a log of LevelDB after 7 bytes.

    Records are divided at blocks of 32 KiB. Each part has a checksum, its length and its kind: a
    whole record is 1, and the first, inner and last parts of one are 2, 3 and 4. What a killed
    process did not finish is left out.
    """
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + length]
        if len(part) < length or not kind:
            return
        record += part
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def wandb_parts(out: Path) -> list[tuple[str, dict[str, list[tuple[int, float]]], str]]:
    """Return of each process its run's id, the metrics that it has logged, and its final state."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted((out / "wandb").glob("offline-run-*/run-*.wandb")):
        run_id = state = ""
        metrics: dict[str, list[tuple[int, float]]] = {}
        for data in stored(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run_id = record.run.run_id
                assert (record.run.display_name, record.run.project) == ("mine", "gridformer")
            elif kind == "history":
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                for name, value in values.items():
                    if not name.startswith("_"):
                        metrics.setdefault(name, []).append((values["_step"], value))
            elif kind == "summary":
                for item in record.summary.update:
                    if item.key == "state":
                        state = json.loads(item.value_json)
        found.append((run_id, metrics, state))
    return found


def test_wandb_has_one_run_with_every_step_once(start: Any) -> None:
    installed("wandb")
    start("wandb", 3, signal.SIGTERM)
    out = start("wandb")
    (first, before, stopped), (second, after, done) = wandb_parts(out)
    assert first == second == json.loads((out / "loggers.json").read_text())["wandb"]["id"]
    assert (stopped, done) == ("stopped", "done")
    joined = {name: before.get(name, []) + after.get(name, []) for name in {**before, **after}}
    assert joined == {grouped(name): values for name, values in recorded(out).items()}


def test_wandb_has_every_step_after_a_kill(start: Any) -> None:
    """What a killed process has written is not known, so the next one writes it again."""
    installed("wandb")
    start("wandb", 7, signal.SIGKILL)
    out = start("wandb")
    [*_, (_, metrics, done)] = wandb_parts(out)
    # A process that is killed early may leave a file without records.
    assert len({run_id for run_id, _, _ in wandb_parts(out) if run_id}) == 1
    assert done == "done"
    assert metrics == {grouped(name): values for name, values in recorded(out).items()}
