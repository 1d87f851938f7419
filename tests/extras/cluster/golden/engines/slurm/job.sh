#!/usr/bin/env bash
# hocket on SLURM: 8 servers of 1 GPU on 1 node, 8 ranks on 1 node.
# Written by `run.py launch --engine slurm`, and yours to edit.
#   sbatch job.sh              submit; the same again goes on from the newest checkpoint, as does a requeued job
#   tail -f slurm-*.log        what the trainer says; /shared/hocket/runs/math7b/logs has every process
#   scancel JOB                end servers and ranks
#SBATCH --job-name=hocket-math7b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/hocket/runs/math7b/launch/slurm/slurm-%j.log
# Whole nodes (--exclusive, --mem=0): on shared ones ask for --cpus-per-task and --mem instead.
# Your site may want these, too:
##SBATCH --partition=NAME
##SBATCH --account=NAME
set -euo pipefail
cd /shared/hocket
PYTHON=/shared/hocket/.venv/bin/python
CONFIG=/shared/hocket/runs/math7b/launch/slurm/config.yaml

# Servers want a token: others use the network, or this node. It travels in the environment, in no file and no command line.
HOCKET_TOKEN=${HOCKET_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export HOCKET_TOKEN PYTHONUNBUFFERED=1
LOGS=/shared/hocket/runs/math7b/logs
SERVERS=/shared/hocket/runs/math7b/launch/slurm/servers.txt # server.discover: the trainer reads it again every few seconds
mkdir -p "$LOGS"

# The first 1 of the job's nodes have servers, the other 1 ranks.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
rank_nodes=("${nodes[@]:1}")

# --overlap: a step may use what others use; who has which GPU is said here. --cpu-bind=none: all cores of the node.
# --export=ALL: the token and your variables, whatever sbatch was told.
step=(srun --export=ALL --overlap --cpu-bind=none --ntasks-per-node=1 --gres=gpu:8)

serve() { # NUMBER NODE PORT GPUS: a server, started again if it dies
    until "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$2" --open-mode=append --output="$LOGS/server_$1.log" \
        env CUDA_VISIBLE_DEVICES="$4" "$PYTHON" run.py serve "$CONFIG" server.port="$3"; do
        sleep 10
    done
}

for ((i = 0; i < 8; i++)); do
    node=${nodes[i / 8]} place=$((i % 8))
    port=$((8000 + place)) gpu=$((place * 1))
    serve "$i" "$node" "$port" "$(seq -s, "$gpu" $((gpu + 1 - 1)))" &
    echo "http://$node:$port"
done > "$SERVERS"

# The trainer: torchrun on each of its nodes. Its end is the job's, and with this script SLURM ends the servers.
status=0
"${step[@]}" --nodes=1 --ntasks=1 --nodelist="$(IFS=, && echo "${rank_nodes[*]}")" --kill-on-bad-exit=1 \
    "$PYTHON" -m torch.distributed.run --nnodes=1 --nproc-per-node=8 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${rank_nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))" \
    --log-dir="$LOGS" --tee=3 --local-ranks-filter=0 run.py train "$CONFIG" || status=$?
exit "$status"
