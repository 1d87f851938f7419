#!/usr/bin/env bash
# Run the quickstart as a Ray job on a cluster of two nodes, kill a server's actor in mid-run, and see it used again.
#   sudo tests/deploy/ray.sh [STEPS]      about 4 minutes on 2 cores, 600 MB for Ray; needs iproute2
# The nodes are network namespaces with a link of their own; their GPUs are only Ray's count of them. It prints what the
# trainer says of the servers, the accuracy before and after, and what is left running: nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
steps=${1:-120} python=$PWD/.venv/bin/python
work=$(mktemp -d /tmp/hr.XXXX) # short: Ray's sockets lie in it, and a socket's path has at most 107 characters
ray=${RAY_ENV:-/tmp/hocket-ray-env}
[ -x "$ray/bin/ray" ] || { python3 -m venv "$ray" && "$ray/bin/pip" install -q 'ray[default]==2.60.*' numpy; }

on() { local node=$1 && shift && ip netns exec "hray$node" env PATH="$ray/bin:$PATH" RAY_ADDRESS=http://10.78.0.1:8265 "$@"; }
pids() { ip netns pids hray1 && ip netns pids hray2; }
finish() {
    status=$?
    for round in $(seq 40); do # SIGTERM first; what still runs after 10 s gets SIGKILL
        left=$(pids) && [ -n "$left" ] || break
        # shellcheck disable=SC2086 # several
        kill -s "$([ "$round" -le 20 ] && echo TERM || echo KILL)" $left 2> /dev/null || :
        sleep 0.5
    done
    echo "processes left in the namespaces: $(pids | wc -l)"
    ip netns del hray1 && ip netns del hray2
    if [ "$status" = 0 ]; then rm -r "$work"; else echo "see $work"; fi
}
trap finish EXIT

ip netns add hray1 && ip netns add hray2
ip link add r1 netns hray1 type veth peer name r2 netns hray2
for node in 1 2; do
    ip -n "hray$node" addr add "10.78.0.$node/24" dev "r$node"
    ip -n "hray$node" link set "r$node" up && ip -n "hray$node" link set lo up
done
common=(--num-gpus=2 --num-cpus=3 --object-store-memory=100000000 --disable-usage-stats --block)
export RAY_memory_monitor_refresh_ms=0
on 1 ray start --head --node-ip-address=10.78.0.1 --port=6379 --dashboard-host=10.78.0.1 --temp-dir="$work/n1" "${common[@]}" > "$work/n1.log" 2>&1 &
for _ in $(seq 120); do on 1 ray job list > /dev/null 2>&1 && break; sleep 1; done
on 2 ray start --address=10.78.0.1:6379 --node-ip-address=10.78.0.2 --temp-dir="$work/n2" "${common[@]}" > "$work/n2.log" 2>&1 &

settings=(config/quickstart.yaml "run.dir=$work/run" "trainer.steps=$steps" launch.servers=2 launch.trainers=2 launch.gpus_per_node=2)
on 1 "$python" run.py launch "${settings[@]}" --engine ray --submit | tee "$work/submit.log"
job=$(grep -o 'raysubmit_[A-Za-z0-9]*' "$work/submit.log" | head -n 1)
on 1 ray job logs -f "$job" > "$work/job.log" 2>&1 & # ends with the job
follow=$!

lines() { cat "$work/run/metrics.jsonl" 2> /dev/null | wc -l; }
for _ in $(seq 240); do
    if [ "$(lines)" -ge 20 ] || ! kill -0 "$follow"; then break; fi
    sleep 1
done
for pid in $(pids); do
    if [ -d "/proc/$pid" ] && [[ $(tr '\0' ' ' < "/proc/$pid/cmdline") == ray::Server* ]]; then
        kill -KILL "$pid" && echo "killed server actor $pid after step $(lines)" && break
    fi
done
for _ in $(seq 300); do kill -0 "$follow" 2> /dev/null || break; sleep 1; done
on 1 ray job status "$job" | grep -oE "'$job'.*" || :
grep -hE 'lost server|is there|steps in|accuracy' "$work/job.log"
grep -c '^hocket: ready' "$work"/run/logs/server_*.log
cat "$work/run/summary.json"
awk '/lost server/ { lost = 1 } lost && /is there/ { back = 1 } END { exit !back }' "$work/job.log"
