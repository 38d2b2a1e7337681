"""The metrics of a learner step."""

from __future__ import annotations

from asyncrl.observe.registry.metric import made_by

gauge, counter, _ = made_by("learner")

_TRAINED = (
    gauge("reward/mean", "reward", "mean reward of the trained trajectories"),
    gauge("reward/std", "reward", "standard deviation of the trained trajectories' rewards"),
    gauge("reward/min", "reward", "smallest reward of a trained trajectory"),
    gauge("reward/max", "reward", "largest reward of a trained trajectory"),
    gauge("outcome/mean", "outcome", "mean outcome of the trained trajectories: the score of the first rule"),
    gauge(
        "groups/zero_variance",
        "share",
        "groups that teach nothing because all members have the same reward, or the same value of the score that the "
        "correction `zero_variance` compares",
    ),
    gauge("length/mean", "tokens", "mean number of sampled tokens of a trained trajectory"),
    gauge("length/max", "tokens", "the most sampled tokens of a trained trajectory"),
    gauge("version", "version", "the policy version before the step"),
    gauge("tokens", "tokens", "all tokens of the step's trajectories"),
    gauge("tokens_sampled", "tokens", "tokens of the step's trajectories that the policy sampled"),
    counter("trajectories_trained", "trajectories", "trained trajectories since the run's start"),
    gauge("lag/mean", "versions", "mean lag of the trained trajectories"),
    gauge("lag/max", "versions", "the largest lag of a trained trajectory"),
    gauge(
        "lag/LAG",
        "trajectories",
        "trained trajectories with this lag; LAG = replay.max_lag + 1 counts all larger lags",
    ),
    gauge("token_lag/mean", "versions", "mean lag of the sampled tokens"),
    gauge("token_lag/LAG", "share", "sampled tokens with this lag; LAG = 16 counts all larger lags, too"),
)

_UPDATES = (
    gauge("loss", "", "mean loss of the step's updates"),
    gauge("loss/policy", "", "the loss's term of the policy, mean over the step's minibatches"),
    gauge("loss/kl", "", "the loss's term of the KL to the reference, mean over the step's minibatches"),
    gauge("loss/entropy", "", "the loss's term of the entropy, mean over the step's minibatches"),
    gauge("loss/demonstration", "", "the loss's term of demonstrations in groups, mean over the step's minibatches"),
    gauge(
        "loss/STREAM", "", "the term of the loss that `algorithm.stream` names STREAM, mean over the step's minibatches"
    ),
    gauge("grad_norm", "", "mean norm of the policy's finite gradients before clipping"),
    gauge("lr", "", "the policy's learning rate, before `lr_scale`"),
    gauge("lr_scale", "", "mean factor of the policy's learning rate in the step's updates, by `algorithm.lr_scale`"),
    counter(
        "updates_empty",
        "updates",
        "updates since the run's start that were left out because there was nothing to learn from",
    ),
    counter(
        "updates_skipped",
        "updates",
        "updates since the run's start that were left out because the gradient was not finite",
    ),
    counter(
        "updates_too_large",
        "updates",
        "updates of any model since the run's start that were left out because the gradient was too large for "
        "learner.skip_grad_norm or learner.skip_grad_norm_factor",
    ),
    counter(
        "updates_overflowed",
        "updates",
        "updates of any model since the run's start that were left out because the gradient was beyond float16. The "
        "loss scale was then halved",
    ),
    gauge(
        "loss_scale",
        "",
        "the factor by which the policy's loss is multiplied, so that its gradient fits float16 (model.dtype)",
    ),
    counter(
        "steps_skipped",
        "steps",
        "steps since the run's start that trained nothing because their plan was skipped (`asyncrl inspect skip-plan`)",
    ),
)

_MEMBERS = (
    gauge(
        "demonstration/episodes",
        "trajectories",
        "trajectories of the step that are demonstrations of tasks (data.demonstration)",
    ),
    gauge(
        "demonstration/reward",
        "",
        "mean reward of the step's demonstrations. The metrics under reward/ leave them out",
    ),
    gauge("demonstration/tokens", "tokens", "tokens of the step's demonstrations that are trained"),
    gauge("demonstration/probability", "", "mean probability that the policy gives to the tokens of demonstrations"),
    gauge("demonstration/nll", "nats", "mean negative log-likelihood of the tokens of demonstrations"),
    gauge("demonstration/advantage", "", "mean advantage of the tokens of demonstrations"),
)

_ROUTING = (
    gauge("routing/replayed", "share", "tokens that went to the experts that the engine used (learner.router_replay)"),
    gauge("routing/changed", "share", "pairs of token and layer at which the policy itself would choose other experts"),
    gauge("routing/refused", "trajectories", "trajectories of the step whose recorded experts do not fit the model"),
)

_EXPERTS = (
    gauge(
        "experts/imbalance",
        "ratio",
        "tokens of a layer's busiest expert, divided by the mean number of tokens of the layer's experts. It is a "
        "mean over the policy's layers",
    ),
    gauge("experts/imbalance_max", "ratio", "experts/imbalance of the single layer where it is largest"),
    gauge("experts/dead", "share", "experts of all layers that got no token of the step"),
    gauge("experts/entropy", "nats", "mean entropy of a router's distribution over the experts"),
    gauge(
        "experts/balance_loss",
        "",
        "the balance loss of the experts before it is multiplied by its weight. It is top_k, the number of experts of "
        "a token, if the experts are balanced",
    ),
)

