"""Whether the process that made something still runs."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was.

    None if it is gone, or a zombie: that holds nothing any more, and its parent may let it be for
    a long time. With the pid it names one process, since the kernel gives pids anew.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] == b"Z" else int(fields[19])
