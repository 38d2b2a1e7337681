import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from asyncrl.config.schema import GuardConfig, ManagerConfig, OutcomeModelConfig, ScoringConfig, ScoringModelConfig
from asyncrl.config.schema.scoring import needs
from asyncrl.errors import RefusedError, ScoringError, UnavailableError, WireError
from asyncrl.replay.starts.admission import Admission
from asyncrl.scoring.managers import ManagerScore
from asyncrl.scoring.scorer import Scorer
from asyncrl.scoring.verifier import Verifier
from asyncrl.scoring.worker import ScoringWorker
from tests.fake_replay import FakeReplay, feed_ticket
from tests.helpers import GENEROUS_S, make_trajectory, until
from tests.scoring.fakes import CharTokenizer, FakeOutcome, FakePRM, ReplayOf, ServedPRM, answered, make_scorer


class Clock:
    """Seconds that tests move on, and `tick` at every call."""

    def __init__(self, tick=0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now


class Log:
    def __init__(self, stop=None, rows=1):
        self.rows, self.stop, self.last = [], stop, rows

    def log(self, step, values):
        self.rows.append((step, values))
        if self.stop and len(self.rows) >= self.last:
            self.stop.set()

    def close(self):
        pass


WITH_PRM = ScoringConfig(prm=ScoringModelConfig(path="fake"))


def worker(replay, clock=None, log=None, prm=None, config=WITH_PRM, scorer=None):
    scorer = scorer or make_scorer(config, prm or FakePRM())
    return ScoringWorker(replay, scorer, config, log or Log(), lease_s=30.0, clock=clock or Clock())


def replay_of(*batches, kind=ReplayOf):
    return kind(*batches, config=WITH_PRM)


@pytest.mark.slow
def test_every_leased_episode_comes_back_as_labels_or_with_a_reason():
    episodes = [answered("72", 0), answered("72 bad", 1), answered("5", 2), answered("72", 3, truth="none")]
    replay = replay_of(episodes)
    verifier = Verifier(WITH_PRM)
    try:
        scorer = Scorer(WITH_PRM, CharTokenizer(), verifier, FakePRM())
        worker(replay, scorer=scorer).work(threading.Event())
    finally:
        verifier.close()
    assert {name: labels.outcome for name, labels in replay.labelled.items()} == {
        feed_ticket(0): 1.0,
        feed_ticket(2): 0.0,
    }
    assert set(replay.failed) == {feed_ticket(1), feed_ticket(3)}
    assert "IndexError" in replay.failed[feed_ticket(1)]


class Slow(FakePRM):
    """A forward pass that ends when `ready` is set."""

    def __init__(self):
        super().__init__()
        self.ready = threading.Event()

    def score(self, transcripts):
        assert self.ready.wait(GENEROUS_S)
        return super().score(transcripts)


@pytest.mark.slow
def test_leases_are_renewed_while_one_forward_pass_runs():
    prm = Slow()

    class Patient(ReplayOf):
        def renew(self):
            super().renew()
            if self.renewals == 3:
                prm.ready.set()

    replay = replay_of([answered("72", index) for index in range(5)], kind=Patient)
    worker(replay, Clock(tick=5.0), prm=prm).work(threading.Event())
    assert len(replay.labelled) == 5
    assert replay.renewals >= 3


@pytest.mark.slow
def test_a_scorer_that_hangs_ends_instead_of_keeping_its_leases_for_ever():
    prm, replay = Slow(), replay_of([answered("72")])
    with pytest.raises(ScoringError, match=r"no result within scoring\.stall_s=600"):
        worker(replay, Clock(tick=50.0), prm=prm).run(threading.Event(), threading.Event())
    prm.ready.set()
    assert replay.renewals > 0
    assert replay.labelled == replay.failed == {}


class Shared:
    """A clock that others set."""

    now, calls = 0.0, 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now


class TimesOut(FakePRM):
    """A model whose server is too slow for every episode, but answers an easy request. A slow call takes 250 s of
    `clock`, which the worker sees."""

    def __init__(self, clock: Shared):
        super().__init__()
        self.clock = clock

    def score(self, transcripts):
        if [passage.text for passage in transcripts[0]] == ["1 + 1 =", " 2"]:
            return super().score(transcripts)
        seen, self.clock.now = self.clock.calls, self.clock.now + 250.0
        until(lambda: self.clock.calls > seen)
        raise UnavailableError("no answer in time")


@pytest.mark.slow
def test_a_model_that_is_too_slow_for_each_episode_fails_them_and_its_scorer_goes_on():
    clock, replay = Shared(), replay_of([answered("72", index) for index in range(5)])
    worker(replay, clock, prm=TimesOut(clock)).work(threading.Event())
    assert clock.now == 6 * 250.0
    assert len(replay.failed) == 5


def test_a_scorer_whose_thread_dies_ends():
    class Broken:
        def score(self, leases, called):
            raise MemoryError("no more")

    with pytest.raises(ScoringError, match="thread died"):
        worker(replay_of([answered("72")]), scorer=Broken()).run(threading.Event(), threading.Event())


def test_labels_that_are_ready_together_are_delivered_together():
    class AllAtOnce:
        def __init__(self):
            self.scorer = make_scorer(WITH_PRM, FakePRM())

        def score(self, leases, called):
            return list(self.scorer.score(leases))

    replay = replay_of([answered("72", index) for index in range(20)])
    worker(replay, scorer=AllAtOnce()).work(threading.Event())
    assert len(replay.labelled) == sum(replay.deliveries) == 20
    assert len(replay.deliveries) < 20


def test_metrics_tell_counts_rates_agreement_and_the_shape_of_the_scores():
    stop, clock = threading.Event(), Clock()
    log = Log(stop)

    class Slow(ReplayOf):
        """A slow replay. One lease and its labels take less than the seconds between two reports, two of each more."""

        def lease(self, *given):
            clock.now += 2.5
            return super().lease(*given)

        def label(self, labels):
            clock.now += 0.5
            return super().label(labels)

    replay = replay_of([answered("72", 0), answered("5", 1)], [answered("72", 2), answered("bad", 3)], kind=Slow)
    worker(replay, clock, log).run(stop, threading.Event())
    assert len(replay.labelled) == 3
    (step, values), (_, last) = log.rows
    assert step == values["labelled"] == 3
    assert (values["failed"], values["refused"], values["handed_on"]) == (1, 0, 0)
    assert values["outcome_mean"] == values["reward_mean"] == values["accuracy_mean"] == pytest.approx(2 / 3)
    assert values["rule/exact_number_mean"] == pytest.approx(2 / 3)
    assert values["process_mean"] == pytest.approx(0.75)
    assert values["prm_agreement"] == pytest.approx(2 / 3)
    assert values["steps_per_answer"] == 2
    assert values["length_mean"] == pytest.approx((8 + 7 + 8) / 3)
    assert values["first_step_share"] == pytest.approx((5 / 8 + 5 / 7 + 5 / 8) / 3)
    assert values["repeated_steps"] == 0
    assert values["step_scores/first/from_0.75"] == values["step_scores/last/from_0.75"] == 1.0
    assert values["step_scores/first/below_0"] == 0.0
    assert "step_scores/inner/below_0" not in values
    assert values["tokens_per_s"] > 0
    assert 0 < values["idle"] < 1
    assert (values["hack_alarm"], values["hack_alarms"]) == (0.0, 0.0)
    assert last["labelled"] == 3, "the end reports what came after the last report"
    assert "reward_mean" not in last


@pytest.mark.parametrize("error", [RefusedError("refused: too late"), WireError("cannot be encoded")], ids=str)
def test_labels_that_are_refused_or_cannot_be_sent_are_a_failure_and_the_others_are_delivered(error):
    class Refusing(ReplayOf):
        def _refused(self, labels):
            return error if labels.trajectory_id == feed_ticket(0) else super()._refused(labels)

    replay = replay_of([answered("72", index) for index in range(6)], kind=Refusing)
    worker(replay).work(threading.Event())
    assert set(replay.labelled) == {feed_ticket(index) for index in range(1, 6)}
    assert replay.failed == {feed_ticket(0): str(error)}
    assert sum(replay.deliveries) == 6


def test_a_stop_ends_the_work_after_what_is_being_delivered():
    stop = threading.Event()

    class Stopping(ReplayOf):
        def label(self, labels):
            stop.set()
            return super().label(labels)

    class OneByOne:
        """The next result comes when the last was delivered."""

        def score(self, leases, called):
            for each in make_scorer(WITH_PRM, FakePRM()).score(leases):
                yield each
                assert stop.wait(GENEROUS_S)

    replay = replay_of([answered("72", index) for index in range(9)], kind=Stopping)
    worker(replay, scorer=OneByOne()).run(stop, threading.Event())
    assert len(replay.labelled) == 1
    assert replay.failed == {}


def test_a_scorer_that_drains_scores_what_it_has_leased_and_leases_no_more():
    drain = threading.Event()

    class Draining(ReplayOf):
        def label(self, labels):
            drain.set()
            return super().label(labels)

    replay = replay_of([answered("72", index) for index in range(9)], [answered("72", 9)], kind=Draining)
    worker(replay).run(threading.Event(), drain)
    assert len(replay.labelled) == 9


def test_trajectories_pass_through_workers_of_different_kinds():
    config = ScoringConfig(
        prm=ScoringModelConfig(path="a"),
        outcome_model=OutcomeModelConfig(path="b"),
        needs={"plain": ["rules"], "liked": ["prm", "outcome_model"]},
    )
    sources = ["test", "plain", "liked", "test"]
    replay = ReplayOf([answered("72", k, source=source) for k, source in enumerate(sources)], config=config)
    scorers = {
        "rules": make_scorer(config),
        "outcome_model": make_scorer(config, outcome_model=FakeOutcome()),
        "prm": make_scorer(config, prm=FakePRM()),
    }

    workers = [worker(replay, config=replace(config, serve=[kind]), scorer=scorer) for kind, scorer in scorers.items()]
    for _ in range(4):
        for each in workers:
            each.work(threading.Event())
    assert replay.failed == {}
    by_source = {source: replay.labelled[feed_ticket(k)] for k, source in enumerate(sources)}
    assert by_source["test"].scorer == "exact_number+outcome@1+fake@1"
    assert by_source["test"].reward == 1.25
    assert by_source["plain"].scorer == "exact_number"
    assert by_source["liked"].scorer == "outcome@1+fake@1"
    assert by_source["liked"].outcome == 0.25


def test_a_reward_that_rises_while_agreement_falls_rings_the_alarm(caplog):
    """Ever more answers are liked and wrong: the process score, which is the reward, rises as agreement falls."""
    stop, log = threading.Event(), Log()
    config = ScoringConfig(prm=ScoringModelConfig(path="fake"), guards=GuardConfig(window_s=100.0))
    config.shaping.process_weight, config.shaping.outcome_weight = 1.0, 0.0
    clock = Clock()

    class Learning(FakePRM):
        def _one(self, transcript):
            return super()._one(transcript) * 0 + (0.1 if "honest" in transcript[-1].text else 0.9)

    batches = [[answered("71" if k < wrong else "71 honest", 10 * wrong + k) for k in range(10)] for wrong in range(10)]
    replay = ReplayOf(*batches, config=config)
    one = worker(replay, clock, log, Learning(), config)
    for _ in batches:
        clock.now += 10
        one.work(stop)
        one.report()
    rows = [values for _, values in log.rows]
    assert rows[-1]["reward_mean"] > rows[0]["reward_mean"]
    assert [row["hack_alarm"] for row in rows] == [0.0] * 5 + [1.0] * 5
    assert rows[-1]["hack_alarms"] == 1
    assert [record.message for record in caplog.records if "exploiting" in record.message] != []


def test_without_a_process_model_there_is_no_alarm_that_could_seem_to_watch():
    log, config = Log(), ScoringConfig()
    replay = ReplayOf([answered("72", 0), answered("5", 1)], config=config)
    one = worker(replay, log=log, config=config, scorer=make_scorer(config))
    one.work(threading.Event())
    one.report()
    ((_, values),) = log.rows
    assert values["reward_mean"] == 0.5
    assert not {"prm_agreement", "hack_alarm", "hack_alarms"} & values.keys()


@pytest.mark.parametrize("serve", [[], ["prm"]])
def test_a_service_that_is_away_for_a_while_costs_no_trajectory_an_attempt(serve, caplog):
    """Meanwhile the rules judge; with nothing else to serve the worker waits."""
    config = replace(WITH_PRM, serve=serve)
    clock, log, prm = Clock(), Log(), ServedPRM(calls=40)
    replay = ReplayOf(*([answered("72", 4 * batch + k) for k in range(4)] for batch in range(10)), config=config)
    rules = worker(replay, config=replace(config, serve=["rules"]))
    one, asked = worker(replay, clock, log, prm, config), []
    while prm.calls > 0:
        calls = prm.calls
        one.work(threading.Event())
        rules.work(threading.Event())
        asked += [clock.now] if prm.calls < calls else []
        clock.now += 1
    assert replay.labelled == replay.failed == {}
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses[:4] == [1, 2, 4, 8]
    assert set(pauses[4:]) == {10}
    assert "prm has been unavailable for 155 s: its trajectories wait, and are tried again in 10 s" in caplog.text
    for _ in range(100):
        one.work(threading.Event())
        rules.work(threading.Event())
        clock.now += 1
    assert len(replay.labelled) == 40
    assert replay.failed == {}
    assert "prm is available again after" in caplog.text
    one.report()
    ((_, values),) = log.rows
    assert values["waited"] > 0
    assert values["failed"] == values["refused"] == 0


def test_an_outage_ends_when_the_model_answers_even_with_a_failure(caplog):
    clock, log = Clock(), Log()
    replay = replay_of([answered("bad", 0)])
    one = worker(replay, clock, log, ServedPRM(calls=2))
    for _ in range(2):
        one.work(threading.Event())
        one.report()
        clock.now += 1
    (_, before), (_, after) = log.rows
    assert before["unavailable"] == "prm: connection refused"
    assert "unavailable" not in after
    assert set(replay.failed) == {feed_ticket(0)}
    assert "prm is available again after 1 s" in caplog.text


def test_an_episode_whose_rule_fails_waits_while_its_model_is_unavailable():
    clock, replay = Clock(), replay_of([answered("72", truth="none")])
    one = worker(replay, clock, prm=ServedPRM(calls=2))
    one.work(threading.Event())
    assert replay.labelled == replay.failed == {}
    clock.now += 1
    one.work(threading.Event())
    assert set(replay.failed) == {feed_ticket(0)}


def test_an_episode_that_fells_the_service_fails_alone():
    replay = replay_of([answered("72", 0), answered("fatal", 1), answered("72", 2)], [answered("fatal", 3)])
    one = worker(replay, prm=ServedPRM())
    for _ in range(2):
        one.work(threading.Event())
    assert set(replay.labelled) == {feed_ticket(0), feed_ticket(2)}
    assert set(replay.failed) == {feed_ticket(1), feed_ticket(3)}


def test_a_service_that_goes_away_is_not_asked_for_the_rest_of_a_batch():
    class Leaving(ServedPRM):
        def score(self, transcripts):
            if len(transcripts) == 1:
                self.calls = 100
            return super().score(transcripts)

    prm, replay = Leaving(), replay_of([answered("bad", 0), *(answered("72", k) for k in range(1, 20))])
    worker(replay, prm=prm).work(threading.Event())
    assert replay.labelled == replay.failed == {}
    assert prm.calls == 99


class HalfBroken:
    """Gives the members of a group its number of calls so far; fails the groups in `bad`."""

    def __init__(self, bad=()):
        self.bad, self.calls = bad, 0

    def submit(self, groups):
        self.calls += 1
        return [[self._judged(group[0].trajectory.group_id) for _ in group] for group in groups]

    def _judged(self, name):
        future = Future()
        if name in self.bad:
            future.set_exception(ScoringError("the manager raised"))
        else:
            future.set_result(ManagerScore(float(self.calls), 1.0, {"acc": 1.0}))
        return future


GROUPS = ScoringConfig(manager=ManagerConfig(name="fake", batch_groups=4))


def groups_in_a_replay(count):
    """A replay that holds `count` groups of three, and their names."""
    replay = FakeReplay(
        group_size=3, batch_size=3 * count, admission=Admission(0, 3 * count), needs=partial(needs, GROUPS)
    )
    tickets = replay.tickets([], 3 * count)
    for ticket in tickets:
        replay.put(make_trajectory(ticket))
    return replay, sorted({ticket.group_id for ticket in tickets})


def test_a_group_is_labelled_whole_and_a_manager_that_raises_fails_its_group_alone():
    replay, (good, bad) = groups_in_a_replay(2)
    log, judge = Log(), HalfBroken([bad])
    scorer = make_scorer(GROUPS, managers=judge)
    work = ScoringWorker(replay, scorer, GROUPS, log, lease_s=30.0, clock=Clock())
    for _ in range(2):
        work.work(threading.Event())
    work.report()
    status = replay.core.status()
    assert (status["labelled"], status["depth_ready"], status["dead"], status["scoring_failures"]) == (3, 1, 3, 6)
    assert {name.split(".")[0] for name in replay.failed} == {bad}
    labels = replay.labels([f"{good}.{member}.0" for member in range(3)])
    assert [each.reward for each in labels] == [1.0] * 3
    assert labels[0].extra == {"manager": 1.0, "manager/acc": 1.0, "accuracy": 1.0, "environment": 0.0}
    ((_, row),) = log.rows
    assert (row["labelled"], row["failed"], row["manager_mean"], row["manager/acc_mean"]) == (3, 6, 1.0, 1.0)


def test_labels_of_a_group_that_the_replay_refuses_fail_the_group():
    replay, _ = groups_in_a_replay(1)

    class Refusing(HalfBroken):
        def _judged(self, name):
            future = Future()
            future.set_result(ManagerScore(1.0, 1.0, {"too large": 1e300}))
            return future

    work = ScoringWorker(replay, make_scorer(GROUPS, managers=Refusing()), GROUPS, Log(), 30.0, clock=Clock())
    work.work(threading.Event())
    assert replay.core.status()["scoring_failures"] == 3
    assert "not finite as a float32" in next(iter(replay.failed.values()))
