"""Code that runs inside a server's processes. Their Python need not have asyncrl: PYTHONPATH has `FOLDER`, this
folder."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent

LOADER = "asyncrl_loader.load"
"""The function that loads weights, by its name for SGLang."""
