"""What a script has to start: how many processes on how many nodes, of which run, for how long."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gridformer.cluster import Cluster, load_cluster
from gridformer.config import RunConfig, parse_run
from gridformer.parallel.validation import check_layout
from gridformer.utils.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

PORT = 29500
# A run is told to stop this number of seconds before it must be gone, plus train.stop_grace_s:
# time to save, and for what comes after the run in a script.
_AFTER_S = 60
# Of a time limit, this number of seconds is left for the start of the processes and the end.
_AROUND_S = 300.0


@dataclass(frozen=True)
class ClusterJob:
    """A run on nodes.

    Attributes:
        run: The run, with all overrides.
        file: Its file or shipped name, as the user typed it.
        overrides: `key=value` texts for the command line, those of the user and then our own.
        run_dir: The run directory.
        nodes: Number of nodes.
        per_node: Number of processes on each.
        whole_nodes: Whether these are all devices of a node.
        gpus: Whether each process needs a GPU.
        cores: CPU cores for each process; 0 means that nothing is said.
        hours: Limit of the job in hours; 0 means none.
        interface: Network interface for NCCL and gloo; empty means that they find it.
        notes: Sentences for a comment at the top.
    """

    run: RunConfig
    file: str
    overrides: tuple[str, ...]
    run_dir: Path
    nodes: int
    per_node: int
    whole_nodes: bool
    gpus: bool
    cores: int = 0
    hours: float = 0.0
    interface: str = ""
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.nodes * self.per_node

    @property
    def label(self) -> str:
        """The run's name in lower-case letters, digits and hyphens, as all launchers accept it."""
        return re.sub(r"[^a-z0-9]+", "-", self.run.name.lower()).strip("-")[:40].strip("-") or "run"

    @property
    def grace_s(self) -> int:
        """Seconds between the signal to stop and the moment when all processes must be gone."""
        return math.ceil(self.run.train.stop_grace_s) + _AFTER_S

    @property
    def stop_signal(self) -> str:
        """The signal after which the run asks to be requeued, such as `USR1`; empty if none."""
        signals = self.run.train.stop_signals
        # SIGUSR1 if possible, since Slurm kills what it has sent SIGTERM to.
        chosen = next((name for name in ("SIGUSR1", "SIGTERM", *signals) if name in signals), "")
        return chosen.removeprefix("SIG")

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that the processes need."""
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        return {name: self.interface for name in names if self.interface and self.nodes > 1}

    def train_words(self, file: str | None = None) -> list[str]:
        """Returns the command line that trains, after the program's name.

        Args:
            file: The run file, if it is another one that has all overrides.
        """
        what = [self.file, *self.overrides] if file is None else [file]
        return ["train", *what, "--out", str(self.run_dir)]


def make_job(
    run: RunConfig,
    file: str,
    overrides: Sequence[str] = (),
    cluster: str = "",
    per_node: int = 0,
    run_dir: Path | None = None,
    hours: float = 0.0,
    interface: str = "",
) -> ClusterJob:
    """Divides a run over nodes.

    Args:
        run: The run, with its overrides.
        file, overrides: As the user typed them.
        cluster: Name or path of a cluster file; empty means that of the run, if it has one.
        per_node: Devices of a node; 0 means those of the cluster file, or of the run's layout.
        run_dir: The run directory; None means `runs/NAME`.
        hours: Limit of the job; the run stops before it, unless it has a train.max_hours.
        interface: See `ClusterJob`.

    Raises:
        ConfigError: The number of processes fits no number of nodes, the options contradict each
            other, or the layout has problems.
    """
    found = load_cluster(cluster or run.layout.cluster) if cluster or run.layout.cluster else None
    n, k = run.layout.n_processes, _devices_per_node(run, found, per_node)
    if found and n > found.size:
        raise ConfigError([f"the layout needs {n} devices, but {found.name} has {found.size}"])
    if n > k and n % k:
        raise ConfigError([_not_divisible(n, k)])
    nodes, on_each = (n // k, k) if n > k else (1, n)
    own: list[str] = []
    notes = [f"{n} processes: {nodes} node{'s' * (nodes > 1)} with {on_each} each"]
    if nodes > 1 and not run.layout.devices_per_node:
        own.append(f"layout.devices_per_node={k}")
        notes.append(f"{own[-1]} is added, which places the ranks that exchange most on one node")
    if hours and run.train.max_hours is None:
        stop = max(hours / 2, hours - _AROUND_S / 3600)
        own.append(f"train.max_hours={math.floor(100 * stop) / 100:.10g}")
        notes.append(f"{own[-1]} is added: the run saves and stops before the limit of {hours:g} h")
    changed = parse_run(run.model_dump(mode="json"), own)
    check_layout(changed)
    cores = int(found.host.cores.value) // found.node_size if found and found.host.cores else 0
    return ClusterJob(
        run=changed,
        file=file,
        overrides=(*overrides, *own),
        run_dir=run_dir or Path("runs") / run.name,
        nodes=nodes,
        per_node=on_each,
        whole_nodes=on_each == k,
        gpus=run.train.device != "cpu" and (found is None or found.device.kind == "cuda"),
        cores=cores,
        hours=hours,
        interface=one_word("--interface", interface),
        notes=tuple(notes),
    )


def _devices_per_node(run: RunConfig, cluster: Cluster | None, asked: int) -> int:
    """Returns the devices of a node from where they are known; all that know must agree."""
    sources = {
        "--devices-per-node": asked,
        f"the cluster {cluster.name}" if cluster else "": cluster.node_size if cluster else 0,
        "layout.devices_per_node": run.layout.devices_per_node,
    }
    known = {name: k for name, k in sources.items() if k}
    if not known:
        raise ConfigError(
            [
                "how many devices a node has is not known: add --cluster with the name or file of "
                "a cluster, or --devices-per-node"
            ]
        )
    (first, k), *rest = known.items()
    for name, other in rest:
        if other != k:
            raise ConfigError(
                [f"{first} says {k} devices per node, but {name} says {other}: use one of them"]
            )
    return k


def _not_divisible(n: int, k: int) -> str:
    smaller, larger = n // k * k, (n // k + 1) * k
    fits = max(d for d in range(1, k) if n % d == 0)
    return (
        f"{n} processes do not fill nodes of {k} devices: use a layout of {smaller} or {larger} "
        f"processes, or --devices-per-node {fits} for {n // fits} nodes that are used in part"
    )


def one_word(option: str, text: str) -> str:
    """Returns a text that a script can contain as it is.

    Raises:
        ConfigError: It has characters that names of machines, partitions and images do not have.
    """
    if text and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,:=@/+^-]*", text):
        raise ConfigError(
            [f"{option} {text!r}: use letters, digits and the characters _ . , : = @ / + ^ - only"]
        )
    return text


def sbatch_option(text: str) -> str:
    """Returns an option of sbatch that is one word.

    Raises:
        ConfigError: It is not one.
    """
    name, _, value = text.partition("=")
    if not re.fullmatch(r"--[a-z][a-z-]*", name) or text.endswith("="):
        raise ConfigError(
            [f"--sbatch {text!r}: write an option of sbatch as --name or --name=value"]
        )
    one_word("--sbatch", value)
    return text
