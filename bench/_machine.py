"""What a result depends on: the machine, the kernel, the versions, who else was at work.

No host name and no path: results are committed.
"""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["MachineFacts"]

#: Distributions whose version can move a number here.
DISTRIBUTIONS = ("Cython", "httptools", "torch", "transformers", "uvloop")
REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Where and with what a benchmark ran.

    Attributes:
        commit: of the repository, with "-dirty" behind it where files differ from
            it; None outside of a checkout.
        load_average: of the last minute, when it was taken. What exceeds the
            benchmark's own threads is other people's work.
    """

    cpu: str
    num_cpus: int
    memory_gib: float
    kernel: str
    libc: str
    compiler: str
    python: str
    packages: dict[str, str]
    commit: str | None
    load_average: float

    @classmethod
    def read(cls) -> "MachineFacts":
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            cpu=_cpu_model(),
            num_cpus=len(os.sched_getaffinity(0)),
            memory_gib=round(memory_bytes / 2**30, 1),
            kernel=f"{platform.system()} {platform.release()}",
            libc=" ".join(platform.libc_ver()),
            compiler=_first_line(os.environ.get("CC", "cc"), "--version") or "unknown",
            python=f"{platform.python_implementation()} {sys.version.split()[0]}",
            packages=_package_versions(),
            commit=_first_line("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"),
            load_average=round(os.getloadavg()[0], 2),
        )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()[0] if done.stdout else None


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
