"""The MCP server of `benchmarks.environments`, which talks over its standard input and output."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums", log_level="WARNING")


@server.tool(structured_output=False)
def multiply(a: int, b: int) -> str:
    """Multiplies two numbers."""
    return str(a * b)


if __name__ == "__main__":
    server.run()
