"""What every room uses: files, tasks, processes, this machine; imported before any package is installed."""
