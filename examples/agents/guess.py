"""An agent as OpenRLHF 0.8 has them: one function, and globals for what an episode must remember."""

import torch

left = 5  # guesses


async def step(state, action, label, **kwargs):
    global left
    left -= 1
    guess = int(action) if action.isdigit() else None
    found = guess == int(label)
    hint = "higher" if guess is not None and guess < int(label) else "lower"
    return {
        "rewards": torch.tensor(float(found)),
        "scores": torch.tensor(float(found)),
        "next_state": state + action + f"<|user|>{hint}<|end|><|assistant|>",
        "done": found or guess is None or left == 0,
        "extra_logs": {"guesses": 5 - left},
    }
