"""Environments: an object an episode, its methods as tools, and faults that stay within the episode."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.chat.chat import Chat
from asyncrl.config.schema import ActorConfig
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.tool_player import ToolPlayer
from asyncrl.errors import ConfigError, ToolError
from asyncrl.tools import Tool
from asyncrl.tools.environments.classes import environment_classes
from asyncrl.tools.environments.environments import Environments
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Trajectory
from tests.episode.fakes import LIMITS, Said, ScriptedEngine, make_ticket, make_tokenizer, play_with_tools
from tests.helpers import GENEROUS_S, async_until
from tests.tools.environments import games

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
TIMEOUT_S = 20.0


def opened(*names: str, timeout_s: float = TIMEOUT_S, retries: int = 1) -> Environments:
    paths = {name: f"tests.tools.environments.games.{name}" for name in names}
    actor = ActorConfig(environment=paths[names[0]]) if len(names) == 1 else ActorConfig(environments=paths)
    return Environments(environment_classes(actor), ToolLimits(timeout_s, retries, 1000))


async def play(environments: Environments, *script: Said, **task: Any) -> tuple[Trajectory, str]:
    """The trajectory of an episode whose policy says the script, and its text."""
    tokenizer = make_tokenizer()
    chat = Chat(tokenizer)
    runner = EpisodeRunner(ScriptedEngine(tokenizer, script), chat, ToolPlayer(environments), LIMITS)
    trajectory = await runner.run(make_ticket(**task), lambda: None)
    return trajectory, chat.text(trajectory.tokens)


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def results(text: str) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)


def test_the_example_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def guess" in block]
    (tmp_path / "my_environments.py").write_text("\n".join(codes))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_environments", raising=False)  # Another test may have imported its own.
    classes = environment_classes(ActorConfig(environment="my_environments.Guess"))
    script = [*(call("guess", f'{{"number": {n}}}') for n in (50, 200, 42)), "It is 42."]
    task = {"messages": [{"role": "user", "content": "Find it."}], "extra_info": {"secret": 42, "index": 1}}
    trajectory, text = asyncio.run(play(Environments(classes, ToolLimits(GENEROUS_S)), *script, **task))
    assert trajectory.rewards == {"Guess": 1.0}
    assert results(text) == ["lower", "Error: the number lies between 1 and 100", "found"]
    assert "Find it.\nThe number lies between 1 and 100.<|im_end|>" in text
    classes = environment_classes(ActorConfig(environment="my_environments.Close"))
    trajectory, _ = asyncio.run(play(Environments(classes, ToolLimits(GENEROUS_S)), *script, **task))
    assert trajectory.turn_scores == pytest.approx([0.92, -0.58, 1.0])
    assert trajectory.rewards == {}


async def test_every_episode_has_its_own_object_whose_synchronous_methods_run_in_one_thread() -> None:
    environments = opened("Counter")
    games.Counter.closed.clear()
    numbers = range(1, 6)
    played = await asyncio.gather(
        *(
            play(environments, call("add", f'{{"number": {n}}}') + call("add", '{"number": 2, "times": 3}'), "Done.")
            for n in numbers
        )
    )
    assert [trajectory.rewards for trajectory, _ in played] == [{"Counter": n + 6.0} for n in numbers]
    assert [results(text) for _, text in played] == [[str(n), str(n + 6)] for n in numbers]
    assert len({id(each) for each in games.Counter.closed}) == len(numbers)
    assert environments.counts.resets == len(numbers)


async def test_the_policy_reads_what_a_method_raises_and_the_episode_goes_on() -> None:
    environments = opened("Counter")
    said = [call("add", '{"number": -1}'), call("add", '{"number": "x"}') + call("fly"), call("read"), "Done."]
    trajectory, text = await play(environments, *said, extra_info={"start": 3, "unknown": 1})
    assert results(text)[0] == "Error: only upwards"
    assert results(text)[3] == "sum 3"
    assert "0+1 (from 3)" in text
    assert trajectory.rewards == {"Counter": 3.0}
    counts = environments.counters()
    assert [counts[name] for name in ("tool_calls", "tool_malformed", "tool_unknown")] == [4, 1, 1]
    assert (counts["environment_errors"], counts["environment_failures"]) == (1, 0)


async def test_an_environment_may_reward_each_call_and_a_turn_has_the_sum_of_its_calls() -> None:
    said = [
        call("add", '{"number": 2}') + call("read") + call("add", '{"number": 3, "times": 2}'),
        call("read"),
        call("add", '{"number": -1}') + call("add", '{"number": "x"}') + call("fly"),
        call("add", '{"number": 0}'),
        "Done.",
    ]
    trajectory, text = await play(opened("Steps"), *said)
    assert [turn.score for turn in trajectory.turns if turn.role == "assistant"] == [8.0, None, None, 0.0, None]
    assert trajectory.turn_scores == [8.0, 0.0]
    assert trajectory.rewards == {"Steps": 8.0}
    assert '"name": "get_call_reward"' not in text


async def test_a_reward_of_a_call_that_is_no_finite_number_fails_the_episode() -> None:
    environments = opened("Steps")
    with pytest.raises(ToolError, match="get_call_reward of environment Steps failed: TypeError: it returned 'much'"):
        await play(environments, call("add", '{"number": 100}'), "Done.")
    assert environments.counts.failures == 1


async def test_what_would_end_the_program_or_a_generator_is_an_error_that_the_policy_reads() -> None:
    _, text = await play(opened("Ending"), call("leave") + call("stop"), "Done.")
    assert results(text) == [
        "Error: it tried to end the program: SystemExit: 3",
        "Error: coroutine raised StopIteration",
    ]


async def test_reset_gets_the_row_and_a_coroutine_may_score() -> None:
    games.AsyncReward.rows.clear()
    trajectory, text = await play(opened("AsyncReward"), "Done.", extra_info={"secret": 1})
    assert games.AsyncReward.rows == [
        {"secret": 1, "prompt": [{"role": "user", "content": "0+1"}], "ground_truth": "1", "data_source": "test"}
    ]
    assert trajectory.rewards == {"AsyncReward": 0.5}
    assert "0+1!" in text


async def test_a_task_chooses_one_of_several_environments_and_gets_its_tools_only() -> None:
    environments = opened("Counter", "Quiet")
    first, text = await play(environments, call("read"), "Done.", extra_info={"environment": "Counter"})
    second, other = await play(environments, "Done.", extra_info={"environment": "Quiet"})
    assert (first.rewards, second.rewards) == ({"Counter": 0.0}, {})
    assert '"name": "add"' in text
    assert '"name": "add"' not in other
    for extra in ({"environment": "Chess"}, {}):
        with pytest.raises(ToolError, match=r"actor.environments has Counter, Quiet"):
            await play(environments, "Done.", extra_info=extra)


async def test_a_task_may_offer_some_of_the_tools_only() -> None:
    schema = {"name": "read", "description": "Reads.", "parameters": {"type": "object", "properties": {}}}
    _, text = await play(opened("Counter"), "Done.", tools=[schema])
    assert '"name": "add"' not in text
    with pytest.raises(ToolError, match="offers fly, which environment Counter does not have"):
        await play(opened("Counter"), "Done.", tools=[{**schema, "name": "fly"}])


@pytest.mark.slow
async def test_a_call_that_takes_too_long_fails_its_episode_alone_and_its_thread_is_counted_until_it_ends() -> None:
    # Its reset, in a thread, has the same limit.
    environments = opened("Hanging", timeout_s=1.0)
    games.Hanging.release.clear()
    with pytest.raises(ToolError, match="wait of environment Hanging failed: it took more than"):
        await play(environments, call("wait"), "Done.")
    assert (environments.counts.failures, environments.counts.stuck) == (1, 1)
    await play(environments, "Done.")
    games.Hanging.release.set()
    await async_until(lambda: environments.counts.stuck == 0)


async def test_reset_is_tried_again_with_a_new_object_and_then_fails_the_episode() -> None:
    games.FailingReset.left[:] = [1]
    environments = opened("FailingReset")
    await play(environments, "Done.")
    assert (environments.counts.failures, environments.counts.resets) == (1, 1)
    games.FailingReset.left[:] = [1, 2, 3]
    with pytest.raises(ToolError, match=r"FailingReset failed: OSError: no room \(\S+, line \d+\) \(2 tries\)"):
        await play(environments, "Done.")


async def test_a_reward_that_is_no_number_fails_the_episode_and_is_no_zero() -> None:
    with pytest.raises(ToolError, match=r"NoNumber failed: TypeError: it returned None.*\(\S+games.py, line \d+\)"):
        await play(opened("NoNumber"), "Done.")


async def test_a_field_that_reset_takes_and_the_row_lacks_is_named_with_those_of_the_row_and_not_tried_again() -> None:
    environments = opened("NeedsField")
    said = r"takes level \(\S+games.py, line \d+\), which task \S+ lacks; its row has data_source, ground_truth, "
    with pytest.raises(ToolError, match=said) as refused:
        await play(environments, "Done.")
    assert "tries" not in str(refused.value)


async def test_a_tool_that_returns_nothing_is_warned_of_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    environments = opened("Forgetful")
    _, text = await play(environments, call("look"), call("look"), "Done.")
    assert results(text) == ["None", "None"]
    [warned] = [each.getMessage() for each in caplog.records if "returned None" in each.getMessage()]
    assert re.search(r"tool look of environment Forgetful \(\S+games.py, line \d+\) returned None", warned)


async def test_a_tool_that_ends_the_program_is_named_with_its_line() -> None:
    with pytest.raises(ToolError, match=r"it tried to end the program: SystemExit: 4 \(\S+games.py, line \d+\)"):
        await play(opened("EndsAtReward"), "Done.")


async def test_a_cancelled_episode_closes_its_environment() -> None:
    games.Counter.closed.clear()
    begun = asyncio.Event()

    async def never(session: str) -> Said:
        begun.set()
        await asyncio.Event().wait()
        return ""

    task = asyncio.create_task(play(opened("Counter"), never))  # type: ignore[arg-type]
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(games.Counter.closed) == 1


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("Unhinted", r"the method move cannot be a tool: TypeHintParsing.*or begin the name"),
        ("NoReset", "has no method reset"),
        ("NeedsArguments", "must be made without arguments: missing a required argument: 'size'"),
        ("TASK_ROW", "is not a class"),
        ("Nothing", "cannot be imported"),
    ],
)
def test_a_class_that_is_no_environment_is_refused_at_the_door(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        environment_classes(ActorConfig(environment=f"tests.tools.environments.games.{path}"))


async def test_the_tools_of_an_episode_share_a_dictionary() -> None:
    class Write(Tool):
        schema = {"name": "write", "description": "", "parameters": {"type": "object", "properties": {}}}  # noqa: RUF012

        async def execute(self, arguments: Any) -> str:
            self.shared["written"] = self.shared.get("written", 0) + 1
            return "ok"

    class Read(Write):
        schema = {**Write.schema, "name": "read"}  # noqa: RUF012

        async def execute(self, arguments: Any) -> str:
            return str(self.shared)

    tokenizer = make_tokenizer()
    chat = Chat(tokenizer)
    toolbox = Toolbox({"write": Write, "read": Read}, ToolLimits(GENEROUS_S))
    for _ in range(2):
        engine = ScriptedEngine(tokenizer, [call("write"), call("read"), "Done."])
        trajectory = await play_with_tools(engine, chat, toolbox)
        assert results(chat.text(trajectory.tokens)) == ["ok", "{'written': 1}"]


async def test_what_methods_return_is_read_as_carefully_as_they_are_called() -> None:
    environments = opened("OddResults")
    calls = [call("odd", '{"text": false}'), call("odd", '{"text": true}'), call("hidden")]
    _, text = await play(environments, *calls, "Done.")
    assert results(text) == ["Error: no text", "environment-t1", "awaited"]
    for number, reward in enumerate(("odd", "huge"), 1):
        with pytest.raises(ToolError, match="get_reward of environment OddResults failed"):
            await play(environments, "Done.", extra_info={"reward": reward})
        assert environments.counts.failures == number
