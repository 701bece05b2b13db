"""Describes a machine, and predicts the time of a kernel or a message on it."""

from gridformer.cluster.file import (
    Cluster,
    Device,
    Figure,
    Fitted,
    Host,
    Level,
    Tables,
    cluster_names,
    cluster_path,
    load_cluster,
)
from gridformer.cluster.kernels import KernelWork, kernel_s
from gridformer.cluster.messages import MessageWork, like_messages, message_cpu_s, message_s

__all__ = [
    "Cluster",
    "Device",
    "Figure",
    "Fitted",
    "Host",
    "KernelWork",
    "Level",
    "MessageWork",
    "Tables",
    "cluster_names",
    "cluster_path",
    "kernel_s",
    "like_messages",
    "load_cluster",
    "message_cpu_s",
    "message_s",
]
