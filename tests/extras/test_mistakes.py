"""The likely mistakes with commands and settings of extras, as typed."""

from pathlib import Path

import pytest
from tests.test_mistakes import check, here  # noqa: F401

# "check" is `train --dry-run`; all have model.path=sort if they name no other
TABLE = """
config model.lora.r=16 | here that is model.lora.rank
config bf16=true | here that is model.dtype
config trainer.lr=1e-5 | unknown key 'trainer.lr'; here that is trainer.learning_rate
config trainer.logging_steps=1 | here that is no setting: every step is logged
config sft.num_train_epochs=1 | here that is trainer.steps, a number of steps, or in sft sft.epochs
config trainer.epochs=3 | here that is trainer.steps, a number of steps, or in sft sft.epochs
config trainer.max_seq_length=512 | here that is model.max_length
config actor_rollout_ref.actor.use_kl_loss=true | here that is algorithm.kl
config algorithm.loss=x | unknown key 'algorithm.loss'; here that is algorithm.preset or algorithm.aggregate
check plugins=[named.py] | named.py, line 3: @tool('add'): write @tool alone, as a tool has the name of its function
check env.name=tool | env.name: there is no environment 'tool' (did you mean 'tools'?); known:
sft model.path=no/such/model | no such folder (paths are relative to HERE)
sft model.path=lora/checkpoints/step_000003 | python3 ../clone/run.py export lora/checkpoints/step_000003 OUTPUT
export empty out | empty is neither a checkpoint nor an adapter; name RUN/checkpoints/step_N, or
sft model.max_length=5 data.limit=9 | shorten them, or raise model.max_length, at most to the model's context
sft data.source=sharegpt.jsonl | must be {'role': text, 'content': text}, got {'from': 'human', 'value': 'a'}
sft model.path=many | the tokenizer has ids up to 5
sft model.path=cut | model.path=cut: model.safetensors is cut off or damaged (its header promises
sft model.path=cut | ; copy or download it again
sft model.path=mute | model.path=mute has no tokenizer: put the model's tokenizer.json beside its config.json
plan model.path=no/model | no such folder (paths are relative to HERE)
report plain | plain is no run: it has no config.yaml; give the run folder
sft --dry-run model.max_length=5 data.limit=9 | shorten them, or raise model.max_length, at most to the model's context
sft --dry-run data.source=turns.jsonl trainer.micro_batch_tokens=8 | fit into trainer.micro_batch_tokens=8; set it to
dpo --dry-run data.source=rows.jsonl | no columns 'chosen' and 'rejected', only 'question', 'answer'
select whole/weights | whole/weights is no run: it has no config.yaml; give the run folder
reward-test --samples nope | --samples nope is not a file: give rows in .jsonl, or a run's rollouts/step_N.jsonl
ledger empty | empty is no run with a ledger: train and quickstart write one, a replay draws nothing
plan --gpus -1 | --gpus -1: a plan needs 1 or more, or 0 for this machine's CPU
plan --gpus 0 model.max_length=800000000 | is beyond the 512 positions of model.path=sort; lower model.max_length to 512
plan sft.epochs=2 rm.epochs=2 | a plan is of one command: leave all but one of the sections rm, sft out
plan --gpus 8 launch.servers=8 launch.trainers=8 | launch.trainers=8 needs 8 GPUs, and of 8 in all it has 0
check data.source=rows.csv | task:NAME, verifiers:NAME: convert it; a name on the hub needs hf:
"""
MISTAKES = [line.split(" | ") for line in TABLE.strip().split("\n")]


@pytest.mark.parametrize(("typed", "said"), MISTAKES)
def test_a_mistake_is_answered_by_its_cause_and_the_fix(
    typed: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(typed, said, capsys, here, monkeypatch)
