"""The commands: their arguments, their parts, and what they do."""
