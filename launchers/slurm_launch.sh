#!/usr/bin/env bash
# A run as a job of Slurm, on as many nodes as the job has:
#
#   sbatch --nodes=2 --gpus-per-node=8 --exclusive launchers/slurm_launch.sh experiment=mine.yaml run.name=mine
#
# The words are those of `asyncrl train`. docs/cluster.md has the rest; `--dry-run` prints every command and starts none.
# Where jobs are not requeued, this submits five, of which each resumes the run when the one before has ended:
#
#   launchers/slurm_launch.sh --chain 5 --nodes=2 --gpus-per-node=8 --time=4:00:00 experiment=mine.yaml run.name=mine
#
# ASYNCRL_PYTHON names a Python that has asyncrl; by default the first python3 of PATH.
#SBATCH --job-name=asyncrl
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before its time ends, the job saves, is requeued, and goes on when Slurm starts it again.
#SBATCH --signal=B:USR1@300
set -euo pipefail
python="${ASYNCRL_PYTHON:-python3}"
# In a checkout any Python finds ./asyncrl, but only that of its environment has the packages that it needs.
needs='import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, ["asyncrl", "torch", "zmq"])))'
if ! { command -v "$python" && "$python" -c "$needs"; } >/dev/null; then
  echo "asyncrl: $python has no asyncrl with its packages; activate its environment, or name its Python by ASYNCRL_PYTHON" >&2
  exit 2
fi
if [[ "${1:-}" == --chain ]]; then
  exec "$python" -m asyncrl.launch.slurm.chain "$0" "${@:2}"
fi
# Python takes the place of this shell, so that Slurm's signals reach it.
exec "$python" -m asyncrl.launch.slurm.job "$@"
