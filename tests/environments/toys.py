"""Where the toy environments are, and which release of verifiers takes which."""

from __future__ import annotations

from pathlib import Path

TOYS = Path(__file__).parent / "packages"
TOY = {"verifiers-0.3": "toy_classic", "verifiers-0.4": "toy_taskset"}
