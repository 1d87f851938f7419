# shellcheck shell=bash
# What ray.sh and slurm.sh have in common: nodes that are network namespaces at one switch, and nothing left of them.
# It does nothing by itself: they read it in (`. tests/deploy/nodes.sh`).
[ "${0##*/}" != nodes.sh ] || { sed -n '2,3s/^# //p' "$0"; exit; }

make_nodes() { # PREFIX NET NUMBER: namespaces PREFIX1, PREFIX2, ... with the addresses NET.1, NET.2, ...
    prefix=$1 nodes=$(seq "$3")
    ip netns add "$prefix-sw"
    ip -n "$prefix-sw" link add br0 type bridge && ip -n "$prefix-sw" link set br0 up
    for node in $nodes; do
        ip netns add "$prefix$node"
        ip link add eth0 netns "$prefix$node" type veth peer name "p$node" netns "$prefix-sw"
        ip -n "$prefix-sw" link set "p$node" master br0 up
        ip -n "$prefix$node" addr add "$2.$node/24" dev eth0
        ip -n "$prefix$node" link set eth0 up && ip -n "$prefix$node" link set lo up
    done
}
pids() { for node in ${1:-$nodes}; do ip netns pids "$prefix$node" 2> /dev/null || :; done; }
words() { tr '\0' ' ' 2> /dev/null < "/proc/$1/cmdline" || :; } # of a process's command line
find_process() { # WORDS [NODE]: the first process with them in its command line
    for pid in $(pids "${2:-}"); do
        if [[ $(words "$pid") == *"$1"* ]]; then echo "$pid" && return; fi
    done
    return 1
}
leaves_nothing() { # once a job has ended, hocket's processes end, too, without help
    for _ in $(seq 60); do find_process run.py > /dev/null || { echo "processes of hocket left by the job: 0"; return; }; sleep 0.5; done
    for pid in $(pids); do words "$pid"; echo; done | grep run.py
    return 1
}
end_all() { # NODES, or '' for all: SIGTERM first; what still runs after 10 s gets SIGKILL
    for round in $(seq 40); do
        left=$(pids "$1") && [ -n "$left" ] || break
        # shellcheck disable=SC2086 # several
        kill -s "$([ "$round" -le 20 ] && echo TERM || echo KILL)" $left 2> /dev/null || :
        sleep 0.5
    done
}
remove_nodes() { # with all that runs in them
    end_all ''
    for node in $nodes -sw; do ip netns del "$prefix$node"; done
}
