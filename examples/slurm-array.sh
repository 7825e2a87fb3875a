#!/bin/bash
# A sweep as a Slurm array: every task times one part of the points into a folder that all of them share.
#
#   sbatch --array=0-15 examples/slurm-array.sh DIR sla_r4 --vary chunk=32..256:*2 --vary "hw.hbm.bandwidth=1000..8000:+10 GB/s"
#   tpusim whatif merge DIR        # when all tasks have ended; says which parts are missing, if any
#
# A task that is stopped leaves whole rows and goes on behind them when it is queued again. TPUSIM names the program where it is not in PATH.
#SBATCH --job-name=tpusim-whatif
#SBATCH --cpus-per-task=4
#SBATCH --requeue
# Half a minute before the end of its time, so that the rows at hand are written.
#SBATCH --signal=TERM@30
set -u

if [ $# -lt 2 ] || [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
    echo "usage: sbatch --array=0-N $0 DIR WORKLOAD --vary FIELD=VALUES ..." >&2
    exit 2
fi
dir=$1
shift
part=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))
export RAYON_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

# `exec`, so that the signal of Slurm reaches the program. Exit code 1: some points have no time, and their rows say why.
exec "${TPUSIM:-tpusim}" whatif "$@" --out "$dir" --shard "$part/$SLURM_ARRAY_TASK_COUNT"
