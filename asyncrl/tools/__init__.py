"""Tools that a policy may call, and environments and simulated users that respond to the policy.

This package keeps these promises (the numbers are those of docs/concepts.md):

- 4, a failure is never a reward of zero: a failed call of a tool is retried, and if it keeps failing, its episode
  fails (`toolbox.py`). Failures of environments (`environments/environments.py`) and simulated users
  (`interactions/users.py`) fail the episode, too.
- Every tool that an episode has opened is released exactly once (`toolbox.py`).

Files in reading order: `base.py` has the base class of tools, `toolbox.py` opens and calls the tools of an episode,
`calculator.py` has the shortest tool. `registry.py` finds tools by name, and `offered.py` lists those on offer.
`interactions/` has simulated users, `environments/` environments, `mcp/` tools of MCP servers, and `search/` the tool
`search`. `python_sandbox.py` and `python_session.py` run programs, `fetch.py` reads web pages.

Supporting files:

- `results.py`: the results of calls. `prompts.py`: the lengths of prompts with their tools.
- `sessions.py`: the Python sessions of episodes. `page_text.py`: the text of a web page.
- `call_threads.py`, `contained.py`: users' code that hangs, or that would end the actor.
- `delayed.py`: slow tools, for measurements.

To add a tool, write a file with a class that derives from `Tool`, and name it in `BUILT_IN` of `registry.py`. Users'
classes derive from the classes below, so the signatures of their methods must not change.
"""

from asyncrl.tools.base import StateLostError, Tool, ToolRefusal
from asyncrl.tools.interactions.base import Interaction, Response
from asyncrl.tools.results import Content

__all__ = ["Content", "Interaction", "Response", "StateLostError", "Tool", "ToolRefusal"]
