"""Messages are strict: what is not exactly right is refused, on either side."""

import json

import pydantic
import pytest

from hocket.protocol import Completion, ReloadRequest

COMPLETION = {
    "token_ids": [4, 2],
    "logprobs": [-0.5, -0.1],
    "text": "a",
    "finish_reason": "stop",
    "versions": [[3, 0, 2]],
}


@pytest.mark.parametrize("change", [{"finish_reason": "eos"}, {"logprobs": [float("nan"), 0.0]}, {"extra": 1}])
def test_a_malformed_completion_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Completion.model_validate_json(json.dumps({**COMPLETION, **change}))


def test_requests_in_flight_go_on_by_default() -> None:
    assert ReloadRequest.model_validate({"version": 1, "source": {"kind": "disk", "name": "v1"}}).in_flight == "keep"
