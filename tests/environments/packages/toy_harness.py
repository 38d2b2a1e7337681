"""A taskset of verifiers 0.4 with a harness of its own, which asks once."""

import aiohttp
import verifiers.v1 as vf

__all__ = ["OnceHarness", "OnceTaskset"]


class OnceConfig(vf.HarnessConfig):
    pass


class OnceHarness(vf.Harness[OnceConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [{"role": "user", "content": f"{data.prompt} Tell me once."}]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{endpoint}/chat/completions", json=body) as answer,
        ):
            answer.raise_for_status()
        return vf.ProgramResult(0, "", "")


class OnceTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def said(self, trace) -> float:
        return float(trace.last_reply == "once")


class OnceTaskset(vf.Taskset[OnceTask]):
    def load(self):
        yield OnceTask(vf.TaskData(prompt="How often?"), self.config.task)
