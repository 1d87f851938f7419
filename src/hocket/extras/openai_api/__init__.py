"""The routes that other programs know: vLLM's OpenAI- and Anthropic-compatible ones.

They stand behind hocket's guard. Their answers name the weight versions that sampled them.
"""
