"""The parts of upper rooms that a lower room uses by name: the option that selects one, and its dotted path.

`compat` is above the rooms, so none of them imports it: a room looks its extension up here when the option is set. A
run without verl's words imports nothing of `compat`. `tests/compat/test_registries.py` holds both.
"""

from __future__ import annotations

from collections.abc import Mapping

EXTENSIONS: Mapping[str, str] = {
    "scoring.manager": "asyncrl.compat.verl.judging",
    "actor.interactions": "asyncrl.compat.verl.VerlInteraction",
}
"""The program that judges whole groups by a reward manager, and the simulated user that wraps a class of verl."""
