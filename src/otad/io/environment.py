"""Where and when a run took place: hardware, versions and commit, for every record."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from otad.checks import require

PACKAGES = "otad torch numpy numba scipy cvxpy clarabel proxsuite POT pyautoattack nevergrad"
PACKAGES += " foolbox adversarial-robustness-toolbox"
OLDEST_TRITON = (3, 3)


@dataclass(frozen=True)
class Environment:
    """Where and when a run took place, with which versions (None: not installed). `commit`: of the
    repository of this file; where there is none, that of the variable OTAD_COMMIT, or None."""

    started: str
    commit: str | None
    python: str
    versions: dict[str, str | None]
    platform: str
    cpu: str
    device: str
    device_name: str
    threads: int

    @staticmethod
    def now(device: torch.device, threads: int) -> Environment:
        cpu = _cpu_name()
        return Environment(
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            python=platform.python_version(),
            versions={name: _version(name) for name in PACKAGES.split()},
            platform=platform.platform(),
            cpu=cpu,
            device=device.type,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            threads=threads,
        )


def _commit() -> str | None:
    git = "git", "-C", str(Path(__file__).parent)
    # None in a repository that does not track this file, such as that around an environment
    if _output(*git, "ls-files", "."):
        return _output(*git, "describe", "--always", "--dirty", "--abbrev=40")
    given = os.environ.get("OTAD_COMMIT", "")
    is_commit = re.fullmatch("[0-9a-f]{7,40}", given)
    require(is_commit or not given, "OTAD_COMMIT", "7 to 40 hexadecimal digits", repr(given))
    return given or None


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    for line in (_output("lscpu") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """What a command prints; None if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def resident_now() -> int:
    """Bytes of resident memory; on systems that do not report it, the peak so far."""
    return _memory("VmRSS")


def resident_peak() -> int:
    """Peak of resident memory in bytes."""
    return _memory("VmHWM")


def _memory(name: str) -> int:
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    import resource  # which Windows does not have; its value starts from the parent's peak

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@cache
def has_numba() -> bool:
    """Return whether Numba is installed. Some platforms have no build of it."""
    return importlib.util.find_spec("numba") is not None


@cache
def has_triton() -> bool:
    """Return whether a Triton is installed that compiles the kernels. It comes with torch for CUDA;
    that of torch 2.6 is too old."""
    if importlib.util.find_spec("triton") is None:
        return False
    version = re.match(r"(\d+)\.(\d+)", importlib.import_module("triton").__version__)
    return version is not None and tuple(map(int, version.groups())) >= OLDEST_TRITON
