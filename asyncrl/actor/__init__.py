"""The actor: takes tickets, runs episodes against an engine and tools, and delivers trajectories."""
