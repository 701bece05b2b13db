"""The starter of one node's processes: their places, their exit code, and that none is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gridformer.launch.node import Node, environments, exit_code, node_of, run_node
from gridformer.mesh.launch_env import rank_env
from gridformer.utils.errors import UserError
from tests.support.launch.programs import still_runs

MEET = {"MASTER_ADDR": "mine-nodes-0-0.mine", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "node[01-02]",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "environ", "address"),
    [
        (2, {**MEET, "JOB_COMPLETION_INDEX": "1"}, MEET["MASTER_ADDR"]),
        (2, {**MEET, "NODE_RANK": "1"}, MEET["MASTER_ADDR"]),
        (None, SRUN, "node01"),
        (2, {**SRUN, "RANK": "7", "WORLD_SIZE": "9"}, "node01"),
    ],
)
def test_nodes_and_their_processes(
    nodes: int | None, environ: dict[str, str], address: str
) -> None:
    node = node_of(nodes, environ)
    assert node[:3] == (1, 2, address)
    places = [rank_env(one) for one in environments(node, 3, environ)]
    assert [(p.rank, p.size, p.local_rank, p.local_size) for p in places if p] == [
        (3, 6, 0, 3), (4, 6, 1, 3), (5, 6, 2, 3),
    ]  # fmt: skip
    assert {(p.master_addr, p.by) for p in places if p} == {(address, "torchrun")}


@pytest.mark.parametrize(
    ("nodes", "environ", "sentence"),
    [
        (2, MEET, "which of the nodes this is is not known"),
        (2, {"NODE_RANK": "1"}, "which of the nodes this is is not known"),
        (None, {**MEET, "NODE_RANK": "1"}, "which of the nodes this is is not known"),
        (2, {**MEET, "NODE_RANK": "2"}, "node 2 of 2 is impossible"),
        (3, SRUN, "--nodes=3, but srun started 2 tasks"),
    ],
)
def test_refusals(nodes: int | None, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        node_of(nodes, environ)


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0), ([75, 75], 75), ([0, 75], 75), ([75, 1], 1), ([1, 2], 2), ([-9, 1], 1),
        ([-9, 75], 137), ([143, 143], 143),
    ],
)  # fmt: skip
def test_exit_codes(codes: list[int], code: int) -> None:
    assert exit_code(codes) == code


def test_the_others_are_stopped_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gridformer.launch.node._NOTICE_S", 0.2)
    monkeypatch.setattr("gridformer.launch.node._END_S", 99.0)
    began = time.monotonic()
    script = "import os, time; time.sleep(600 if os.environ['RANK'] == '1' else 0); exit(2)"
    environs = [*environments(Node(0, 1, "127.0.0.1", "1"), 2, os.environ)]
    assert run_node([sys.executable, "-c", script], environs) == 2
    assert time.monotonic() - began < 90.0, "it was stopped when it had not noticed"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_signals_reach_all_processes(signum: int, tmp_path: Path) -> None:
    """Nothing is left of a starter that is killed, either."""
    (tmp_path / "gridformer.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def stop(*_): sys.exit(75)\n"
        "for one in (signal.SIGTERM, signal.SIGUSR1): signal.signal(one, stop)\n"
        f"(pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()\n"
        "time.sleep(600)\n"
    )
    program = (
        "import sys\n"
        "from gridformer.launch.node import Node, environments, run_node\n"
        "environs = [*environments(Node(0, 1, '127.0.0.1', '1'), 2, {})]\n"
        f"sys.exit(run_node([sys.executable, {str(tmp_path / 'gridformer.py')!r}], environs))\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 120
    while len(pids := [path.name for path in tmp_path.glob("[0-9]*")]) < 2:
        assert starter.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    starter.send_signal(signum)
    assert starter.wait(120) == (-9 if signum == signal.SIGKILL else 75)
    while any(map(still_runs, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
