"""Messages are strict: what is not exactly right is refused, on either side."""

import base64
import json
import sys
from pathlib import Path

import pydantic
import pytest

import hocket
from hocket import protocol
from hocket.errors import OUTCOMES, ErrorOutcome, ServerError
from hocket.protocol import Completion, GenerateRequest, ReloadRequest, SamplingParams, SessionRequest, SleepRequest
from hocket.sync.share_gpu import GONE
from hocket.sync.transports import NO_WAY

NUMBERS = {"token_ids": [4, 2], "logprobs": [-0.5, -0.1]}
COMPLETION = {**NUMBERS, "text": "a", "finish_reason": "stop", "versions": [[3, 0, 2]]}
BASE64 = {"token_ids": "BAAAAAIAAAA=", "logprobs": "AAAAv83MzL0="}  # 4, 2; −0.5, −0.1 as float32
WRONG_NUMBERS = ([float("nan"), 0.0], [-0.5], "", "AAAAvw==", "AAAAv83Mvw==", "?", "AADAfwAAwH8=")
"""Not finite, one, none, one, not of four bytes each, no base64, not finite."""


@pytest.mark.parametrize(
    "change", [{"finish_reason": "eos"}, {"extra": 1}, *({"logprobs": it} for it in WRONG_NUMBERS)]
)
def test_a_malformed_completion_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Completion.model_validate_json(json.dumps({**COMPLETION, **change}))


GROUP: dict[str, object] = {"name": "g", "host": "::1", "port": 5, "device": None, "timeout_s": 1.0}
RELOAD: dict[str, object] = {"version": 1, "source": {"kind": "disk", "name": "v" * 512}}
BAD: list[tuple[type[protocol.Strict], dict[str, object], dict[str, list[object]]]] = [
    (GenerateRequest, {"prompts": [[5]]}, {"prompts": [[], [[-1]]], "n": [0], "stream": [1], "logprobs": [5]}),
    (SamplingParams, {}, {"temperature": [-0.1, 2.1], "top_p": [0.0, 1.1], "seed": [-1, 2**63], "max_tokens": [0]}),
    (SamplingParams, {}, {"top_k": [-2], "stop": [[""]], "stop_token_ids": [[-1]]}),
    (SleepRequest, {}, {"level": [0, 3], "in_flight": ["wait"], "mode": ["abort"]}),
    (ReloadRequest, RELOAD, {"version": [True], "in_flight": ["forget"]}),
    (ReloadRequest, RELOAD, {"source": [{"kind": "disk", **name} for name in ({}, {"name": ""}, {"name": "v" * 513})]}),
    (protocol.CollectiveSource, {"group": GROUP, "turn": 1, "buckets": [[]]}, {"buckets": [[]], "turn": [0]}),
    (protocol.GroupAddress, GROUP, {"port": [0, 65536], "timeout_s": [0.0]}),
]


@pytest.mark.parametrize(("message", "good", "wrong"), BAD)
def test_what_is_out_of_bounds_is_refused(
    message: type[protocol.Strict], good: dict[str, object], wrong: dict[str, list[object]]
) -> None:
    message.model_validate_json(json.dumps(good))
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(pydantic.ValidationError):
            message.model_validate_json(json.dumps(good | {name: value}))


MANY = 100_000
WRONG: list[tuple[type[protocol.Strict], str]] = [
    (GenerateRequest, '{"prompts": [%s]}'),
    (GenerateRequest, '{"prompts": [[%s]]}'),
    (GenerateRequest, '{"prompts": ["a"], "seeds": [%s]}'),
    (GenerateRequest, '{"prompts": ["a"], "seeds": [[%s]]}'),
    (GenerateRequest, '{"prompts": ["a"], "tools": {"parser": "x", "tools": [%s]}}'),
    (SessionRequest, '{"sampling": {"stop": [%s]}}'),
    (SessionRequest, '{"sampling": {"stop_token_ids": [%s]}}'),
    (ReloadRequest, '{"source": {"kind": "nccl", "buckets": [%s]}}'),
    (ReloadRequest, '{"source": {"kind": "nccl", "buckets": [[%s]]}}'),
    (ReloadRequest, '{"source": {"kind": "nccl", "buckets": [[{"shape": [%s]}]]}}'),
    (ReloadRequest, '{"source": {"kind": "nccl", "adapter": {"target_modules": [%s]}}}'),
]


@pytest.mark.parametrize(("message", "body"), WRONG)
def test_of_a_list_of_wrong_things_only_the_first_is_explained(message: type[protocol.Strict], body: str) -> None:
    # pydantic takes a kilobyte for each error: all of them would be gigabytes, for one body of a few megabytes.
    with pytest.raises(pydantic.ValidationError) as caught:
        message.model_validate_json(body % ",".join(["-1.5"] * MANY))
    assert caught.value.error_count() < 10


def test_numbers_of_a_packed_stream_are_base64_of_four_bytes_each() -> None:
    sent = Completion.model_validate_json(json.dumps(COMPLETION)).model_dump_json(context=True)
    assert json.loads(sent).items() >= BASE64.items()
    read = Completion.model_validate_json(sent)
    rounded = pytest.approx(-0.1, rel=2**-24)  # once, to float32
    assert (list(read.token_ids), list(read.logprobs)) == ([4, 2], [-0.5, rounded])


def test_a_machine_of_the_other_byte_order_swaps_what_it_sends_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Completion.model_validate_json(json.dumps(COMPLETION))
    plain = json.loads(sent.model_dump_json(context=True))
    monkeypatch.setattr("sys.byteorder", "big" if sys.byteorder == "little" else "little")
    swapped = json.loads(sent.model_dump_json(context=True))
    first, second = (base64.b64decode(one["token_ids"])[:4] for one in (plain, swapped))
    assert first == second[::-1]
    assert list(Completion.model_validate_json(json.dumps({**COMPLETION, **swapped})).token_ids) == [4, 2]


def test_every_code_that_has_a_meaning_is_one_that_a_server_or_client_gives() -> None:
    package = Path(hocket.__file__).parent
    rooms = ("server", "client", "extras")
    if not (package / "extras").exists():  # run.py test --core
        pytest.skip("extras give some of the codes")
    sources = [path.read_text(encoding="utf-8") for room in rooms for path in package.glob(f"{room}/**/*.py")]
    for code in {*OUTCOMES, *protocol.CURABLE, *GONE, *NO_WAY}:
        assert any(f'"{code}"' in source for source in sources), code


@pytest.mark.parametrize(
    ("code", "status", "outcome"),
    [
        ("context_too_long", 422, ErrorOutcome.REFUSED),
        ("unauthorized", 401, ErrorOutcome.REFUSED),
        ("not_finite", 500, ErrorOutcome.REFUSED),
        ("asleep", 503, ErrorOutcome.AGAIN),
        ("aborted", None, ErrorOutcome.AGAIN),  # within a stream
        ("body_timeout", 408, ErrorOutcome.AGAIN),
        ("other_session", 409, ErrorOutcome.LOST),
        ("engine_dead", None, ErrorOutcome.LOST),
        ("protocol", 404, ErrorOutcome.LOST),
        ("of_a_plugin", 422, ErrorOutcome.REFUSED),
        ("of_a_plugin", 500, ErrorOutcome.LOST),
        ("of_a_plugin", None, ErrorOutcome.REFUSED),
    ],
)
def test_an_error_has_one_of_three_outcomes_for_a_client(code: str, status: int | None, outcome: ErrorOutcome) -> None:
    assert ServerError("it failed", code=code, status=status).outcome is outcome
