#!/usr/bin/env bash
# Train over two hosts, and cut the link between them. Linux, root; needs iproute2 and hocket's environment.
#
#   tests/deploy/hosts.sh            all of: whole, cut, lost, replaced (about 6 minutes on 2 cores)
#   tests/deploy/hosts.sh whole      a whole run over both hosts
#   tests/deploy/hosts.sh cut        the link is cut for CUT_S (20) seconds in mid-run: the run goes on and ends well
#   tests/deploy/hosts.sh lost       the link is cut for good: every process ends, says why, within LOST_S (240) seconds
#   tests/deploy/hosts.sh replaced   the host of rank 1 is lost and another one takes its place, as Kubernetes makes a pod again:
#                                    rank 0 ends at once, and not after 6 x sync.timeout_s
#
# The hosts are network namespaces with a bridge between them: real TCP over a real link, a name, /etc/hosts and
# /dev/shm each. n1 has rank 0, n2 has rank 1 and the server, so that both the gradients (gloo) and everything between
# trainer and server (HTTP, and gloo for the weights) cross the link. Logs and runs are left in OUT (runs/hosts).
# PYTHON (.venv/bin/python) runs hocket.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
parts=("${@:-}"); [ "${parts[*]}" ] || parts=(whole cut lost replaced)
[ "$(id -u)" = 0 ] || { echo "hosts.sh: needs root, to make network namespaces" >&2; exit 2; }

OUT=${OUT:-runs/hosts} PYTHON=${PYTHON:-.venv/bin/python} CUT_S=${CUT_S:-20} LOST_S=${LOST_S:-240}
HOCKET_TOKEN=hosts-$RANDOM$RANDOM$RANDOM; export HOCKET_TOKEN  # the server listens where other hosts reach it
NAME=hocket$$  # of the namespaces: no other run's, and nobody else's

# Deadlines as short as a cut of 20 s allows: TCP tries again ever more seldom, and may notice its end 13 s late.
DEADLINES=(sync.timeout_s=8 server.silence_s=30 server.start_timeout_s=30)
SETTINGS=(config/sort.yaml "${DEADLINES[@]}"
  sync.backend=nccl sync.upload=true)  # as with hosts that share no disk

say() { echo "[$SECONDS s] $*"; }
fail() { say "FAILED: $*"; exit 1; }
wait_for() {  # SECONDS WHAT COMMAND...: until the command succeeds
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do [ $SECONDS -lt $end ] || fail "$what"; sleep 0.5; done
}
host() {  # NUMBER LOG COMMAND...: run a command on a host, in the background; its pid is $!
  local number=$1 log=$2
  shift 2
  # shellcheck disable=SC2016  # the inner shell expands these
  ip netns exec "$NAME-$number" unshare --mount --uts bash -c '
    hostname "n$1"; mount -t tmpfs -o size=1g tmpfs /dev/shm; mount --bind "$2" /etc/hosts; shift 2; exec "$@"
  ' _ "$number" "$OUT/hosts" "$@" > "$log" 2>&1 < /dev/null &
}
pull() { ip -n "$NAME-sw" link set "p$1" down; }  # the cable of a host, at the switch
plug() { ip -n "$NAME-sw" link set "p$1" up; }

up() {
  mkdir -p "$OUT"
  OUT=$(cd "$OUT" && pwd)
  printf '127.0.0.1 localhost\n10.77.0.1 n1\n10.77.0.2 n2\n10.77.0.3 n3\n' > "$OUT/hosts"
  ip netns add "$NAME-sw"
  ip -n "$NAME-sw" link add br0 type bridge
  ip -n "$NAME-sw" link set br0 up
  for i in 1 2 3; do
    ip netns add "$NAME-$i"
    ip link add eth0 netns "$NAME-$i" type veth peer name "p$i" netns "$NAME-sw"
    ip -n "$NAME-sw" link set "p$i" master br0 up
    ip -n "$NAME-$i" addr add "10.77.0.$i/24" dev eth0
    ip -n "$NAME-$i" link set eth0 up
    ip -n "$NAME-$i" link set lo up
    # torchrun's own calls have no deadline but TCP's: a quarter of an hour, here 100 s.
    ip netns exec "$NAME-$i" sysctl -q net.ipv4.tcp_retries2=8
  done
}
inhabitants() { for i in 1 2 3; do ip netns pids "$NAME-$i" 2> /dev/null || :; done; }
down() {
  local pids
  trap '' INT TERM  # what was begun here is finished
  for signal in TERM KILL; do
    pids=$(inhabitants)
    # shellcheck disable=SC2086  # one word per pid
    [ -z "$pids" ] || kill -$signal $pids 2> /dev/null || :
    for _ in $(seq 40); do [ "$(inhabitants)" ] || break; sleep 0.5; done
  done
  for ns in 1 2 3 sw; do ip netns del "$NAME-$ns" 2> /dev/null || :; done
}

