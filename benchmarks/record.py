"""Writes benchmark results to benchmarks/results/NAME.json, with the date and the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> str:
    """A description of the machine: processor, cores and Python."""
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


def write_result(name: str, result: Any, device: str | None = None, folder: Path = RESULTS) -> Path:
    """Write a result, and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"date": datetime.date.today().isoformat(), "machine": device or machine(), "result": result}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
