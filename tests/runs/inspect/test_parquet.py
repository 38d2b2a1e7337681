"""A run to Parquet and back: nothing changes on the way, and other tools read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from asyncrl.config.changes import values_of
from asyncrl.config.schema import DataConfig, PartConfig, TrainConfig
from asyncrl.errors import DataError, StoreError
from asyncrl.learner.batch.batches import RecordedReplay
from asyncrl.modelling.images import digest_of
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.store.records import TrajectoryRecord
from asyncrl.replay.stored import StoredRun, StoredTrajectory
from asyncrl.runs.inspect.columns import DEAD_LETTERS, PLANS, STEPS, TRAJECTORIES, read_row, rows_of, trajectory_batch
from asyncrl.runs.inspect.importing import count_rows, import_run
from asyncrl.runs.inspect.parquet import (
    DEAD_LETTERS_FILE,
    PLANS_FILE,
    STEPS_FILE,
    TRAJECTORIES_FILE,
    export_run,
)
from asyncrl.types import Labels, Trajectory
from asyncrl.wire import encode, join, labels_message, trajectory_message
from tests.helpers import make_task
from tests.replay.support import Core, make_settings
from tests.runs.inspect.support import make_episode, make_run, run_episodes, score
from tests.test_wire import trajectories

FILES = (TRAJECTORIES_FILE, PLANS_FILE, DEAD_LETTERS_FILE, STEPS_FILE)
ROOT = Path(__file__).parents[3]


@st.composite
def records(draw: st.DrawFn) -> StoredTrajectory:
    trajectory = draw(trajectories())
    numbers = st.floats(-1e38, 1e38)
    scores = np.array(draw(st.lists(st.floats(-1, 1, width=32), max_size=3)), np.float32)
    labels = Labels(
        trajectory.id,
        draw(numbers),
        draw(numbers),
        draw(st.text(max_size=9)),
        scores,
        np.arange(1, len(scores) + 1, dtype=np.int32),
        draw(st.dictionaries(st.text(), numbers, max_size=3)),
    )
    kept = draw(st.booleans())
    facts = TrajectoryRecord(
        trajectory.group_id,
        trajectory.member,
        len(trajectory),
        trajectory.sampled_tokens,
        trajectory.oldest_version,
        attempts=draw(st.integers(0, 9)),
        scored=int(kept),
        reward=labels.reward if kept else 0.0,
        outcome=labels.outcome if kept else 0.0,
        plans=int(kept),
        last_plan=draw(st.integers(0, 9)) if kept else -1,
        lag=draw(st.integers(-1, 9)),
        finish=trajectory.finish,
        reason=draw(st.text(max_size=9)),
    )
    if kept and draw(st.booleans()):
        return StoredTrajectory(trajectory.id, facts, None, None, None)
    return StoredTrajectory(trajectory.id, facts, trajectory, labels if kept else None, None)


def stored_bytes(trajectory: Trajectory | None, labels: Labels | None) -> tuple[bytes, bytes]:
    """Return the bytes that a store would hold of them. Equal bytes mean that everything is equal."""
    return (
        join(encode(trajectory_message(trajectory))) if trajectory else b"",
        join(encode(labels_message(labels))) if labels else b"",
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(records(), max_size=3))
def test_records_come_back_from_their_rows_bit_for_bit(sent: list[StoredTrajectory]) -> None:
    got = [read_row(row) for row in rows_of(trajectory_batch(sent))]
    assert [stored_bytes(each.trajectory, each.labels) for each in got] == [
        stored_bytes(each.trajectory, each.labels) for each in sent
    ]
    assert [(each.id, each.facts) for each in got] == [(each.id, each.facts) for each in sent]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A run of two shards, with one planned step."""
    for shard in range(2):
        feed = Feed([make_task(i) for i in range(6)], seed=0, shuffle=True, shard=shard, shards=2)
        core = Core(tmp_path / "shards" / str(shard), make_settings(feed=feed, shard=shard, shards=2))
        run_episodes(core, 4)
        core.plan(0)
        core.store.close()
    return tmp_path / "shards"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two planned steps, of which a checkpoint covers one; a change between them, a dead letter, and trajectories
    that wait."""
    core = make_run(tmp_path / "run")
    config = TrainConfig(data=DataConfig(["train.parquet"]))
    core.configure(values_of(config))
    run_episodes(core, 8)
    core.plan(0)
    config.algorithm.correction = [PartConfig("truncate", {"cap": 3.0})]
    core.configure(values_of(config))
    core.plan(1)
    core.publish(1)
    core.checkpointed(1)
    core.fail(core.tickets(1)[0].id)
    run_episodes(core, 2, version=1)
    core.store.close()
    return tmp_path / "run" / "replay"


def contents(folder: Path) -> tuple[object, ...]:
    with closing(StoredRun(folder)) as stored:
        names = list(stored.ids())
        found = [stored.record(name) for name in names]
        return (
            names,
            [stored_bytes(each.trajectory, each.labels) for each in found],
            [structs.astuple(each.facts) for each in found if each.facts],
            [stored.plan(step) for step in range(stored.steps())],
            stored.changes(),
            [(name, structs.replace(letter, order=0, size=0)) for name, letter in stored.dead_letters()],
            {name: value for name, value in stored.counters().items() if not name.startswith("depth_")},
        )


def export(store: Path, folder: Path, states: Sequence[str] = (), **options: Any) -> list[pa.Table]:
    with closing(StoredRun(store)) as stored:
        export_run(stored, folder, states, **options)
    return [pq.read_table(folder / name) for name in FILES]


@pytest.mark.parametrize(("which", "rows"), [("run", [10, 2, 1, 2]), ("shards", [8, 1, 0, 1])])
def test_export_import_export_gives_equal_tables_and_stores(
    which: str, rows: list[int], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run = request.getfixturevalue(which)
    first = export(run, tmp_path / "first", group_tokens=30)
    assert import_run(tmp_path / "first", tmp_path / "store") == first[0].num_rows == count_rows(tmp_path / "first")
    assert contents(tmp_path / "store") == contents(run)
    assert export(tmp_path / "store", tmp_path / "second") == first
    assert [table.num_rows for table in first] == rows


def test_row_groups_are_bounded_and_compressed_with_zstd(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", group_tokens=30)
    metadata = pq.ParquetFile(tmp_path / "out" / TRAJECTORIES_FILE).metadata
    assert [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)] == [3, 3, 3, 1]
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_state_filters_trajectories_and_keeps_all_plans(run: Path, tmp_path: Path) -> None:
    rows, plans, *_ = export(run, tmp_path / "out", ["trained"])
    assert rows["state"].to_pylist() == ["trained"] * 4
    assert set(rows["id"].to_pylist()) == set(plans["ids"][0].as_py())
    assert plans.num_rows == 2


def test_every_state_is_written_in_columns_of_numbers_and_texts_with_the_data_that_is_there(
    run: Path, tmp_path: Path
) -> None:
    core = make_run(tmp_path / "run")
    core.publish(3)
    core.evaluate(3)
    run_episodes(core, 1, version=3)
    core.store.close()
    forgetting = Core(run, make_settings())
    forgetting.publish(9)
    forgetting.store.close()
    rows, _, _, steps = export(run, tmp_path / "out", decode=lambda ids: f"{len(ids)} tokens")
    assert import_run(tmp_path / "out", tmp_path / "store") == len(rows)
    assert export(tmp_path / "store", tmp_path / "again", decode=lambda ids: f"{len(ids)} tokens")[0] == rows
    kinds = {field.type.value_type if pa.types.is_list(field.type) else field.type for field in rows.schema}
    assert not any(pa.types.is_nested(kind) for kind in kinds)
    found = {row["state"]: row for row in rows.to_pylist()}
    assert found.keys() == {"trained", "planned", "evicted", "evaluated"}
    trained, evicted = found["trained"], found["evicted"]
    assert (trained["step"], trained["lag"], trained["turns"], trained["data_source"]) == (0, 0, 2, "test")
    assert (trained["prompt"], trained["answer"]) == ("3 tokens", "3 tokens")
    assert trained["seconds"] == pytest.approx(0.225)
    assert evicted["reason"].startswith("sampled by version 1: too old for version")
    assert (evicted["step"], evicted["token_ids"]) == (None, None)
    assert steps["episodes"].to_pylist() == [4, 4]
    assert steps["reward_max"].to_pylist() == [0.375, 0.875]


def test_a_folder_that_is_there_is_never_written_over(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    with pytest.raises(StoreError, match="name a new folder"):
        export(run, tmp_path / "out")
    with pytest.raises(StoreError, match="name a new folder"):
        import_run(tmp_path / "out", run)


def test_an_export_that_breaks_leaves_nothing(run: Path, tmp_path: Path) -> None:
    def full_disk(_: int) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        export(run, tmp_path / "out", progress=full_disk)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_no_export_is_refused_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run that `asyncrl inspect export` wrote"):
        import_run(tmp_path / "nothing", tmp_path / "store")
    export(run, tmp_path / "out")
    path = tmp_path / "out" / TRAJECTORIES_FILE
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["token_ids"]), path)
    with pytest.raises(DataError, match=r"the columns of trajectories\.parquet are"):
        import_run(tmp_path / "out", tmp_path / "store")
    pq.write_table(table.replace_schema_metadata({"asyncrl": '{"format": 99}'}), path)
    with pytest.raises(DataError, match="its format is 99"):
        import_run(tmp_path / "out", tmp_path / "store")
    earlier = table.drop_columns(["masked"]).replace_schema_metadata({"asyncrl": '{"format": 8}'})
    pq.write_table(earlier, path)
    with pytest.raises(DataError, match="its format is 8, this asyncrl reads"):
        count_rows(tmp_path / "out")
    assert not (tmp_path / "store").exists()


def test_an_imported_store_is_not_served(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    import_run(tmp_path / "out", tmp_path / "other" / "replay")
    with pytest.raises(StoreError, match="imported"):
        make_run(tmp_path / "other")


def test_an_imported_store_whose_trajectories_show_images_is_no_source_of_a_training(tmp_path: Path) -> None:
    core = make_run(tmp_path / "run")
    for ticket in core.tickets(4):
        image = f"image of {ticket.group_id}".encode()
        names = np.frombuffer(digest_of(image), np.uint8)[None]
        spans = np.array([[1, 3]], np.int32)
        trajectory = structs.replace(make_episode(ticket), image_spans=spans, image_digests=names)
        assert core.put(trajectory, [image]) == "stored"
    for number, trajectory in enumerate(core.lease()):
        score(core, trajectory.id, number / 8)
    core.plan(0)
    core.store.close()
    source = tmp_path / "run" / "replay"
    export(source, tmp_path / "out")
    assert import_run(tmp_path / "out", tmp_path / "store") == 4
    with closing(RecordedReplay(source, 1)) as replay:
        assert replay.plan(0) is not None
    with pytest.raises(StoreError, match=r"4 of its trajectories show images, .* replay folder of the run itself"):
        RecordedReplay(tmp_path / "store", 1)


def test_the_learner_trains_from_an_imported_store(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    import_run(tmp_path / "out", tmp_path / "store")
    replays = [RecordedReplay(folder, 2) for folder in (run, tmp_path / "store")]
    for step in range(2):
        plan, again = (replay.plan(step) for replay in replays)
        assert plan == again
        assert plan is not None
        before, after = ([*map(stored_bytes, replay.fetch(plan.ids), replay.labels(plan.ids))] for replay in replays)
        assert before == after
    for replay in replays:
        replay.close()


def test_every_column_is_documented() -> None:
    page = (ROOT / "docs" / "replay.md").read_text()
    assert [name for name in TRAJECTORIES.names if f"`{name}`" not in page] == []


def documented(page: str, table: str) -> dict[str, str]:
    """The columns of docs/replay.md with their types. Of two types in a row the second is that of the last column."""
    after = page.partition(f"| column of `{table}`")[2].partition("\n\n")[0]
    found = dict[str, str]()
    for names, types in re.findall(r"^\| (`.*?`(?:, `.*?`)*) \| ([^|]*) \|", after, re.M):
        columns, first = re.findall(r"`(.*?)`", names), types.partition(", of ")[0].removeprefix("list of ")
        own = [f"{types[:8] if types.startswith('list of ') else ''}{first}"] * len(columns)
        if of := types.partition(", of ")[2]:
            own[-1] = f"list of {of}"
        found |= dict(zip(columns, own, strict=True))
    return found


def test_the_page_lists_every_column_with_its_type() -> None:
    page = (ROOT / "docs" / "replay.md").read_text()
    types = {field.name: str(field.type).replace("list<item: ", "list of ").rstrip(">") for field in TRAJECTORIES}
    assert documented(page, TRAJECTORIES_FILE) == types
    for file, schema in ((PLANS_FILE, PLANS), (STEPS_FILE, STEPS), (DEAD_LETTERS_FILE, DEAD_LETTERS)):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{file}` | each "))
        assert set(schema.names) <= set(re.findall(r"`(\w+)`", row)), file
