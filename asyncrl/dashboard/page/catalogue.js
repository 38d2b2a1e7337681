// The figures, in groups: what each shows, from which metrics, and what to look for.

const LEARNER = "learner";
const ACTORS = "actor-*";
const SCORERS = "scoring-*";
const REPLAYS = "replay*";
const of = (file, combine) => (name, label, more = {}) => ({ file, combine, name, label, ...more });
const [learner, measured, actor, scorer, replay] = [of(LEARNER), of("evaluation"), of(ACTORS, "mean"), of(SCORERS, "mean"), of(REPLAYS, "sum")];
const rate = { rate: true };
const digits = { only: /^\d+$/ };
const main = { main: true };
const FLOW = [...["accepted", "labelled", "trained", "evicted", "filtered", "dropped"].map((name) => [name, name]), ["dead", "given up"]];
const DECIDED = ["trained", "evicted", "filtered"];
const shareOf = (of, ...and) => ({ of, and, combine: "mean" });

// Means of scores that are not a part of the reward.
const NO_PART = "reward|outcome|length|rules|process|manager|environment|accuracy";
const withoutMean = (name) => name.replace(/_mean$/, "");

const RATIO_BINS = 8;

/** The bounds of a bin of ratios: bin 8 is around 1, bins 9 to 16 are above it, and bins 7 to 0 mirror these. */
function ratioBin(name) {
  const far = Number(name) - RATIO_BINS;
  const [low, high] = [0, 1].map((more) => 2 ** (2 ** (Math.abs(far) - 7 + more)));
  if (far === 0) return `${shown(1 / high)} to ${shown(high)}`;
  if (Math.abs(far) === RATIO_BINS) return far > 0 ? `${shown(low)} or more` : `${shown(1 / low)} or less`;
  return far > 0 ? `${shown(low)} to ${shown(high)}` : `${shown(1 / high)} to ${shown(1 / low)}`;
}

function shown(ratio) {
  return String(Number(ratio.toPrecision(3)));
}

/** Each figure: `id`, `title`, `group`, `lines` (see linesOf), `unit`, `about`; `stack`: its lines add up; `marks`: it
 * has few points, and each is marked; `main`: of several runs it is drawn first, instead of the first line; `ramp`: its lines have an order, shown by their colours; `least` and `most` of its
 * y axis. */
