"""Reward managers for single rows, as verl 0.9.1 has them: its own, and a class written for it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from asyncrl.compat.verl import DataProto, load_reward_manager, provide_verl
from asyncrl.compat.verl.rewards.judging import check
from asyncrl.compat.verl.rewards.rate_limits import AsyncTokenBucket, RequestGate, RequestLimits
from asyncrl.compat.verl.rewards.reward_loop import REWARD_MANAGER, RewardLoop
from asyncrl.errors import ConfigError, ScoringError
from tests.compat.verl.operations import CharTokenizer, judged_batch, score_mapping, score_number
from tests.helpers import GENEROUS_S, until

WRITTEN_FOR_VERL = "tests.data.verl.loop_manager"
BRIEF = f"{WRITTEN_FOR_VERL}.BriefRewardManager"
ROWS = [["p", "xy", "x", "a", 1.0], ["pq", "zzz", "z", "b", 0.5], ["p", "x", "x", "a", 1.0]]


@pytest.fixture(autouse=True)
def _without_verl() -> Iterator[None]:
    """Remove the modules and the manager of these tests from the process, before and after each test."""

    def forget() -> None:
        REWARD_MANAGER.pop("brief", None)
        for name in list(sys.modules):
            if name.partition(".")[0] == "verl" or name == WRITTEN_FOR_VERL:
                del sys.modules[name]

    forget()
    yield
    forget()


def batch() -> DataProto:
    data: DataProto = judged_batch(DataProto, {"rows": ROWS})
    return data


def manager(name: str, compute_score: Any = score_number, **params: Any) -> Callable[..., Any]:
    return load_reward_manager(name, CharTokenizer(), 0, compute_score, **params)


def judged(name: str, compute_score: Any = score_number, **params: Any) -> Mapping[str, Any]:
    result = manager(name, compute_score, **params)(batch(), return_dict=True)
    return {"rewards": result["reward_tensor"].sum(-1).tolist(), **result["reward_extra_info"]}


async def right(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, worth: float = 1.0) -> float:
    await asyncio.sleep(0)
    return worth * (ground_truth in solution_str)


def test_a_class_written_for_verl_judges_the_rows_of_a_batch() -> None:
    loop = manager(BRIEF, right, points=6.0)
    rewards = loop(batch())
    assert rewards.nonzero().tolist() == [[0, 2], [1, 3], [2, 1]], "at the last token, which ends the text"
    assert rewards.sum(-1).tolist() == [3.0, 2.0, 6.0]
    assert judged(BRIEF, score_number, points=1.0)["letters"] == [2, 3, 1]


def test_a_class_and_a_function_are_found_in_files_of_any_folder(tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "data" / "verl" / "loop_manager.py"
    (tmp_path / "math.py").write_text(source.read_text())
    (tmp_path / "scores.py").write_text(
        "def one(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    found = judged(f"{tmp_path}/math.py:BriefRewardManager", f"{tmp_path}/scores.py:one", points=6.0)
    assert found["rewards"] == [3.0, 2.0, 6.0]
    with pytest.raises(ConfigError, match=r"scores\.py has no won; did you mean one\?"):
        manager("naive", f"{tmp_path}/scores.py:won")
    with pytest.raises(ConfigError, match=r"nowhere\.py cannot be imported \(FileNotFoundError"):
        manager(f"{tmp_path}/nowhere.py:Manager")


@pytest.mark.slow
def test_a_function_of_a_file_runs_in_processes(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(
        "def size(data_source, solution_str, ground_truth, extra_info, by=1):\n    return by * len(solution_str)\n"
    )
    score = f"{tmp_path}/scores.py:size"
    assert judged("prime", score, compute_score_params={"by": 2}, num_processes=1)["rewards"] == [4.0, 6.0, 2.0]
    assert judged("remote", score, num_workers=1)["rewards"] == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("name", ["naive", "batch", "dapo", BRIEF, "rate_limited"])
def test_the_function_of_each_manager_gets_its_own_parameters(name: str) -> None:
    def scaled(by: float = 1.0, **given: Any) -> Any:
        texts = given.get("solution_strs", given.get("solution_str"))
        return [by * len(each) for each in texts] if isinstance(texts, list) else by * len(texts)

    once, thrice = (judged(name, scaled, compute_score_params=params)["rewards"] for params in ({}, {"by": 3.0}))
    assert thrice == [3 * each for each in once]
    with pytest.raises(ConfigError, match="compute_score_params has extra_info: every call passes it"):
        manager(name, scaled, compute_score_params={"extra_info": {}})
    with pytest.raises(ConfigError, match="compute_score_params has by: name the function in compute_score"):
        manager(name, None, compute_score_params={"by": 3.0})


def test_verls_own_managers_for_single_rows_add_what_they_add_there() -> None:
    assert judged("rate_limited", score_mapping)["turns"] == [2, 2, 2]
    config = {"trainer": {"experiment_name": "mine"}}
    named = judged("gdpo", lambda extra_info, **_: {"score": 1.0, "name": extra_info["experiment_name"]}, config=config)
    assert named["name"] == ["mine"] * 3
    asked = judged(
        "gdpo",
        lambda reward_router_address, **_: len(reward_router_address),
        config=config,
        reward_router_address="host:1",
    )
    assert asked["rewards"] == [6.0] * 3
    with pytest.raises(AssertionError, match=r"gdpo passes trainer\.experiment_name"):
        manager("gdpo")


def test_a_program_finds_them_under_verls_names() -> None:
    provide_verl()
    from verl.experimental.reward_loop.reward_manager import (  # type: ignore[import-not-found]
        DAPORewardManager,
        get_reward_manager_cls,
        register,
    )

    assert get_reward_manager_cls("dapo") is DAPORewardManager
    with pytest.raises(ValueError, match="Unknown reward manager: none"):
        get_reward_manager_cls("none")
    with pytest.raises(ValueError, match="dapo has already been registered"):
        register("dapo")(object)
    buffer = {"enable": True, "len": 2, "penalty_factor": 0.5, "log": True}
    config = OmegaConf.create({"reward": {"reward_kwargs": {"max_resp_len": 4, "overlong_buffer_cfg": buffer}}})

    async def judge() -> Any:
        dapo = DAPORewardManager(config=config, tokenizer=CharTokenizer(), compute_score=score_number)
        return await dapo.run_single(batch()[1:2])

    found = asyncio.run(judge())
    assert found == {
        "reward_score": 2.0,
        "reward_extra_info": {"acc": 2.5, "overlong_reward": -0.5, "overlong": True},
    }


def failing(kind: str) -> Callable[..., Any]:
    async def score(solution_str: str, **_: Any) -> Any:
        if solution_str != "zzz":
            return 1.0
        match kind:
            case "raises":
                raise LookupError("no such thing")
            case "exits":
                raise SystemExit(3)
            case "escapes":
                raise GeneratorExit
            case "cancels":
                raise asyncio.CancelledError
            case "nan":
                return float("nan")
        await asyncio.sleep(GENEROUS_S)

    return score


@pytest.mark.parametrize("name", [BRIEF, "rate_limited"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raises", r"run_single failed for row 1: LookupError: no such thing"),
        ("exits", r"failed for row 1: .*it tried to end the program: SystemExit: 3"),
        ("escapes", r"failed for row 1: .*it raised an exception that is not an Exception: GeneratorExit"),
        ("cancels", r"failed for row 1: .*it raised CancelledError"),
        ("nan", r"the reward of row 1 is nan"),
    ],
)
def test_a_row_that_fails_is_an_error_that_names_it_and_never_a_reward(name: str, kind: str, reason: str) -> None:
    with pytest.raises(ScoringError, match=reason):
        manager(name, failing(kind))(batch())


def test_a_call_that_takes_too_long_is_an_error_that_names_its_row() -> None:
    with pytest.raises(ScoringError, match=r"row 1: compute_score took longer than timeout=0\.2"):
        manager("rate_limited", failing("hangs"), timeout=0.2, max_concurrent=3)(batch())


@pytest.mark.slow
def test_functions_that_hang_do_not_use_up_the_threads_of_later_calls() -> None:
    may_end = threading.Event()

    def score(solution_str: str, **_: Any) -> float:
        return 1.0 if solution_str != "zzz" else float(may_end.wait())

    def rewards_of_others() -> float:
        with suppress(ScoringError):  # On a busy machine their calls may take too long, too.
            return float(with_limit(batch()[:1]).sum())
        return 0.0

    with_limit = manager("rate_limited", score, timeout=0.05, max_concurrent=3)
    # The pool of asyncio has 32 threads at most.
    for _ in range(33):
        with pytest.raises(ScoringError, match="compute_score took longer than timeout"):
            with_limit(batch()[1:2])
    assert until(rewards_of_others) == 1.0
    may_end.set()


@pytest.mark.slow
def test_a_process_that_ends_is_an_error_that_names_its_row() -> None:
    with pytest.raises(ScoringError, match=r"row 1: compute_score failed for the response 'zzz': .*unfit"):
        manager("remote", unfit)(batch())


def unfit(solution_str: str, **_: Any) -> float:
    if solution_str == "zzz":
        raise ValueError("unfit")
    return 1.0


def test_what_is_no_result_is_refused() -> None:
    class Wrong:
        def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
            self.result = config.reward.result

        async def run_single(self, data: Any) -> Any:
            return self.result

    config = OmegaConf.create({"reward": {"result": {"score": 1}}})
    with pytest.raises(
        ScoringError, match=r"Wrong\.run_single \(.*, line \d+\) returned \{'score': 1\} for row 0; it must"
    ):
        RewardLoop(lambda: Wrong(config, None, None))(batch())
    config.reward.result = {"reward_score": None}
    with pytest.raises(ScoringError, match=r"returned reward_score=None .* for row 0; they must be a number"):
        RewardLoop(lambda: Wrong(config, None, None))(batch())


SETTINGS = {"name": BRIEF, "compute_score": None, "compute_score_params": {}, "params": {}}


def test_settings_are_checked_before_a_run() -> None:
    check({**SETTINGS, "params": {"points": 2, "config": {"trainer": {}}}}, "scoring.manager")
    check({**SETTINGS, "name": "rate_limited", "params": {"max_rpm": 60}}, "scoring.manager")
    with pytest.raises(ConfigError, match=r"params: rate_limited has no max_rmp; did you mean max_rpm\?"):
        check({**SETTINGS, "name": "rate_limited", "params": {"max_rmp": 60}}, "scoring.manager")
    score = f"{__name__}.judged"
    with pytest.raises(ConfigError, match=r"compute_score=.*the manager remote passes data_source"):
        check({**SETTINGS, "name": "remote", "compute_score": score}, "scoring.manager")


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_bucket_lets_through_its_rate_after_the_first_burst() -> None:
    clock = Clock()
    bucket = AsyncTokenBucket(2.0, 4.0, clock, clock.sleep)

    async def times(*sizes: float) -> list[float]:
        found = []
        for size in sizes:
            await bucket.acquire(size)
            found.append(clock.now)
        return found

    assert asyncio.run(times(4, 1, 1, 10, 1)) == [0.0, 0.5, 1.0, 6.0, 6.5]
    clock.now = 100.0
    assert asyncio.run(times(4, 2)) == [100.0, 101.0], "a long pause fills the bucket no further"


def test_a_call_that_is_cancelled_gives_its_tokens_back() -> None:
    async def gave_up() -> float:
        bucket = AsyncTokenBucket(1.0, 1.0, lambda: 0.0, lambda _: asyncio.sleep(GENEROUS_S))
        await bucket.acquire()
        waiting = asyncio.ensure_future(bucket.acquire(5))
        await asyncio.sleep(0)
        assert bucket.tokens == -5
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return bucket.tokens

    assert asyncio.run(gave_up()) == 0


def test_so_many_requests_run_at_once_in_one_event_loop_after_another() -> None:
    gate = RequestGate(RequestLimits(max_concurrent=2))

    async def most() -> int:
        running = largest = 0

        async def request() -> None:
            nonlocal running, largest
            async with gate.request():
                running += 1
                largest = max(largest, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(request() for _ in range(5)))
        return largest

    assert [asyncio.run(most()), asyncio.run(most())] == [2, 2]
