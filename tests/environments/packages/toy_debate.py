"""An environment of verifiers 0.4 with two agents."""

import verifiers.v1 as vf
from toy_taskset import ToyTaskset

__all__ = ["DebateEnv", "DebateTaskset"]


class DebateTaskset(ToyTaskset):
    pass


class DebateConfig(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateConfig]):
    async def run(self, task, agents):
        await agents.one.run(task)
        await agents.other.run(task)
