"""The live page: what it answers, whom, and, where Chromium is installed, what it shows while a run goes on."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from hocket.config import ObserveConfig
from hocket.extras.page import watch
from hocket.extras.page.page import policy
from hocket.extras.page.reader import RunReader
from hocket.launch import page_of, stop
from hocket.observe.owner import owning
from hocket.observe.rows import lines_of
from hocket.server.middleware import Guard
from hocket.types import Group, Prompt, Rollout, Score, TokenSequence
from support.browser import PATH, Browser, browser
from support.processes import ROOT, free_port, wait_for

HOSTILE = "<script>alert(1)</script></style>\x1b[31m\u202e" + "x" * (1 << 20)
WITH_SELF = "'self'"


def record(folder: Path, step: int, **metrics: float) -> None:
    row = {"step": step, "reward/mean": step / 10, "rollout/length_mean": 3.0, "time/step": 1.0} | metrics
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def play(folder: Path, step: int, *texts: str) -> None:
    """Write a step's rollouts: a group per text, rewards 0 and 1."""
    (folder / "rollouts").mkdir(exist_ok=True)
    groups = []
    for number, text in enumerate(texts):
        prompt = Prompt(id="p", token_ids=(1,), text=f"question {number}")
        tokens = {"token_ids": (1, 2), "mask": (False, True), "logprobs": (0.0, -1.0)}
        rollouts = tuple(
            Rollout(id=f"g{number}/{i}", prompt=prompt, sequences=(TokenSequence(**tokens, text=f"{text}{i}"),))
            for i in range(2)
        )
        scores = tuple(Score(total=float(i), parts={"even": 1.0 - i}) for i in range(2))
        groups.append(Group(id=f"g{number}", rollouts=rollouts, scores=scores))
    (folder / f"rollouts/step_{step:06d}.jsonl").write_text(lines_of(groups), encoding="utf-8")


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/").is_success
    return False


