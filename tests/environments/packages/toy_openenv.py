"""Servers of OpenEnv: a game whose action is a text, one whose action has fields, and one with tools.

python -m toy_openenv KIND PORT
"""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

SESSIONS = 4


class Say(Action):
    message: str


class Place(Action):
    row: int
    column: int


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    """The secret is the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=0, episode_id=None, **more):
        self._secret, self._steps = seed, 0
        return Hint(hint="Guess a number.", done=False, reward=None)

    def step(self, action, timeout_s=None, **more):
        said = str(action.row) if isinstance(action, Place) else action.message
        if said == "crash":
            raise RuntimeError("the board fell from the table")
        found = said == str(self._secret)
        return Hint(hint="found" if found else "wrong", done=found, reward=1.0 if found else -0.25)

    @property
    def state(self):
        return State(episode_id="", step_count=0)


class WithTasks(Guessing):
    """The same with a list of tasks."""

    def reset(self, seed=0, episode_id=None, split="", index=0, **more):
        return super().reset(seed=index)

    def list_splits(self):
        return ["train"]

    def num_tasks(self, split):
        return 3


class WithTools(MCPEnvironment):
    """The number is added up by a tool, whose steps are scored."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(number: int) -> str:
            """Adds to the sum."""
            self._sum += number
            return f"the sum is {self._sum}"

        super().__init__(server)

    def reset(self, seed=0, episode_id=None, **more):
        self._sum, self._wanted = 0, seed
        return Hint(hint=f"Make {seed}.", done=False)

    async def step_async(self, action, timeout_s=None, **more):
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        if isinstance(action, CallToolAction):
            seen.reward, seen.done = float(self._sum == self._wanted), self._sum >= self._wanted
        return seen

    def _step_impl(self, action, timeout_s=None, **more):
        raise ValueError("only tools can be called")

    @property
    def state(self):
        return State(episode_id="", step_count=0)


KINDS = {
    "text": (Guessing, Say, Hint),
    "fields": (Guessing, Place, Hint),
    "tasks": (WithTasks, Say, Hint),
    "tools": (WithTools, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    kind, port = sys.argv[1:]
    app = create_fastapi_app(*KINDS[kind], max_concurrent_envs=SESSIONS)
    uvicorn.run(app, port=int(port), log_level="warning")
