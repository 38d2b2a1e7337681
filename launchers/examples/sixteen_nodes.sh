#!/usr/bin/env bash
# Sixteen nodes with 8 GPUs each: eight train, eight have SGLang's servers and the scorers. Submit it in the repository's
# folder:
#
#   sbatch launchers/examples/sixteen_nodes.sh model.path=Qwen/Qwen3-32B data.train=train.parquet
#
# The learner's ranks are on several nodes, and their collectives are not encrypted: network.insecure=true says that the
# nodes' network is private.
#SBATCH --nodes=16
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --job-name=asyncrl
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600
launch="$(dirname "${BASH_SOURCE[0]}")/../slurm_launch.sh"
# Slurm runs a copy of this script from another folder, so the path above may not exist. The working folder is the one
# where sbatch was called.
[[ -x "$launch" ]] || launch=launchers/slurm_launch.sh
exec "$launch" experiment=gsm8k_calculator engine=sglang engine.server.tp_size=2 \
  "cluster.pools={train: {nodes: 8, gpus: 8}, rollout: {nodes: 8, gpus: 8}}" \
  "cluster.roles={actor: rollout, scoring: rollout}" learner.replicas=8 network.insecure=true "$@"
