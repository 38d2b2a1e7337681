"""An engine made of servers: routing, partial rollouts, weights into each, and servers that come and go."""