_DEMONSTRATIONS = (
    gauge("sft/loss", "nats", "mean negative log-likelihood of the step's demonstrations, before the update"),
    gauge("sft/tokens", "tokens", "tokens of demonstrations that the step learned"),
    gauge("sft/weight", "", "weight of sft/loss, relative to the policy's loss"),
    gauge("sft/epoch", "epochs", "passes of the run through its demonstrations"),
    gauge(
        "sft/cut",
        "demonstrations",
        "demonstrations that were cut because they are longer than algorithm.sft.max_tokens",
    ),
    gauge(
        "sft/left_out",
        "demonstrations",
        "demonstrations that were left out because they are longer than algorithm.sft.max_tokens",
    ),
)

_POLICIES = (
    gauge(
        "mismatch/ess",
        "share",
        "effective sample size (sum w)^2 / (N sum w^2) of the raw importance weights w of the N sampled tokens that no "
        "grammar restricted. The other metrics `mismatch/` are over these tokens, too",
    ),
    gauge("mismatch/kl", "nats", "KL from the behaviour policy to the proximal policy, as k1"),
    gauge("mismatch/k3", "nats", "KL from the behaviour policy to the proximal policy, as k3"),
    gauge("mismatch/chi_square", "", "mean w^2 - 1"),
    gauge(
        "mismatch/chi_square_sequence",
        "",
        "mean over sequences of P^2 - 1, where P is the product of the sequence's w",
    ),
    gauge("mismatch/agree", "share", "tokens on which engine and learner agree: abs(log w) <= 1e-4"),
    gauge("mismatch/perplexity_ratio", "ratio", "mean over sequences of exp(mean log mu - mean log pi_prox)"),
    gauge("mismatch/behaviour_perplexity", "", "mean over sequences of exp(-mean log mu)"),
    gauge("mismatch/proximal_perplexity", "", "mean over sequences of exp(-mean log pi_prox)"),
    gauge("update/kl", "nats", "KL from the proximal policy to the trained policy, as k1"),
    gauge(
        "update/k3",
        "nats",
        "KL from the proximal policy to the trained policy, as k3. With algorithm.proximal=behaviour it is the "
        "distance to the policy that sampled, and `mismatch/kl` and `mismatch/k3` are 0",
    ),
    gauge("weight/mean", "", "mean of the corrected weights of the kept tokens"),
    gauge(
        "weight/ess",
        "share",
        "effective sample size of the corrected weights. The weight of a dropped token counts as 0",
    ),
    gauge(
        "ratio_bin/BIN",
        "share",
        "sampled tokens by their raw importance weight w: BIN 8 is from 2^(-1/64) to 2^(1/64). BIN 9 to 16 "
        "begin at 2^(1/64), 2^(1/32), 2^(1/16), 2^(1/8), 2^(1/4), 2^(1/2), 2 and 4. BIN 7 to 0 are the same for 1/w",
    ),
    gauge("weight_bin/BIN", "share", "kept tokens by their corrected weight, in the same bins; only with a correction"),
    gauge("clip/high", "share", "tokens beyond the upper clip bound of the loss"),
    gauge("clip/low", "share", "tokens beyond the lower clip bound of the loss"),
    gauge("clip/faded", "share", "tokens with a weight below 0.01 in the losses vespo and topr"),
    gauge("clip/BOUND", "share", "tokens beyond another bound of the loss"),
    gauge("masked/CORRECTION", "share", "tokens that a correction drops"),
    gauge(
        "masked/grammar",
        "share",
        "tokens that are not trained because a grammar restricted them ([engines.md](engines.md))",
    ),
    gauge("masked/any", "share", "tokens that any correction or a grammar drops"),
    gauge("noop", "0 or 1", "1 if no token was left to learn from"),
    gauge("advantage/mean", "", "mean advantage of the kept tokens"),
    gauge("advantage/std", "", "standard deviation of the kept tokens' advantages"),
    gauge("advantage/positive", "share", "kept tokens with a positive advantage"),
    gauge(
        "entropy",
        "nats",
        "mean entropy of the policy before each update. It is over all kept tokens if the loss needs it. Otherwise it "
        "is over a sample: a sixteenth of them, but at least 256 tokens of a step",
    ),
    gauge("kl_reference", "nats", "KL from the policy to the reference policy; only if there is a reference"),
    gauge("kl_reference/weight", "", "weight of the KL to the reference in the reward or in the loss"),
)

