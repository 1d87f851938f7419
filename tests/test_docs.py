"""The documentation is what the program itself prints."""

import collections
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hocket import config
from hocket.common.registry import load_plugins
from hocket.config import loading
from hocket.envs import Action
from hocket.envs.base import HISTORIES, bind
from hocket.observe import rows
from hocket.types import Prompt
from support.batches import played, scorer_of_all

ROOT = Path(__file__).parents[1]


def test_the_reference_pages_are_up_to_date() -> None:
    written = (ROOT / "docs" / "reference" / "presets.md").read_text(encoding="utf-8")
    assert written.endswith(config.preset_table() + "\n"), "tests/reference.py --write refreshes it"
    unsaid = {key for key, field in loading._fields() if "." in key and not field.description}
    assert unsaid == {"checkpoint.best.name", "checkpoint.best.patience"}  # checkpoint.best tells them


def test_the_page_of_a_run_s_files_has_every_key_of_their_types() -> None:
    written = (ROOT / "docs" / "reference" / "run_folder.md").read_text(encoding="utf-8")
    assert written.endswith(rows.reference() + "\n"), "tests/reference.py --write refreshes it"


OPTIONS = {
    "critic",
    "credit",
    "curriculum",
    "discover",
    "float32_head",
    "history",
    "lora",
    "memory",
    "mixture",
    "nccl",
    "nccl_worker",
    "prefixes",
    "reference",
    "replay",
    "shapes",
    "share_gpu",
    "take_over",
    "vision",
}
"""Files of options that are woven into a step, by the setting that turns them on."""


def test_architecture_says_how_large_each_room_the_options_and_the_extras_are() -> None:
    source = ROOT / "src" / "hocket"
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    said = {
        room: (int(files), int(lines.replace(",", "")))
        for room, files, lines in re.findall(r"^\| `([\w.]+)/?` \| (\d+) \| ([\d,]+) \|", page, re.M)
    }
    found: dict[str, list[int]] = collections.defaultdict(list)
    for file in source.rglob("*.py"):
        room = file.relative_to(source).parts[0] if file.parent != source else "."
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if file.name == "__init__.py":
            continue
        is_option = room != "extras" and file.stem in OPTIONS
        found["options" if is_option else room].append(lines)
    options = re.findall(r"They are not counted above: (\d+) files,\s+about\s+([\d,]+)\s+lines", page)
    said["options"] = (int(options[0][0]), int(options[0][1].replace(",", "")))
    if not (source / "extras").exists():  # run.py test --core
        del said["extras"]
    assert said.keys() == found.keys()
    for room, (files, lines) in said.items():
        assert len(found[room]) == files, room
        assert sum(found[room]) == pytest.approx(lines, rel=0.1, abs=50), room  # lines are rounded to hundreds


def test_readme_and_architecture_name_no_file_that_is_not_there() -> None:
    named, found = named_files()
    assert {"loop.py", "sync/publish.py", "data/"} <= named
    assert {name for name in named - found if "extras/" not in name} == set()  # which may be deleted


def named_files() -> tuple[set[str], set[str]]:
    """Returns the files that README and docs/explanation/architecture.md name, and those of them that are there."""
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## How it works")[1].split("```")[1]
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    named = {word for word in tree.split() if word.endswith((".py", ".yaml"))}
    named |= set(re.findall(r"[\w/]+\.py", page)) | set(re.findall(r"`([\w/]+/)`", page))
    folders = [ROOT / folder for folder in ("src", "tests", "config", "benchmarks")]
    found = {name for name in named if (ROOT / name).exists() or any(any(folder.rglob(name)) for folder in folders)}
    return named, found


async def test_the_readmes_own_model_data_and_reward_are_the_example_and_work_as_they_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Your own model, data and reward")[1]
    folder = ROOT / "examples" / "own_everything"
    for language, name in (("yaml", "config.yaml"), ("python", "reward.py"), ("json", "train.jsonl")):
        shown, file = section.split(f"```{language}\n")[1].split("```")[0], folder.joinpath(name).read_text("utf-8")
        assert shown == (file if language != "json" else "".join(file.splitlines(True)[:2]))
    monkeypatch.chdir(ROOT)
    settings = config.load("examples/own_everything/config.yaml")
    load_plugins(settings.plugins)
    rollout = played(Prompt(id="p", token_ids=(1,), answer="dcba"), "r", "dcab")
    with scorer_of_all(settings.rewards) as scorer:
        assert (await scorer.score(rollout)).total == pytest.approx(2 / 3)  # dc and ca fall, ab does not; no bonus


