"""A machine of round numbers, on which the time of a message can be worked out by hand."""

from benchmarks.planner.fitting import with_fitted

from gridformer.cluster.file import FITTED, Cluster, Figure, Level, load_cluster


def round_cluster() -> Cluster:
    """Return nodes of four devices with links of 100 GB/s and 3 us a hop.

    Nodes are connected by two links each, of 10 GB/s and 5 us a hop, and a message begins after
    10 us. Nothing is lost to efficiency.
    """

    def figure(value: float) -> Figure:
        return Figure(value=value, source="a test")

    base = load_cluster("selene-a100")
    node = Level(name="node", size=4, bandwidth_gbps=figure(100), latency_us=figure(3))
    outer = node.model_copy(update={"size": 64, "shared_by": 2})
    outer = outer.model_copy(update={"bandwidth_gbps": figure(10), "latency_us": figure(5)})
    host = base.host.model_copy(update={"message_us": figure(10)})
    ideal = {name: float(name.endswith("efficiency")) for name in FITTED}
    return with_fitted(base.model_copy(update={"levels": (node, outer), "host": host}), ideal)
