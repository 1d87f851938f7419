"""Where the processes of a run go, and what they need."""
