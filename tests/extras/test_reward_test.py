import math
from dataclasses import replace
from pathlib import Path

import pytest

from hocket.commands.cli import main
from hocket.config import load
from hocket.errors import ConfigError
from hocket.extras.reward_test import agreement, score_samples
from hocket.observe.rows import lines_of
from hocket.types import Prompt, Score
from support.processes import ROOT
from support.records import group, sequence, user, write_rows


def test_reward_test_scores_a_file_without_a_model_and_fails_where_a_score_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin, samples = tmp_path / "mine.py", tmp_path / "samples.jsonl"
    plugin.write_text(
        "from hocket.rewards import reward\n"
        "from hocket.types import Score\n"
        "@reward('first_told', inline=True)\n"
        "def first_told(completions, meta):\n"
        "    first = Score(total=meta['level'], note='it came\\n\\x1b[2Jfirst')\n"
        "    return [first] + [0] * (len(completions) - 1)\n"
    )
    functions = "{exact_match: 1, first_told: 0.5, length: {target: 2, unit: characters}}"
    command = ["reward-test", f"plugins=[{plugin}]", f"rewards.functions={functions}", f"--samples={samples}"]
    rows = [{"prompt": "1+1?", "answer": 2, "level": 3, "completion": text} for text in ("2 ", "33")]
    rows.append({"messages": [user("2+2?")], "level": 1, "completion": "4"})
    write_rows(samples, *rows[:2])
    assert main(command) == 0
    first, said, why, second, *calls, last = capsys.readouterr().out.splitlines()
    assert first == f"{samples}:1  2.5  exact_match 1, length 0, first_told 3"
    assert [said, why] == ["    first_told: it came", "    [2Jfirst"]
    assert second == f"{samples}:2  0  exact_match 0, length 0, first_told 0"
    assert [call.split(":")[0] for call in calls] == [f"calls of {n}" for n in ("exact_match", "first_told", "length")]
    assert last == "2 samples in 1 groups, 0 without a score"
    measured = functions.replace("exact_match: 1", "exact_match: 0")  # as a run does that trains on another
    assert main([*command, f"rewards.functions={measured}", "--against=exact_match"]) == 0
    compared = "rank correlation 1.000; 100.0% of 1 pairs"
    assert f"\nagainst exact_match: {compared}" in capsys.readouterr().out
    write_rows(samples, *rows)
    assert main(command) == 1
    out = capsys.readouterr().out
    assert f"{samples}:3  error: exact_match: ValueError: the prompt has no answer to compare with" in out
    assert "3 samples in 2 groups, 1 without a score" in out
    for text, error in (('{"completion": 4}', "the column 'completion' must be a text, got 4"), ("{", "Expecting")):
        samples.write_text(text)
        assert main(command) == 1
        assert f"error: {samples}:1 is no sample: {error}" in capsys.readouterr().err


def test_reward_test_reads_a_runs_own_rollouts_whatever_columns_the_data_has_and_gives_a_failed_one_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Prompt(id="rows:1", token_ids=(1,), text="1+2?", answer="3", meta={"nums": [1, 2]})
    said = sequence(5, 6, opening="<think>\n", text="both</think><answer>1 + 2</answer>")
    good = Score(total=7.0, parts={"env": 0.25})  # what a reward did before does not count: it may be better by now
    late = Score(total=math.nan, error="it was late")
    hung = Score(total=math.nan, parts={"env": 0.25}, error="length: it was late")
    first = group(asked, [said] * 2, [good, late], "a")
    failed = replace(first.rollouts[1], error="it was late")
    groups = [replace(first, rollouts=(first.rollouts[0], failed)), group(asked, [said], [hung], "b")]
    path = tmp_path / "step_000001.jsonl"
    path.write_text(lines_of(groups))
    functions = "{think_format: 1, countdown: 1, length: {up_to: 4}, env: 1}"  # opening, meta, sampled tokens, reward
    columns = [f"--samples={path}", "data.prompt_column=question", "data.answer_column=target"]
    assert main(["reward-test", f"rewards.functions={functions}", *columns, "data.limit=1"]) == 1
    first, none, again, *_, last = capsys.readouterr().out.splitlines()
    assert first == "a/0  2.75  think_format 1, countdown 1, length 0.5, env 0.25"
    assert (none, again) == ("a/1  error: it was late  ", first.replace("a/0", "b/0"))
    assert last == "3 samples in 2 groups, 1 without a score"
    rows = [{"question": "1+2?", "target": 3, "group_id": name, "completion": "3"} for name in "ab"]  # a user's own
    write_rows(path, *rows)
    assert main(["reward-test", "rewards.functions={exact_match: 1}", *columns]) == 0
    assert capsys.readouterr().out.endswith("2 samples in 1 groups, 0 without a score\n")


