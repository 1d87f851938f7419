"""What servers (7 s of processor time) and trainers (5 s) import: the fork server of a test process does it once."""

import importlib
import os

import setproctitle

from hocket.server.main import prepare_environment

setproctitle.getproctitle()  # looks for the title's place by the environment, which changes
prepare_environment(1, 1)  # vLLM reads it while it is imported
os.environ["DS_ACCELERATOR"] = "cpu"  # and this one, DeepSpeed
for name in (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "hocket.commands.runs",
    "hocket.loop",
    "hocket.server.engine",
    "hocket.trainer.trainer",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # with the first optimizer, and with it torch's compiler
    "peft",
):
    importlib.import_module(name)
