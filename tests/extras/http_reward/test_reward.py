from typing import Any

import pytest

from hocket.errors import ConfigError
from hocket.extras.http_reward.reward import MAX_SHOWN, retry_after
from hocket.rewards import runners
from support.episodes import Scorers, Scores
from support.service import Answer, Saying


async def test_a_group_is_one_request_with_the_documented_fields_and_each_sample_gets_its_own_result(
    scores_of: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["a", "b", "c", "half \ud83d", "e"]
    said = [1.5, {"good": 0.5, "short": 0.25}, {"error": "no such word"}, "2", {"total": 2, "parts": {}, "note": None}]
    monkeypatch.setenv("MY_KEY", " hush-hush\n")
    async with Saying((200, {}, {"scores": said})).open() as service:
        functions = {"http": {"url": f"{service.url}/score", "key_env": "MY_KEY"}}
        one, parts, error, text, told = await scores_of(functions, *texts)
    assert (one.total, parts.total, told.total, told.note) == (1.5, 0.75, 2, "")
    assert dict(parts.parts) == {"http": 0.75, "http/good": 0.5, "http/short": 0.25}
    assert (error.error, text.error) == ("http: no such word", "http: returned str instead of a number")
    (body,) = service.bodies
    assert service.headers["authorization"] == "Bearer hush-hush"
    assert [sample["completion"] for sample in body["samples"]] == texts
    assert body["samples"][0] == {
        "id": "a",
        "prompt": "Sort: dbca",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sort: dbca"}],
        "opening": "",
        "completion": "a",
        "answer": "abcd",
        "meta": {"level": 2},
        "finish_reason": "stop",
        "token_ids": [10, 11, 12],
    }


async def test_a_service_for_openrlhf_is_asked_and_answers_in_its_format(scores_of: Scores) -> None:
    async with Saying((200, {}, {"rewards": [1.0, -1.0], "extra_logs": {}})).open() as service:
        scores = await scores_of({"http": {"url": service.url, "format": "openrlhf"}}, "ab", "ba")
    queries = ["Sort: dbcaab", "Sort: dbcaba"]
    assert service.bodies == [{"query": queries, "prompts": ["Sort: dbca"] * 2, "labels": ["abcd"] * 2}]
    assert [score.total for score in scores] == [1.0, -1.0]


@pytest.mark.parametrize(
    ("answers", "error", "requests"),
    [
        ([(503, {"retry-after": "0"}, "busy"), (429, {"retry-after": "0"}, "busy"), (200, {}, {"scores": [1]})], "", 3),
        ([None, (200, {}, {"scores": [1]})], "", 2),
        ([None] * 2, "RetryError: URL gave no answer within 1 s", 2),
        ([(503, {}, "busy")] * 2, "RefusedError: URL answered 503: busy", 2),
        ([(429, {"retry-after": "301"}, "busy")], "RefusedError: URL answered 429: busy", 1),
        ([(500, {}, "KeyError: " + "x" * 999)], "ValueError: URL answered 500: KeyError: " + "x" * 190 + " (", 1),
        ([(302, {"location": "http://other"}, "")], "No redirect is followed: name http://other in its place", 1),
        ([(200, {}, {"scores": [1, 2]})], 'answered 200: {"scores": [1, 2]} It must answer {"scores": a list of 1}', 1),
        ([(200, {}, "<html>")], "answered 200: <html> It must answer", 1),
    ],
)
async def test_a_service_is_asked_again_only_where_that_can_help_and_errors_say_what_it_said(
    scores_of: Scores, monkeypatch: pytest.MonkeyPatch, answers: list[Answer | None], error: str, requests: int
) -> None:
    monkeypatch.setattr(runners, "BACK_OFF_S", 0.01)
    async with Saying(*answers).open() as service:
        timeout_s = 1 if None in answers else 60
        functions = {"http": {"url": service.url, "timeout_s": timeout_s, "retries": len(answers) - 1 or 1}}
        (score,) = await scores_of(functions, "abcd", timeout_s=0.01)
    assert len(service.arrivals) == requests
    assert error.replace("URL", service.url) in (score.error or "")
    assert (score.total == 1) == (not error)


@pytest.mark.parametrize(
    ("headers", "body", "error"),
    [
        ({"content-encoding": "gzip"}, "", "URL packed its answer: it must heed the header Accept-Encoding: identity"),
        ({}, {"scores": [1], "more": "x" * 1000}, "URL answered more than 0 MiB, the limit"),
        ({"content-length": "2000"}, "x" * 1001, "URL answered more than 0 MiB, the limit"),  # the rest never comes
        ({}, {"scores": [1]}, None),
    ],
)
async def test_an_answer_is_read_up_to_a_limit_and_never_unpacked(
    scores_of: Scores, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], body: Any, error: str | None
) -> None:
    monkeypatch.setattr("hocket.extras.http_reward.reward.MAX_ANSWER_BYTES", 1000)
    async with Saying((200, headers, body)).open() as service:
        (score,) = await scores_of({"http": {"url": service.url}}, "abcd")
    assert service.headers["accept-encoding"] == "identity"
    assert len(service.arrivals) == 1
    assert score.error == (error and f"http: {error.replace('URL', service.url)}")