def test_reward_test_scores_as_many_groups_at_once_as_a_step_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin, samples = tmp_path / "together.py", tmp_path / "samples.jsonl"
    plugin.write_text(
        "import asyncio\n"
        "from hocket.rewards import reward\n"
        "begun, running = [], []\n"
        "@reward('together')\n"
        "async def together(completion):\n"
        "    begun.append(completion)\n"
        "    running.append(completion)\n"
        "    most = len(running)\n"
        "    while len(begun) < 3:\n"
        "        await asyncio.sleep(0.01)\n"
        "    running.remove(completion)\n"
        "    return most\n"
    )
    write_rows(samples, *({"prompt": f"{i}", "answer": "a", "completion": f"{i}"} for i in range(9)))
    settings = [f"plugins=[{plugin}]", "rewards={functions: {together: 1}, timeout_s: 600}"]
    settings.append("rollout.prompts_per_step=3")
    assert main(["reward-test", *settings, f"--samples={samples}"]) == 0
    totals = [float(line.split("  ")[1]) for line in capsys.readouterr().out.splitlines()[:9]]
    assert max(totals) == 3.0 == totals[2]


def test_two_rewards_are_compared_by_their_ranks_over_all_and_within_groups() -> None:
    def scored(*pairs: tuple[float, float]) -> list[tuple[Score, Score]]:
        return [(Score(total=a), Score(total=b)) for a, b in pairs]

    # ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4: 1 - 6 Σd²/(n³ - n) without ties; with them 4.5 / √(4.5 · 5)
    group = [(0.0, 1.0), (5.0, 3.0), (5.0, 2.0), (9.0, 10.0)]
    assert agreement([scored(*group)]).startswith(f"rank correlation {4.5 / math.sqrt(4.5 * 5):.3f};")
    assert agreement([scored((1.0, 9.0), (2.0, 4.0), (3.0, 1.0))]).startswith("rank correlation -1.000;")
    assert agreement([scored((1.0, 2.0), (1.0, 3.0))]).startswith("rank correlation nan;")
    failed = (Score(total=math.nan, error="late"), Score(total=1.0))
    groups = [scored(*group), scored((3.0, 0.0), (2.0, 1.0)), scored((1.0, 0.0), (1.0, 0.0)), [failed]]
    # pairs: 5 in the same order and an equal one of 6; 0 of 1; the third group has none that the second orders
    said = agreement(groups)
    assert said.endswith("; 78.6% of 7 pairs in the same order")
    assert agreement([]) == "no two rollouts of a group differ"


def test_rewards_that_differ_between_sources_are_no_answer_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "completion": "c", "answer": "a"}')
    config = load(ROOT / "config" / "mixture.yaml", [f"model.path={ROOT}/checkpoints/tiny-tools"])
    with pytest.raises(ConfigError, match=r"the source guess has rewards of its own: add data\.sources="):
        score_samples(config, tmp_path / "rows.jsonl", None)
    assert score_samples(load(None, ["data.sources=[task:sort, a.jsonl]"]), tmp_path / "rows.jsonl", None) == 0
