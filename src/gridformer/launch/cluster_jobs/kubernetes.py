"""`gridformer launch kubernetes`: a manifest with a JobSet, one pod a node.

A JobSet (jobset.x-k8s.io) restarts all pods together when one fails, which a run needs, and it is
what Kubeflow's TrainJob creates, too. Exit code 75 and the eviction of a pod are restarts that do
not count; others count to a limit. Its pods are those of an indexed Job of batch/v1.

The run file travels in a ConfigMap with all overrides, so that the image needs nothing of the run.
Data and run directory are on a volume that all pods share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from gridformer.launch.cluster_jobs.job import PORT, ClusterJob, one_word
from gridformer.launch.cluster_jobs.shell import PYTHON, comments
from gridformer.utils.signals import REQUEUE

_GROUP = "nodes"  # the name of the pods of a JobSet: NAME-nodes-0-INDEX
_CONTAINER = "gridformer"
_FILE = "/etc/gridformer/run.yaml"
_USER = 1000  # that of docker/Dockerfile
# The first heartbeat comes once all processes have met, which waits for all images and machines.
_START_S, _START_EVERY_S, _ALIVE_EVERY_S = 3600, 10, 60


@dataclass(frozen=True)
class PodSettings:
    """Where the pods of a run get their image and files from, and what they may use.

    Attributes:
        image: The container image.
        claim: Name of a PersistentVolumeClaim that all pods can write (ReadWriteMany).
        mount: Where it is mounted; relative paths of the run start there.
        memory_gib: Memory of a pod in GiB; 0 says nothing.
        max_restarts: How many failures are met by starting all pods again.
    """

    image: str
    claim: str
    mount: str = "/workspace"
    memory_gib: float = 0.0
    max_restarts: int = 3


def manifest(job: ClusterJob, place: PodSettings) -> str:
    """Returns a ConfigMap, a NetworkPolicy and a JobSet as YAML for `kubectl apply -f -`."""
    sentences = ["Written by `gridformer launch kubernetes`.", *job.notes]
    documents = [_config_map(job), _network_policy(job), _job_set(job, place)]
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)
    return "\n".join(comments(sentences)) + f"\n---\n{text}"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _network_policy(job: ClusterJob) -> dict[str, Any]:
    """Lets nobody but the pods of the run connect to them: their store knows no password."""
    run = {"podSelector": {"matchLabels": _labels(job)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job.label, "labels": _labels(job)},
        "spec": {**run, "policyTypes": ["Ingress"], "ingress": [{"from": [run]}]},
    }


def _config_map(job: ClusterJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.label, "labels": _labels(job)},
        "data": {"run.yaml": job.run.to_yaml()},
    }


def _job_set(job: ClusterJob, place: PodSettings) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.label, "labels": _labels(job)},
        "spec": {
            # A service without an address of its own gives each pod a name in DNS.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": place.max_restarts,
                "rules": [
                    {
                        "name": "requeue",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {"name": _GROUP, "replicas": 1, "template": {"spec": _job_spec(job, place)}}
            ],
        },
    }


def _job_spec(job: ClusterJob, place: PodSettings) -> dict[str, Any]:
    requeue = {"containerName": _CONTAINER, "operator": "In", "values": [REQUEUE]}
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one pod cannot start again alone: its peers would wait for it
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": requeue},
                {"action": "FailJob", "onPodConditions": evicted},
            ]
        },
        "template": {"metadata": {"labels": _labels(job)}, "spec": _pod(job, place)},
    }


def _pod(job: ClusterJob, place: PodSettings) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        **({"activeDeadlineSeconds": max(1, round(job.hours * 3600))} if job.hours else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, place)],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": place.claim}},
            {"name": "run", "configMap": {"name": job.label}},
            # The 64 MiB that containers have are too small for NCCL.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _container(job: ClusterJob, place: PodSettings) -> dict[str, Any]:
    health = [PYTHON, "-m", "gridformer", "health", str(job.run_dir)]
    starting = [*health, f"--max-age-s={3 * _START_EVERY_S}"]  # not what the last attempt wrote
    return {
        "name": _CONTAINER,
        "image": one_word("--image", place.image),
        "workingDir": place.mount,
        "command": _literal(_program(job)),
        "env": [{"name": name, "value": _dollar(value)} for name, value in _variables(job).items()],
        "resources": _resources(job, place),
        "startupProbe": {
            "exec": {"command": _literal(starting)},
            "periodSeconds": _START_EVERY_S,
            "timeoutSeconds": _START_EVERY_S,
            "failureThreshold": _START_S // _START_EVERY_S,
        },
        "livenessProbe": {
            "exec": {"command": _literal(health)},
            "periodSeconds": _ALIVE_EVERY_S,
            "timeoutSeconds": 30,
            "failureThreshold": 3,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "workspace", "mountPath": place.mount},
            {"name": "run", "mountPath": "/etc/gridformer", "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }


def _program(job: ClusterJob) -> list[str]:
    train = job.train_words(_FILE)
    if job.nodes == 1:
        return [PYTHON, "-m", "gridformer", *train]
    return [PYTHON, "-m", "gridformer.launch.node", f"--nodes={job.nodes}",
            f"--processes={job.per_node}", "--", *train]  # fmt: skip


def _variables(job: ClusterJob) -> dict[str, str]:
    """Returns the variables by which the pods meet. Kubernetes sets JOB_COMPLETION_INDEX itself."""
    if job.nodes == 1:
        return {}
    # The name of the first pod in the JobSet's service.
    first = f"{job.label}-{_GROUP}-0-0.{job.label}"
    return {"MASTER_ADDR": first, "MASTER_PORT": str(PORT), **job.environment}


def _resources(job: ClusterJob, place: PodSettings) -> dict[str, Any]:
    limits: dict[str, str] = {}
    if job.gpus:
        limits["nvidia.com/gpu"] = str(job.per_node)
    if place.memory_gib:
        limits["memory"] = f"{round(place.memory_gib * 1024)}Mi"
    requests = {"cpu": str(job.cores * job.per_node)} if job.cores else {}
    return {
        **({"limits": limits} if limits else {}),
        **({"requests": requests} if requests else {}),
    }


def _labels(job: ClusterJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "gridformer", "app.kubernetes.io/instance": job.label}


def _literal(words: list[str]) -> list[str]:
    return [_dollar(word) for word in words]


def _dollar(text: str) -> str:
    """Keeps Kubernetes from replacing `$(NAME)` by a variable."""
    return text.replace("$(", "$$(")
