"""The devices that models run on, asked for without loading torch where nothing else is said.

GPUs are numbered as `nvidia-smi` does, by their place on the bus; stages run with
`CUDA_DEVICE_ORDER=PCI_BUS_ID` (`tasks.runtime.launch`), so that CUDA numbers them so too.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MIB = 2**20
MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
PROGRAM = "nvidia-smi"
FIELDS = "name,uuid,memory.total,memory.free"


@dataclass(frozen=True)
class Device:
    """Where models run."""

    name: str
    is_gpu: bool
    total: int
    """Bytes there are."""
    free: int
    """Bytes that nobody uses now."""


def _ask(fields: str) -> list[str]:
    """A line of `fields` per GPU of the machine; none where nvidia-smi isn't installed or finds
    none."""
    query = [PROGRAM, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else done.stdout.splitlines()


def _gpus() -> dict[str, Device]:
    """The machine's GPUs by UUID in nvidia-smi's order."""
    rows = [line.rsplit(",", 3) for line in _ask(FIELDS)]
    return {
        uuid.strip(): Device(name.strip(), True, int(total) * MIB, int(free) * MIB)
        for name, uuid, total, free in rows
    }


def _kilobytes(text: str, name: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _memory() -> Device | None:
    """This machine's memory, or what the container it runs in may take of it."""
    if not MEMINFO.is_file():
        return None
    text = MEMINFO.read_text(encoding="utf-8")
    total, free = _kilobytes(text, "MemTotal"), _kilobytes(text, "MemAvailable")
    limit = CGROUP / "memory.max"
    if limit.is_file() and (most := limit.read_text(encoding="utf-8").strip()) != "max":
        stat = (CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
        cache = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
        used = int((CGROUP / "memory.current").read_text(encoding="utf-8")) - cache
        total, free = min(total, int(most)), min(free, max(0, int(most) - used))
    return Device("this machine's memory", False, total, free)


def _named(entry: str, gpus: dict[str, Device]) -> str | None:
    """UUID of the GPU that an entry of CUDA_VISIBLE_DEVICES names, by index or the start of its
    UUID; None for no GPU."""
    uuids = list(gpus)
    if entry.isdecimal():
        return uuids[int(entry)] if int(entry) < len(uuids) else None
    found = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def visible_gpus() -> list[Device]:
    """The GPUs that a process here sees, in its order: those that CUDA_VISIBLE_DEVICES names up to
    the first entry that names none, as CUDA reads it ('-1' or 'NoDevFiles' hides all); all of them
    where it is unset or names slices of a GPU (MIG), which nvidia-smi doesn't list here."""
    gpus = _gpus()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or named.strip().startswith("MIG-"):
        return list(gpus.values())
    seen: list[Device] = []
    for entry in named.split(","):
        uuid = _named(entry.strip(), gpus)
        if uuid is None:
            break
        seen.append(gpus[uuid])
    return seen


def cuda_names() -> list[str]:
    """The GPUs that CUDA counts from 0 in this process, by names that CUDA_VISIBLE_DEVICES takes.
    Asks torch, which also knows slices of a GPU (MIG)."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [str(index) for index in range(torch.cuda.device_count())]
    return found if named is None else [name.strip() for name in named.split(",")][: len(found)]


def find_device() -> Device | None:
    """The first GPU, the machine's memory where there is none; None where neither can be asked."""
    return next(iter(visible_gpus()), None) or _memory()


@cache
def device_description() -> str:
    """The machine's accelerators by name, or its processor and number of cores."""
    names = [line.strip() for line in _ask("name")]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, 'CPU')}, {os.cpu_count()} cores"
