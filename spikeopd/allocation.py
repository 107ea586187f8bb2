"""Memory that training frees and takes again, kept by the process. Standard library; glibc alone has the switch."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h
SLICE = 64 << 20  # the heap grows by so much at a time
GAPS = 2  # a heap that is never returned was measured to take up to twice what is in use


def keep_freed_memory(needed: int = 0) -> bool:
    """Ask the C library not to return freed memory to the operating system; whether it agreed.

    Every tensor above 32 MiB otherwise comes from the system anew, page by page, each time it is made: for the neurons
    of OPT-125M's width that costs more than computing them. The heap's gaps take memory for it, so a process that
    needs so many bytes that the machine may not have room for them too is left as it is. Who sets MALLOC_… variables
    has decided already.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    if GAPS * needed > free_memory():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(option, value) for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, SLICE))
    )


def free_memory(root: str | Path = "/") -> float:
    """Bytes this process may still take: the machine's, or its container's if that has fewer, shared equally by what a
    launcher started here. Infinite where Linux does not say.
    """
    system = {}
    for line in _read(Path(root, "proc/meminfo")).splitlines():
        name, _, value = line.partition(":")
        system[name] = value.split()[0] if value.split() else ""
    machine = float(system.get("MemAvailable", "inf")) * 1024
    group = Path(root, "sys/fs/cgroup")
    limit, used = _read(group / "memory.max").strip(), _read(group / "memory.current").strip()
    container = float(limit) - float(used) if limit.isdecimal() and used.isdecimal() else float("inf")
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return min(machine, container) / (int(beside) if beside.isdecimal() and int(beside) else 1)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
