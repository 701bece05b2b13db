"""`gridformer launch kubernetes`: a manifest with a JobSet, one pod a node.

A JobSet (jobset.x-k8s.io) restarts all pods together when one fails, which a run needs. Exit code
75 and the eviction of a pod are restarts that do not count. The run file travels in a ConfigMap
with all overrides; data and run directory are on a volume that all pods share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from gridformer.launch.job_scripts import PORT, PYTHON, ClusterJob, comments, one_word
from gridformer.utils.signals import REQUEUE

# Values that are `$name` are filled in, and left out where there is none. The network policy lets
# nobody but the pods of the run connect to them: their store knows no password.
_TEMPLATE = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: $label
  labels: {app.kubernetes.io/name: gridformer, app.kubernetes.io/instance: $label}
data: {run.yaml: $run}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: $label
  labels: {app.kubernetes.io/name: gridformer, app.kubernetes.io/instance: $label}
spec: {podSelector: $pods, policyTypes: [Ingress], ingress: [from: [podSelector: $pods]]}
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $label
  labels: {app.kubernetes.io/name: gridformer, app.kubernetes.io/instance: $label}
spec:
  # A service without an address of its own gives each pod a name in DNS.
  network: {enableDNSHostnames: true, publishNotReadyAddresses: true}
  failurePolicy:
    maxRestarts: $max_restarts
    rules:
    - name: requeue
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: nodes  # the pods are LABEL-nodes-0-INDEX
    replicas: 1
    template:
      spec:
        parallelism: $nodes
        completions: $nodes
        completionMode: Indexed
        backoffLimit: 0  # one pod cannot start again alone: its peers would wait for it
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {containerName: gridformer, operator: In, values: [$requeue]}
          - action: FailJob
            onPodConditions: [{type: DisruptionTarget, status: "True"}]
        template:
          metadata:
            labels: {app.kubernetes.io/name: gridformer, app.kubernetes.io/instance: $label}
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: $grace_s
            activeDeadlineSeconds: $limit_s
            securityContext:
              runAsNonRoot: true
              runAsUser: 1000  # that of docker/Dockerfile
              fsGroup: 1000
              seccompProfile: {type: RuntimeDefault}
            containers:
            - name: gridformer
              image: $image
              workingDir: $mount
              command: $command
              env: $env
              resources: $resources
              # The first heartbeat comes once all processes have met, which waits for all images
              # and machines, for at most an hour.
              startupProbe:
                exec: {command: $starting}
                periodSeconds: 10
                timeoutSeconds: 10
                failureThreshold: 360
              livenessProbe:
                exec: {command: $health}
                periodSeconds: 60
                timeoutSeconds: 30
                failureThreshold: 3
              securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
              volumeMounts:
              - {name: workspace, mountPath: $mount}
              - {name: run, mountPath: /etc/gridformer, readOnly: true}
              - {name: shared-memory, mountPath: /dev/shm}
            volumes:
            - {name: workspace, persistentVolumeClaim: {claimName: $claim}}
            - {name: run, configMap: {name: $label}}
            # The 64 MiB that containers have are too small for NCCL.
            - {name: shared-memory, emptyDir: {medium: Memory}}
"""


@dataclass(frozen=True)
class PodSettings:
    """Where the pods of a run get their image and files from, and what they may use."""

    image: str
    claim: str  # a PersistentVolumeClaim that all pods can write (ReadWriteMany)
    mount: str = "/workspace"  # relative paths of the run start there
    memory_gib: float = 0.0  # of a pod; 0 says nothing
    max_restarts: int = 3  # how many failures are met by starting all pods again


def manifest(job: ClusterJob, place: PodSettings) -> str:
    """Returns a ConfigMap, a NetworkPolicy and a JobSet as YAML for `kubectl apply -f -`."""
    labels = {"app.kubernetes.io/name": "gridformer", "app.kubernetes.io/instance": job.label}
    health = _literal(PYTHON, "-m", "gridformer", "health", str(job.run_dir))
    program, env = ["gridformer"], {}
    if job.nodes > 1:
        program = ["gridformer.launch.node", f"--nodes={job.nodes}"]
        program += [f"--processes={job.per_node}", "--"]
        # The name of the first pod in the JobSet's service. Kubernetes sets JOB_COMPLETION_INDEX.
        env = {"MASTER_ADDR": f"{job.label}-nodes-0-0.{job.label}", "MASTER_PORT": str(PORT)}
        env |= job.environment
    gpus = {"nvidia.com/gpu": str(job.per_node)} if job.gpus else {}
    memory = {"memory": f"{round(place.memory_gib * 1024)}Mi"} if place.memory_gib else {}
    cpu = {"cpu": str(job.cores * job.per_node)} if job.cores else {}
    limited = {"limits": gpus | memory, "requests": cpu}
    values = {
        "label": job.label,
        "run": job.run.to_yaml(),
        "pods": {"matchLabels": labels},
        "max_restarts": place.max_restarts,
        "nodes": job.nodes,
        "requeue": REQUEUE,
        "grace_s": job.grace_s,
        "limit_s": max(1, round(job.hours * 3600)) if job.hours else None,
        "image": one_word("--image", place.image),
        "mount": place.mount,
        "claim": place.claim,
        "command": _literal(PYTHON, "-m", *program, *job.train_words("/etc/gridformer/run.yaml")),
        "env": [{"name": n, "value": value} for n, value in zip(env, _literal(*env.values()))],
        "resources": {name: amounts for name, amounts in limited.items() if amounts},
        "health": health,
        "starting": [*health, "--max-age-s=30"],  # not what the last attempt wrote
    }
    documents = [_filled(document, values) for document in yaml.safe_load_all(_TEMPLATE)]
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)
    return f"{comments(['Written by `gridformer launch kubernetes`.', *job.notes])}---\n{text}"


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        filled = {key: _filled(value, values) for key, value in node.items()}
        return {key: value for key, value in filled.items() if value is not None}
    if isinstance(node, list):
        return [_filled(value, values) for value in node]
    return values[node[1:]] if isinstance(node, str) and node.startswith("$") else node


def _literal(*words: str) -> list[str]:
    """Keeps Kubernetes from replacing `$(NAME)` in words by a variable."""
    return [word.replace("$(", "$$(") for word in words]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
