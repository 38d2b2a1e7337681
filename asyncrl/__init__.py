"""asyncrl: asynchronous off-policy reinforcement learning of tool-calling language models."""

__version__ = "0.1.0"
