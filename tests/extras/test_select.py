"""The best rollouts of a run become demonstrations, best and worst preferences."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hocket.common.vision import data_url, file_name
from hocket.config import DataConfig, load, to_yaml
from hocket.errors import ConfigError
from hocket.extras.select import select, select_pairs
from hocket.extras.stages.demonstrations import load_demonstrations
from hocket.extras.stages.preferences import load_preferences

ROOT = Path(__file__).parents[2]


def recorded(number: int, prompt: str, reward: float | None, completion: str, **more: Any) -> dict[str, Any]:
    """A rollout as its run has recorded it."""
    chat = [{"role": "user", "content": f"Sort: {prompt}"}]
    row = {"prompt_id": prompt, "prompt": f"Sort: {prompt}", "messages": chat, "completion": completion}
    row["group_id"] = f"step {number}/{prompt}"
    return {**row, "reward": reward, "finish_reason": "stop", "step": number, **more}


def run_of(folder: Path, rows: Sequence[Mapping[str, Any]], *settings: str) -> Path:
    """Makes the folder of a run with rollouts."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(load(None, [f"run.dir={folder}", *settings]).as_dict()))
    (folder / "rollouts" / "eval_000001.jsonl").write_text(json.dumps(recorded(1, "held out", 9.0, "x")) + "\n")
    for row in rows:
        with (folder / "rollouts" / f"step_{row['step']:06d}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


def test_select_writes_the_best_whole_rollouts_of_each_prompt_the_newest_of_equal_ones(tmp_path: Path) -> None:
    rows = [
        recorded(1, "ba", 1.0, "ab of step 1"), recorded(1, "ba", 0.5, "half"), recorded(1, "dc", 0.0, "dc"),
        recorded(2, "ba", 1.0, "ab"), recorded(2, "ba", 1.0, "ab"), recorded(2, "dc", 0.4, "cd?"),
        recorded(2, "fe", None, "ef"), recorded(2, "fe", 2.0, "e", finish_reason="length"),
    ]  # fmt: skip
    run, output = run_of(tmp_path / "lr=1e-5", rows), tmp_path / "rows.jsonl"

    def chosen(**options: Any) -> list[tuple[str, str, float]]:
        said = select(run, output, **options)
        assert f"data.source={output} model.path=checkpoints/tiny-sort sft.epochs=3 " in said
        assert "trainer.learning_rate=1e-05 run.dir=NEW" in said
        found = [json.loads(line) for line in output.read_text().splitlines()]
        assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in found)
        return [(row["prompt_id"], row["messages"][1]["content"], row["reward"]) for row in found]

    assert chosen(min_reward=None, per_prompt=1) == [("ba", "ab", 1.0)]  # the mean of six is .65
    best = [("ba", "ab", 1.0), ("ba", "ab of step 1", 1.0)]
    assert chosen(min_reward=0.4, per_prompt=2) == [*best, ("dc", "cd?", 0.4)]
    assert chosen(min_reward=0.0, per_prompt=9) == [*best, ("ba", "half", 0.5), ("dc", "cd?", 0.4), ("dc", "dc", 0.0)]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-sort")
    shown = tokenizer.decode(load_demonstrations(DataConfig(source=str(output)), tokenizer, 99)[0].token_ids)
    assert shown == "<|user|>Sort: ba<|end|><|assistant|>ab<|end|>"
    with pytest.raises(ConfigError, match=r"no rollout of .* has a reward of at least 3: the highest is 1"):
        select(run, output, min_reward=3, per_prompt=1)
    with pytest.raises(ConfigError, match="--per-prompt=0 would choose nothing: set 1 or more"):
        select(run, output, min_reward=None, per_prompt=0)


def test_select_takes_turns_with_their_tools_and_plain_text_and_says_what_it_can_not(tmp_path: Path) -> None:
    says = {"role": "assistant", "content": "<tool_call>{}</tool_call>"}
    dialogue = [says, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "1"}]
    told = [says, {"role": "environment", "content": "hint"}, says]
    rows = [recorded(1, "ba", 1.0, "1", dialogue=dialogue)]
    rows += [recorded(1, "dc", 1.0, "1", dialogue=between) for between in (told, [says, says])]
    tools = ("env.name=tools", "env.tools=[calculate]", "env.parser=hermes")
    output = tmp_path / "rows.jsonl"
    assert "1 of 3 rollouts, of 1 prompts" in select(
        run_of(tmp_path / "tools", rows, *tools), output, min_reward=None, per_prompt=1
    )
    row = json.loads(output.read_text())
    assert row["messages"] == [{"role": "user", "content": "Sort: ba"}, *dialogue]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["calculate"]

    plain = run_of(tmp_path / "plain", [recorded(1, "ba", 1.0, "ab", messages=None)])
    assert " data.chat_template=false " in select(plain, output, min_reward=None, per_prompt=1)
    row = json.loads(output.read_text())
    assert (row["prompt"], row["response"]) == ("Sort: ba", "ab")
    settings = ("env.name=agent", "env.function=guess", f"plugins=[{ROOT}/config/guess_agent.py]")
    agent = run_of(tmp_path / "agent", rows, *settings)
    with pytest.raises(ConfigError, match=r"of an agent's calls it has the tokens, not the messages"):
        select(agent, output, min_reward=None, per_prompt=1)