@contextlib.contextmanager
def serving(*folders: Path, token: str | None = None) -> Iterator[str]:
    """Serve the page of folders in a thread; yield its URL."""
    app = watch.make_app([RunReader(folder) for folder in folders])
    guard = Guard(app, host="127.0.0.1", token=token, free=("/",))
    server = app.state.server = uvicorn.Server(uvicorn.Config(guard, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def first_of(http: httpx.Client) -> Any:
    """The first event: all that a page shows."""
    with http.stream("GET", "/events") as answer:
        return json.loads(next(answer.iter_lines())[6:])


def test_every_answer_forbids_what_the_page_does_not_need_and_the_data_needs_the_token(tmp_path: Path) -> None:
    record(tmp_path, 1)
    play(tmp_path, 1, HOSTILE)
    with serving(tmp_path, token="a secret token") as url, httpx.Client(base_url=url) as http:
        page = http.get("/")
        assert "question" not in page.text
        assert page.headers["content-security-policy"] == f"{policy(WITH_SELF)}; frame-ancestors 'none'"
        for path in ("/events", "/rollouts", "/tokens", "/metrics", "/health", "/docs"):
            assert http.get(path).status_code == 401
        http.headers["Authorization"] = "Bearer a secret token"
        told = http.get("/rollouts?run=0&name=step_000001")
        assert told.headers["x-content-type-options"] == "nosniff"
        assert [row["completion"] for row in told.json()] == [f"{HOSTILE}0", f"{HOSTILE}1"]
        assert first_of(http)["runs"][0]["curves"]["step"] == [1]
        assert http.get("/rollouts?run=0&name=../metrics").json() == []
        assert f'hocket_metric{{metric="step",run="{tmp_path.name}"}} 1.0' in http.get("/metrics").text.splitlines()
        assert http.get("/openapi.json").status_code == http.post("/events").status_code - 1 == 404


def test_the_page_of_a_run_that_has_not_begun_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    port = free_port()
    page = page_of(tmp_path / "run", ObserveConfig(port=port), None)
    try:
        wait_for(lambda: answers(port) or page.poll() is not None, "the page answers")
        assert page.poll() is None, page.last_words("the page")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            told = first_of(http)
    finally:
        stop([page])
    assert told["runs"][0]["state"] == "stopped"


def test_a_page_of_another_site_gets_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as url:
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            assert httpx.get(f"{url}/events", headers=headers).status_code == 403


def test_events_tell_what_is_new_and_all_again_where_the_run_was_resumed(tmp_path: Path) -> None:
    record(tmp_path, 1)
    with serving(tmp_path) as url, httpx.stream("GET", f"{url}/events", timeout=60) as answer:
        events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        assert next(events)["runs"][0]["curves"]["step"] == [1]
        record(tmp_path, 2)
        assert next(events)[0]["curves"]["step"] == [2]
        (tmp_path / "metrics.jsonl").write_text("")
        record(tmp_path, 1, **{"reward/mean": 0.75})
        resumed = next(event for event in events if "runs" in event)
        assert resumed["runs"][0]["curves"]["reward/mean"] == [0.75]


ODD = ["/rollouts?run=9&name=step_1", f"/rollouts?run=0&name=step_{'1' * 300}", "/tokens?run=5&name=a&group=b"]


def test_what_is_not_there_or_not_as_a_run_writes_it_is_said_and_the_page_goes_on(tmp_path: Path) -> None:
    record(tmp_path, 1)
    play(tmp_path, 1, "hi")
    with serving(tmp_path) as url, httpx.Client(base_url=url) as http:
        assert [http.get(path).status_code for path in ODD] == [422] * len(ODD)
        for row in ('{"step": 1' + "0" * 400 + "}", '{"step": 2, "a": "text"}'):
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(f"{row}\n")
            told = http.get("/metrics")
            assert (told.status_code, "metrics.jsonl is damaged" in told.text) == (422, True)
        record(tmp_path, 3)
        curves = first_of(http)["runs"][0]["curves"]
        assert (curves["step"], curves["reward/mean"], curves["seconds"]) == ([1, 3], [0.1, 0.3], [1.0, 2.0])
        (tmp_path / "rollouts/step_000001.jsonl").write_text("{}\n")
        assert "KeyError: 'group_id'" in http.get("/rollouts?run=0&name=step_000001").json()["error"]["message"]
        (tmp_path / "config.yaml").write_text("a: [")
        assert http.get("/events").status_code == 422


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    if PATH is None:
        pytest.skip("Chromium is not installed")
    with browser() as one:
        yield one


def test_curves_move_alarms_appear_and_rollouts_are_found_without_a_reload(tab: Browser, tmp_path: Path) -> None:
    with owning(tmp_path, print, wait=False), serving(tmp_path) as url:
        tab.open(url)
        tab.wait("document.querySelector('header')?.innerText.includes('running')")
        tab.run("window.stays = true")
        play(tmp_path, 1, "first", HOSTILE)
        record(tmp_path, 1)
        reward = "document.querySelector('svg[aria-label^=\"Reward,\"]')?.ariaLabel"
        tab.wait(f"{reward}?.includes('step 1: mean 0.1')")
        for step in (2, 3):
            play(tmp_path, step, "first", HOSTILE)
            record(tmp_path, step)
        tab.wait(f"{reward}.includes('step 3: mean 0.3')")
        path = "document.querySelector('svg[aria-label^=\"Reward,\"] path').getAttribute('d')"
        assert tab.run(f"{path}.match(/L/g).length") == 2
        assert "Alarms" not in tab.text()
        play(tmp_path, 4, "first", HOSTILE)
        record(tmp_path, 4, **{"rollout/truncated": 0.5})
        tab.wait("document.querySelector('.alarms .now')?.innerText.includes('raise rollout.max_tokens')")
        assert tab.run("window.stays")

        tab.wait("document.querySelector('input[type=number]').value == 4")  # the newest step is shown
        tab.wait("document.querySelectorAll('.prompt').length == 2")
        tab.type("input[type=search]", "first")
        assert tab.run("document.querySelectorAll('.prompt').length") == 1
        assert "2 of 4 rollouts" in tab.text()
        tab.type("input[placeholder=from]", "1")
        assert "1 of 4 rollouts" in tab.text()
        tab.type("input[type=search]", "")
        tab.type("input[placeholder=from]", "")
        tab.run("document.querySelectorAll('.prompt')[1].click()")
        tab.wait("document.querySelectorAll('article').length == 2")
        said = tab.run("document.querySelector('article').innerText")
        assert "<script>alert(1)</script></style>\ufffd[31m" in said
        shown = "[...document.querySelectorAll('article pre')].map(one => one.textContent).join('')"
        assert tab.run(f"{shown}.length") > 1 << 20
        assert tab.run("[document.scripts.length, document.styleSheets.length]") == [2, 1]
        assert tab.events == []


def test_a_prompt_opens_while_a_step_loads_and_what_is_refused_is_said(tab: Browser, tmp_path: Path) -> None:
    for step in (1, 2):
        play(tmp_path, step, f"of {step}")
        record(tmp_path, step)
    with serving(tmp_path) as url:
        tab.open(url)
        tab.wait("document.querySelector('input[type=number]').value == 2")
        tab.wait("document.querySelector('.prompt') !== null")
        tab.run("""opened = new Promise(resolve => { open_gate = resolve; });
            real = fetch;
            fetch = (path, more) => path.includes("group=") ? real(path, more) : opened.then(() => real(path, more))""")
        tab.type("input[type=number]", "1")
        tab.click(".prompt")
        tab.wait("document.querySelectorAll('article').length == 2")
        tab.run("open_gate()")
        tab.run("ask('rollouts?run=0&name=step_000001').then(() => 1)")  # as long as the step's answer
        assert "of 20" in tab.run("document.querySelector('article').innerText")
        assert tab.run("document.querySelector('input[type=number]').value") == "2"
        (tmp_path / "rollouts/step_000001.jsonl").write_text("{}\n")
        tab.type("input[type=number]", "1")
        tab.wait("document.querySelector('#link').innerText.includes('bring a damaged file back')")
        (tmp_path / "config.yaml").write_text("a: [")
        tab.open(f"{url}/?")
        tab.wait("document.body.innerText.includes('ParserError')")
        tab.events.clear()  # the refused requests


def test_a_token_behind_the_hash_opens_the_page_and_without_it_the_page_says_so(tab: Browser, tmp_path: Path) -> None:
    record(tmp_path, 1)
    with serving(tmp_path, token="a secret token") as url:
        tab.open(f"{url}/?")
        tab.wait("document.body.innerText.includes('open the URL that ends in #token=')")
        tab.open(f"{url}/#token=a%20secret%20token")
        tab.wait("document.querySelector('header')?.innerText.includes('0.100')")
        tab.events.clear()  # the refused requests


def test_a_chart_is_zoomed_smoothed_and_read_by_keys(tab: Browser, tmp_path: Path) -> None:
    for step in range(1, 2001):
        record(tmp_path, step, **{"rollout/tokens": 100})
    with serving(tmp_path) as url:
        tab.open(url)
        tab.wait("document.querySelector('svg[aria-label^=\"Reward,\"]')?.ariaLabel")
        tab.run("chart = document.querySelector('svg[aria-label^=\"Reward,\"]'); chart.focus()")
        press = "chart.dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
        tab.run(press % "ArrowLeft")
        assert "mean of steps" in tab.run("document.querySelector('.tip').innerText")
        tab.run("zoom([100, 140])")
        tab.run(press % "Home")
        assert "step 100\nmean 10" in tab.run("document.querySelector('.tip').innerText")
        tab.run(press % "Escape")
        assert tab.run("view.range") is None
        tab.type("input[type=range]", "0.9")
        assert tab.run("chart.querySelectorAll('path.raw').length") == 1
        tab.type("select", "tokens")
        assert "200K" in tab.run("chart.textContent")
        size = tab.run("(one => [one.width, one.toDataURL().length])(picture(chart.closest('figure'), 'Reward'))")
        assert size[0] > 400
        assert size[1] > 4000
