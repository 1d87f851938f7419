"""GRPO with a vLLM generation server and a DeepSpeed trainer, in step over HTTP."""

COMMANDS = {
    "quickstart": "start server and trainer on this machine; without CONFIG, train the small policy that ships here",
    "launch": "start the servers and trainer ranks of CONFIG on this machine, GPUs divided between them",
    "test": "run the test-suite; further arguments go to pytest",
    "serve": "start the generation server (vLLM)",
    "train": "start the GRPO trainer (DeepSpeed), which finds the server over HTTP; one process per GPU under torchrun",
    "rollout": "play and score trainer.steps batches without a trainer; train on them by pipeline.replay",
    "sft": "fine-tune on demonstrations: conversations (messages), or prompts with responses",
    "select": "write the best rollouts of the run in folder RUN as demonstrations for sft (rejection sampling)",
    "generate": "ask a running server for completions",
    "eval": "measure held-out accuracy of a running server, or of model.path where none answers",
    "ledger": "report the fate of every prompt of the run in folder RUN",
    "export": "turn a checkpoint, or a trained adapter (model.lora), into a Hugging Face model folder",
    "config": "check a config, or print every key",
    "doctor": "report on this machine: packages, GPUs, ports, leftovers",
}
