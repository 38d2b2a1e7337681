"""Agents that play episodes by a chat API, and agents of ours for environments that others run as servers."""

from asyncrl.agents.chat_api.result import Agent, AgentResult

__all__ = ["Agent", "AgentResult"]
