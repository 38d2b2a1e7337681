"""Lists the parts of `compat` that lower packages use: the option that selects each part, and the dotted path of the
part.

Lower packages must not import `compat`. They look up the path here when the option is set, so that a run without verl's
options loads nothing of `compat`. `tests/compat/test_registries.py` checks this.
"""

from __future__ import annotations

from collections.abc import Mapping

EXTENSIONS: Mapping[str, str] = {
    "scoring.manager": "asyncrl.compat.verl.rewards.judging",
    "actor.interactions": "asyncrl.compat.verl.VerlInteraction",
    "actor.verl_tools": "asyncrl.compat.verl.tools.playing.verl_tools",
    "actor.agent": "asyncrl.compat.verl.agent_loops.player.open_loops",
    "actor.agent_options": "asyncrl.compat.verl.agent_loops.player.import_loop",
}
"""The first path is a program that judges whole groups by one of verl's reward managers. The second is a simulated user
that wraps a class written for verl. The third is a function that makes classes of tools written for verl. The fourth
opens the player that plays episodes with agent loops of verl. The fifth imports the class of such a loop."""
