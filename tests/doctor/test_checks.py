"""`gridformer doctor`: good machines pass, faults have a remedy, and hangs are bounded."""

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import typer

from gridformer import doctor
from gridformer.cli import machine as command
from gridformer.doctor import Finding, grid


def levels(findings: Iterable[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_this_machine() -> None:
    """Run the whole examination, with two processes that really connect."""
    findings = list(doctor.examine(2, timeout_s=120.0))
    assert "bad" not in levels(findings), findings
    text = "\n".join(f.text for f in findings)
    assert "2 processes as a 1x2 grid: sums along rows, columns and all are right" in text
    assert "chosen: 2 processes over gloo on CPU" in text or "nccl" in text
    assert "16 MiB in" in text


@pytest.mark.parametrize(("n", "shape"), [(1, (1, 1)), (4, (2, 2)), (6, (2, 3)), (7, (1, 7))])
def test_grids_are_as_square_as_can_be(n: int, shape: tuple[int, int]) -> None:
    assert (grid(n).rows, grid(n).cols) == shape


# --------------------------------------------------------------------------- faults


def test_packages() -> None:
    wanted = ["pytest>=1", "numpy>=9999", "gridformer-is-not-this>=1", 'nope>=1; extra == "dev"']
    old, missing, fine = doctor.check_packages(wanted)
    assert old.level == missing.level == "bad"
    assert "does not satisfy numpy>=9999" in old.text
    assert old.remedy == "pip install 'numpy>=9999'"
    assert missing.text == "gridformer-is-not-this is missing"
    assert "pytest" in fine.text
    assert "nope" not in fine.text


@pytest.mark.parametrize(("free", "level"), [(2**29, "warn"), (2**32, "ok"), (None, "ok")])
def test_little_memory(free: int | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: free)
    assert only(doctor.check_machine()).level == level


def test_too_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(doctor.check_shared_memory(tmp_path / "absent", 4)) == []
    assert levels(doctor.check_shared_memory(tmp_path, 1)) == ["ok"]
    found = only(doctor.check_shared_memory(tmp_path, 10**9))
    assert (found.level, "--shm-size" in found.remedy) == ("warn", True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert only(doctor.check_shared_memory(tmp_path, 1)).level == "bad"


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor.check_disk(tmp_path)).text.startswith("disk: ")
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    found = only(doctor.check_disk(tmp_path))
    assert (found.level, "Permission denied" in found.text) == ("warn", True)
    assert "train with --out" in found.remedy, "doctor has no such option"


def test_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", refuse)
    found = only(doctor.check_loopback())
    assert (found.level, "127.0.0.1" in found.remedy) == ("bad", True)


def test_a_check_that_breaks_does_not_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        raise RuntimeError("driver gone")
        yield

    monkeypatch.setattr(doctor, "check_gpus", broken)
    findings = list(doctor.examine(1, timeout_s=120.0))
    assert [f.text for f in findings if f.level == "bad"] == [
        "GPUs: the check failed (RuntimeError: driver gone)"
    ]
    assert findings[-1].text == "one process: nothing to connect"


# --------------------------------------------------------------------------- processes

GOOD = {"why": "2 processes over gloo", "wrong": [], "small_s": 0.001, "big_s": 0.016777216}


def answering(**changes: object) -> str:
    """Return a program that answers as the probe would, without starting anything."""
    return f"import sys; open(sys.argv[3], 'w').write({json.dumps({**GOOD, **changes})!r})"


def test_a_hang_is_reported() -> None:
    # The grandchild holds the error pipe open, as a hung worker would.
    program = "import subprocess, time; subprocess.Popen(['sleep', '900']); time.sleep(900)"
    began = time.monotonic()
    found = only(doctor.check_processes(4, 0.5, program))
    assert time.monotonic() - began < 280, "neither was waited for"
    assert found.level == "bad"
    assert found.text == "4 processes as a 2x2 grid: no answer within 0.5 s"
    assert "firewall" in found.remedy


@pytest.mark.parametrize(
    ("program", "text", "remedy"),
    [
        ("raise OSError('no sockets')", "failed (OSError: no sockets)", "Traceback"),
        (answering(wrong=["rank 1: [1.0]"]), "wrong sums: rank 1: [1.0]", "do not train"),
    ],
)
def test_failures_and_wrong_sums_are_reported(program: str, text: str, remedy: str) -> None:
    found = only(doctor.check_processes(2, 120.0, program))
    assert found.level == "bad"
    assert text in found.text
    assert remedy in found.remedy


def test_speed_in_words() -> None:
    findings = list(doctor.check_processes(2, 120.0, answering()))
    assert levels(findings) == ["ok", "ok", "ok"]
    assert findings[-1].text.endswith("4 bytes in 1.00 ms, 16 MiB in 17 ms (1.00 GB/s)")


# --------------------------------------------------------------------------- the command


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warn", 0), ("bad", 1)])
def test_exit_code(
    level: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*_: object) -> list[Finding]:
        return [Finding(level, "a finding", "a remedy\nof two lines")]  # type: ignore[arg-type]

    monkeypatch.setattr(doctor, "examine", found)
    with pytest.raises(typer.Exit) as exit_:
        command.doctor(nproc=2, timeout=120.0)
    assert exit_.value.exit_code == code
    out = capsys.readouterr().out
    assert "a finding\n    a remedy\n    of two lines\n" in out
    assert ("Ready to train" in out) == (code == 0)
