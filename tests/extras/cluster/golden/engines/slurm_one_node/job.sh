#!/usr/bin/env bash
# hocket on SLURM: 2 servers of 1 GPU and 6 ranks on one node.
# Written by `run.py launch --engine slurm`, and yours to edit.
#   sbatch job.sh              submit; the same again goes on from the newest checkpoint, as does a requeued job
#   tail -f slurm-*.log        what the trainer says; /shared/hocket/runs/one-node/logs has every process
#   scancel JOB                end servers and ranks
#SBATCH --job-name=hocket-one-node
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/shared/hocket/runs/one-node/launch/slurm/slurm-%j.log
# Whole nodes (--exclusive, --mem=0): on shared ones ask for --cpus-per-task and --mem instead.
# Your site may want these, too:
##SBATCH --partition=NAME
##SBATCH --account=NAME
set -euo pipefail
cd /shared/hocket
PYTHON=/shared/hocket/.venv/bin/python
CONFIG=/shared/hocket/runs/one-node/launch/slurm/config.yaml

# Servers want a token: others use the network, or this node. It travels in the environment, in no file and no command line.
HOCKET_TOKEN=${HOCKET_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export HOCKET_TOKEN PYTHONUNBUFFERED=1

# All on one node: one command divides the GPUs and ends everything with the trainer.
exec "$PYTHON" run.py launch "$CONFIG"
