"""What is learned from: pure torch functions without weights, files or globals."""
