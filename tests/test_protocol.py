"""Messages are strict: what is not exactly right is refused, on either side."""

import json

import pydantic
import pytest

from hocket.protocol import (
    CollectiveSource,
    Completion,
    DiskSource,
    GenerateResponse,
    Manifest,
    ReloadRequest,
    StreamEnd,
    StreamLine,
)

COMPLETION = {
    "token_ids": [4, 2],
    "logprobs": [-0.5, -0.1],
    "text": "a",
    "finish_reason": "stop",
    "versions": [[3, 0, 2]],
}


def test_an_answer_survives_the_wire() -> None:
    answer = GenerateResponse.model_validate_json(
        json.dumps({"version": 3, "model": "tiny", "completions": [[COMPLETION]]})
    )
    assert answer.completions[0][0].versions == ((3, 0, 2),)
    assert GenerateResponse.model_validate_json(answer.model_dump_json()) == answer


@pytest.mark.parametrize("change", [{"finish_reason": "eos"}, {"logprobs": [float("nan"), 0.0]}, {"extra": 1}])
def test_a_malformed_completion_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Completion.model_validate_json(json.dumps({**COMPLETION, **change}))


def test_the_last_line_of_a_stream_is_told_from_the_others() -> None:
    line = StreamLine.model_validate_json(json.dumps({"prompt": 0, "index": 1, "completion": COMPLETION}))
    end = StreamEnd.model_validate({"version": 3, "model": "tiny"})
    assert end.done is True
    with pytest.raises(pydantic.ValidationError):
        StreamEnd.model_validate_json(line.model_dump_json())
    with pytest.raises(pydantic.ValidationError):
        StreamLine.model_validate_json(end.model_dump_json())


def test_a_manifest_names_every_tensor_completely() -> None:
    tensor = {"dtype": "float32", "shape": [2, 3], "checksum": "00"}
    body = {"version": 1, "tensors": {"a": tensor}, "checksum": "11"}
    assert Manifest.model_validate(body).tensors["a"].shape == [2, 3]
    with pytest.raises(pydantic.ValidationError):
        Manifest.model_validate({**body, "tensors": {"a": {"dtype": "float32", "shape": [2, 3]}}})


def test_a_source_is_told_by_its_kind_and_requests_in_flight_go_on_by_default() -> None:
    tensor = {"name": "a", "dtype": "float32", "shape": [2]}
    nccl = {"kind": "nccl", "session": "g", "turn": 1, "buckets": [[tensor]]}
    collective = ReloadRequest.model_validate({"version": 1, "source": nccl})
    assert isinstance(collective.source, CollectiveSource)
    assert collective.source.buckets[0][0].shape == [2]
    disk = ReloadRequest.model_validate({"version": 1, "source": {"kind": "disk", "name": "v1"}})
    assert isinstance(disk.source, DiskSource)
    assert (disk.in_flight, collective.in_flight) == ("keep", "keep")
