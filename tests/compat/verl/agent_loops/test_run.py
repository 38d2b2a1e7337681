"""`actor.agent=verl`: a run whose episodes agent loops play, and options that are refused at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.agents.verl_loops import check_loops, open_verl_loops
from asyncrl.compat.verl.names import provide_verl
from asyncrl.config.compose import read
from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig
from asyncrl.data.layout import RowLayout
from asyncrl.data.reading import TaskFile
from asyncrl.errors import ConfigError
from asyncrl.types import Role
from tests.chaos.world import World
from tests.compat.verl.agent_loops.support import play
from tests.end_to_end.support import Run

pytestmark = pytest.mark.skipif(not provide_verl(), reason="verl itself is installed here")
LOOPS = f"{__package__}.loops"


def options(**given: Any) -> ActorConfig:
    return ActorConfig(agent="verl", agent_options=given)


async def test_the_options_choose_the_loop_and_its_tokenizer_is_the_models(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    player = open_verl_loops(
        options(default_agent_loop=f"{LOOPS}.Twice"), DataConfig(), ModelConfig(path=str(world.model))
    )
    trajectory = await play(player, ["it is 15", "yes"])
    assert trajectory.rewards == {"reward_score": 1.0}


async def test_a_loop_that_renders_by_the_tokenizer_gets_a_list_of_ids(tmp_path: Path) -> None:
    model = ModelConfig(path=str(World.make(tmp_path).model))
    player = open_verl_loops(options(default_agent_loop=f"{LOOPS}.Renders"), DataConfig(), model)
    trajectory = await play(player, ["it is 15"])
    assert sum(turn.role is Role.ASSISTANT for turn in trajectory.turns) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"loops": []}, r"agent_options: .*'loops'"),
        ({"default_agent_loop": "thrice"}, "default_agent_loop=thrice"),
        ({"agent_loop_config_path": "nowhere.yaml"}, "agent_loop_config_path=nowhere.yaml cannot be read"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    world = World.make(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        open_verl_loops(options(**given), DataConfig(), ModelConfig(path=str(world.model)))


def test_the_length_of_prompts_may_be_limited_since_the_loops_keep_to_it() -> None:
    words = ["model.path=m", "data.train=t.parquet", "data.max_prompt_length=64"]
    assert read([*words, "actor.agent=verl"], names_missing_data=False).data.max_prompt_length == 64
    with pytest.raises(ConfigError, match=r"actor.agent=my.agent: an agent makes its own prompts"):
        read([*words, "actor.agent=my.agent"], names_missing_data=False)


def test_a_start_names_the_row_whose_loop_does_not_exist(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    [before] = pq.read_table(world.tasks).slice(0, 1).to_pylist()
    path = tmp_path / "named.parquet"
    pq.write_table(
        pa.Table.from_pylist([{**before, "agent_name": name} for name in ("tool_agent", "tool_agnet")]), path
    )
    files = [TaskFile(path, layout=RowLayout(whole_rows=True))]
    with pytest.raises(
        ConfigError, match=r"named\.parquet: row 1: .*'tool_agnet' is not registered; did you mean tool_agent"
    ):
        check_loops(options(), DataConfig(), ModelConfig(path=str(world.model)), files)


@pytest.mark.heavy
def test_a_run_trains_on_the_episodes_of_a_loop(tmp_path: Path) -> None:
    world = World.make(tmp_path)
    loop = f"actor.agent_options={{default_agent_loop: {LOOPS}.Older}}"
    words = ["actor.agent=verl", loop, "actor.max_turns=2", "learner.steps=3"]
    with Run("train", tmp_path, *world.overrides(1), *words) as run:
        run.finish()
        steps = [row["step"] for row in run.steps()]
        metrics = "".join(file.read_text() for file in run.dir.rglob("*.jsonl"))
    assert steps == [0, 1, 2]
    assert '"agent/num_turns"' in metrics
