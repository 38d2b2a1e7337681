"""Agents: functions, programs and remote clients that play episodes through a chat API. Some are built in.

This package keeps these promises (the numbers are those of docs/concepts.md):

- 4, a failure is never a reward of zero: an agent that fails ends its episode without a reward (`chat_api/agent.py`).
- 7, back-pressure: connections, requests, bodies and waits are bounded (`chat_api/server.py`).
- 8, closed by default: each episode has a key, and a malformed request is refused with a reason and counted
  (`chat_api/server.py`).

Files in reading order: `chat_api/opening.py` opens the agent that the configuration names, `chat_api/agent.py` lets
agents play episodes, `chat_api/server.py` answers the agents' requests. Each protocol has a file:
`chat_completions.py`, `responses.py`, `anthropic_messages.py`. `chat_api/program.py` runs agents that are programs,
`chat_api/sessions.py` serves agents on other machines. `chat_api/waiting.py` is the base of agents that may let an
episode wait, for example for a free program.

`openenv.py` and `nemo_gym.py` are agents for environments on servers. `policy.py` requests the policy's turns for them.
`verl_loops.py` opens the player of verl's agent loops. `programs/` has agents for environments that need the Python and
the packages of another project.

The agents for environments, and the fields that a protocol reads, may change. Only `episode.recorder` may record
sampled tokens.
"""

from asyncrl.agents.chat_api.result import Agent, AgentResult

__all__ = ["Agent", "AgentResult"]
