"""Everything that hocket does with a model, done with a real one: every command, as a user would run it.

MODEL is the folder of a small instruction-tuned model without thoughts, tools or images, such as SmolLM2-135M-Instruct.
Its task is to add two numbers. Each part prints what came of it; the exit status is 1 where one failed, and the folder
of its output is kept.

    benchmarks/real_model.py MODEL
    benchmarks/real_model.py MODEL --only sft,export
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from shared import ROOT, parser
from transformers.utils import get_json_schema

from hocket.extras.tools.tools import calculate
from hocket.observe.rows import read_metrics, step_of
from support.processes import Process, free_port, wait_for

AGENT = '''
import openai
from hocket.envs import Task, agent

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none")


@agent("asks_twice")
async def asks_twice(task: Task) -> float:
    """Has the model check its answer: the reward is 1 if either is right."""
    policy = client.with_options(base_url=task.base_url, api_key=task.api_key)
    chat = list(task.messages)
    right = False
    for _ in range(2):
        answer = await policy.chat.completions.create(model=task.model, messages=chat)
        text = answer.choices[0].message.content or ""
        right = right or task.answer in text
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "Check that."}]
    return float(right)
'''
REWARD = '''
from hocket.rewards import reward


@reward("holds")
def holds(completion: str, answer: str) -> float:
    """1 for an answer that has the sum in it and no other number after it."""
    numbers = "".join(c if c.isdigit() else " " for c in completion).split()
    return float(bool(numbers) and numbers[-1] == answer)


@reward("digits")
def digits(completion: str) -> float:
    """The share of digits, by which almost any two completions differ."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