def test_rollouts_of_a_mixture_have_the_tools_of_their_source_and_an_agents_are_left_out(tmp_path: Path) -> None:
    sources = "[{name: plain}, {name: calls, env: {name: tools, tools: [calculate], parser: hermes}}, "
    sources += "{name: agent, env: {name: agent, function: guess}}]"
    rows = [
        recorded(1, f"{source}{number}", 1.0, f"{number}", source=source, group_id=source) | {"reward": 1.0 - number}
        for source in ("plain", "calls", "agent")
        for number in range(2)
    ]
    run = run_of(tmp_path / "run", rows, f"data.sources={sources}", f"plugins=[{ROOT}/config/guess_agent.py]")
    output = tmp_path / "rows.jsonl"
    for how in (lambda: select(run, output, min_reward=None, per_prompt=1), lambda: select_pairs(run, output)):
        how()
        found = [json.loads(line) for line in output.read_text().splitlines()]
        tools = {
            row["prompt_id"]: [tool["function"]["name"] for tool in row["tools"] or ()]
            for row in found
            if "tools" in row
        }
        assert [row["prompt_id"] for row in found] == ["plain0", "calls0"]
        assert tools == {"calls0": ["calculate"]}


def test_best_and_worst_of_a_group_become_a_preference_with_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    rows = [
        recorded(1, "ba", 0.5, "ba"), recorded(1, "ba", 1.0, "ab"), recorded(1, "ba", 1.0, "a b"),
        recorded(1, "ba", None, "b"), recorded(1, "dc", 1.0, "cd"), recorded(1, "dc", 1.0, "cd!"),
        recorded(2, "ba", 0.0, "aa"), recorded(2, "ba", 2.0, "ab", finish_reason="length"),
        recorded(2, "ba", 0.75, "a"), recorded(2, "ba", -1.0, ""),
        recorded(2, "dc", 1.0, "cd"), recorded(2, "dc", 0.0, "cd"),  # by a judge that is not sure
        recorded(2, "ba", 3.0, "so ab", opening="<think>\n"),
    ]  # fmt: skip
    output = tmp_path / "pairs.jsonl"
    said = select_pairs(run_of(tmp_path / "run", rows), output)
    what, command = said.splitlines()
    assert what.startswith(f"{output}: 2 pairs of 4 groups, whose answers and rewards differ; 4 of 13 rollouts have no")
    assert command.endswith(f" dpo data.source={output} model.path=checkpoints/tiny-sort run.dir=NEW")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny-sort")
    found = load_preferences(DataConfig(source=str(output)), tokenizer, 99)
    assert [pair.margin for pair in found] == [0.75, 0.5]  # the newest step first
    asked = tokenizer.apply_chat_template(rows[0]["messages"], add_generation_prompt=True, return_dict=False)
    for pair, (chosen, rejected) in zip(found, [("a", "aa"), ("ab", "ba")], strict=True):
        for side, text in ((pair.chosen, chosen), (pair.rejected, rejected)):
            sampled = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            assert list(side.token_ids) == asked + sampled
            assert list(side.mask) == [False] * len(asked) + [True] * len(sampled)

    equal = run_of(tmp_path / "equal", rows[4:6])
    with pytest.raises(
        ConfigError, match=r"no group of .* has different answers with different rewards: none is preferred"
    ):
        select_pairs(equal, output)


def test_pairs_of_turns_have_the_tools_and_those_of_plain_text_have_texts(tmp_path: Path) -> None:
    says = {"role": "assistant", "content": "<tool_call>{}</tool_call>"}
    dialogue = [says, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "1"}]
    output = tmp_path / "pairs.jsonl"
    rows = [recorded(1, "ba", 1.0, "1", dialogue=dialogue), recorded(1, "ba", 0.0, "2")]
    tools = ("env.name=tools", "env.tools=[calculate]", "env.parser=hermes")
    select_pairs(run_of(tmp_path / "tools", rows, *tools), output)
    row = json.loads(output.read_text())
    assert (row["prompt"], row["chosen"]) == (rows[0]["messages"], dialogue)
    assert row["rejected"] == [{"role": "assistant", "content": "2"}]
    assert [tool["function"]["name"] for tool in row["tools"]] == ["calculate"]

    rows = [recorded(1, "ba", reward, text, messages=None) for reward, text in ((1.0, "ab"), (0.0, "ba"))]
    assert " data.chat_template=false " in select_pairs(run_of(tmp_path / "plain", rows), output)
    row = json.loads(output.read_text())
    assert [row[key] for key in ("prompt", "chosen", "rejected")] == ["Sort: ba", "ab", "ba"]


def test_select_writes_the_images_of_a_rollout_and_pairs_those_with_the_same(tmp_path: Path) -> None:
    files = [b"\x89PNG\r\n" + bytes([number]) for number in range(2)]
    seen = [[{"file": file_name(data), "start": 1, "length": 4, "placeholder": 7}] for data in files]
    rows = [
        recorded(1, "ba", 1.0, "ab", images=seen[0]), recorded(1, "ba", 0.0, "a", images=seen[0]),
        recorded(1, "dc", 1.0, "cd", images=seen[0]), recorded(1, "dc", 0.0, "c", images=seen[1]),
    ]  # fmt: skip
    run, output = run_of(tmp_path / "run", rows), tmp_path / "rows.jsonl"
    (run / "images").mkdir()
    for data in files:
        (run / "images" / file_name(data)).write_bytes(data)
    for write, count in (
        (lambda: select(run, output, min_reward=1.0, per_prompt=1), 2),
        (lambda: select_pairs(run, output), 1),
    ):
        write()
        found = [json.loads(line)["images"] for line in output.read_text().splitlines()]
        assert found == [[data_url(files[0])]] * count
