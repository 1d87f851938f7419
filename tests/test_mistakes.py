"""The likely mistakes of a first hour, as typed: each is answered by cause and fix, before an engine is loaded.

Three are elsewhere, where their processes are: a command that there is not (test_run.py), a port in use
(server/test_main.py), a server with another model or tokenizer than the trainer's (commands/test_runs.py).
"""

import shlex
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from hocket.client.server import ServerClient
from hocket.commands import parts
from hocket.commands.cli import main
from hocket.data import sources, tokenizer
from hocket.errors import ServerError
from hocket.observe.owner import owning
from hocket.protocol import Health
from hocket.rollout.collect import Slot
from hocket.types import Prompt, Rollout
from support import fakes
from support.batches import played

SORT = Path(__file__).parents[1] / "checkpoints" / "tiny-sort"
FILES = {
    "trained/metrics.jsonl": '{"step": 3}',
    "rows.jsonl": '{"question": "a", "answer": "b"}\n',
    "broken.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": }\n',
    "sharegpt.jsonl": '{"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n',
    "turns.jsonl": '{"prompt": "sort ba", "response": "ab ab ab ab"}\n',
    "null.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": "a", "answer": null}\n',
    "tab.yaml": "run:\n\tdir: a\n",
    "colon.yaml": "rewards:\n  functions:\n    length:1\n",
    "twice.yaml": "trainer:\n  steps: 3\ntrainer:\n  seed: 1\n",
    "dotted.yaml": "trainer.steps: 3\nmodel.lora.rank: 8\n",
    "shell.yaml": "run:\n  dir: ${OUT}/a\n",
    "commas.jsonl": '{"prompt": "a", "answer": "b"},\n',
    "array.jsonl": '[{"prompt": "a", "answer": "b"}]\n',
    "rows.csv": "prompt,answer\na,b\n",
    "bare.py": "from hocket.rewards import reward\n\n@reward\ndef bare(completion):\n    return 1.0\n",
    "lacks.py": "import levenshtein_nope\n",
    "plain.py": "from hocket.envs import environment\n\n@environment('plain')\nclass Plain: ...\n",
    "still.py": "from hocket.envs import *\n\n@environment('still')\nclass Still(Environment): ...\n",
    "named.py": "from hocket.envs import tool\n\n@tool('add')\ndef add(a, b):\n    return a + b\n",
    "short.py": "from hocket import reward\n",
    "fine.yaml": "trainer: {steps: 3}\n",
    "typo.yaml": "trainer: {stps: 3}\n",
    "mine.py": "import time\n\nfrom hocket.rewards import reward\n"
    "@reward('my_raises')\ndef raises(meta):\n    return meta['sol']\n"
    "@reward('my_text')\ndef text():\n    return 'good'\n"
    "@reward('my_none')\ndef none(completion):\n    len(completion)\n"
    "@reward('my_hangs')\ndef hangs():\n    time.sleep(60)\n"
    "import numpy\n@reward('my_array')\ndef array():\n    return numpy.ones(2)\n"
    "def forgotten(completion):\n    return 1.0\n"
    "@reward('my_solution')\ndef solution(completion, solution):\n    return 1.0\n"
    "@reward('my_response')\ndef response(prompt, response):\n    return 1.0\n"
    "@reward('my_verl')\ndef verl(solution_str, ground_truth):\n    return 1.0\n"
    "@reward('my_class')\nclass Own:\n    def __call__(self, output):\n        return 1.0\n"
    "@reward('my_trl')\ndef trl(prompts, completions, **kwargs):\n    return [0.0]\n",
}
MARKS = (
    "lora/metrics.jsonl lora/weights/v000001/COMPLETE lora/weights/v000002/COMPLETE new/metrics.jsonl "
    "lora/weights/v000002/adapter_config.json lora/checkpoints/step_000003/state.json empty/notes "
    "whole/metrics.jsonl whole/weights/v000009/COMPLETE whole/weights/v000009/config.json"
)
# "check" is `train --dry-run`; all have model.path=sort if they name no other
TABLE = """
config nowhere.yaml | No such file or directory: 'nowhere.yaml'; paths are relative to HERE
config tab.yaml | in "tab.yaml", line 2, column 1; indent by spaces
config trainer.steps:5 | relative to HERE, text is UTF-8, settings look like section.key=value
config twice.yaml | twice.yaml: the key 'trainer' stands here twice: join the two
config dotted.yaml | dotted.yaml: unknown key 'trainer.steps'; in a file, nest it: trainer: {steps: VALUE}
config dotted.yaml | in a file, nest it: model: {lora: {rank: VALUE}}
config shell.yaml | run.dir: ${OUT}/a names a variable: only a shell replaces it
config launch.trainer=4 | did you mean 'launch.trainers'?
config a.yaml b.yaml | one config file at most
config typo.yaml | typo.yaml: unknown key 'trainer.stps'; did you mean 'trainer.steps'?
eval typo.yaml --json eval.sample=1 | command line: unknown key 'eval.sample'
config trainer.every_steps=5 | unknown key 'trainer.every_steps'; did you mean 'eval.every_steps' or 'checkpoint.
config fine.yaml plugins=[a, b] | a bracket is left open: quote the whole setting, as a shell splits it at blanks
config rewards.functions={exact_match: 1} | a bracket is left open: quote the whole setting, as a shell splits it
config data.system_prompt=Be very kind | one config file at most, got very, kind; settings look like
config data.system_prompt=Be very kind | a value with blanks needs quotes
config 'rewards.functions={exact_match}' | must be a mapping of key: value, got None ({NAME: weight} or {NAME: {weight:
config trainer.steps=ten | trainer.steps: must be a whole number, got 'ten' (Steps, each with one batch of rollouts
config model.random_init=ja | model.random_init: must be true or false, got 'ja' (Random weights, for sft; servers need
config plugins=3 | plugins: must be a list: [one, two], got 3 (Python files with your rewards, environments,
config rewards=[length] | rewards: must be a mapping of key: value, got ['length'] (rewards.functions, rewards.time
config rewards.functions=[length] | must be a mapping of key: value, got ['length'] ({NAME: weight} or {NAME: {weight:
config algorithm.los=x | unknown key 'algorithm.los'; `python run.py config --reference` lists all
config 'rewards.functions={length:1}' | length:1: must be a mapping of key: value, got None; write a space after
config colon.yaml | colon.yaml: rewards.functions: must be a mapping of key: value, got 'length:1'; write a space
config sft=3 | sft: must be a mapping of key: value, got 3 (sft.batch_size, sft.epochs)
check rollout.group_size=1 | rollout.group_size=1 leaves algorithm.advantage=mean nothing to compare with: set 2 or more
config algorithm.preset=dr-grpo | (did you mean 'dr_grpo'?)
check 'algorithm.correction={name: mask, bounds: [3, 1]}' | algorithm.correction.bounds: must be [lowest, highest]
check rollout.temperature=0 | alike: set 0.01 or more, such as 1; eval.temperature=0 evaluates greedily
check plugins=[nowhere.py] | plugin 'nowhere.py' does not exist; paths are relative to HERE
check data.source=nowhere.jsonl | data.source=nowhere.jsonl is not a file; paths are relative to HERE
check data.source=commas.jsonl | commas.jsonl:1: Extra data: line 1 column 31 (char 30); a line is one object
check data.source=array.jsonl | array.jsonl:1: must be a JSON object, got list; a line is one object in UTF-8, without a
check data.source=rows.csv | NAME: convert it; a name on the hub needs hf:
check plugins=[bare.py] | bare.py, line 3: it needs a name: @reward("bare")
check plugins=[lacks.py] | ; .venv/bin/pip install levenshtein_nope, or, for a file of yours, set PYTHONPATH
check plugins=[plain.py] | environment 'plain' must be a class of its own: class Mine(Environment)
check plugins=[still.py] | environment 'still' lacks a method: async def step(self, action) -> Step
check plugins=[short.py] | short.py, line 1: ImportError: cannot import name 'reward' from 'hocket'
check plugins=[short.py] | ; decorators are in hocket.rewards and hocket.envs
check data.source=rows.jsonl data.split=test | data: split=test: leave it out of a file, which has none; eval.data
config server.urls=http://a:80x0 | server.urls.0: Port could not be cast to integer value as '80x0'
config checkpoint.copy_to=rows.jsonl | checkpoint: copy_to=rows.jsonl is a file: name a folder, which need not be there
check data.source=rows.jsonl | no column 'prompt', only 'question', 'answer': set data.prompt_column to one of these
check data.source=broken.jsonl | broken.jsonl:2: Expecting value: line 1 column 12 (char 11)
check data.source=null.jsonl | 1 of 2 rows of null.jsonl can't be used; repair or remove them (line):
check 'rewards.functions={exact_mach: 1}' | no reward 'exact_mach' (did you mean 'exact_match'?); known:
check 'rewards.functions={exact_mach: 1}' | ; add your own as a Python file under plugins
check eval.reward=exact_mach | rewards.functions or eval.reward: there is no reward 'exact_mach' (did you mean 'exact_
check algorithm.preset=distill | needs a teacher: set algorithm.reference to its folder or server
config algorithm.preset=distill algorithm.reference=http://127.0.0.1:8100 rollout.temperature=0.8 | set rollout.temp
config algorithm.kl=k2 algorithm.kl_coef=1 algorithm.reference=http://here:90000 | Port out of range
check algorithm.advantage=meen | algorithm.advantage: there is no advantage 'meen' (did you mean 'mean'?); known:
check plugins=mine.py 'rewards.functions={forgotten: 1}' | ; mine.py has a function forgotten without @reward("for
check plugins=[mine.py] 'rewards.functions={my_solution: 1}' | needs the option 'solution': set rewards.functions.my_
check plugins=[mine.py] 'rewards.functions={my_solution: 1}' | solution; the row's answer is the argument answer, its
check 'rewards.functions={length: {tarket: 1}}' |  has no option 'tarket' (did you mean 'target'?)
check 'rewards.functions={length: 1}' | reward length refuses its options: target or up_to must be at least 1
check plugins=[mine.py] 'rewards.functions={my_response: 1}' | needs the option 'response' (did you mean 'completion'?)
check plugins=[mine.py] 'rewards.functions={my_verl: 1}' | needs the option 'solution_str' (did you mean 'completion'?)
check plugins=[mine.py] 'rewards.functions={my_verl: 1}' | needs the option 'ground_truth' (did you mean 'answer'?)
check plugins=[mine.py] 'rewards.functions={my_class: 1}' | needs the option 'output' (did you mean 'completion'?)
check plugins=[mine.py] 'rewards.functions={my_trl: 1}' | takes a batch, but here it scores one rollout: name its
rollout plugins=[mine.py] 'rewards.functions={my_raises: 1}' | scores failed, more than rewards.max_error_rate=0.5; the
rollout plugins=[mine.py] 'rewards.functions={my_raises: 1}' | KeyError: 'sol' (HERE/mine.py:6)
rollout plugins=[mine.py] 'rewards.functions={my_text: 1}' | the first: step 1/0/0: my_text: returned str
rollout plugins=[mine.py] 'rewards.functions={my_array: 1}' | my_array: returned ndarray (return its .item()) instead of
rollout plugins=[mine.py] 'rewards.functions={my_none: 1}' | my_none: returned None instead of a number; rewards can be
rollout plugins=[mine.py] 'rewards.functions={my_none: 1}' | reward-test CONFIG --samples RUN/rollouts/FILE
rollout plugins=[mine.py] 'rewards.functions={my_hangs: 1}' | no result within 1 s; its worker process was ended
check model.path=no/model | no such folder (paths are relative to HERE)
check model.path=lora | model.path=lora/weights/v000002 holds one adapter, not a model; make one of it:
rollout model.path=empty | model.path=empty is no model: it has no config.json
eval model.path=new | model.path=new is no model
serve model.random_init=true | by python3 ../clone/run.py sft CONFIG, and serve it: model.path=RUN/model model.random_
serve whole | whole is a run, not a config file; as a model: model.path=whole
check model.path=plain | put one as chat_template.jinja into its folder, or set data.chat_template=false
check rollout.max_tokens=512 | rollout.max_tokens=512 leaves no prompt room in the con
check eval.max_tokens=600 | eval.max_tokens=600 leaves no prompt room in the context of
check rollout.max_tokens=505 | 7 tokens; the longest has 15: rollout.max_tokens=497 has room for all
check trainer.micro_batch_tokens=8 | no prompt room in trainer.micro_batch_tokens=8: lower it, or raise that
check model.max_length=20 rollout.max_tokens=16 | rollout.max_tokens=5 has room for all in the context of 20 tokens (m
check data.max_prompt_tokens=3 | 15: data.max_prompt_tokens=3 leaves them out
check run.dir=trained | choose another run.dir; it kept no checkpoint, so that its training can't go on
rollout run.dir=trained | holds a run of 3 steps already; choose another run.dir
rollout run.dir=owned | which is running: choose another run.dir, or end that process first
launch run.dir=trained | trained holds a run of 3 steps already; choose another run.dir
launch --dry-run sync.root=empty | runs/default must lie under sync.root=HERE/empty, in no hidden folder
launch --dry-run launch.share_gpu=true launch.servers=2 | launch.share_gpu is for one server; give several GPUs of
quickstart fine.yaml run.dir=trained | trained holds a run of 3 steps already; choose another run.dir
check model.max_length=800000000 | is beyond the 512 positions of model.path=sort; lower model.max_length to 512
config checkpoint.best=eval/reward | checkpoint.best=eval/reward is no metric of this evaluation, which has eval/greedy
config 'rewards.functions={exact_match: {clip: [1, 1]}}' | must be [lowest, highest], the first below the second
launch --submit | --output and --submit need an --engine
launch --gpus-per-node 4 | --gpus-per-node, --output and --submit need an --engine
generate -p a -n 0 | can't be asked for: Input should be greater than or equal to 1
generate -p a server.port=1 | start one there: python3 ../clone/run.py serve CONFIG
eval server.urls=http://down server.start_timeout_s=0.1 | Start one with `python3 ../clone/run.py serve CONFIG`, correct
eval server.urls=http://other | serves m, whose tokenizer is not that of model.path=sort; name the same model
eval server.port=7 | serves m, not model.path=sort; to measure that one set server.urls=[http://127.0.0.1:7], else
"""
MISTAKES = [line.split(" | ") for line in TABLE.strip().split("\n")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with folders of every kind; servers that answer at some URLs, and no hub."""
    tmp_path, monkeypatch = tmp_path_factory.mktemp("mistakes"), pytest.MonkeyPatch()
    monkeypatch.setattr(sources, "NUM_ROWS", 64)
    for name in (*MARKS.split(), *FILES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(FILES.get(name, ""))
    for name in ("sort", "many", "plain", "cut", "mute"):
        shutil.copytree(SORT, tmp_path / name)
    (tmp_path / "plain/chat_template.jinja").unlink()
    (tmp_path / "cut/model.safetensors").write_bytes((SORT / "model.safetensors").read_bytes()[:5000])
    (tmp_path / "mute/tokenizer.json").unlink()
    wide = AutoTokenizer.from_pretrained(tmp_path / "many")
    wide.add_tokens([f"<{number}>" for number in range(300)])
    wide.save_pretrained(tmp_path / "many")
    own = tokenizer.fingerprint(tokenizer.load(str(SORT)))
    served = {"http://other": "another", "http://127.0.0.1:7": own}

    async def health(client: ServerClient, **_: object) -> Health:
        if client.url not in served:
            raise ServerError("nothing listens there", code="unreachable")
        return fakes.health(vocab_size=261, tokenizer_sha256=served[client.url])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", Mock(side_effect=ConnectionError("refused")))
    monkeypatch.setattr(ServerClient, "health", health)
    monkeypatch.setattr("sys.argv", ["../clone/run.py"])
    with owning(tmp_path / "owned", print, wait=False):
        yield tmp_path
    monkeypatch.undo()


@asynccontextmanager
async def servers(*_: object) -> AsyncIterator[None]:
    yield


async def play(prompt: Prompt, slot: Slot) -> Rollout:
    return played(prompt, slot.id)


@pytest.mark.parametrize(("typed", "said"), MISTAKES)
def test_a_mistake_is_answered_by_its_cause_and_the_fix(
    typed: str, said: str, capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(typed, said, capsys, here, monkeypatch)


def check(
    typed: str, said: str, capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks what is said of a command."""
    command, *words = shlex.split(typed)
    if command == "check":
        command, words = "train", ["--dry-run", *words]
    if "rewards.functions" in typed:
        monkeypatch.setattr(parts.Parts, "servers_as_they_are", servers)
        monkeypatch.setattr(parts.Parts, "_play_by_source", lambda *_: play)
        words += ["rewards.timeout_s=1", "rollout.prompts_per_step=1", "rollout.group_size=2"]
    named = command in ("config", "ledger", "launch", "export", "select", "report") or "model.path" in typed
    assert main([command, *words, *([] if named else ["model.path=sort"])]) == 1
    error = capsys.readouterr().err.partition("error: ")[2]
    assert said.replace("HERE", str(here)) in error
    assert "Traceback" not in error
