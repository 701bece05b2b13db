"""Cluster files: the devices, links and host of a machine, each number with its source.

`configs/clusters` ships some, and `gridformer calibrate` writes one for this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.functional_validators import AfterValidator

from gridformer.cluster.tables import Tables
from gridformer.config.base import closest
from gridformer.config.reading import configs_dir, read_yaml, said_of
from gridformer.config.schema import DIALECT
from gridformer.utils.errors import ConfigError

# The numbers that may be fitted, at most four of them in a file, and the values that count where a
# file leaves one out. These are rough and assumed for any machine.
FITTED = {
    "product_efficiency": 0.8,  # of the peak rate, for large matrix products
    "memory_efficiency": 0.75,  # of the memory's bandwidth, for memory-bound kernels
    "inner_efficiency": 0.75,  # of the bandwidth of the innermost level
    "outer_efficiency": 0.8,  # of that of the other levels
    "slowdown_per_node": 0.0,  # messages between n nodes take 1 + (n - 2) times this longer
}
MAX_FITTED = 4
NO_DATA = "nothing"  # the data of a number that is assumed
LINK_GBPS = 15.75  # of PCI Express 3.0 x16, for files without `host.link_gbps`
LOCAL = "local"  # the file that `gridformer calibrate` writes into the current folder


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Figure(_Part):
    """A number and where it comes from: a data sheet, a paper, or a measurement."""

    value: float = Field(ge=0)
    source: str = Field(min_length=1)


def _above_zero(figure: Figure) -> Figure:
    if not figure.value:
        raise ValueError("value is 0, but times are divided by it: use a number above 0")
    return figure


Rate = Annotated[Figure, AfterValidator(_above_zero)]


class Device(_Part):
    """A device: one GPU, or one process on a CPU."""

    name: str
    kind: Literal["cuda", "cpu"]
    n_processors: Rate
    """The multiprocessors of a GPU, over which the tiles of products are distributed."""
    memory_gib: Figure
    """The memory of the device in GiB."""
    reserved_gib: Figure
    """The part that the driver, CUDA's context and NCCL take."""
    peak_tflops: dict[str, Rate] = Field(min_length=1)
    """The peak TFLOP/s of dense products by data type. tf32 multiplies float32 tensors as TF32."""
    memory_gbps: Rate
    """The bandwidth of the device's memory in GB/s."""
    fused_attention: bool = True
    """Whether attention is one kernel that keeps no scores. false describes software from before
    2022, whose attention is two products, and passes over the scores between them."""


class Level(_Part):
    """A level of the network. Levels are listed from the inside out: node, rack, ..."""

    name: str
    size: int = Field(ge=1)
    """The number of devices in one unit of this level, for example in one node."""
    bandwidth_gbps: Rate
    """GB/s in one direction of one link that attaches devices to this level."""
    latency_us: Figure
    """The latency of one hop of a message in microseconds."""
    shared_by: int = Field(default=1, ge=1)
    """The number of neighboring devices that share one such link: 1 where each has its own, 2 for a
    node with 8 devices and 4 network cards."""
    source: str = "not stated"
    """Where size and shared_by come from."""


class Host(_Part):
    """The processor that launches kernels and messages."""

    launch_us: Figure
    """Microseconds that the host takes to launch one kernel of PyTorch."""
    step_us: Figure
    """Microseconds of a training step that depend on no kernel."""
    message_us: Figure
    """Microseconds before the first byte of a message travels."""
    cores: Rate | None = None
    """The cores that the processes of a run on a CPU share."""
    link_gbps: Rate | None = None
    """GB/s in one direction between the host and one GPU."""


class Fitted(_Part):
    """A number that was fitted to measurements of whole training steps."""

    value: float = Field(ge=0)
    source: str
    """The command that fitted it."""
    data: str
    """The measurements that it was fitted to."""
    identified: bool
    """Whether the measurements determine it."""
    note: str = ""
    """A caution for uses that the measurements do not cover."""
    up_to_nodes: int | None = Field(default=None, ge=1)
    """The most nodes of a measurement, if the number depends on them: predictions beyond say so."""