'''
TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} Call one by"
    ' <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
)
THOUGHT = "{% if add_generation_prompt %}<think>\n{% endif %}"


class PartError(Exception):
    """A part did not do what it must."""


class Trial:
    """One model in a working folder, in which the parts find what others have made."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        rng = random.Random(0)
        rows = []
        for _ in range(320):
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            rows.append({"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)})
        self.write("train.jsonl", rows[:256])
        self.write("test.jsonl", rows[256:])
        self.write("shown.jsonl", [{"prompt": row["prompt"], "response": row["answer"]} for row in rows[:256]])
        pairs = []
        for row in rows[:256]:
            wrong = str(int(row["answer"]) + rng.choice((-10, -1, 1, 10)))
            pairs.append({"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong})
        self.write("pairs.jsonl", pairs)
        schema = get_json_schema(calculate)
        calls = []
        for row in rows[:256]:
            sum_ = re.sub(r"^What is |\?.*$", "", row["prompt"])
            call = {"name": "calculate", "arguments": {"expression": sum_}}
            response = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
            calls.append({"prompt": row["prompt"], "response": response, "tools": [schema]})
        self.write("calls.jsonl", calls)
        self.write("images.jsonl", [{**row, "image": "picture.png"} for row in rows[:4]])
        (folder / "agent.py").write_text(AGENT)
        (folder / "reward.py").write_text(REWARD)

    def write(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, name: str, *words: str, fails: bool = False) -> str:
        """Runs a command to its end; returns its output."""
        log = self.folder / f"{name}.log"
        command = [sys.executable, "run.py", *words]
        with log.open("w") as output:
            status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
        text = log.read_text()
        if (status != 0) is not fails:
            raise PartError(f"exit status {status}: {' '.join(text.splitlines()[-1:])}")
        return text

    def settings(self, name: str, **more: Any) -> list[str]:
        """Returns the settings of a small training in the folder `name`."""
        chosen: dict[str, Any] = {
            "model.path": self.model,
            "model.max_length": 256,
            "data.source": self.folder / "train.jsonl",
            "run.dir": self.folder / name,
            "trainer.steps": 2,
            "eval.num_prompts": 0,
        }
        return [
            f"{key}={value}" for key, value in (chosen | {k.replace("__", "."): v for k, v in more.items()}).items()
        ]

    def grpo(self, name: str, **more: Any) -> list[str]:
        """Returns the settings of a small GRPO run, with a server of its own."""
        chosen: dict[str, Any] = {
            "server__port": free_port(),
            "plugins": f"[{self.folder}/reward.py, {self.folder}/agent.py]",
            "rewards__functions": "{holds: 1}",
            "rollout__prompts_per_step": 4,
            "rollout__group_size": 4,
            "rollout__max_tokens": 12,
            "trainer__learning_rate": 1e-5,
        }
        return self.settings(name, **(chosen | more))

    def steps(self, name: str) -> list[dict[str, Any]]:
        return [row for row in read_metrics(self.folder / name) if step_of(row) > 0]

    def variant(self, name: str, change: Callable[[str], str]) -> Path:
        """Returns a copy of the model with another chat template; its weights are links."""
        copy = self.folder / name
        copy.mkdir(exist_ok=True)
        for file in self.model.iterdir():
            if file.suffix == ".safetensors":
                os.link(file, copy / file.name) if file.stat().st_dev == copy.stat().st_dev else shutil.copy(file, copy)
            else:
                shutil.copy(file, copy)
        template = copy / "chat_template.jinja"
        template.write_text(change(template.read_text()))
        return copy


def last_figures(text: str) -> str:
    """Returns the last line that has a loss or an accuracy."""
    lines = [line for line in text.splitlines() if re.search(r"loss|accuracy|reward", line)]
    return lines[-1].strip() if lines else ""


def look(trial: Trial) -> str:
    trial.run("plan", "plan", *trial.grpo("look"))
    text = trial.run("dry_run", "train", "--dry-run", *trial.grpo("look"))
    if (trial.folder / "look").exists():
        raise PartError("the dry run left its folder")
    return text.splitlines()[-1]


def sft(trial: Trial) -> str:
    shown = {"data__source": trial.folder / "shown.jsonl", "sft__batch_size": 16, "trainer__learning_rate": 2e-5}
    text = trial.run("sft", "sft", *trial.settings("sft", **shown, trainer__steps=8))
    losses = [step["train/loss"] for step in trial.steps("sft")]
    if not losses[-1] < losses[0] / 2:
        raise PartError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {text.splitlines()[-1]}"


def rm(trial: Trial) -> str:
    pairs = {"data__source": trial.folder / "pairs.jsonl", "rm__batch_size": 16, "trainer__learning_rate": 2e-5}
    return last_figures(trial.run("rm", "rm", *trial.settings("rm", **pairs, trainer__steps=4)))


def dpo(trial: Trial) -> str:
    pairs = {"data__source": trial.folder / "pairs.jsonl", "dpo__batch_size": 16, "trainer__learning_rate": 5e-6}
    text = trial.run("dpo", "dpo", *trial.settings("dpo", **pairs, trainer__steps=4))
    return last_figures(text)


def evaluate(trial: Trial) -> str:
    """The model as it is, and what sft has made of it."""
    shown = []
    for name, model in (("as it is", trial.model), ("after sft", trial.folder / "sft" / "model")):
        more = {"model__path": model, "eval__data__source": trial.folder / "test.jsonl", "eval__num_prompts": 64}
        text = trial.run("eval", "eval", "--json", *trial.grpo("eval", **more))
        figures = json.loads(text.splitlines()[-1])
        shown.append(f"{name}: {figures}"[:200])
    return "; ".join(shown)


def train(trial: Trial) -> str:
    """Full fine-tuning must teach: its server's log-probs are those that are trained."""
    held_out = {"eval__data__source": trial.folder / "test.jsonl", "eval__num_prompts": 64, "eval__every_steps": 8}
    size = {"rollout__prompts_per_step": 8, "rollout__group_size": 8, "trainer__steps": 8}
    text = trial.run("train", "quickstart", *trial.grpo("train", **held_out, **size))
    gap = max(step["train/logprob_gap"] for step in trial.steps("train"))
    if gap > 1e-3:
        raise PartError(f"the server's log-probs differ by {gap:.2g} from the trainer's")
    lines = [line.strip() for line in text.splitlines() if line.startswith("held-out")]
    return f"{'; '.join(lines)}; gap <= {gap:.1g}"


def lora(trial: Trial) -> str:
    """An adapter on sft's model: killed after its second step and resumed, it must go on as if nothing had been."""
    adapter: dict[str, Any] = {
        "model__path": trial.folder / "sft" / "model",
        "model__lora": "{rank: 8}",
        "trainer__steps": 4,
        "trainer__learning_rate": 1e-4,
        "checkpoint__every_steps": 2,
    }
    trial.run("whole", "quickstart", *trial.grpo("whole", **adapter))
    words = trial.grpo("killed", **adapter)
    with Process(["quickstart", *words], trial.folder / "killed.log") as process:
        wait_for(lambda: any((trial.folder / "killed" / "checkpoints").glob("*2")), "a checkpoint", 600, 0.01)
        process.signal(9)
        process.wait_end(60)
    trial.run("resumed", "quickstart", *words, "checkpoint.resume=true")
    keys = ("train/loss", "train/grad_norm", "reward/std", "reward/mean", "train/entropy")
    whole, resumed = ({s["step"]: [s.get(k) for k in keys] for s in trial.steps(name)} for name in ("whole", "killed"))
    if whole != resumed:
        raise PartError(f"the steps differ: {whole} {resumed}")
    count = sum(value is not None for values in whole.values() for value in values)
    updated = sum(values[1] is not None for values in whole.values())
    return f"4 steps, {updated} of them updates, killed after 2 and resumed: equal bits in {count} figures"


def export(trial: Trial) -> str:
    """The adapter's checkpoint as a model: transformers must say what the server says."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (checkpoint, *_) = sorted((trial.folder / "whole" / "checkpoints").glob("*4"))
    output = trial.folder / "exported"
    trial.run("export", "export", str(checkpoint), str(output))
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    says = tokenizer.decode(generated, skip_special_tokens=True)
    port = free_port()
    words = trial.settings("serve", model__path=output, server__port=port)
    with Process(["serve", *[w for w in words if "trainer" not in w]], trial.folder / "serve.log") as process:
        wait_for(lambda: "hocket: ready" in process.output(), "the server", 600, 0.5)
        asked = {"model": "", "messages": chat, "max_tokens": 16, "temperature": 0}
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
        asked["model"] = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    if answer != says:
        raise PartError(f"transformers says {says!r}, the server {answer!r}")
    return f"transformers and server say {answer!r}"


def tools(trial: Trial) -> str:
    """A template that shows no tools is refused; with one that does, the model learns to call the calculator."""
    env = {"env": "{name: tools, tools: [calculate], parser: hermes, max_turns: 2}", "rollout__max_tokens": 48}
    env |= {"rewards__functions": "{digits: 1}"}
    refusal = trial.run("tools_refused", "train", "--dry-run", *trial.grpo("tools", **env), fails=True)
    model = trial.variant("shows_tools", lambda template: TOOLS + template)
    shown = {"data__source": trial.folder / "calls.jsonl", "sft__batch_size": 16, "trainer__learning_rate": 5e-5}
    trial.run("calls", "sft", *trial.settings("calls", model__path=model, **shown, trainer__steps=6))
    trial.run("tools", "quickstart", *trial.grpo("tools", model__path=trial.folder / "calls" / "model", **env))
    calls = [step["tool/calculate/calls"] for step in trial.steps("tools")]
    errors = [step["tool/calculate/errors"] for step in trial.steps("tools")]
    if not min(calls) > 0.5:
        raise PartError(f"after sft on calls, an episode has {calls} of them")
    return f"refused: {refusal.splitlines()[-1][:120]}; after sft: calls per episode {calls}, errors {errors}"


def agent(trial: Trial) -> str:
    """A function with an OpenAI client plays two turns."""
    more = {"env": "{name: agent, function: asks_twice}", "rewards__functions": "{env: 1}"}
    trial.run("agent", "quickstart", *trial.grpo("agent", **more))
    return f"rewards {[round(step['reward/mean'], 3) for step in trial.steps('agent')]}"


def thinking(trial: Trial) -> str:
    """A template that opens a thought, closed after 8 tokens."""
    model = trial.variant("thinks", lambda template: template + THOUGHT)
    more = {"env": "{thinking_tokens: 8}", "rewards__functions": "{digits: 1}"}
    trial.run("thinking", "quickstart", *trial.grpo("thinking", model__path=model, **more))
    return f"rewards {[round(step['reward/mean'], 3) for step in trial.steps('thinking')]}"


def images(trial: Trial) -> str:
    more = {"data__source": trial.folder / "images.jsonl"}
    return trial.run("images", "train", "--dry-run", *trial.grpo("images", **more), fails=True).splitlines()[-1][:200]


PARTS = {part.__name__: part for part in (
    look, sft, evaluate, rm, dpo, train, lora, export, tools, agent, thinking, images,
)}  # fmt: skip


def main(model: Path, only: Sequence[str]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="real_model_"))
    trial = Trial(model.resolve(), folder)
    failed = 0
    for name in only or PARTS:
        begun = time.monotonic()
        try:
            outcome = PARTS[name](trial)
        except (PartError, AssertionError, LookupError, OSError, ValueError) as error:
            failed += 1
            outcome = f"FAILED: {type(error).__name__}: {error}"
        print(f"{name} ({time.monotonic() - begun:.0f} s): {outcome}", flush=True)
    if failed:
        print(f"{failed} of {len(only or PARTS)} parts failed; their output is in {folder}")
    else:
        shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    arguments = parser(__doc__, only=("", f"of {', '.join(PARTS)}; default: all"))
    arguments.add_argument("model", type=Path, help="its folder")
    options = arguments.parse_args()
    sys.exit(main(options.model, [name for name in options.only.split(",") if name]))
