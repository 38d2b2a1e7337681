"""Files of a stranger as an exported run: refused in one line, with nothing left of them, or a store that reads."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.errors import DataError
from asyncrl.replay.stored import StoredRun
from asyncrl.runs.inspect import importing
from asyncrl.runs.inspect.episodes import step_row
from asyncrl.runs.inspect.importing import count_rows, import_run
from asyncrl.runs.inspect.parquet import DEAD_LETTERS_FILE, PLANS_FILE, TRAJECTORIES_FILE, export_run
from tests.helpers import status_of
from tests.runs.inspect.support import make_run, run_episodes

Spoil = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps and a dead letter, as files that no test changes."""
    folder = tmp_path_factory.mktemp("exported")
    core = make_run(folder / "run")
    run_episodes(core, 8)
    for step in range(2):
        core.plan(step)
    core.publish(1)
    core.checkpointed(1)
    core.fail(core.tickets(1)[0].id)
    core.store.close()
    with closing(StoredRun(folder / "run" / "replay")) as stored:
        export_run(stored, folder / "exported")
    return folder / "exported"


@pytest.fixture
def exported(files: Path, tmp_path: Path) -> Path:
    """The files, for a test that changes them."""
    shutil.copytree(files, tmp_path / "exported")
    return tmp_path / "exported"


