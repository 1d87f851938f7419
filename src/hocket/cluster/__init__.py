"""Where the processes of a run go: on this machine's GPUs, by an engine of a cluster, and what each needs."""
