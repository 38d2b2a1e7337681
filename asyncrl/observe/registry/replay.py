"""The metrics of a shard of the replay."""

from __future__ import annotations

from asyncrl.observe.registry.metric import made_by

gauge, counter, text = made_by("replay")

_FLOW = (
    gauge("version", "version", "the newest published version"),
    gauge(
        "committed",
        "trajectories",
        "trajectories of all groups that were opened so far, except groups that were thrown away",
    ),
    gauge(
        "capacity",
        "trajectories",
        "the largest value that `committed` may have now: `age_bound`, or less because of `ahead`",
    ),
    gauge("age_bound", "trajectories", "the largest value of `committed` that replay.max_lag allows at this version"),
    gauge(
        "ahead",
        "trajectories",
        "the limit of pacing: at most this many trajectories are in groups that were opened, but are in no batch yet "
        "(replay.spare_batches)",
    ),
    counter("accepted", "trajectories", "trajectories stored for training, since the run's start"),
    counter(
        "labelled",
        "trajectories",
        "trajectories with final labels since the run's start, those of evaluations included",
    ),
    counter(
        "trained", "trajectories", "trained trajectories since the run's start whose step is covered by a checkpoint"
    ),
    counter("evicted", "trajectories", "trajectories thrown away as older than replay.max_lag"),
    counter("filtered", "trajectories", "trajectories thrown away by replay.filter"),
    counter("filtered/REASON", "groups", "groups that the filter REASON refused"),
    counter("dropped", "trajectories", "trajectories thrown away with their group because a member failed too often"),
    gauge(
        "dead",
        "trajectories",
        "trajectories that were given up: they could not be scored, or their plan was skipped. A trajectory that was "
        "requeued later does not count",
    ),
    counter(
        "late",
        "trajectories",
        "trajectories that came after their ticket had ended: its episode had failed, or its group was closed",
    ),
    counter("late_labels", "labels", "labels that came after their trajectory was given to another scorer"),
    counter("duplicates", "trajectories", "trajectories that were sent twice; each of them is stored once"),
    counter("failures", "attempts", "failed attempts at episodes"),
    counter("scoring_failures", "attempts", "failed attempts at scorings"),
    counter("tickets_redelivered", "tickets", "tickets sent again because a reply was lost"),
    counter("leases_redelivered", "leases", "leases sent again because a reply was lost"),
    counter("groups_reissued", "groups", "groups opened for a task whose earlier group was thrown away"),
    counter("plans_skipped", "plans", "plans skipped by `asyncrl inspect skip-plan`"),
    counter("tasks_passed_over", "tasks", "tasks that were skipped because their success rate is outside data.band"),
    counter("tokens_accepted", "tokens", "sampled tokens of the accepted trajectories"),
    counter("tokens_labelled", "tokens", "sampled tokens of the labelled trajectories, those of evaluations included"),
    counter("tokens_trained", "tokens", "sampled tokens of the trained trajectories, without masked tokens"),
    counter(
        "tokens_masked",
        "tokens",
        "sampled tokens that are in batches but were not trained, because they were older than replay.max_lag "
        "(replay.old_groups.mask)",
    ),
    counter("tokens_evicted", "tokens", "sampled tokens of the evicted trajectories"),
    counter("tokens_filtered", "tokens", "sampled tokens of the filtered trajectories"),
    counter("tokens_dropped", "tokens", "sampled tokens of the dropped trajectories"),
    gauge("tokens_dead", "tokens", "sampled tokens of the trajectories that were given up"),
    counter("tokens_thrown_away", "tokens", "tokens sampled for trajectories that were thrown away, and masked tokens"),
    counter(
        "wait_limits_reached",
        "steps",
        "steps for which the learner stopped waiting for old groups because replay.old_groups.wait_s had passed",
    ),
    counter("damaged", "trajectories", "trajectories whose stored data could not be read"),
    counter("refused", "requests", "requests that were malformed or not allowed"),
    counter("internal_errors", "errors", "errors of the replay itself: its log has each traceback"),
    counter("dead_letters_dropped", "dead letters", "dead letters that were deleted to make room for newer ones"),
)

