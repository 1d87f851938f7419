#!/usr/bin/env bash
# Prove docker/ on a machine with a Docker engine: real images, training, failures. Exits non-zero where a check fails.
#   tests/deploy/compose.sh [PHASE...]      all of them by default; about 10 minutes on 2 cores, and the build
#     build    both images from a copy of this tree, and their sizes
#     one      one server: accuracy rises, curl answers, the server is killed, comes back, its engine crashes, it comes back
#     two      `up --scale server=2`: both play; one is killed and comes back
#     nccl     weights over the network: no version goes by disk
#     ranks    two trainer processes
#     resume   stopped as by Ctrl-C, the trainer closes the run; the next `up` ends it
#     status   `up --exit-code-from trainer` ends with the trainer's status, for good and for bad
#   GPU=1 adds docker/compose.gpu.yaml. HOCKET_PORT is the first port used on this machine (default 18000).
#   Where the build reaches no index: PIP_INDEX_URL=URL, WHEELS=FOLDER with torch's wheel, BUILD_NETWORK=host, BASE=IMAGE.
# It needs docker with compose, git, curl and python3, and leaves nothing but the images.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
port=${HOCKET_PORT:-18000}
device=${GPU:+cuda}; device=${device:-cpu}
version=$(sed -n 's/^__version__ = "\(.*\)".*/\1/p' src/hocket/__init__.py)
export HOCKET_TOKEN=a-token-of-this-test HOCKET_PORT=$port HF_TOKEN=hf_of_this_test

# A copy of what git knows or would add, as a user's clone: a run must need nothing else, and leaves nothing here.
mkdir "$work/hocket"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference -t "$work/hocket"
owner=$(id -u):$(id -g)
if [ "$owner" = 0:0 ]; then owner=1000:1000; chown -R $owner "$work/hocket"; fi  # a user is not root
export HOCKET_USER=$owner
build() {  # the part of an override that says how SERVICE is built
    echo "  $1:
    build:
      network: ${BUILD_NETWORK:-default}
      args: {${PIP_INDEX_URL:+PIP_INDEX_URL: '$PIP_INDEX_URL', }${BASE:+BASE: '$BASE'}}${WHEELS:+
      additional_contexts: {wheels: '$WHEELS'\}}"
}
cat > "$work/override.yaml" << YAML
services:
$(build server)
    environment: {VLLM_ENABLE_V1_MULTIPROCESSING: 1}  # a process for the engine, as on GPUs; it wants more than 64 MB
    shm_size: 1gb
$(build trainer)
YAML
files=(-f "$work/hocket/docker/compose.yaml" ${GPU:+-f "$work/hocket/docker/compose.gpu.yaml"} -f "$work/override.yaml")
compose() { timeout 600 docker compose --ansi never "${files[@]}" "$@"; }  # bounded, whatever hangs

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
fail() {
    say "FAILED: $*"
    compose logs --no-color --tail 40 || :
    exit 1
}
finish() {
    compose down --volumes --timeout 30 > "$work/down.log" 2>&1 || cat "$work/down.log"
    rm -rf "$work"
}
trap finish EXIT

