"""A taskset of verifiers 0.4: the policy adds numbers by a tool that counts its calls in the rollout's state."""

import verifiers.v1 as vf

__all__ = ["ToyTaskset"]


class ToyState(vf.State):
    calls: int = 0


class ToyData(vf.TaskData):
    answer: str


class AdderConfig(vf.ToolsetConfig):
    pass


class Adder(vf.Toolset[AdderConfig, ToyState]):
    async def setup_task(self, task):
        self.answer = task.answer

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        if a < 0:
            raise ValueError("a must not be negative")
        self.state.calls += 1
        return str(a + b)

    @vf.tool
    def reveal(self) -> str:
        """Tells the answer."""
        return self.answer


class ToyConfig(vf.TaskConfig):
    adder: AdderConfig = AdderConfig()
    fails: bool = False


class ToyTask(vf.Task[ToyData, ToyState, ToyConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.adder)]

    @vf.reward
    async def right(self, trace) -> float:
        if self.config.fails:
            raise ValueError("the scorer is not there")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return 1.0 if len(trace.last_reply) < 20 else 0.0

    @vf.metric
    async def calls(self, trace) -> float:
        return float(trace.state.calls)


class ToyTasksetConfig(vf.TasksetConfig):
    size: int = 3
    task: ToyConfig = ToyConfig()


class ToyTaskset(vf.Taskset[ToyTask, ToyTasksetConfig]):
    def load(self):
        for n in range(1, self.config.size + 1):
            data = ToyData(prompt=f"{n} + {n}?", system_prompt="Add.", answer=str(2 * n))
            yield ToyTask(data, self.config.task)
