#!/usr/bin/env bash
# Start a container of compose.yaml: docker/logged.sh COMMAND [ARGUMENT...], the command of hocket. serve and train keep a
# log in runs/logs, HOCKET_RANKS processes of them train, others run as they are.
#
# This shell stays process 1: were it hocket, its end would end tee, too, before tee has written the last lines.
case ${1:-} in
    -h | --help)
        sed -n '2,3s/^# //p' "$0"
        ! command -v hocket > /dev/null || exec hocket --help
        exit
        ;;
    serve) program=(hocket) log=server-$HOSTNAME.log ;;
    train) program=(${HOCKET_RANKS:+torchrun --standalone "--nproc-per-node=$HOCKET_RANKS" -m} hocket) log=trainer.log ;;
    *) exec hocket "$@" ;;
esac
command='' pending=''
# shellcheck disable=SC2329
forward() { # to hocket, or keep the signal until that has started; traps call it
    if [[ $command ]]; then kill "-$1" "$command"; else pending=$1; fi
}
trap 'forward INT' INT
trap 'forward TERM' TERM
mkdir -p runs/logs
exec 3> >(trap '' INT TERM; exec tee -a "runs/logs/$log")
tee=$!
set -m # or a command in the background would ignore SIGINT
"${program[@]}" "$@" >&3 2>&1 3>&- < /dev/null &
command=$!
exec 3>&-
[[ ! $pending ]] || kill "-$pending" "$command"
while kill -0 "$command" 2> /dev/null; do wait "$command"; done # a signal ends a wait
wait "$command" && status=0 || status=$?
wait "$tee"
exit "$status"
