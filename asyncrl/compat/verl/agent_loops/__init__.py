"""Agent loops of verl: classes that play episodes in tokens.

Files in reading order: `base.py` has verl's base class and registry, `policy.py` the policy that a loop calls, and
`outputs.py` what a loop returns. `single_turn.py` and `tool_agent.py` are verl's own loops. `player.py` plays the
episodes of a run with loops, and `settings.py` makes the configuration that loops read.
`parsers.py` and `helpers.py` have further names that files of loops import from verl.
"""

from asyncrl.compat.verl.agent_loops.base import AgentLoopBase, register
from asyncrl.compat.verl.agent_loops.outputs import AgentLoopMetrics, AgentLoopOutput, TokenOutput

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "TokenOutput", "register"]
