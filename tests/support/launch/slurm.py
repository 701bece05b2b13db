"""A fake Slurm on one machine: it runs sbatch scripts on nodes that are namespaces.

    python -m tests.support.launch.slurm srun ARGUMENTS       # what the scripts find as `srun`

Where namespaces cannot be created, the nodes are groups of processes that share the network. As
Slurm does, srun ends with the highest exit code of its tasks, ends all tasks some time after the
first has ended (--wait), and passes signals on to them; and a job is run again if it asked for that
with scontrol, or if one of its nodes has failed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from benchmarks.published import namespaces

ROOT = Path(__file__).parents[3]
LIMIT_S = 200.0


class Slurm:
    """Runs jobs in a folder; `create` makes it."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.folder, self.nodes = folder, nodes

    def start(self, script: Path, attempt: int = 0) -> subprocess.Popen[str]:
        """Start a job's script, as Slurm does on its first node."""
        text = script.read_text()
        options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
        n_nodes, per_node = int(options["nodes"]), int(options["ntasks-per-node"])
        assert n_nodes <= len(self.nodes)
        environ = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": str(attempt),
            "FAKE_SLURM": json.dumps([str(self.folder), list(self.nodes[:n_nodes]), per_node]),
        }
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMP_"))}
        (self.folder / "requeued").unlink(missing_ok=True)
        return subprocess.Popen(
            ["bash", str(script)], cwd=self.folder, env={**kept, **environ}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    @property
    def requeued(self) -> bool:
        """Whether the job has asked to be run again."""
        return (self.folder / "requeued").exists()

    def tasks(self) -> list[list[int]]:
        """Return the process ids of the tasks on each node, once all have started."""
        found: list[list[int]] = json.loads((self.folder / "tasks").read_text())
        return found

    def kill_node(self, number: int) -> None:
        """Kill everything on a node, without a word to anyone."""
        for pid in self.tasks()[number]:
            os.killpg(pid, signal.SIGKILL)

    def signal_step(self, signum: int) -> None:
        """Send a signal to every process of every task, as --signal does."""
        for pid in [pid for node in self.tasks() for pid in node]:
            with suppress(ProcessLookupError):
                os.killpg(pid, signum)


@contextmanager
def slurm(folder: Path, n_nodes: int) -> Iterator[Slurm]:
    """Provide nodes, and `srun` and `scontrol` in a folder; all processes end with the block."""
    here = f'exec {sys.executable} -m tests.support.launch.slurm "$0" "$@"'
    programs = {
        "srun": f"#!/bin/sh\n{here}\n",
        "scontrol": f'#!/bin/sh\n[ "$1 $2" = "requeue 7" ] && touch {folder}/requeued\n',
        "python3": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    plain = [""] * n_nodes
    network = nullcontext(plain) if namespaces.problems() else namespaces.network(n_nodes, 10_000)
    with network as nodes:
        found = Slurm(folder, nodes)
        try:
            yield found
        finally:
            with suppress(FileNotFoundError):
                found.signal_step(signal.SIGKILL)


def srun(words: Sequence[str]) -> int:
    """Start the tasks of a step and wait for them."""
    folder, nodes, per_node = json.loads(os.environ["FAKE_SLURM"])
    n_options = next(i for i, word in enumerate(words) if not word.startswith("-"))
    options, command = words[:n_options], words[n_options:]
    wait_s = next(float(o.partition("=")[2]) for o in options if o.startswith("--wait="))
    assert "--kill-on-bad-exit=0" in options
    in_network = bool(nodes[0])
    names = f"10.77.0.[1-{len(nodes)}]" if in_network else "127.0.0.1"
    started: list[subprocess.Popen[bytes]] = []
    for node, name in enumerate(nodes):
        for local in range(per_node):
            environ = {
                **os.environ,
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(node * per_node + local),
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
                "SLURM_STEP_NUM_TASKS": str(len(nodes) * per_node),
                "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{len(nodes)})",
                "SLURM_STEP_NODELIST": names,
                **({"GLOO_SOCKET_IFNAME": namespaces.INTERFACE} if in_network else {}),
            }
            begin = partial(namespaces.enter, name) if in_network else None
            started.append(
                subprocess.Popen(command, env=environ, preexec_fn=begin, start_new_session=True)
            )
    pids = [task.pid for task in started]
    unfinished = Path(folder) / "tasks.unfinished"
    unfinished.write_text(
        json.dumps([pids[i * per_node : (i + 1) * per_node] for i in range(len(nodes))])
    )
    unfinished.rename(Path(folder) / "tasks")

    def pass_on(signum: int, frame: FrameType | None) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(signum, pass_on)
    end_at = float("inf")
    while None in (codes := [task.poll() for task in started]):
        if end_at == float("inf") and codes != [None] * len(codes):
            end_at = time.monotonic() + wait_s
        if time.monotonic() > end_at:
            pass_on(signal.SIGKILL, None)
        time.sleep(0.05)
    return max(code if code >= 0 else 128 - code for code in codes if code is not None)


if __name__ == "__main__":
    sys.exit(srun(sys.argv[2:]))
