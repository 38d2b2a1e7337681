"""Agents that are programs play in processes of their own. One that misbehaves fails only its own episode."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.agents.chat_api.agent import AgentPlayer
from asyncrl.agents.chat_api.program import LAST_STDERR, MAX_LINE, AgentProgram, AgentPrograms
from asyncrl.agents.chat_api.result import AgentError
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.errors import ConfigError
from asyncrl.machine import guard
from asyncrl.types import Trajectory
from tests.agents.chat_api.support import CHAT, LIMITS, TOKENIZER
from tests.episode.fakes import END, ScriptedEngine, make_ticket
from tests.helpers import async_until, until

ASK = """
import json, os, sys, urllib.request

def ask(asked, *messages):
    body = json.dumps({"messages": messages}).encode()
    headers = {"Authorization": f"Bearer {asked['api_key']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{asked['base_url']}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
"""
PLAYS = (
    ASK
    + """
for line in sys.stdin:
    asked = json.loads(line)
    if "FAILS" in os.environ and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        exec(os.environ["FAILS"])
        continue
    first = ask(asked, *asked["task"]["messages"])
    print("it said", first)
    ask(asked, *asked["task"]["messages"], first, {"role": "user", "content": "sure?"})
    print(json.dumps({"rewards": {"polite": 1}, "turns": [0.5, None], "metrics": {"pid": os.getpid()}}))
"""
)


class Programs:
    """A program as the agent of an actor whose engine says `script`."""

    def __init__(self, player: AgentPlayer, agent: AgentPrograms, task: dict[str, Any]) -> None:
        self.player, self.agent, self.task = player, agent, task
        self.played = 0

    async def play(self, limit_s: float | None = None, begin: Callable[[], None] = lambda: None) -> Trajectory:
        self.played += 1
        engine = ScriptedEngine(TOKENIZER, ["hm", "yes"], end=END)
        runner = EpisodeRunner(engine, CHAT, self.player, LIMITS)
        async with asyncio.timeout(limit_s):
            return await runner.run(make_ticket(f"t/{self.played}", **self.task), begin)


@asynccontextmanager
async def programs(
    code: str, processes: int | None = None, extra_info: Mapping[str, Any] | None = None, **environment: str
) -> AsyncIterator[Programs]:
    agent = AgentPrograms([sys.executable, "-c", textwrap.dedent(code)], environment, processes)
    player = AgentPlayer(agent, counters=agent.counters)
    await player.start()
    try:
        yield Programs(player, agent, {"extra_info": extra_info or {}})
    finally:
        await player.close()
        await agent.close()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("processes", [None, 2])
async def test_a_program_plays_an_episode_and_gives_rewards_metrics_and_rewards_of_turns(processes: int | None):
    async with programs(PLAYS, processes) as agents:
        trajectory = await agents.play()
        assert trajectory.rewards == {"polite": 1.0}
        assert trajectory.turn_scores == [0.5]
        assert [turn.score for turn in trajectory.turns if turn.role.value == "assistant"] == [0.5, None]
        counters = agents.player.counters()
        assert counters["agent_programs_started"] == 1
        assert counters["agent_programs_failed"] == 0


async def test_an_episode_begins_once_a_program_is_free_so_that_its_limit_does_not_count_the_wait():
    async with programs(PLAYS, processes=1) as agents:
        answered = list[int]()
        episodes = [agents.play(begin=lambda: answered.append(agents.player.counts.answered)) for _ in range(3)]
        await asyncio.gather(*episodes)
        assert answered == [0, 2, 4], "each begins after the two turns of the one before"


async def test_programs_that_stay_play_one_episode_after_another_and_as_many_at_once_as_there_are():
    async with programs(PLAYS, processes=2) as agents:
        await asyncio.gather(*(agents.play() for _ in range(6)))
        assert agents.agent.counts.started == 2
        agents.player.counters()
        pids = set()
        for _ in range(4):
            await agents.play()
            pids.add(agents.player.counters()["agent/pid"])
        assert len(pids) <= 2
    for pid in pids:
        await async_until(lambda pid=int(pid): not runs(pid))


async def test_a_program_for_each_episode_may_end_well_without_an_answer_and_has_no_rewards_then():
    async with programs(ASK + 'ask(json.loads(input()), {"role": "user", "content": "?"})') as agents:
        assert (await agents.play()).rewards == {}


ONE = ASK + 'asked = json.loads(sys.stdin.readline())\nask(asked, {"role": "user", "content": "?"})\n'


@pytest.mark.parametrize(
    "code",
    [
        'json.dump({"rewards": {"a": 1}}, sys.stdout)',
        'sys.stdout.write("\\ufeff" + json.dumps({"rewards": {"a": 1}}))',
        'json.dump({"rewards": {"a": 1}}, sys.stdout)\nsys.stdout.flush()\n'
        "import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True)",
    ],
)
async def test_an_answer_needs_no_end_of_its_line_if_the_program_ends(code: str):
    async with programs(ONE + code) as agents:
        assert (await agents.play(30)).rewards == {"a": 1.0}


@pytest.mark.parametrize(
    "code",
    [
        'print({"rewards": {"a": 1}})',
        'print(json.dumps({"rewards": {"a": 1}}, indent=2))',
        'print(json.dumps({"rewards": {"a": 1}, "trace": "x" * (1 << 21)}))',
        'print(\'{"rewards": \' + "[" * 100_000 + "]" * 100_000 + "}")',
    ],
)
async def test_an_answer_that_cannot_be_read_fails_its_episode_which_has_no_rewards_otherwise(code: str):
    async with programs(ONE + code) as agents:
        with pytest.raises(AgentError, match=r"without an answer, but with a line that cannot be read as one: b.\{"):
            await agents.play(30)


async def test_an_answer_that_comes_when_its_episode_has_failed_is_not_the_next_ones():
    late = ASK + (
        "for line in sys.stdin:\n"
        "  asked = json.loads(line)\n"
        '  ask(asked, {"role": "user", "content": "?"})\n'
        '  if "first" not in globals():\n'
        "    first = asked\n"
        '    print(json.dumps({"error": "", "api_key": first["api_key"]}))\n'
        "    continue\n"
        "  for each in (first, asked):\n"
        '    print(json.dumps({"rewards": {"own": int(each is asked)}, "api_key": each["api_key"]}))\n'
    )
    async with programs(late, processes=1) as agents:
        with pytest.raises(AgentError, match="the agent's program reports: an error without a message"):
            await agents.play(30)
        assert (await agents.play(30)).rewards == {"own": 1.0}
        assert agents.agent.counts.started == 1


async def test_an_episode_that_is_cancelled_while_its_program_ends_leaves_its_place_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    end, ending, goes_on = AgentProgram.end, asyncio.Event(), asyncio.Event()

    async def slow_end(program: AgentProgram) -> None:
        ending.set()
        await goes_on.wait()
        await end(program)

    monkeypatch.setattr(AgentProgram, "end", slow_end)
    async with programs(PLAYS, 1, MARK=str(tmp_path / "mark"), FAILS="sys.exit(3)") as agents:
        episode = asyncio.ensure_future(agents.play())
        await ending.wait()
        episode.cancel()
        goes_on.set()
        await asyncio.gather(episode, return_exceptions=True)
        assert (await agents.play(30)).rewards == {"polite": 1.0}


async def test_the_mean_of_metrics_whose_sum_is_not_finite_is_written():
    async with programs(ONE + 'print(json.dumps({"metrics": {"large": 1.5e308}}))') as agents:
        for _ in range(2):
            await agents.play(30)
        assert agents.player.counters()["agent/large"] == pytest.approx(1.5e308)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ('print(\'{"error": ""}\')', "the agent's program reports: an error without a message"),
        ("import sys; sys.exit('no such model')", "ended with status 1 without an answer: no such model"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9 without an answer"),
        ('print(\'{"error": "the site is down"}\')', "the agent's program reports: the site is down"),
        ("print('{\"reward\": 1}')", "the result has reward; it may have rewards, metrics and turns"),
        ("print('{\"rewards\": [1]}')", "rewards and metrics are objects of numbers"),
        ('print(\'{"turns": ["x"]}\')', "turns is a list of numbers and null"),
        ('print(\'{"rewards": {"a": "x"}}\')', "rewards and metrics are objects of numbers"),
        ("print('{\"turns\": [NaN]}')", "rewards of turns are .*use finite numbers"),
        ("print('{\"turns\": [1.0]}')", "there are 1 rewards of turns for 0 completions"),
    ],
)
@pytest.mark.parametrize("processes", [None, 1])
async def test_a_program_that_fails_fails_its_episode_alone_with_the_reason(
    code: str, reason: str, processes: int | None, tmp_path: Path
):
    async with programs(PLAYS, processes, MARK=str(tmp_path / "mark"), FAILS=code) as agents:
        with pytest.raises(AgentError, match=reason):
            await agents.play(30)
        assert (await agents.play(30)).rewards == {"polite": 1.0}


@pytest.mark.slow
async def test_the_end_of_what_a_program_wrote_to_its_standard_error_is_in_the_log(caplog: pytest.LogCaptureFixture):
    noisy = "import sys\nfor n in range(100000): print('line', n, file=sys.stderr)\nsys.exit(3)"
    async with programs(noisy) as agents:
        with pytest.raises(AgentError, match=r"status 3 without an answer: line 99999$"):
            await agents.play(30)
    text = caplog.records[-1].getMessage()
    assert "line 99990\nline 99991" in text
    assert len(text) < LAST_STDERR + 500


@pytest.mark.slow
async def test_a_program_that_prints_without_end_is_read_within_bounds_until_the_episode_is_over():
    floods = "import sys\nfor _ in range(100): sys.stdout.write('x' * 2**20)\nprint()\n"
    async with programs(floods + PLAYS) as agents:
        before = psutil.Process().memory_info().rss
        assert (await agents.play(60)).rewards == {"polite": 1.0}
        assert psutil.Process().memory_info().rss - before < 32 * MAX_LINE


async def test_a_program_that_hangs_ends_with_its_episode_and_so_do_its_children(tmp_path: Path):
    hangs = f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}\\n")
        time.sleep(600)
    """
    async with programs(hangs, processes=1) as agents:
        episode = asyncio.ensure_future(agents.play())
        await async_until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n"))
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            await async_until(lambda pid=pid: not runs(pid))


@pytest.mark.slow
async def test_a_program_that_does_not_read_a_long_task_does_not_keep_others_waiting():
    async with programs("import time; time.sleep(600)", extra_info={"text": "x" * (1 << 22)}) as agents:
        with pytest.raises(TimeoutError):
            await agents.play(2.0)
        assert agents.agent.counts.started == 1


@pytest.mark.slow
async def test_an_answer_that_nobody_asked_for_is_not_the_next_episodes():
    twice = ASK + (
        "for line in sys.stdin:\n"
        "  asked = json.loads(line)\n"
        '  ask(asked, {"role": "user", "content": "?"})\n'
        '  print(json.dumps({"rewards": {"a": 1}}) + "\\n" + json.dumps({"rewards": {"a": 2}}), flush=True)\n'
    )
    async with programs(twice, processes=1) as agents:
        for _ in range(3):
            assert (await agents.play(30)).rewards == {"a": 1.0}


async def test_programs_get_no_variables_of_the_actor_but_those_that_they_need(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    tells = ASK + (
        'ask(json.loads(input()), {"role": "user", "content": "?"})\n'
        'print(json.dumps({"metrics": {name: 1 for name in os.environ if name != "LC_CTYPE"}}))'
    )
    async with programs(tells, MY_KEY="1") as agents:
        await agents.play(30)
        found = {name.removeprefix("agent/") for name in agents.player.counters() if name.startswith("agent/")}
    assert found - {"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER"} == {
        "MY_KEY",
        "PYTHONUNBUFFERED",
        guard.VARIABLE,
    }


def test_a_command_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"actor\.agent_command: there is no program no-such-agent"):
        AgentPrograms(["no-such-agent"], {})


ACTOR = """
import asyncio, sys
from asyncrl.agents.chat_api.program import AgentPrograms
from tests.helpers import make_task
code = "import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); "
code += "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}\\\\n'); time.sleep(600)"
asyncio.run(AgentPrograms([sys.executable, "-c", code, sys.argv[1]], {})(make_task(), "http://127.0.0.1:1/t/v1", "k"))
"""


@pytest.mark.slow
def test_programs_and_their_children_do_not_outlive_an_actor_that_is_killed(tmp_path: Path):
    told = tmp_path / "pids"
    actor = subprocess.Popen([sys.executable, "-c", ACTOR, str(told)])
    until(lambda: told.exists() and told.read_text().endswith("\n"))
    actor.send_signal(signal.SIGKILL)
    actor.wait()
    for pid in map(int, told.read_text().split()):
        until(lambda pid=pid: not runs(pid))