class Cluster(_Part):
    """A machine: its devices, the levels of its network, its host, and what was fitted.

    Attributes:
        tables: The measurements of `gridformer calibrate` there.
        processes: How many processes compute at the same time on one machine with a CPU, whose
            cores they share. The caller that asks for times sets it; it is not a key of the file.
    """

    name: str
    device: Device
    levels: tuple[Level, ...] = Field(min_length=1)
    host: Host
    fitted: dict[str, Fitted] = {}
    tables: Tables = Tables()
    processes: int = Field(default=1, ge=1, exclude=True)

    @field_validator("fitted")
    @classmethod
    def _known(cls, fitted: dict[str, Fitted]) -> dict[str, Fitted]:
        for name, number in fitted.items():
            if name not in FITTED:
                raise ValueError(f"'{name}' is not a fitted number{closest(name, FITTED)}")
            if name != "slowdown_per_node" and not number.value:
                raise ValueError(f"{name} is 0, but times are divided by it: use {FITTED[name]}")
        if len(fitted) > MAX_FITTED:
            raise ValueError(f"has {len(fitted)} numbers: at most {MAX_FITTED} may be fitted")
        return fitted

    @model_validator(mode="after")
    def _nested(self) -> Self:
        for level in self.levels:
            if level.size % level.shared_by:
                raise ValueError(
                    f"level {level.name}: {level.size} devices cannot share links by "
                    f"{level.shared_by}; use a divisor of {level.size}"
                )
        for inner, outer in itertools.pairwise(self.levels):
            if outer.size % inner.size or outer.size <= inner.size:
                raise ValueError(
                    f"level {outer.name} has {outer.size} devices: it must be a multiple of the "
                    f"{inner.size} of level {inner.name}, such as {inner.size * 2}"
                )
            if outer.shared_by > inner.size:
                raise ValueError(
                    f"level {outer.name}: links are counted for each unit of level {inner.name}, "
                    f"whose {inner.size} devices cannot be {outer.shared_by}: use shared_by at "
                    f"most {inner.size}, with a lower bandwidth if several units share a link"
                )
        return self

    @property
    def node_size(self) -> int:
        """Devices in one node."""
        return self.levels[0].size

    @property
    def nodes_per_rack(self) -> int:
        """Nodes in a unit of the second level, if there is a third level; 0 otherwise."""
        return self.levels[1].size // self.node_size if len(self.levels) > 2 else 0

    @property
    def size(self) -> int:
        """The most devices that the file describes."""
        return self.levels[-1].size

    def for_processes(self, n: int) -> Cluster:
        """Returns the cluster as n processes see it, which share the cores and memory of a CPU."""
        if self.device.kind != "cpu":
            return self
        host = self.host
        if measured := self.tables.host_s(n):
            figures = zip(("launch_us", "step_us"), (host.launch_us, host.step_us), measured)
            values = {key: one.model_copy(update={"value": 1e6 * s}) for key, one, s in figures}
            host = host.model_copy(update=values)
        return self.model_copy(update={"processes": n, "host": host})

    @property
    def limit_gib(self) -> float:
        """Memory that a training process can use on one device; those on a CPU share its memory."""
        whole = self.device.memory_gib.value - self.device.reserved_gib.value
        return whole / self.processes if self.device.kind == "cpu" else whole

    @property
    def fastest_dtype(self) -> str:
        """The type in which a device multiplies fastest; bfloat16 before float16."""
        peaks = self.device.peak_tflops
        half = [name for name in ("bfloat16", "float16") if name in peaks]
        best = max(half, key=lambda name: peaks[name].value, default="float32")
        single = peaks.get("float32")
        return best if half and (not single or peaks[best].value > single.value) else "float32"

    @property
    def link_gbps(self) -> float:
        """GB/s in one direction between the host and a GPU; by default of PCI Express 3.0 x16."""
        return self.host.link_gbps.value if self.host.link_gbps else LINK_GBPS

    def number(self, name: str) -> float:
        """Returns a fitted number, or what is assumed for any machine if the file has none."""
        return self.fitted[name].value if name in self.fitted else FITTED[name]


