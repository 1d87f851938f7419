"""The commands: their arguments, the parts they are made of, and what they do."""
