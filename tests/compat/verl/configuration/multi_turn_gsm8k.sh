# Like the scripts of verl's examples that start it with a configuration file of their own.
set -x
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/settings"

python3 -m verl.trainer.main_ppo \
    --config-path="$CONFIG_PATH" \
    --config-name='several_turns' \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=64 \
    actor_rollout_ref.rollout.n=8
