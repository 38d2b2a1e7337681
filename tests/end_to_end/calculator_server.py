"""An MCP server with the demo's calculator, which ends after so many calls: `python calculator_server.py CALLS`."""

from __future__ import annotations

import os
import sys
from typing import Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from asyncrl.commands.demo.tool import StepCalculator
from asyncrl.tools import ToolRefusal

server = MCPServer("calculator")
left = int(sys.argv[1])


@server.tool(structured_output=False)
async def calculator(operator: Literal["+", "-", "*"], expression: str) -> str:
    """Works out the leftmost operation with the given operator, and returns the expression left."""
    global left
    left -= 1
    if left < 0:
        os._exit(5)
    try:
        return await StepCalculator("").execute({"operator": operator, "expression": expression})
    except ToolRefusal as refusal:
        raise ToolError(str(refusal)) from None


if __name__ == "__main__":
    server.run()
