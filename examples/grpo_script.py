"""GRPO as a script: synchronous, on this machine, with the demo's calculator task unless words name another.

    python examples/grpo_script.py [KEY=VALUE ...]

It goes on from the checkpoint in runs/grpo_script, if there is one.
"""

import os
import sys
from pathlib import Path

from asyncrl.commands.demo import prepare_demo, prepared_overrides
from asyncrl.compat.verl.controller import ClassWithInitArgs, LocalWorkerGroup
from asyncrl.compat.verl.controller.operators import (
    ActorRolloutRefWorker,
    PromptFeed,
    RewardModelWorker,
    TrainConfig,
    compute_advantage,
    open_algorithm,
    read_config,
)


def train(config: TrainConfig, folder: Path) -> None:
    with (
        LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, config)) as policy,
        LocalWorkerGroup(ClassWithInitArgs(RewardModelWorker, config)) as rewards,
    ):
        policy.init_model()
        rewards.init_model()
        begun = policy.load_checkpoint(str(folder))
        feed, algorithm = PromptFeed(config, begun), open_algorithm(config)
        for step in range(begun, config.learner.total_steps):
            prompts = feed.next().repeat(config.learner.group_size)
            data = policy.generate_sequences(prompts)
            data = rewards.compute_reward(data)
            data = data.union(policy.compute_log_prob(data))
            data = compute_advantage(data, algorithm)
            metrics = policy.update_actor(data).meta_info["metrics"]
            sys.stdout.write(f"step {step}: reward {metrics['reward/mean']:.3f}, loss {metrics['actor/loss']:.4f}\n")
        policy.save_checkpoint(str(folder))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    demo = prepared_overrides(prepare_demo(Path(".cache/demo"), 0, print))
    train(read_config([*demo, "algorithm=grpo", "learner.steps=10", *sys.argv[1:]]), Path("runs/grpo_script"))
