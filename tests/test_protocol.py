"""Messages are strict: what is not exactly right is refused, on either side."""

import json

import pydantic
import pytest

from hocket.protocol import Completion, GenerateRequest, ReloadRequest, SessionRequest, Strict, WakeRequest

COMPLETION = {
    "token_ids": [4, 2],
    "logprobs": [-0.5, -0.1],
    "text": "a",
    "finish_reason": "stop",
    "versions": [[3, 0, 2]],
}


BASE64 = {"token_ids": "BAAAAAIAAAA=", "logprobs": "AAAAv83MzL0="}  # 4, 2; −0.5, −0.1 as float32
WRONG_NUMBERS = ([float("nan"), 0.0], [-0.5], "", "AAAAvw==", "AAAAv83Mvw==", "?", "AADAfwAAwH8=")
"""Not finite, one, none, one, not of four bytes each, no base64, not finite."""


@pytest.mark.parametrize(
    "change", [{"finish_reason": "eos"}, {"extra": 1}, *({"logprobs": it} for it in WRONG_NUMBERS)]
)
def test_a_malformed_completion_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Completion.model_validate_json(json.dumps({**COMPLETION, **change}))


def test_requests_in_flight_go_on_by_default() -> None:
    assert ReloadRequest.model_validate({"version": 1, "source": {"kind": "disk", "name": "v1"}}).in_flight == "keep"


MANY = 100_000
WRONG: list[tuple[type[Strict], str]] = [
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
    (WakeRequest, '{"tags": [%s]}'),
]


@pytest.mark.parametrize(("message", "body"), WRONG)
def test_of_a_list_of_wrong_things_only_the_first_is_explained(message: type[Strict], body: str) -> None:
    # pydantic takes a kilobyte for each error: all of them would be gigabytes, for one body of a few megabytes.
    with pytest.raises(pydantic.ValidationError) as caught:
        message.model_validate_json(body % ",".join(["-1.5"] * MANY))
    assert caught.value.error_count() < 10


def test_numbers_of_a_packed_stream_are_base64_of_four_bytes_each() -> None:
    sent = Completion.model_validate_json(json.dumps(COMPLETION)).model_dump_json(context=True)
    assert json.loads(sent).items() >= BASE64.items()
    read = Completion.model_validate_json(sent)
    assert (list(read.token_ids), list(read.logprobs)) == ([4, 2], [-0.5, pytest.approx(-0.1)])