async def test_a_key_that_a_service_echoes_is_in_nothing_that_is_kept(
    scores_of: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-hush-hush")
    echo = "x" * (MAX_SHOWN - 6) + "sk-hush-hush"  # cut in its middle
    noted = {"scores": [{"total": 1, "parts": {}, "note": "sk-hush-hush"}]}
    for status, answer in [(401, echo), (200, echo), (200, noted)]:
        async with Saying((status, {}, answer)).open() as service:
            (score,) = await scores_of({"http": {"url": service.url, "key_env": "MY_KEY"}}, "abcd")
        assert "sk-hush" not in f"{score.error} {score.note}"
        assert "[secr" in f"{score.error} {score.note}"


async def test_a_service_that_nothing_listens_for_is_named(scores_of: Scores) -> None:
    async with Saying(None).open() as service:
        pass
    (score,) = await scores_of({"http": {"url": service.url, "retries": 0}}, "abcd")
    assert f"RefusedError: {service.url} can't be reached: ConnectError" in str(score.error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://example.org/score"}, r"set hosts: \[example.org\]"),
        ({"url": "http://127.0.0.1@example.org/"}, "http.url: must hold no user, password or key, as files keep it"),
        ({"url": "http://:sk-hush@localhost/"}, "must hold no user, password or key, as files keep it: use key_env"),
        ({"url": "http://localhost/?n=1&api_key=sk-hush"}, "must hold no user, password or key"),
        ({"url": "http://localhost:1", "key_env": "SPLIT_KEY"}, "SPLIT_KEY needs at least 8 plain ASCII characters"),
        ({"url": "file:///etc/passwd"}, "http.url: must begin with http:// or https:// and a host, got 'file:///etc"),
        ({"url": "http:///score"}, "http.url: must begin with http:// or https:// and a host"),
        ({"url": "http://localhost:1", "key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
        ({"url": "http://localhost:1", "format": "trl"}, "'hocket' or 'openrlhf'"),
    ],
)
def test_options_that_can_not_work_are_refused(
    scorer_of: Scorers, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("SPLIT_KEY", "sk-hush\nsk-hush")
    with pytest.raises(ConfigError, match=message) as refused:
        scorer_of({"http": options})
    assert "sk-hush" not in str(refused.value)
    for hosts in ("example.org", ["gpu7", "example.org"]):
        scorer_of({"http": {"url": "https://example.org/score", "hosts": hosts}})


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after({"retry-after": "7"}) == 7
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert retry_after({"retry-after": "soon"}) is retry_after({}) is None