serve() {
  host 2 "$OUT/server.log" "$PYTHON" run.py serve "${SETTINGS[@]}" run.dir="$OUT/server" server.host=10.77.0.2
  server=$!
  wait_for 240 "the server is not ready: $OUT/server.log" grep -qs "hocket: ready" "$OUT/server.log"
  say "server on n2: $(grep 'hocket: ready' "$OUT/server.log")"
}
train() {  # RUN: one rank on each host, by torchrun; the first host keeps the list of ranks
  run=$1
  rm -rf "${OUT:?}/$run"
  plug 2
  for i in 1 2; do
    host "$i" "$OUT/$run.n$i.log" "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
      --rdzv-backend c10d --rdzv-endpoint n1:29400 --rdzv-id "$run" --local-addr "n$i" \
      run.py train "${SETTINGS[@]}" run.dir="$OUT/$run" server.discover=n2:8000
    launchers[i]=$!
  done
}
rank() {  # HOST RANK: one of two ranks that a scheduler has numbered, with the default deadline
  host "$1" "$OUT/$run.n$1.log" "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
    --node-rank "$2" --master-addr n1 --master-port 29500 \
    run.py train "${SETTINGS[@]}" sync.timeout_s=300 run.dir="$OUT/$run" server.discover=n2:8000
  launchers[$1]=$!
}
steps() { wc -l 2> /dev/null < "$OUT/$run/metrics.jsonl" || echo 0; }
reached() { [ "$(steps)" -gt "$1" ] || ! kill -0 "${launchers[1]}" 2> /dev/null; }
ended() { ! kill -0 "${launchers[$1]}" 2> /dev/null; }
any_ended() {  # report and forget a launcher that has ended
  local status
  for i in "${!launchers[@]}"; do
    ended "$i" || continue
    status=0; wait "${launchers[i]}" || status=$?
    unset "launchers[$i]"
    say "$run: n$i ended after $((SECONDS - start)) s with status $status:"
    grep -hE '^(error|hocket|lost server)' "$OUT/$run.n$i.log" || fail "$run: n$i does not say why"
    [ $status != 0 ] || fail "$run: n$i ended as if nothing were wrong"
    return 0
  done
  return 1
}
ends_well() {  # both launchers end with status 0, and the policy has learnt
  local status
  for i in 1 2; do
    wait_for 300 "$run: the launcher on n$i still runs after 300 s" ended "$i"
    status=0; wait "${launchers[i]}" || status=$?
    [ $status = 0 ] || { tail -n 15 "$OUT/$run.n$i.log"; fail "$run: status $status on n$i: $OUT/$run.n$i.log"; }
  done
  grep -E '^(lost server|server .* holds|[0-9]+ steps in|held-out accuracy)' "$OUT/$run.n1.log"
}

trap 'down; say "nothing is left of the two hosts"' EXIT
launchers=()
up
say "hosts n1 (rank 0) and n2 (rank 1, server); logs in $OUT"
serve
for part in "${parts[@]}"; do
  [ "$part" = replaced ] || train "$part"
  case $part in
    whole)
      ends_well
      ;;
    cut)
      wait_for 180 "no step 20 in 180 s: $OUT/$run.n1.log" reached 20
      say "$run: the link is cut after step $(steps)"
      pull 2
      sleep "$CUT_S"
      plug 2
      say "$run: the link is mended after ${CUT_S} s, at step $(steps)"
      ends_well
      ;;
    lost)
      wait_for 180 "no step 20 in 180 s: $OUT/$run.n1.log" reached 20
      pull 2
      start=$SECONDS
      say "$run: the link is cut for good after step $(steps)"
      for _ in 1 2; do
        wait_for $((LOST_S + start - SECONDS)) "$run: a launcher still runs $LOST_S s later" any_ended
      done
      ;;
    replaced)
      run=replaced
      rm -rf "${OUT:?}/$run"
      plug 2
      rank 1 0
      rank 3 1
      wait_for 180 "no step 20 in 180 s: $OUT/$run.n1.log" reached 20
      say "$run: the host of rank 1 is lost after step $(steps); another one is started as rank 1"
      pull 3
      unset "launchers[3]"
      start=$SECONDS
      rank 2 1
      for _ in 1 2; do
        wait_for $((90 + start - SECONDS)) "$run: a launcher still runs 90 s later" any_ended
      done
      grep -q 'rank 1 was started again' "$OUT/$run.n1.log" || fail "$run: n1 has another reason"
      ;;
    *) fail "unknown part $part; --help names them" ;;
  esac
done
kill -TERM "$server"
status=0; wait "$server" || status=$?
[ $status = 0 ] || fail "the server ended with status $status: $OUT/server.log"
say "the server has outlived all of it, and stops well"