async def test_the_rewards_of_the_documentation_work_as_they_stand(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "rewards.md").read_text(encoding="utf-8")
    codes = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL))
    configs = dict(re.findall(r"```yaml\n# (\w+\.yaml)\n(.*?)```", page, re.DOTALL))
    for name, text in (codes | configs).items():
        (tmp_path / name).write_text(text)
    settings = config.load(tmp_path / "three.yaml", ["rewards.timeout_s=60"])
    load_plugins([str(tmp_path / name) for name in codes])
    assert set(settings.plugins) < codes.keys()
    rollouts = [played(Prompt(id="p", token_ids=(1,), answer="ab"), "r", text) for text in ("a b a", "be")]
    with scorer_of_all(settings.rewards) as scorer:
        scores = await scorer.score_group(rollouts)
    # "a b a" has both letters and three more; "be" one of them
    expected = [0.5 * (1 - 0.3) + (2 - 1) + 0, 0.5 * 0.5 + (1 - 0) + 1]
    assert [score.total for score in scores] == pytest.approx(expected)
    # The page shows the rewards of completions, too.
    rows = [json.loads(line) for line in page.split('```json title="hand.jsonl"\n')[1].split("```")[0].splitlines()]
    rewards = [float(reward) for reward in re.findall(r"^hand\.jsonl:\d  ([\d.]+)  ", page, re.M)]
    with scorer_of_all(config.load(tmp_path / "my.yaml", ["rewards.timeout_s=60"]).rewards) as scorer:
        for row, reward in zip(rows, rewards, strict=True):
            rollout = played(Prompt(id="p", token_ids=(1,), answer=row["answer"]), "r", row["completion"])
            assert (await scorer.score(rollout)).total == pytest.approx(reward)


def test_the_rows_and_the_reward_of_the_first_model_are_those_of_its_plugin() -> None:
    page = (ROOT / "docs" / "tutorials" / "first_model.md").read_text(encoding="utf-8")
    plugin = (ROOT / "config" / "sums.py").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    assert [block for block in blocks if block not in plugin] == []
    lines = len(plugin.splitlines())
    assert f"a plugin of {lines} lines" in page


async def test_the_completions_of_the_first_model_get_what_its_page_shows() -> None:
    page = (ROOT / "docs" / "tutorials" / "first_model.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in re.findall(r"^\{.*\}$", page, re.M)]
    rewards = [float(reward) for reward in re.findall(r"^hand\.jsonl:\d  (\d)  ", page, re.M)]
    settings = config.load(ROOT / "config" / "smollm2_sums.yaml", [f"plugins=[{ROOT}/config/sums.py]"])
    load_plugins(settings.plugins)
    with scorer_of_all(settings.rewards) as scorer:
        for row, reward in zip(rows, rewards, strict=True):
            rollout = played(Prompt(id="p", token_ids=(1,), answer=row["answer"]), "r", row["completion"])
            assert (await scorer.score(rollout)).total == reward


def shown(page: str, name: str, settings_name: str, folder: Path) -> Any:
    """Returns the environment of a page's plugin `name`, with the settings that the page shows for it."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    files = dict(re.findall(r"```(?:python|yaml)\n# (\w+\.\w+)\n(.*?)```", text, re.DOTALL))
    for shown_name in (name, settings_name):
        (folder / shown_name).write_text(files[shown_name])
    settings = config.load(folder / settings_name)
    assert name in settings.plugins
    assert f"python3 run.py train --dry-run {settings_name}\n" in text
    load_plugins(str((folder if plugin == name else ROOT) / plugin) for plugin in settings.plugins)
    return bind(settings.env.name, settings.env.model_extra or {})()


async def test_the_environment_of_the_documentation_works_as_it_stands(tmp_path: Path) -> None:
    spell = shown("how-to/environments.md", "my_envs.py", "spell.yaml", tmp_path)
    assert spell.wrong == -0.1
    started = await spell.reset(Prompt(id="p", token_ids=(1,), answer="ab"), 0)
    assert started.messages[0]["content"] == "First letter?"
    steps = [await spell.step(Action(text=text, token_ids=(1,), finish_reason="stop")) for text in ("a ", "c")]
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (-0.1, True)]


async def test_the_history_of_the_documentation_keeps_the_newest_message(tmp_path: Path) -> None:
    shown("how-to/environments.md", "my_history.py", "long_guess.yaml", tmp_path)
    hints = ["higher", "lower"]
    dialogue = [{"role": "user", "content": hint} for hint in hints]
    dialogue.insert(1, {"role": "assistant", "content": "7"})
    told, newest = await HISTORIES.get("summary")([], dialogue)
    assert (told["content"], newest) == ("Hints so far: higher", dialogue[-1])


async def test_the_first_environment_pays_what_its_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "first_environment.md").read_text(encoding="utf-8")
    episode = shown("tutorials/first_environment.md", "my_guess.py", "my_guess.yaml", tmp_path)
    await episode.reset(Prompt(id="p", token_ids=(1,), answer="12"), 0)
    lines = []
    for guess in ("7", "13", "12"):
        step = await episode.step(Action(text=guess, token_ids=(1,), finish_reason="stop"))
        lines.append(f"{guess} {[message['content'] for message in step.messages]} {step.reward} {step.done}\n")
    assert f"```text\n{''.join(lines)}```" in page
    assert episode.metrics == {"env/guesses": 3}
