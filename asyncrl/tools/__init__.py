"""Tools that a policy may call, and the environments and simulated users that answer it."""

from asyncrl.tools.base import StateLostError, Tool, ToolRefusal
from asyncrl.tools.interactions.base import Interaction, Response
from asyncrl.tools.results import Content

__all__ = ["Content", "Interaction", "Response", "StateLostError", "Tool", "ToolRefusal"]