wait_for() {  # wait_for SECONDS WHAT COMMAND...: until the command succeeds
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "$what did not happen in time"
        sleep 0.5
    done
    say "$what"
}
run=  # folder of the current run, set by `start`
start() {  # start NAME SETTINGS OPTIONS-OF-UP...
    run=$work/hocket/runs/$1
    export HOCKET_SETTINGS="config/sort.yaml run.dir=runs/$1 $2"
    shift 2
    compose up --detach --no-build "$@" > "$work/up.log" 2>&1 || { cat "$work/up.log"; fail "up"; }
    say "up: the server is healthy and the trainer has started"
}
steps() { [ "$(wc -l < "$run/metrics.jsonl")" -gt "$1" ]; }  # the first line is the evaluation before step 1
container() { docker ps --all --quiet --filter label=com.docker.compose.project=hocket --filter "name=hocket-$1\$"; }
lines() { docker logs "$(container trainer-1)" 2>&1; }
said() { [ "$(lines | grep -c -- "$2")" -ge "$1" ]; }  # said TIMES WORDS
healthy() { [ "$(docker inspect -f '{{.State.Health.Status}}' "$(container "$1")")" = healthy ]; }
ended() { [ "$(docker inspect -f '{{.State.Status}}' "$(container trainer-1)")" = exited ]; }
answer() { curl -fsS --max-time 20 -H "Authorization: Bearer $HOCKET_TOKEN" "$@"; }
trained() {  # the trainer ended well and the policy is better
    wait_for 400 "the trainer has ended" ended
    status=$(docker inspect -f '{{.State.ExitCode}}' "$(container trainer-1)")
    [ "$status" = 0 ] || fail "the trainer ended with status $status"
    lines | grep -E 'steps in|held-out acc' | while read -r line; do say "$line"; done
    python3 - "$run/summary.json" "${1:-0.5}" << 'PY' || fail "accuracy did not rise"
import json, sys
summary = json.load(open(sys.argv[1]))
sys.exit(not summary["after"]["sampled"] > summary["before"]["sampled"] + float(sys.argv[2]))
PY
    grep -q 'held-out accuracy' "$work/hocket/runs/logs/trainer.log" || fail "no log of the trainer on the host"
    grep -qs 'ready on' "$work"/hocket/runs/logs/server-*.log || fail "no log of a server on the host"
    foreign=$(find "$work/hocket/runs" ! -user "${owner%:*}")
    [ -z "$foreign" ] || fail "files of another user than ${owner%:*}: $foreign"
}
stop() {  # down leaves nothing
    compose down --timeout 30 > "$work/down.log" 2>&1 || { cat "$work/down.log"; fail "down"; }
    left=$(docker ps -aq --filter label=com.docker.compose.project=hocket; docker network ls -q --filter label=com.docker.compose.project=hocket)
    [ -z "$left" ] || fail "left after down: $left"
    say "down: no container and no network is left"
}

phase_build() {
    for service in server trainer; do  # one after the other: the second takes downloads from the first one's cache
        compose --progress plain build $service
    done
    docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep '^hocket-' | while read -r line; do say "image $line"; done
    for image in server trainer; do
        docker history --no-trunc --format '{{.CreatedBy}}' "hocket-$image:$version-$device" > "$work/layers"
        if grep -i token "$work/layers"; then fail "a token in a layer"; fi
        docker run --rm --network none --user 4242:4242 --entrypoint sh "hocket-$image:$version-$device" -c 'mkdir "$HF_HOME"' ||
            fail "another user without the mount has no place for downloads"
    done
}

