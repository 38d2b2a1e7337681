"""The folder of the toy environments, and the one that each release of verifiers takes."""

from __future__ import annotations

from pathlib import Path

TOYS = Path(__file__).parent / "packages"
TOY = {"verifiers-0.3": "toy_classic", "verifiers-0.4": "toy_taskset"}