_OTHER_MODELS = (
    gauge(
        "return/mean",
        "",
        "mean return of the sampled tokens; only with an advantage that has returns, such as one with a critic",
    ),
    gauge("return/std", "", "standard deviation of the sampled tokens' returns"),
    gauge("value/bias", "", "mean error of the critic's values"),
    gauge(
        "value/explained_variance",
        "share",
        "share of the returns' variance that the critic explains. It is below 0 if the critic's errors vary more than "
        "the returns",
    ),
    gauge("value/clipped", "share", "tokens whose value the critic's loss clips"),
    gauge("value/grad_norm", "", "the critic's gradient norm before clipping"),
    gauge("value/warmup", "", "1 while the critic is trained alone (critic.warmup_steps), then 0"),
    gauge("value/loss_scale", "", "the factor by which the critic's loss is multiplied, like loss_scale"),
    gauge("implicit/loss", "", "loss of the implicit process model (algorithm=prime)"),
    gauge("implicit/grad_norm", "", "gradient norm of the implicit process model before clipping"),
    gauge(
        "implicit/loss_scale",
        "",
        "the factor by which the implicit process model's loss is multiplied, like loss_scale",
    ),
    gauge(
        "implicit/accuracy",
        "share",
        "outcomes (right if above 0.5) that the implicit process model predicts correctly",
    ),
    gauge(
        "implicit/pairwise_accuracy",
        "share",
        "pairs of a group's members that the implicit process model puts in the order of their outcomes. It is a mean "
        "over groups; a group in which all outcomes are equal counts as 0.5",
    ),
)

_WEIGHTS = (
    counter("kept/episodes", "episodes", "episodes kept for people to read, since the learner's start"),
    gauge("kept/bytes", "bytes", "size of the kept episodes of learner steps"),
    counter("kept/episodes_evaluated", "episodes", "held-out episodes kept since the start (observe.keep_evaluated)"),
    gauge("kept/bytes_evaluated", "bytes", "size of the kept held-out episodes"),
    counter("kept/lost_evaluated", "evaluations", "evaluations whose sample of episodes is lost"),
    counter(
        "kept/thinned",
        "steps",
        "steps whose episodes were deleted since the start to make room (observe.keep_episodes_mb)",
    ),
    counter("kept/left_out", "groups", "groups that are too large to be kept, since the learner's start"),
    counter(
        "kept/lost",
        "steps",
        "steps whose episodes could not be kept since the learner's start, for example because the disk was full",
    ),
    gauge("weights/bytes", "bytes", "size of the newest version's weights"),
    gauge("weights/delta_bytes", "bytes", "size of the newest version if it is sent as a delta"),
    gauge("weights/density", "share", "share of the weights that the newest delta changes"),
    gauge(
        "weights/adapters_kept",
        "share",
        "share of the adapters' change that is left once the merged weights are rounded to model.dtype",
    ),
    gauge("weights/prepare_s", "s", "time that the learner took to prepare the newest version for the engines"),
    counter("weights/refused", "requests", "requests for weights that the learner refused since its start"),
    counter("weights/broadcasts", "broadcasts", "broadcasts of weights since the learner's start"),
    counter("weights/broadcast_failures", "broadcasts", "broadcasts of weights that failed, since the learner's start"),
    counter(
        "weights/folder_failures",
        "versions",
        "versions that could not be written to a folder, since the learner's start",
    ),
)

_TIMES = (
    gauge("seconds/step", "s", "the whole step"),
    gauge("seconds/wait", "s", "waiting for a batch"),
    gauge(
        "seconds/fetch",
        "s",
        "fetching the batch. This is nearly 0 if the batch was fetched while the previous one was trained, which the "
        "samplers `oldest` and `fifo` allow",
    ),
    gauge("seconds/proximal", "s", "forward passes before the updates"),
    gauge("seconds/train", "s", "the updates"),
    gauge("seconds/keep", "s", "gathering the kept episodes of the step"),
    gauge("seconds/publish", "s", "publishing weights"),
    gauge(
        "seconds/checkpoint",
        "s",
        "waiting for the previous checkpoint, if it is still being written, and for the copy of the state",
    ),
    gauge("seconds/release", "s", "with `cluster.colocated`: waiting for servers to free the GPUs"),
    gauge("seconds/onload", "s", "with `cluster.colocated`: copying models and the optimizer's moments to the GPUs"),
    gauge(
        "seconds/offload", "s", "with `cluster.colocated`: copying models and the optimizer's moments back to the host"
    ),
    gauge(
        "idle",
        "share",
        "share of seconds/step that seconds/wait and seconds/fetch take; with `cluster.colocated` also "
        "seconds/release, seconds/onload and seconds/offload",
    ),
    gauge("tokens_per_s", "tokens/s", "`tokens` divided by `seconds/step`"),
    gauge("mfu/train", "share", "model FLOPs utilisation in seconds/train; only on GPUs"),
    gauge("mfu/step", "share", "model FLOPs utilisation in seconds/step; only on GPUs"),
    gauge(
        "memory/peak_gb",
        "GB",
        "largest memory of a rank. On a GPU it is the peak of its tensors since the last row; on the CPU it is the "
        "peak of its process since the start",
    ),
)

METRICS = (
    *(*_TRAINED, *_UPDATES, *_MEMBERS, *_ROUTING, *_EXPERTS, *_DEMONSTRATIONS),
    *(*_POLICIES, *_OTHER_MODELS, *_WEIGHTS, *_TIMES),
)
