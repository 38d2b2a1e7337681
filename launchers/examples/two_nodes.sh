#!/usr/bin/env bash
# Two nodes with 8 GPUs each: one trains, the second has SGLang's servers and the scorers. Submit it in the repository's
# folder:
#
#   sbatch launchers/examples/two_nodes.sh model.path=Qwen/Qwen3-8B data.train=train.parquet
#
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --job-name=asyncrl
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
launch="$(dirname "${BASH_SOURCE[0]}")/../slurm_launch.sh"
# Slurm runs a copy of this script from another folder, so the path above may not exist. The working folder is the one
# where sbatch was called.
[[ -x "$launch" ]] || launch=launchers/slurm_launch.sh
exec "$launch" experiment=gsm8k_calculator engine=sglang \
  "cluster.pools={train: {nodes: 1, gpus: 8}, rollout: {nodes: 1, gpus: 8}}" \
  "cluster.roles={actor: rollout, scoring: rollout}" "$@"
