"""What is trained before GRPO: demonstrations."""
