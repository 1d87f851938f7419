"""Rewards that do what they can to hurt: their rollout has an error, the next one its score, nothing stays."""

import asyncio
import math
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.common.registry import load_plugins
from hocket.config import RewardsConfig
from hocket.rewards import RewardScorer
from hocket.types import Rollout, Score
from support import hostile
from support.batches import scorer_of_all
from support.episodes import Register, Scorers, make_rollout
from support.processes import started, wait_for

pytestmark = pytest.mark.long
PLUGIN = """
import ctypes, json, os, re, signal, sys, threading, time
from hocket.rewards import reward
from hocket.types import Score

class Mute(Exception):
    def __str__(self):
        raise ValueError

{hostile}
@reward("torture")
def torture(completion):
    descriptor = answers()
    said = eval(completion)
    if isinstance(said, bytes):
        os.write(descriptor, said)
        return 1.0
    return said
"""
TORTURE = RewardsConfig.model_validate({"functions": {"torture": 1.0}, "timeout_s": 60})
FRAME = '["", {"total": 5.0, "parts": {}, "error": null, "note": ""}]\\n'


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("plugins") / "torture.py"
    hostiles = Path(hostile.__file__).read_text(encoding="utf-8")
    file.write_text(PLUGIN.replace("{hostile}", hostiles), encoding="utf-8")
    load_plugins([str(file)])


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """In the environment of all that the tests here start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOCKET_TORTURE", mark := uuid.uuid4().hex)
        yield mark


@pytest.fixture(scope="module")
def scorer(mark: str) -> Iterator[RewardScorer]:
    """One for all tests, with one worker; nothing is left when it is closed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hocket.rewards.workers.NUM_WORKERS", 1)
        patch.setattr("hocket.rewards.workers.MAX_PROCESSES", 20)
        patch.setattr("hocket.rewards.workers.MAX_MIB", 1000)
        with scorer_of_all(TORTURE) as scorer:
            yield scorer
    assert len(started(mark)) == 0


HANGS = "no result within 0.5 s; its worker process was ended"
NONSENSE = "its worker process answered with something else than a result"
TOOK = "its worker process ended: it took more than 1000 MiB or 20 processes"


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("{}['gone']", "KeyError: 'gone' ("),
        ("(_ for _ in ()).throw(Mute())", "Mute: a Mute without a text ("),
        ("int('x' * 10**6)", "ValueError: "),
        ("(lambda f: f(f))(lambda f: f(f))", "RecursionError: "),
        ("sys.exit(3)", "SystemExit: 3 ("),
        ("os._exit(7)", "its worker process ended with exit code 7"),
        ("os.abort()", "its worker process ended with exit code 134"),
        ("ctypes.string_at(0)", "its worker process ended with exit code 139"),
        ("os.kill(os.getppid(), 9) or time.sleep(600)", "its worker process ended with exit code -9"),
        ("time.sleep(600)", HANGS),
        ("os.kill(os.getppid(), signal.SIGSTOP) or time.sleep(600)", HANGS),
        ("os.write(descriptor, b'[') and time.sleep(600)", HANGS),  # half an answer
        ("(lambda to: [os.write(to, b'[') and time.sleep(0.2) for _ in range(20)])(descriptor)", HANGS),  # bit by bit
        ("re.match('(a+)+$', 'a' * 64 + 'b')", HANGS),  # holds the interpreter's lock
        ("[fork_and_sleep() for _ in range(1000)]", TOOK),
        ("[bytearray(os.urandom(1 << 20)) * 100 for _ in range(100)]", TOOK),
        ("[os.fork() or (b'x' * (100 << 20), time.sleep(600)) for _ in range(15)] and os.wait()", TOOK),
    ],
)
async def test_a_reward_that_raises_ends_hangs_or_takes_too_much_is_an_error(
    scorer: RewardScorer, monkeypatch: pytest.MonkeyPatch, does: str, error: str
) -> None:
    assert (await scorer.score(make_rollout("1"))).total == 1
    with monkeypatch.context() as patch:
        if error == HANGS:
            patch.setattr(scorer._calls, "_timeout_s", 0.5)
        assert await error_of(scorer, make_rollout(does)) == starts_with(f"torture: {error}")
    assert (await scorer.score(make_rollout("2"))).total == 2


@pytest.mark.parametrize(
    ("returns", "error"),
    [
        ("None", "returned None instead of a number"),
        ("1j", "returned complex instead of a number"),
        ("{}", "returned no parts"),
        ("{'style': float('-inf')}", "returned -inf, which is not a finite number"),
        ("'1.0'", "returned str instead of a number"),
        ("[1.0]", "returned list instead of a number"),
        ("float('nan')", "returned nan, which is not a finite number"),
        ("{'good': 'very'}", "returned str instead of a number"),
        ("{str(i): 0 for i in range(10**5)}", NONSENSE),  # too much of it
        ("10**400", "OverflowError: "),
        ("Score(total=float('inf'))", "returned inf, which is not a finite number"),
        ("Score(total=1.0, parts={'good': None})", "returned None instead of a number"),
        ("Score(total=1.0, parts=5)", "AttributeError: "),
        ("Score(total=1.0, parts=object(), error=['refused'])", "['refused']"),
        ("Score(total=1.0, error='\\ud800' + 'x' * 10**6)", "?" + "x" * 1900),
    ],
)
async def test_a_reward_that_returns_no_number_is_an_error(scorer: RewardScorer, returns: str, error: str) -> None:
    assert await error_of(scorer, make_rollout(returns)) == starts_with(f"torture: {error}")
    assert (await scorer.score(make_rollout("2"))).total == 2