export const FIGURES = [
  ...group("Learning", [
    ["reward", "Reward", [learner("reward/mean", "mean"), learner("reward/max", "largest"), learner("reward/min", "smallest")],
      { about: "Rewards of the trained trajectories of each step." }],
    ["accuracy", "Outcome and held-out accuracy", [learner("outcome/mean", "outcome, trained"), measured("eval/outcome", "outcome, held out", { marks: true }), measured("eval/accuracy", "accuracy, held out", { marks: true, ...main })],
      { about: "The first rule's score of trained trajectories, and of held-out tasks, which are never trained." }],
    ["pass", "Held-out pass@k", [measured("eval/pass@*", "pass@", { marks: true })], { unit: "share", about: "Held-out tasks that at least one of k attempts would solve." }],
    ["parts", "Parts of the reward", [scorer("rule/*", withoutMean, { only: /_mean$/ }), scorer("rules_mean", "all rules"), scorer("environment_mean", "environment"), scorer("process_mean", "process model"), scorer("manager_mean", "manager"), scorer("*", withoutMean, { only: new RegExp(`^(?!(?:${NO_PART})_)[^/]*_mean$`) })],
      { about: "Each score by its name, before its weight: means over the trajectories that were labelled since the last row." }],
    ["truncated", "Truncated and failed episodes", [actor("truncated", "truncated at a limit", shareOf("episodes")), actor("failed", "failed", shareOf("episodes"))],
      { unit: "share", least: 0, about: "Shares of the newest 100 episodes of all actors. A truncated episode has no answer, or only a part of it." }],
    ["calls", "Tool calls that went wrong", [actor("tool_malformed", "malformed or unknown", shareOf("tool_calls", "tool_unknown")), actor("tool_refused", "refused by the tool", shareOf("tool_calls"))],
      { unit: "share", least: 0, about: "Shares of the newest 100 calls of all actors: calls that cannot be read, calls of tools that do not exist, and calls that the tool refused." }],
    ["length", "Length", [learner("length/mean", "mean"), learner("length/max", "largest"), measured("eval/length", "held out", { marks: true })],
      { unit: "tokens", about: "Sampled tokens of a trajectory." }],
    ["teaching", "Groups that teach nothing", [learner("groups/zero_variance", "equal rewards"), learner("masked/any", "masked tokens")],
      { unit: "share", least: 0, about: "Groups whose rewards are all equal have no advantage. Masked tokens are left out by a correction." }],
    ["loss", "Loss", [learner("loss", "loss"), learner("loss/*")], { about: "The loss and its terms." }],
    ["gradient", "Gradient norm", [learner("grad_norm", "policy"), learner("value/grad_norm", "critic")], { about: "Before clipping." }],
    ["entropy", "Entropy and KL to the reference", [learner("entropy", "entropy"), learner("kl_reference", "KL to the reference")], { unit: "nats" }],
    ["advantage", "Advantages", [learner("advantage/mean", "mean"), learner("advantage/std", "deviation")]],
    ["value", "Critic", [learner("value/explained_variance", "explained variance"), learner("value/bias", "bias")]],
    ["demonstrations", "Loss of demonstrations", [learner("sft/loss", "learned"), learner("demonstration/nll", "members of groups"), measured("eval/loss", "held out", { marks: true })],
      { unit: "nats", about: "Mean negative log-likelihood of the tokens of demonstrations, by their use." }],
    ["experts", "Balance of experts", [learner("experts/imbalance", "mean of the layers"), learner("experts/imbalance_max", "most uneven layer")],
      { about: "Tokens of a layer's busiest expert, divided by the mean of its experts." }],
    ["lr", "Learning rate", [learner("lr", "policy")]],
  ]),
  ...group("Age of the data", [
    ["lag", "Lag of trained trajectories", [learner("lag/*", "lag ", digits)], { stack: true, unit: "trajectories", ramp: true, about: "Trajectories by the lag of their oldest trained token, in versions: a colour for each lag." }],
    ["token_lag", "Lag of trained tokens", [learner("token_lag/*", "lag ", digits)], { stack: true, unit: "share", ramp: true, most: 1, about: "Sampled tokens by their own lag." }],
    ["mismatch", "Mismatch of engine and learner", [learner("mismatch/kl", "KL (k1)"), learner("mismatch/k3", "KL (k3)"), learner("mismatch/chi_square", "\u03c7\u00b2")],
      { about: "Divergence of the learner's log-probs from the log-probs at sampling. It should stay small; a rise means stale or differing engines." }],
    ["ess", "Effective sample size", [learner("mismatch/ess", "raw weights"), learner("weight/ess", "corrected weights"), learner("mismatch/agree", "tokens that agree")], { unit: "share" }],
    ["ratio_bins", "Raw importance weights of tokens", [learner("ratio_bin/*", ratioBin, digits)], { stack: true, unit: "share", ramp: true, most: 1, about: "Tokens by the ratio of the learner's to the engine's probability, before a correction. If all are near 1, training is on-policy." }],
    ["weight_bins", "Corrected importance weights of tokens", [learner("weight_bin/*", ratioBin, digits)], { stack: true, unit: "share", ramp: true, most: 1, about: "Tokens that no correction drops, by their weight in the loss." }],
    ["clip", "Clipped and masked tokens", [learner("clip/*", "clip "), learner("masked/*", "masked ")], { unit: "share", least: 0, about: "Tokens beyond a bound of the loss, and tokens that a correction drops." }],
    ["update", "Size of the updates", [learner("update/kl", "KL (k1)"), learner("update/k3", "KL (k3)")], { unit: "nats" }],
  ]),
  ...group("Flow", [
    ["flow", "Trajectories per second", FLOW.map(([name, label]) => replay(name, label, { ...rate, main: name === "trained" })),
      { least: 0, about: "Trajectories that the replay accepted for training, labelled and trained, and trajectories that it threw away." }],
    ["flow_tokens", "Tokens per second, by state", [actor("tokens", "sampled", { ...rate, combine: "sum" }), replay("tokens_accepted", "accepted", rate), replay("tokens_labelled", "labelled", rate), replay("tokens_trained", "trained", rate), replay("tokens_evicted", "evicted", rate), replay("tokens_filtered", "filtered", rate), replay("tokens_dropped", "dropped", rate), replay("tokens_dead", "given up", rate)],
      { least: 0, about: "Tokens that actors sampled, and sampled tokens of trajectories by their state in the replay." }],
    ["totals", "Trajectories so far", FLOW.map(([name, label]) => replay(name, label, { main: name === "trained" })), { least: 0 }],
    ["lengths", "Length of the decided episodes", DECIDED.map((end) => replay(`decided/${end}/tokens`, end, shareOf(`decided/${end}/episodes`))),
      { unit: "tokens", least: 0, about: "Mean sampled tokens of the newest episodes by their end. If evicted episodes are longer than trained ones, the age bound chooses by length." }],
    ["evicted_lengths", "Evicted episodes by length", [replay("decided/evicted/length/*", "from ", digits)], { stack: true, unit: "trajectories", ramp: true, about: "Episodes that were thrown away as too old, by the power of two below their sampled tokens." }],
    ["depths", "Queues", [replay("depth_pending", "tickets that wait"), replay("depth_tickets", "open tickets"), replay("depth_waiting", "wait for a scorer"), replay("depth_ready", "groups ready to train", main), replay("depth_groups", "open groups"), replay("depth_dead", "dead letters")],
      { least: 0, about: "The lengths of the replay's queues now." }],
    ["admission", "Admission", [replay("committed", "admitted"), replay("capacity", "bound now")], { unit: "trajectories", about: "Actors wait while both lines meet. The bound follows from replay.max_lag; it is lower while complete groups wait for the learner." }],
    ["store", "Store", [replay("store_bytes", "in use"), replay("dead_letter_bytes", "dead letters")], { unit: "bytes", least: 0 }],
  ]),
  ...group("Time", [
    ["idle", "Idle shares", [learner("idle", "learner"), actor("idle", "engines"), scorer("idle", "scorers")],
      { unit: "share", least: 0, most: 1, about: "Who waits: the learner for batches, engines without a request, scorers without a trajectory." }],
    ["phases", "Seconds of a step, by phase", ["wait", "fetch", "proximal", "train", "publish", "checkpoint", "release", "onload", "offload"].map((name) => learner(`seconds/${name}`, name)), { stack: true, unit: "s" }],
    ["speed", "Tokens per second", [learner("tokens_per_s", "learner"), actor("tokens_per_s", "sampled by actors", { combine: "sum" }), scorer("tokens_per_s", "scored", { combine: "sum" })], { least: 0 }],
    ["mfu", "Model FLOPs utilisation", [learner("mfu/train", "while it trains"), learner("mfu/step", "of the whole step")], { unit: "share", least: 0 }],
    ["waited", "What the learner waited for", [replay("learner_waited_for_episodes_s", "episodes"), replay("learner_waited_for_labels_s", "labels"), replay("learner_waited_for_store_s", "the store"), replay("learner_waited_for_old_groups_s", "old groups")], { unit: "s", stack: true, about: "Sums since the replay's start. More actors, more scorers, a larger store or a larger age bound reduce them." }],
    ["tool_time", "Time in tools", [actor("tools_s", "tools of an episode"), actor("user_s", "simulated user"), actor("agent_s", "agent")],
      { unit: "s", least: 0, about: "Mean seconds of an episode in which its engine waits for something else." }],
    ["episode", "Seconds of an episode, by phase", [actor("wait_s", "wait"), actor("generate_s", "generate"), actor("tools_s", "tools"), actor("user_s", "user"), actor("agent_s", "agent")], { stack: true, unit: "s" }],
  ]),
  ...group("Pushes of weights", [
    ["versions", "Versions", [learner("version", "learner"), { file: ACTORS, name: "version", label: "engine", combine: "each" }, replay("version", "published", { combine: "mean" })], { about: "The version that each actor's engine serves. A line that stays behind shows an engine that takes no new versions." }],
    ["pauses", "Stops of engines by a push", [actor("push_pause_last_s", "the last"), actor("push_pause_max_s", "the longest"), actor("weights_switch_s", "switching, in total", { combine: "sum" }), actor("weights_transfer_s", "transfers, in total", { combine: "sum" })], { unit: "s", least: 0 }],
    ["pushed", "Bytes of a version", [learner("weights/bytes", "whole"), learner("weights/delta_bytes", "as a delta")], { unit: "bytes", least: 0 }],
    ["prepare", "Preparing a version", [learner("weights/prepare_s", "until it is offered"), learner("seconds/publish", "of the step")], { unit: "s", least: 0 }],
    ["canary", "Canary", [actor("canary_difference", "difference"), actor("canary_allowed", "allowed")], { unit: "nats", least: 0 }],
  ]),
  ...group("Scoring", [
    ["agreement", "Agreement of step scores and rules", [scorer("prm_agreement", "agreement"), scorer("hack_alarm", "alarm")], { unit: "share", least: 0, most: 1, about: "A reward that rises while the agreement falls is an alarm: the policy may exploit the process reward model." }],
    ["scores", "Scores", [scorer("reward_mean", "reward"), scorer("outcome_mean", "outcome"), scorer("process_mean", "process"), scorer("rules_mean", "rules"), scorer("environment_mean", "environment")], { about: "Means over the trajectories that were labelled since the last row." }],
    ["steps", "Steps of an answer", [scorer("steps_per_answer", "steps"), actor("turns_mean", "turns")], { least: 0 }],
    ["degenerate", "Signs of reward hacking", [scorer("first_step_share", "tokens in the first step"), scorer("repeated_steps", "repeated steps")], { unit: "share", least: 0 }],
  ]),
  ...group("Failures", [
    ["failures", "Failures so far", [replay("failures", "episodes"), replay("scoring_failures", "scorings"), replay("depth_dead", "dead letters"), actor("tool_failures", "tools", { combine: "sum" }), actor("server_faults", "servers", { combine: "sum" }), learner("updates_skipped", "updates skipped")], { least: 0 }],
    ["tools", "Tool calls so far", [actor("tool_calls", "calls", { combine: "sum" }), actor("tool_refused", "refused", { combine: "sum" }), actor("tool_malformed", "malformed", { combine: "sum" }), actor("tool_unknown", "unknown", { combine: "sum" })], { least: 0 }],
    ["episodes", "Episodes so far", [actor("episodes", "delivered", { combine: "sum" }), actor("truncated", "truncated", { combine: "sum" }), actor("failed", "failed", { combine: "sum" })], { least: 0 }],
  ]),
  ...group("Machines", [
    ["cpu", "Processor", each("usage/cpu_cores"), { unit: "cores", least: 0, about: "Cores that each role keeps busy." }],
    ["memory", "Host memory", each("usage/memory_gb"), { unit: "GB", least: 0 }],
    ["gpu", "GPU utilisation", each("usage/gpu_utilisation"), { unit: "share", least: 0 }],
    ["gpu_memory", "GPU memory", [...each("usage/gpu_memory_gb"), learner("memory/peak_gb", "learner's peak")], { unit: "GB", least: 0 }],
  ]),
];

function group(name, rows) {
  return rows.map(([id, title, lines, more = {}]) => ({ id, title, group: name, lines, unit: "", ...more }));
}

function each(name) {
  return [LEARNER, ACTORS, SCORERS, REPLAYS].map((file) => ({ file, name, label: "", combine: "each" }));
}

/** A figure of one metric that a person chose: FILE:NAME. */
export function chosenFigure(word, meaning) {
  const at = word.indexOf(":");
  const [file, name] = [word.slice(0, at), word.slice(at + 1)];
  return { id: word, title: name, group: file, lines: [{ file, name, label: name }], unit: meaning?.unit ?? "", about: meaning?.meaning ?? "" };
}
