"""An engine of many servers: routing, partial rollouts, weight updates, and servers that join and leave."""
