#!/usr/bin/env bash
# Run config/sort.yaml as a SLURM job on a cluster of two nodes: kill a server's engine in mid-run and see it used again, then
# have the job requeued and see it go on from its checkpoint.
#   sudo tests/deploy/slurm.sh [STEPS]    about 5 minutes on 2 cores; needs Debian's apt-get, iproute2, overlayfs
# The nodes are network namespaces with a switch of their own; their GPUs are only SLURM's count of them. SLURM comes from
# Debian's packages, unpacked into a folder and seen by this script's processes alone: nothing is installed. STEPS: 400.
# WORK is that folder where it is there already, as in its own second start.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,8s/^# //p' "$0"; exit ;; esac
cd "$(dirname "$0")/../.."
. tests/deploy/nodes.sh
steps=${1:-400} python=$PWD/.venv/bin/python
if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d /tmp/hslurm.XXXX)
    export WORK
    (cd "$WORK" && apt-get -q -o APT::Sandbox::User=root download slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 \
        liblua5.1-0 libjson-c5 libhwloc15 libnuma1 libdbus-1-3 > /dev/null && for deb in *.deb; do dpkg -x "$deb" debs; done
        for program in debs/usr/sbin/*-wlm; do ln -s "${program##*/}" "${program%-wlm}"; done) # as the packages' scripts do
    exec unshare --mount "$0" "$@"
fi
mount -t overlay overlay -o "lowerdir=$WORK/debs/usr:/usr" /usr
[ ! -d "$WORK/debs/lib" ] || cp -a "$WORK/debs/lib/." "$WORK/debs/usr/lib/"
printf '127.0.0.1 localhost\n10.79.0.1 hs1\n10.79.0.2 hs2\n' > "$WORK/hosts"
mount --bind "$WORK/hosts" /etc/hosts
cat > "$WORK/slurm.conf" <<CONF
ClusterName=hocket
SlurmctldHost=hs1(10.79.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$WORK/state
SlurmdSpoolDir=$WORK/spool-%n
SlurmctldPidFile=$WORK/slurmctld.pid
SlurmdPidFile=$WORK/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
NodeName=hs1 NodeAddr=10.79.0.1 CPUs=2 Gres=gpu:2
NodeName=hs2 NodeAddr=10.79.0.2 CPUs=2 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES
CONF
# any device files do
echo 'Name=gpu File=/dev/tty[1-2]' > "$WORK/gres.conf"
mkdir "$WORK/state" "$WORK/spool-hs1" "$WORK/spool-hs2"
export SLURM_CONF=$WORK/slurm.conf

# `ip netns exec` would hide /sys/fs/cgroup
on() { local node=$1 && shift && nsenter --net="/run/netns/hs$node" unshare --uts bash -c 'hostname "$0" && exec "$@"' "hs$node" "$@"; }
finish() {
    status=$?
    remove_nodes
    if [ "$status" = 0 ]; then rm -r "$WORK"; else echo "failed; see $WORK"; fi
}
trap finish EXIT

make_nodes hs 10.79.0 2
on 1 slurmctld -D > "$WORK/slurmctld.log" 2>&1 &
for node in 1 2; do on "$node" slurmd -D > "$WORK/slurmd-$node.log" 2>&1 & done
for _ in $(seq 60); do [ "$(on 1 sinfo -h -o %t 2> /dev/null)" = idle ] && break; sleep 1; done
on 1 sinfo

settings=(config/sort.yaml "run.dir=$WORK/run" "trainer.steps=$steps" checkpoint.every_steps=20)
launch=("$python" run.py launch "${settings[@]}" launch.servers=2 launch.trainers=2 --gpus-per-node=2 --engine slurm)
on 1 "${launch[@]}"
# an edit, which is to be submitted: engines in processes of their own, as on GPUs
sed -i 's/^set -euo pipefail$/&\nexport VLLM_ENABLE_V1_MULTIPROCESSING=1/' "$WORK/run/launch/slurm/job.sh"
on 1 "${launch[@]}" --submit | tee "$WORK/submit.log"
job=$(grep -o 'batch job [0-9]*' "$WORK/submit.log" | grep -o '[0-9]*$')
log=$WORK/run/launch/slurm/slurm-$job.log

lines() { cat "$WORK/run/metrics.jsonl" 2> /dev/null | wc -l; }
state() { on 1 scontrol -o show job "$job" | grep -o 'JobState=[A-Z]*'; }
reach() { for _ in $(seq 240); do [ "$(lines)" -ge "$1" ] || [[ $(state) == *=@(COMPLETED|FAILED) ]] && break; sleep 1; done; }
reach 20
engine=$(find_process VLLM::EngineCore)
kill -KILL "$engine" && echo "killed a server's engine, $engine, after step $(lines)"
back() { awk '/lost server/ { lost = 1 } lost && /holds version/ { back = 1 } END { exit !back }' "$log"; }
for _ in $(seq 240); do back && break; sleep 1; done
reach $(($(lines) + 10))
echo "requeued after step $(lines)" && on 1 scontrol requeue "$job"
for _ in $(seq 60); do # a requeued job waits for two minutes, unless told not to
    if [ "$(state)" = JobState=PENDING ]; then on 1 scontrol update job="$job" starttime=now && break; fi
    sleep 1
done
for _ in $(seq 240); do [[ $(state) == *=@(COMPLETED|FAILED) ]] && break; sleep 3; done
state
grep -hE 'lost server|holds version|going on|steps in|accuracy' "$log"
cat "$WORK/run/summary.json"
back && [ "$(state)" = JobState=COMPLETED ] && leaves_nothing
