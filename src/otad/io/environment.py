"""Where and when a run took place: hardware, versions and commit, for every record."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = "otad torch numpy scipy cvxpy clarabel proxsuite POT pyautoattack nevergrad foolbox"
PACKAGES += " adversarial-robustness-toolbox"


@dataclass(frozen=True)
class Environment:
    """Where and when a benchmark ran, with which versions (None: not installed)."""

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
            commit=_commit_of(Path(__file__).parent),
            python=platform.python_version(),
            versions={name: _version(name) for name in PACKAGES.split()},
            platform=platform.platform(),
            cpu=cpu,
            device=device.type,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            threads=threads,
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit_of(folder: Path) -> str | None:
    """The commit `folder` was checked out at, "-dirty" if changed since; None if unknown, or in a
    repository that does not track it, such as that around an environment."""
    if not _output("git", "-C", str(folder), "ls-files", "."):
        return None
    return _output("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40")


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
    return _status("VmRSS") or _peak_of_usage()


def resident_peak() -> int:
    """Peak of resident memory in bytes."""
    return _status("VmHWM") or _peak_of_usage()  # whose value starts from the parent's peak


def _status(name: str) -> int | None:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else ()
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    return next(found, None)


def _peak_of_usage() -> int:
    import resource  # which Windows does not have

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
