"""An environment of verifiers 0.3: the policy adds numbers by a tool. The rubric has rewards, a weight and a metric."""

from datasets import Dataset

import verifiers as vf


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b)


def right(completion, answer) -> float:
    return float(answer in str(completion[-1]["content"]))


async def brief(completion) -> float:
    return 1.0 if len(str(completion[-1]["content"])) < 20 else 0.0


def turns(state) -> float:
    return float(len(state["trajectory"]))


def broken(completion) -> float:
    raise ValueError("the scorer is not there")


def together(completions) -> list[float]:
    return [0.0 for _ in completions]


def load_environment(size: int = 3, extra: str = ""):
    rows = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(1, size + 1)]
    more = {"broken": broken, "together": together}
    rubric = vf.Rubric([right, brief, *([more[extra]] if extra else [])], [1.0, 0.5, *([1.0] if extra else [])])
    rubric.add_metric(turns)
    print("an environment may print what it likes")
    return vf.ToolEnv(tools=[add], dataset=Dataset.from_list(rows), system_prompt="Add.", rubric=rubric, max_turns=5)
