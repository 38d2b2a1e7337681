"""An environment of verifiers 0.4 that answers its one agent, the player, and has a tool that all tasks share."""

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]


class GuessState(vf.State):
    looked: int = 0


class BookConfig(vf.SharedToolsetConfig):
    pass


class Book(vf.Toolset[BookConfig, GuessState]):
    TOOL_PREFIX = None

    async def setup(self):
        self.readers = 0

    @vf.tool
    async def look_up(self, word: str) -> str:
        """Looks a word up."""
        self.readers += 1
        self.state.looked += 1
        return f"{word} was looked up {self.state.looked} times, and this book was read {self.readers} times"


class GuessingConfig(vf.TasksetConfig):
    book: BookConfig = BookConfig()


class GuessingTask(vf.Task[vf.TaskData, GuessState]):
    pass


class GuessingTaskset(vf.Taskset[GuessingTask, GuessingConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config):
        return [Book(config.book)]

    def load(self):
        while True:
            yield GuessingTask(vf.TaskData(prompt="Guess a number."), self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != "7":
                segment = await interaction.turn("It is another one.")
        interaction.trace.record_reward("found", float(not segment.terminated))