def cluster_schema() -> dict[str, Any]:
    """Returns the JSON schema of what `load_cluster` reads; the name is that of the file."""
    schema = Cluster.model_json_schema()
    schema["required"].remove("name")
    return {"$schema": DIALECT, **schema, "title": "A cluster file of gridformer"}


def cluster_names() -> list[str]:
    """Returns the names of the shipped clusters, for example `dgx-h100`, in alphabetical order."""
    return sorted(path.stem for path in (configs_dir() / "clusters").glob("*.yaml"))


def cluster_path(name_or_path: str | Path) -> Path | None:
    """Returns the file with this path or of a shipped cluster of this name; None if there is none.

    `local` is `local.yaml` in the current folder, which `gridformer calibrate` writes.
    """
    path, name = Path(name_or_path), str(name_or_path)
    if path.is_file():
        return path
    if name == LOCAL:
        path = Path(f"{LOCAL}.yaml")
    elif path.name == name:  # no folder
        path = configs_dir() / "clusters" / f"{name}.yaml"
    return path if path.is_file() else None


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Reads a cluster file, which `cluster_path` finds.

    Raises:
        ConfigError: There is no such cluster, or the file has problems: all of them are listed,
            each with what would be valid.
    """
    path = cluster_path(name_or_path)
    if path is None:
        name = str(name_or_path)
        if not name:
            raise ConfigError(
                f"--cluster is missing: name one of {', '.join(cluster_names())}, or the file that "
                "`gridformer calibrate` writes of this machine"
            )
        if name == LOCAL:
            text = f"there is no {LOCAL}.yaml here: `gridformer calibrate` measures this machine"
            raise ConfigError(f"{text} and writes it")
        near = closest(name, [*cluster_names(), LOCAL])
        raise ConfigError(f"no cluster is called '{name}', and there is no such file{near}")
    stat = path.stat()
    return _read(path, path.resolve(), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)  # the check of a run reads the file, too, and a search checks many runs
def _read(path: Path, whole: Path, changed_ns: int, size: int) -> Cluster:
    raw = read_yaml(path, "device, levels and host")
    return parse_cluster({"name": path.stem, **raw}, str(path))


def parse_cluster(raw: Mapping[str, Any], where: str) -> Cluster:
    """Validates the contents of a cluster file; a ConfigError lists its problems, after `where`."""
    try:
        return Cluster.model_validate(raw)
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            loc = [str(part) for part in problem["loc"]]
            keys, message = ".".join(loc), said_of(problem)
            if problem["type"] == "extra_forbidden":
                message = "unknown key" + closest(loc[-1], _keys(loc[:-1]))
            elif problem["type"] == "missing":
                message = "is missing"
            elif problem["type"] == "model_type" and keys:
                message = "must be a mapping, such as {value: 312, source: where it comes from}"
            problems.append(f"{where}: {keys}: {message}" if keys else f"{where}: {message}")
        raise ConfigError(*problems) from None


def _keys(loc: list[str]) -> list[str]:
    """Returns the keys that the part of a cluster file at this place may have."""
    names = [part for part in loc if not part.isdecimal()]
    if not names:
        return list(Cluster.model_fields)
    parts: dict[str, type[BaseModel]] = {"device": Device, "levels": Level, "host": Host}
    inside = Fitted if names[0] == "fitted" else Tables if names[0] == "tables" else Figure
    return list(parts.get(names[-1], inside).model_fields)
