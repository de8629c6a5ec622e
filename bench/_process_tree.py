"""The CPU time of a process and all that it has started: servers have workers."""

from pathlib import Path

__all__ = ["cpu_ns", "pids_of_tree"]


def pids_of_tree(pid: int) -> list[int]:
    """The process and its descendants of now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def cpu_ns(pids: list[int]) -> int:
    """Nanoseconds that all threads of these processes have had so far, user and system."""
    return sum(
        int((task / "schedstat").read_text().split()[0])
        for pid in pids
        for task in Path(f"/proc/{pid}/task").iterdir()
    )