@pytest.mark.parametrize(
    ("note", "kept"),
    [("'so'", "torture: so"), ("'x\\ud800' * 10**6", ("torture: " + "x?" * 1000)[:2000]), ("[5]", "torture: [5]")],
)
async def test_a_note_crosses_the_pipe_as_text_of_bounded_length_with_a_score_or_an_error(
    scorer: RewardScorer, note: str, kept: str
) -> None:
    for error in ("None", "'refused'"):
        assert (await scorer.score(make_rollout(f"Score(total=2.0, error={error}, note={note})"))).note == kept


@pytest.mark.parametrize(
    "writes",
    [
        FRAME,  # a whole answer, before its own
        *(FRAME.replace(*pair) for pair in (("5.0", "NaN"), ("5.0", '"lots"'), ("{}", "5"), ("null", "[1]"))),
        '{"value": "lots"}\\n',
        "\\n",
        "\\xff\\xfe",
        "[' * 60000 + b'",
        "1' * (1 << 20) + b'",  # without an end
        '["", 5.0,',
    ],
)
async def test_whatever_a_reward_writes_to_its_workers_pipe_is_an_error(scorer: RewardScorer, writes: str) -> None:
    assert await error_of(scorer, make_rollout(f"b'{writes}'")) == f"torture: {NONSENSE}"
    assert (await scorer.score(make_rollout("2"))).total == 2


async def test_a_reward_that_forks_and_returns_in_both_processes_answers_once(scorer: RewardScorer) -> None:
    for _ in range(30):  # more than there may be processes
        assert (await scorer.score(make_rollout("os.fork() and 1.0"))).total == 1
        assert (await scorer.score(make_rollout("2"))).total == 2


async def test_a_daemon_ends_with_its_worker(scorer: RewardScorer, mark: str) -> None:
    assert (await scorer.score(make_rollout("daemonise() or 1.0"))).total == 1
    wait_for(lambda: len(started(mark)) == 3, "the worker, what watches it, and the daemon; earlier forks have ended")
    before = started(mark)
    assert "exit code 7" in await error_of(scorer, make_rollout("os._exit(7)"))
    assert not before & started(mark)


async def test_a_million_lines_are_dropped_after_the_first(
    mark: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hocket.rewards.workers.MAX_LINES", 10)
    with scorer_of_all(TORTURE) as scorer:
        prints = "print(0) or print(1) or print('again\\n' * 10**6, file=sys.stderr) or 1.0"
        assert (await scorer.score(make_rollout(prints))).total == 1
        shown = wait_for(lambda: (text := capfd.readouterr().err).count("\n") == 11 and text, "it is shown")
        assert shown.split("\n")[:2] == ["0", "1"]
        assert shown.endswith("rewards have printed more: it is not shown\n")
        assert (await scorer.score(make_rollout("print('x' * 10**7) or 2"))).total == 2
    assert capfd.readouterr() == ("", "")


async def test_no_secret_is_in_its_environment(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_TOKEN", "the servers' own")
    with scorer_of_all(TORTURE) as scorer:
        names = "{name: 1 for name in ('HOCKET_TOKEN', 'HOCKET_TORTURE') if name in os.environ}"
        assert (await scorer.score(make_rollout(names))).parts == {"torture": 1, "torture/HOCKET_TORTURE": 1}


async def test_async_and_inline_ones_may_raise_anything_too(scorer_of: Scorers, register: Register) -> None:
    errors: dict[str, BaseException] = {
        "exits": SystemExit(2),
        "refuses": ValueError("\ud800" + "x" * 10**6),
        "cancels": asyncio.CancelledError(),
    }

    async def raises(completion: str) -> None:
        raise errors[completion]

    def raises_inline(completion: str) -> None:
        raise errors[completion]

    register("raises", raises, inline=False)
    register("raises_inline", raises_inline)
    says = {"exits": "SystemExit: 2 (", "refuses": "ValueError: ?" + "x" * 900, "cancels": "it cancelled itself"}
    for text, error in says.items():
        assert await error_of(scorer_of({"raises": 1.0}), make_rollout(text)) == starts_with(f"raises: {error}")
        if text != "cancels":
            one = scorer_of({"raises_inline": 1.0})
            assert await error_of(one, make_rollout(text)) == starts_with(f"raises_inline: {error}")


async def test_a_sum_that_is_no_finite_number_is_an_error(scorer_of: Scorers, register: Register) -> None:
    register("huge", lambda completion: 1e308)
    register("huge_too", lambda completion: 1e308)
    assert "the weighted sum is inf" in await error_of(scorer_of({"huge": 1.0, "huge_too": 1.0}), make_rollout())


class starts_with(str):  # noqa: N801 - reads as a word
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other.startswith(str(self))

    __hash__ = str.__hash__


async def error_of(scorer: RewardScorer, rollout: Rollout) -> str:
    score: Score = await scorer.score(rollout)
    assert math.isnan(score.total), score
    assert score.error is not None
    return score.error
