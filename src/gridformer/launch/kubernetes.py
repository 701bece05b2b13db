"""`gridformer launch kubernetes`: a manifest with a JobSet, one pod a node.

A JobSet (jobset.x-k8s.io) restarts all pods together when one fails, which a run needs. Exit code
75 and the eviction of a pod are restarts that do not count. The run file travels in a ConfigMap
with all overrides; data and run directory are on a volume that all pods share.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from string import Template
from textwrap import indent

from gridformer.launch.job_scripts import PORT, PYTHON, ClusterJob, comments, one_word
from gridformer.utils.signals import REQUEUE

# Values are filled in as JSON, which is YAML. The network policy lets only the pods of the run
# connect to each other: their store knows no password.
_TEMPLATE = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: $label
  labels: {app.kubernetes.io/name: gridformer, app.kubernetes.io/instance: $label}
data:
  run.yaml: |
$run
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
            terminationGracePeriodSeconds: $grace_s$limit
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
        "pods": {"matchLabels": labels},
        "max_restarts": place.max_restarts,
        "nodes": job.nodes,
        "requeue": REQUEUE,
        "grace_s": job.grace_s,
        "image": one_word("--image", place.image),
        "mount": place.mount,
        "claim": place.claim,
        "command": _literal(PYTHON, "-m", *program, *job.train_words("/etc/gridformer/run.yaml")),
        "env": [{"name": n, "value": value} for n, value in zip(env, _literal(*env.values()))],
        "resources": {name: amounts for name, amounts in limited.items() if amounts},
        "health": health,
        "starting": [*health, "--max-age-s=30"],  # not what the last attempt wrote
    }
    written = {name: _json(value) for name, value in values.items()}
    written["run"] = indent(job.run.to_yaml().rstrip(), "    ")
    seconds = f"\n{' ' * 12}activeDeadlineSeconds: {max(1, round(job.hours * 3600))}"
    text = Template(_TEMPLATE).substitute(written, limit=seconds if job.hours else "")
    return f"{comments(['Written by `gridformer launch kubernetes`.', *job.notes])}---\n{text}"


def _literal(*words: str) -> list[str]:
    """Keeps Kubernetes from replacing `$(NAME)` in words by a variable."""
    return [word.replace("$(", "$$(") for word in words]


def _json(value: object) -> str:
    """Returns a value as JSON that YAML reads alike, without control characters or surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029\ufeff]", lambda one: f"\\u{ord(one[0]):04x}", text)