phase_one() {
    start one ''
    [ "$(docker exec "$(container trainer-1)" printenv HF_TOKEN)" = "$HF_TOKEN" ] || fail "the hub's token does not arrive"
    wait_for 200 "10 steps are trained" steps 10
    say "curl /health: $(curl -fsS "http://127.0.0.1:$port/health" | cut -c 1-90)..."
    [ "$(curl -s -o /dev/null -w '%{http_code}' "http://127.0.0.1:$port/v1/models")" = 401 ] || fail "no token was asked for"
    say "curl /generate: $(answer "http://127.0.0.1:$port/generate" -d '{"prompts": ["Sort: dbca"], "sampling": {"max_tokens": 8}}' | cut -c 1-150)..."

    docker kill "$(container server-1)" > /dev/null
    wait_for 60 "docker kill: the trainer waits for the server" said 1 'lost server'
    docker start "$(container server-1)" > /dev/null
    wait_for 120 "docker start: the server is back, with the current weights" said 2 'holds version'

    wait_for 200 "40 steps are trained" steps 40
    kill -KILL "$(docker top "$(container server-1)" -eo pid,args | awk '/VLLM::EngineCore/ {print $1; exit}')"
    wait_for 60 "crash of vLLM's engine: the trainer waits for the server" said 2 'lost server'
    wait_for 120 "the server has ended, Docker has started it again; it has the current weights" said 3 'holds version'
    trained
    lines | grep 'holds version' | while read -r line; do say "  $line"; done

    say "eval: $(compose run --rm --no-deps -T trainer eval config/sort.yaml server.discover=server:8000 run.dir=runs/eval 2> /dev/null | grep 'eval/sampled ')"
    compose up --no-build --exit-code-from trainer > "$work/again.log" 2>&1 || { cat "$work/again.log"; fail "a second up"; }
    say "up again: $(grep -o 'all .* steps are done.*' "$work/again.log")"
    stop
}

phase_two() {
    HOCKET_PORT=$port-$((port + 1)) start two 'trainer.steps=120' --scale server=2
    wait_for 200 "10 steps are trained" steps 10
    docker kill "$(container server-2)" > /dev/null
    wait_for 200 "docker kill of one: the other goes on, 25 steps are trained" steps 25
    docker pause "$(container trainer-1)" > /dev/null  # on a fast machine the run would end meanwhile
    docker start "$(container server-2)" > /dev/null
    wait_for 120 "docker start: it answers again" healthy server-2
    docker unpause "$(container trainer-1)" > /dev/null
    wait_for 120 "it has the current weights" said 3 'holds version'
    trained
    for number in 1 2; do
        address=$(compose port --index $number server 8000)
        tokens=$(answer "http://$address/metrics" | awk '/^vllm:generation_tokens_total/ {print int($2)}')
        say "server $number at $address has generated $tokens tokens since its start"
        [ "$tokens" -gt 0 ] || fail "server $number did not play"
    done
    lines | grep -E 'server http' | while read -r line; do say "  $line"; done
    stop
}

phase_nccl() {
    HOCKET_SYNC=nccl start nccl ''
    trained
    python3 - "$run/metrics.jsonl" << 'PY' || fail "versions went by disk"
import json, sys
rows = [row for row in map(json.loads, open(sys.argv[1])) if "sync/fallbacks" in row]
print(f"         {len(rows)} versions, {sum(row['sync/fallbacks'] for row in rows):.0f} by disk")
sys.exit(not rows or any(row["sync/fallbacks"] for row in rows))
PY
    stop
}

phase_ranks() {
    export HOCKET_RANKS=2
    start ranks 'trainer.steps=20'
    trained 0.1
    say "eval, by one process: $(compose run --rm --no-deps -T trainer eval config/sort.yaml server.discover=server:8000 run.dir=runs/eval eval.num_prompts=8 2> /dev/null | grep -c 'eval/sampled ')"
    unset HOCKET_RANKS
    stop
}

phase_resume() {
    start resume 'trainer.steps=30 checkpoint.every_steps=5'
    wait_for 200 "10 steps are trained" steps 10
    compose stop > "$work/stop.log" 2>&1 || { cat "$work/stop.log"; fail "stop"; }
    status=$(docker inspect -f '{{.State.ExitCode}}' "$(container trainer-1)")
    [ "$status" = 130 ] || fail "the stopped trainer ended with status $status, not as after Ctrl-C"
    [ -e "$run/report.html" ] || fail "the stopped run has no report"
    say "stop: the trainer has closed the run"
    compose up --detach --no-build > "$work/up.log" 2>&1 || { cat "$work/up.log"; fail "up"; }
    trained 0.1
    stop
}

phase_status() {
    export HOCKET_SETTINGS='config/sort.yaml run.dir=runs/status trainer.steps=3 eval.num_prompts=8'
    compose up --no-build --exit-code-from trainer > "$work/up.log" 2>&1 || { cat "$work/up.log"; fail "a good run"; }
    say "a good run: up ends with status 0"
    stop
    export HOCKET_SETTINGS='config/sort.yaml run.dir=runs/bad data.source=not-there.jsonl'
    status=0
    compose up --no-build --exit-code-from trainer > "$work/up.log" 2>&1 || status=$?
    [ "$status" = 1 ] || { cat "$work/up.log"; fail "a bad run ended with $status"; }
    say "a bad run: up ends with status 1: $(grep -o 'error: .*' "$work/up.log" | head -n 1)"
    stop
}

for phase in "${@:-build one two nccl ranks resume status}"; do
    for name in $phase; do
        say "== $name"
        "phase_$name"
    done
done
say "all checks passed"