def rewrite(path: Path, spoil: Spoil) -> None:
    """The same table with rows that `spoil` has changed."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    spoil(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


def refusal(exported: Path) -> str:
    """Why the files are refused. Fails if they are not, or if something is left of them."""
    store = exported.parent / "store"
    before = {path.name for path in exported.parent.iterdir()}
    with pytest.raises(DataError) as caught:
        import_run(exported, store)
    assert {path.name for path in exported.parent.iterdir()} == before
    reason = str(caught.value)
    assert reason.isprintable()
    assert len(reason) < 1000
    return reason


def given(row: int = 0, /, **values: Any) -> Spoil:
    return lambda rows: rows[row].update(values)


def at(name: str, index: int, value: Any) -> Spoil:
    """One element of a list has another value."""

    def spoil(rows: list[dict[str, Any]]) -> None:
        rows[0][name][index] = value

    return spoil


ROWS: Mapping[str, tuple[Spoil, str]] = {
    "no id": (given(id=None), "Expected `str`"),
    "an empty id": (given(id=""), "is not an id"),
    "an id of another member": (given(id="t000000000.7.0"), "not an id of member 0"),
    "an id with a control character": (
        given(id="t000000000.0.\x1b[31m"),
        r"row 0 of trajectories\.parquet \('t000000000",
    ),
    "an id without a number": (given(id="t000000000.0.x"), "is not an id"),
    "an id that is too long": (given(id="t" + "0" * 600 + ".0.0", group_id="t" + "0" * 600), "an id has 605 bytes"),
    "a group without a number": (given(group_id="evil"), "evil"),
    "a group of an evaluation without a version": (given(group_id="ex-1", id="ex-1.0.0"), "invalid literal"),
    "an id twice": (lambda rows: rows[1].update(id=rows[0]["id"], member=0), "row 1 .* it comes twice"),
    "no group": (given(group_id=None), "row 0"),
    "a negative member": (given(member=-1), "not an id of member -1"),
    "an unknown state": (given(state="stolen"), "'stolen' is not a valid"),
    "no count of tokens": (given(tokens=None), "Expected `int`"),
    "another count of tokens": (given(tokens=99), "tokens, sampled and oldest are"),
    "a negative count": (given(sampled=-1), "one of its counts is negative"),
    "a count of attempts below zero": (given(attempts=-5), "one of its counts is negative"),
    "a negative time": (given(seconds=-1.5), r"its time is negative: -1\.5"),
    "a reward that is no number": (given(reward=math.nan), "not finite"),
    "an infinite outcome": (given(outcome=math.inf), "not finite"),
    "an infinite time": (given(seconds=-math.inf), "not finite"),
    "a negative step": (given(step=-2), "less than -1"),
    "another finish": (given(finish="won"), "'won' is not a valid"),
    "no tokens": (given(token_ids=[]), "row 0"),
    "tokens that are missing": (given(token_ids=None), "an array or one of its elements is missing"),
    "a token that is missing": (at("token_ids", 0, None), "an array or one of its elements is missing"),
    "a negative token": (at("token_ids", 0, -1), "a token id is negative"),
    "more tokens than log-probs": (given(token_ids=[1] * 10_000), "row 0"),
    "a log-prob that is no number": (at("logprobs", -1, math.nan), "no valid log-prob"),
    "a log-prob above zero": (at("logprobs", -1, 1.0), "no valid log-prob"),
    "a negative version": (at("versions", -1, -7), "version"),
    "a version that is missing": (at("versions", 0, None), "is missing"),
    "a negative span": (at("turns_start", 0, -3), r"turn \[-3"),
    "a span that ends before it begins": (at("turns_end", 0, -3), "turn"),
    "a span beyond the tokens": (at("turns_end", -1, 10**6), "turn"),
    "a span without its end": (given(turns_end=[]), "shorter"),
    "a span that is missing": (at("turns_start", 0, None), "row 0"),
    "a step out of order": (given(steps_start=[5], steps_end=[1]), "step"),
    "a role that is none": (at("turns_role", 0, "judge"), "'judge' is not a valid"),
    "tool calls that are no JSON": (at("turns_tool_calls", 0, "[{"), "row 0"),
    "tool calls of another form": (at("turns_tool_calls", 0, '[{"evil": 1}]'), "unexpected keyword argument"),
    "tool calls that are nested without end": (at("turns_tool_calls", 0, "[" * 100_000), "recursion"),
    "arguments that are nested too deep": (
        at("turns_tool_calls", 0, '[{"name": "f", "arguments": {"a": ' + "[" * 150 + "]" * 150 + "}}]"),
        "nested",
    ),
    "rewards that are a list": (given(rewards="[1]"), "not a JSON object"),
    "rewards that are texts": (given(rewards='{"a": "b"}'), "row 0"),
    "rewards that are no number": (given(rewards='{"a": NaN}'), "not finite"),
    "reasons of another form": (given(reasons='{"a": 1}'), "row 0"),
    "step scores that are no number": (given(step_scores=[math.nan], step_ends=[1]), "not finite as a float32"),
    "step ends that fall": (given(step_scores=[0.5, 0.5], step_ends=[3, 2]), "step ends must"),
    "scores without their ends": (given(step_scores=[0.5], step_ends=[]), "step_ends"),
    "experts of another shape": (given(routed_experts=[1, 2, 3]), "row 0"),
    "half an image": (given(image_spans=[1]), "row 0"),
    "half a digest": (given(image_spans=[0, 1], image_digests=[1] * 31), "row 0"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "reason"), ROWS.values(), ids=ROWS)
def test_a_trajectory_that_no_export_has_is_refused_with_its_row_and_the_reason(
    exported: Path, spoil: Spoil, reason: str
) -> None:
    rewrite(exported / TRAJECTORIES_FILE, spoil)
    found = refusal(exported)
    assert "of trajectories.parquet" in found
    assert re.search(reason, found), found


PLANS: Mapping[str, tuple[Spoil, str]] = {
    "no step": (given(step=None), "Expected `int`"),
    "a step twice": (given(1, step=0), "the next step is 1"),
    "a step that is left out": (given(1, step=2), "the next step is 1"),
    "a negative version": (given(version=-1), "its version is -1"),
    "lists of other lengths": (given(weights=[1.0]), "must be parallel"),
    "an id that is missing": (at("ids", 0, None), "row 0"),
    "an unknown id": (at("ids", 0, "t000000077.0.0"), r"names 't000000077\.0\.0', which trajectories\.parquet lacks"),
    "another group": (at("group_ids", 0, "t000000077"), "group, tokens and sampled"),
    "other tokens": (at("tokens", 0, 10**6), "group, tokens and sampled"),
    "a weight that is no number": (at("weights", 0, math.nan), "negative or not finite"),
    "a negative weight": (at("weights", 0, -1.0), "negative or not finite"),
    "a shared part that is too long": (at("shared", 0, 10**6), "more tokens than it has"),
    "a demonstration elsewhere": (given(demonstrations=[99]), "not among its ids"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "reason"), PLANS.values(), ids=PLANS)
def test_a_plan_that_no_export_has_is_refused_with_its_row_and_the_reason(
    exported: Path, spoil: Spoil, reason: str
) -> None:
    rewrite(exported / PLANS_FILE, spoil)
    found = refusal(exported)
    assert "of plans.parquet" in found
    assert re.search(reason, found), found


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (given(id=None), "row 0"),
        (given(id="x"), "row 0"),
        (given(member=-1), "member -1"),
        (given(row=-2), "is negative"),
        (given(reason=None), "Expected `str`"),
        (lambda rows: rows.append(rows[0]), "row 1 .* it comes twice"),
    ],
)
def test_a_dead_letter_that_no_export_has_is_refused_with_its_row_and_the_reason(
    exported: Path, spoil: Spoil, reason: str
) -> None:
    rewrite(exported / DEAD_LETTERS_FILE, spoil)
    found = refusal(exported)
    assert "of dead_letters.parquet" in found
    assert re.search(reason, found), found


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ("", "metadata"),
        ("[]", "metadata .* are missing"),
        ("[" * 100_000, "recursion"),
        ({"counters": 5}, "Expected `object`"),
        ({"counters": {"run": 5}}, "'run' is not a counter"),
        ({"counters": {"identity": 5}}, "'identity' is not a counter"),
        ({"counters": {"accepted": -1}}, "the counter accepted is -1"),
        ({"counters": {"accepted": 1 << 70}}, "accepted"),
        ({"counters": {"accepted": "many"}}, "Expected `int`"),
        ({"changes": {"step": 1}}, "Expected `array`"),
        ({"changes": [{"step": "x", "key": "a", "old": 1, "new": 2, "time": 3}]}, "Expected `int`"),
        ({"format": "x" * 9999}, "its format is 'xxx"),
    ],
)
def test_metadata_that_no_export_has_are_refused(exported: Path, about: Any, reason: str) -> None:
    path = exported / TRAJECTORIES_FILE
    table = pq.read_table(path)
    if isinstance(about, dict):
        about = json.dumps({**json.loads(table.schema.metadata[b"asyncrl"]), **about})
    pq.write_table(table.replace_schema_metadata({"asyncrl": about} if about else None), path)
    assert re.search(reason, refusal(exported))


def test_columns_of_other_types_or_twice_are_refused(exported: Path) -> None:
    path = exported / TRAJECTORIES_FILE
    table = pq.read_table(path)
    wide = table.set_column(0, "id", table["id"].cast(pa.large_string()))
    twice = table.append_column("member", table["member"])
    for each in (wide, twice):
        pq.write_table(each, path)
        assert "the columns of trajectories.parquet are" in refusal(exported)


@pytest.mark.slow
def test_a_list_that_would_take_more_memory_than_there_may_be_is_refused_before_it_is_read(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(exported / TRAJECTORIES_FILE, given(token_ids=[0] * 1_000_000))
    assert (exported / TRAJECTORIES_FILE).stat().st_size < 1_000_000
    monkeypatch.setattr(importing, "MAX_COLUMN_BYTES", 1_000_000)
    assert "rows of token_ids.list.element take" in refusal(exported)


@pytest.mark.parametrize("name", [TRAJECTORIES_FILE, PLANS_FILE, DEAD_LETTERS_FILE])
def test_damaged_files_are_refused(exported: Path, name: str) -> None:
    path = exported / name
    content = path.read_bytes()
    for damaged in (b"", b"PAR1", content[:-9], content[: len(content) // 2], b"\0" * len(content)):
        path.write_bytes(damaged)
        refusal(exported)


def test_the_command_says_the_reason_on_one_line(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(exported / TRAJECTORIES_FILE, at("token_ids", 0, None))
    assert status_of("inspect", "import", "--from", exported, "--to", exported.parent / "s") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "row 0 of trajectories.parquet" in line
    assert not (exported.parent / "s").exists()


HOSTILE: Mapping[pa.DataType, Sequence[Any]] = {
    pa.string(): (
        "",
        "x",
        "\0",
        "\x1b[31m",
        "t000000000.0.0",
        "é" * 400,
        "NaN",
        "[]",
        "{}",
        "[{}]",
        "[" * 5000,
        "9" * 5000,
    ),
    pa.int32(): (-(2**31), -2, -1, 0, 1, 7, 2**31 - 1),
    pa.float64(): (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308),
    pa.float32(): (math.nan, math.inf, -math.inf, -1.0, 0.0, 1.0),
    pa.bool_(): (True, False),
    pa.uint8(): (0, 1, 255),
}


def spoilt(draw: random.Random, kind: pa.DataType, value: Any) -> Any:
    """Another value of a column."""
    if draw.random() < 0.2:
        return None
    if not pa.types.is_list(kind):
        return draw.choice(HOSTILE[kind])
    kept = list(value or [])
    match draw.randrange(4):
        case 0 if kept:
            kept[draw.randrange(len(kept))] = spoilt(draw, kind.value_type, None)
        case 1:
            kept.append(spoilt(draw, kind.value_type, None))
        case 2:
            kept = kept[: len(kept) // 2]
        case _:
            kept = kept * draw.choice((0, 2, 100))
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_what_is_imported_reads_and_what_is_not_leaves_nothing(exported: Path, seed: int) -> None:
    draw = random.Random(seed)
    tables = {name: pq.read_table(exported / name) for name in (TRAJECTORIES_FILE, PLANS_FILE, DEAD_LETTERS_FILE)}
    refused = 0
    for number in range(50):
        chosen = draw.choice(list(tables))
        for name, table in tables.items():
            rows = table.to_pylist()
            if name == chosen:
                field, row = draw.choice(list(table.schema)), draw.choice(rows)
                row[field.name] = spoilt(draw, field.type, row[field.name])
            pq.write_table(pa.Table.from_pylist(rows, table.schema), exported / name)
        store = exported.parent / f"store{number}"
        try:
            import_run(exported, store)
        except DataError:
            refused += 1
            assert not store.exists()
            continue
        with closing(StoredRun(store)) as stored:
            export_run(stored, exported.parent / f"again{number}")
            for name in list(stored.ids()):
                assert stored.record(name).facts is not None
            assert len([step_row(stored, plan) for plan in map(stored.plan, range(stored.steps())) if plan]) == 2
            stored.audit(1)
        assert count_rows(exported.parent / f"again{number}") == 8
    assert 0 < refused < 50