_SELECTION = (
    counter(
        "decided/END/episodes",
        "trajectories",
        "trajectories by their END: trained (in a batch), masked (in a batch, but all their tokens were too old), "
        "evicted, filtered, dropped or dead. A trajectory counts once all groups that began at its group's version or "
        "earlier have ended",
    ),
    counter("decided/END/tokens", "tokens", "sampled tokens of the decided trajectories"),
    counter("decided/END/turns", "turns", "turns of the policy in the decided trajectories"),
    counter("decided/END/scored", "trajectories", "decided trajectories with final labels"),
    gauge("decided/END/reward", "", "sum of the rewards of the trajectories in decided/END/scored"),
    counter(
        "decided/END/length/TOKENS",
        "trajectories",
        "decided trajectories with at least TOKENS sampled tokens, but less than twice as many",
    ),
    gauge(
        "age_bias/QUANTITY/shift",
        "standard deviations",
        "the mean of QUANTITY (length, turns or reward) over trained groups, minus its mean over trained and evicted "
        "groups together",
    ),
    gauge(
        "age_bias/QUANTITY/deviation",
        "",
        "sum over trained groups of the difference between QUANTITY and its mean over the groups of the same version, "
        "in standard deviations",
    ),
    gauge(
        "age_bias/QUANTITY/variance",
        "",
        "variance that age_bias/QUANTITY/deviation would have if eviction chose groups at random",
    ),
    counter("age_bias/QUANTITY/trained", "groups", "trained groups that count in age_bias/QUANTITY/deviation"),
)

_STORED = (
    gauge("depth_pending", "tickets", "tickets that wait for an actor"),
    gauge("depth_tickets", "tickets", "tickets that are open"),
    gauge("depth_groups", "groups", "groups that are open"),
    gauge("depth_ready", "groups", "groups that may be trained"),
    gauge("depth_data", "trajectories", "trajectories whose tokens are stored"),
    gauge(
        "depth_waiting",
        "trajectories",
        "trajectories that wait for a scorer, or for a manager that judges them once their group is complete",
    ),
    gauge("depth_plans", "plans", "plans that are stored"),
    gauge(
        "depth_dead",
        "dead letters",
        "stored dead letters: failed episodes, and trajectories that were given up",
    ),
    gauge("depth_again", "tasks", "tasks to be run again"),
    gauge("store_bytes", "bytes", "bytes of the store in use"),
    gauge("high_water_bytes", "bytes", "bytes of the store above which no group is opened"),
    gauge("dead_letter_bytes", "bytes", "bytes of dead letters and their episodes"),
)

_PEERS = (
    gauge("actors", "processes", "actors that are known"),
    gauge("scorers", "processes", "scorers that are known"),
    counter("failed_handshakes", "handshakes", "handshakes of clients without the right keys, since the start"),
    counter("dead_readers", "processes", "processes that died while they read the store, since the start"),
    gauge("lingering_readers", "processes", "processes that read one snapshot of the store for too long"),
    counter(
        "learner_waited_for_episodes_s",
        "s",
        "time that the learner waited for episodes since the start; more actors shorten it",
    ),
    counter(
        "learner_waited_for_labels_s",
        "s",
        "time that the learner waited for labels since the start; more scorers shorten it",
    ),
    counter(
        "learner_waited_for_store_s",
        "s",
        "time that the learner waited since the start while the store was full; a larger replay.max_store_gb shortens "
        "it",
    ),
    counter(
        "learner_waited_for_old_groups_s",
        "s",
        "time that the learner waited since the start for running groups that would have become too old "
        "(replay.old_groups.wait_s); a larger replay.max_lag shortens it",
    ),
    text("failing", "text", "the newest failures, while few tickets are issued because the last attempts all failed"),
    text(
        "refusing",
        "text",
        "the reason why filters refuse every group. It is written once they have refused as many groups in a row as "
        "two batches have, and at least 8",
    ),
    text(
        "solved",
        "text",
        "the text that replaces `refusing` if filters refuse every group because the policy has learned to solve the "
        "tasks",
    ),
    text("newest_failure", "text", "the newest failure, with the id of its episode"),
)

METRICS = (*_FLOW, *_SELECTION, *_STORED, *_PEERS)
