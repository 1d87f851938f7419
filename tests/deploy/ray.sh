#!/usr/bin/env bash
# Run config/sort.yaml as a Ray job on a cluster of four nodes: kill a server's actor in mid-run and see it used again, then take
# a node of the trainer off the network and see the run go on from its checkpoint, on another one.
#   sudo tests/deploy/ray.sh [STEPS]      about 4 minutes on 2 cores, 600 MB for Ray; needs iproute2
# The nodes are network namespaces with a switch of their own; their GPUs are only Ray's count of them. It prints what the
# trainer says of the servers, the accuracy before and after, and what the job leaves running: nothing. STEPS: 120.
# RAY_ENV (/tmp/hocket-ray-env) is the folder with Ray's environment, made where there is none.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,7s/^# //p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
. tests/deploy/nodes.sh
steps=${1:-120} python=$PWD/.venv/bin/python
work=$(mktemp -d /tmp/hr.XXXX) # short: Ray's sockets lie in it, and a socket's path has at most 107 characters
ray=${RAY_ENV:-/tmp/hocket-ray-env}
[ -x "$ray/bin/ray" ] || { python3 -m venv "$ray" && "$ray/bin/pip" install -q 'ray[default]==2.60.*' numpy; }

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
on() { local node=$1 && shift && ip netns exec "hray$node" env PATH="$ray/bin:$PATH" RAY_ADDRESS=http://10.78.0.1:8265 "$@"; }
finish() {
    status=$?
    remove_nodes
    if [ "$status" = 0 ]; then rm -r "$work"; else say "failed; see $work"; fi
}
trap finish EXIT

make_nodes hray 10.78.0 4
export RAY_memory_monitor_refresh_ms=0 GLOO_SOCKET_IFNAME=eth0 # all nodes have the name of this machine
export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=3000 RAY_health_check_failure_threshold=3
start() { # NODE OPTIONS...: Ray's part of a node
    local node=$1 && shift
    on "$node" ray start "$@" --node-ip-address="10.78.0.$node" --temp-dir="$work/n$node" --num-gpus=1 --num-cpus=1 \
        --object-store-memory=100000000 --disable-usage-stats --block >> "$work/n$node.log" 2>&1 &
}
start 1 --head --port=6379 --dashboard-host=10.78.0.1
for _ in $(seq 120); do on 1 ray job list > /dev/null 2>&1 && break; sleep 1; done
for node in 2 3 4; do start "$node" --address=10.78.0.1:6379; done

settings=(config/sort.yaml "run.dir=$work/run" "trainer.steps=$steps" checkpoint.every_steps=10)
settings+=(launch.servers=2 launch.trainers=2)
on 1 "$python" run.py launch "${settings[@]}" --engine ray --gpus-per-node=1 --submit | tee "$work/submit.log"
job=$(grep -o 'raysubmit_[A-Za-z0-9]*' "$work/submit.log" | head -n 1)
on 1 ray job logs -f "$job" > "$work/job.log" 2>&1 & # ends with the job
follow=$!

lines() { cat "$work/run/metrics.jsonl" 2> /dev/null | wc -l; }
until_or_end() { # SECONDS COMMAND...: until it succeeds, or the job has ended
    for _ in $(seq "$1"); do "${@:2}" > /dev/null 2>&1 || ! kill -0 "$follow" 2> /dev/null || { sleep 1 && continue; }; break; done
}
reached() { [ "$(lines)" -ge "$1" ]; }
back() { awk '/lost server/ { lost = 1 } lost && /holds version/ { back = 1 } END { exit !back }' "$work/job.log"; }
until_or_end 240 reached 20
actor=$(find_process ray::Server)
kill -KILL "$actor" && say "killed server actor $actor after step $(lines)"
until_or_end 120 back
until_or_end 120 reached $(($(lines) + 10))
for node in 2 3 4; do find_process torch.distributed.run "$node" > /dev/null && break; done
ip -n hray-sw link set "p$node" down
say "node $node, with a rank of the trainer, is off the network after step $(lines)"
until_or_end 120 grep -q 'a node of the trainer is lost' "$work/job.log"
grep -q 'a node of the trainer is lost' "$work/job.log" && say "Ray has noticed"
end_all "$node"
ip -n hray-sw link set "p$node" up
start "$node" --address=10.78.0.1:6379 # a new node
until_or_end 120 grep -q 'going on from' "$work/job.log"
grep -q 'going on from' "$work/job.log" && say "the trainer goes on"
until_or_end 300 false
say "$(on 1 ray job status "$job" | grep -oE "'$job'.*" || :)"
grep -hE 'lost server|holds version|is lost|going on|steps in|accuracy' "$work/job.log"
grep -c '^hocket: ready' "$work"/run/logs/server_*.log
cat "$work/run/summary.json"
back && grep -q 'going on from' "$work/job.log" && on 1 ray job status "$job" | grep -q succeeded && leaves_nothing
