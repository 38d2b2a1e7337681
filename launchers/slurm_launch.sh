#!/usr/bin/env bash
# A run as a job of Slurm, on all nodes of the job:
#
#   sbatch --nodes=2 --gpus-per-node=8 --exclusive launchers/slurm_launch.sh experiment=mine.yaml run.name=mine
#
# The arguments are those of `asyncrl train` (docs/cluster.md). `--dry-run` prints every command and starts nothing.
# If the site does not requeue jobs, this submits five jobs that each resume the run after the end of the previous job:
#
#   launchers/slurm_launch.sh --chain 5 --nodes=2 --gpus-per-node=8 --time=4:00:00 experiment=mine.yaml run.name=mine
#
# ASYNCRL_PYTHON names a Python that has asyncrl; by default the first python3 of PATH.
#SBATCH --job-name=asyncrl
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# Five minutes before its time ends, the job saves and is requeued. It resumes when Slurm starts it again.
#SBATCH --signal=B:USR1@300
set -euo pipefail
python="${ASYNCRL_PYTHON:-python3}"
# In a checkout any Python finds ./asyncrl, but only the Python of asyncrl's environment has the packages.
needs='import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, ["asyncrl", "torch", "zmq"])))'
if ! { command -v "$python" && "$python" -c "$needs"; } >/dev/null; then
  echo "asyncrl: $python has no asyncrl with its packages; activate its environment, or set ASYNCRL_PYTHON to its Python" >&2
  exit 2
fi
if [[ "${1:-}" == --chain ]]; then
  exec "$python" -m asyncrl.launch.slurm.chain "$0" "${@:2}"
fi
# Python replaces this shell, so that Slurm's signals reach Python.
exec "$python" -m asyncrl.launch.slurm.job "$@"
