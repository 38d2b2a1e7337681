"""asyncrl: asynchronous off-policy reinforcement learning of tool-calling language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from asyncrl.version import VERSION

if TYPE_CHECKING:
    from asyncrl.commands.from_python import RunView as Run
    from asyncrl.commands.from_python import evaluate, train

__version__ = VERSION

__all__ = ["Run", "evaluate", "train"]


def __getattr__(name: str) -> Any:
    """Return `Run`, `evaluate` or `train`. The file that defines them is imported only when one of them is first used,
    so that `import asyncrl` stays fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("asyncrl.commands.from_python")
    return module.RunView if name == "Run" else getattr(module, name)
