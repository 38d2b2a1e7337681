"""Tools of MCP servers: programs that speak over pipes, and servers at a URL."""
