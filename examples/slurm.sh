#!/bin/sh
# Start Ray on the nodes of a SLURM job, and run or go on with a comparison there: docs/cluster.md explains it.
#     sbatch examples/slurm.sh COMPARISON.yaml OUTPUT
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -eu

comparison=$1
output=$2
# Several jobs may share a node: each has ports and a folder of its own.
port=$((20000 + SLURM_JOB_ID % 10000))
client_port=$((port + 10000))
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_ADDRESS="$first:$port" RAY_USAGE_STATS_ENABLED=0
# Other users of these nodes, who may reach its ports, do not know the job's token.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

# nproc counts the cores that SLURM has bound a task to, and Ray the GPUs of CUDA_VISIBLE_DEVICES.
on_node='exec ray start --block --num-cpus="$(nproc)" --min-worker-port=0 --max-worker-port=0'
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" sh -c "unset RAY_ADDRESS; $on_node --head --port=$port \
  --ray-client-server-port=$client_port --include-dashboard=false --temp-dir=/tmp/ray-$SLURM_JOB_ID" > ray.log 2>&1 &
started=$!
trap 'kill $started ${others:-} ${running:-} 2> /dev/null || true' TERM INT EXIT
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  others_count=$((SLURM_JOB_NUM_NODES - 1))
  srun --overlap --nodes=$others_count --ntasks=$others_count --exclude="$first" \
    sh -c "until ray status > /dev/null 2>&1; do sleep 1; done; $on_node --address=$RAY_ADDRESS" >> ray.log 2>&1 &
  others=$!
fi
until ray status > /dev/null 2>&1; do
  kill -0 $started || { echo "Ray has not started: see ray.log" >&2; exit 1; }
  sleep 1
done
python - "$SLURM_JOB_NUM_NODES" << 'END'
import sys
import time

import ray

ray.init(log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
END

if [ -e "$output/comparison.yaml" ]; then
  fed compare --resume "$output" --jobs auto &
else
  fed compare "$comparison" --output "$output" --jobs auto &
fi
running=$!
wait $running
