"""The sampler without an engine: tokenizers and threads, and what is refused."""

import threading
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hocket.config import load
from hocket.server.errors import ApiError
from hocket.server.sampler import Sampler

MODEL = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-sort"


async def test_no_tokenizer_is_used_by_two_threads(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(kit.make_tokenizer())
    kit.make_tokenizer().save_pretrained(tmp_path)
    llm = types.SimpleNamespace(model_config=types.SimpleNamespace(get_vocab_size=lambda: 96, max_model_len=512))
    sampler = Sampler(llm, load(None, [f"model.path={tmp_path}"]), broken=lambda: None)
    threads: dict[int, set[int]] = defaultdict(set)

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            threads[id(self)].add(threading.get_ident())
            return original(self, *args, **kwargs)

        return call

    for name in ("__call__", "decode", "apply_chat_template"):
        monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    _, jobs = await sampler.read(b'{"prompts": ["ab", [{"role": "user", "content": "c"}]]}')
    output = types.SimpleNamespace(
        token_ids=jobs[0].token_ids,
        logprobs=types.SimpleNamespace(logprobs=[-1.0]),
        finish_reason="length",
        weight_versions=None,
    )
    assert sampler._message(jobs[0], output)["text"] == "ab"
    assert len(set.union(*threads.values())) == 2, "prompts are read in a thread of their own"
    assert all(len(seen) == 1 for seen in threads.values())


async def test_log_probs_that_are_no_numbers_are_the_weights_fault_and_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = types.SimpleNamespace(model_config=types.SimpleNamespace(get_vocab_size=lambda: 96, max_model_len=512))
    sampler = Sampler(llm, load(None, [f"model.path={MODEL}"]), broken=lambda: None)
    output = types.SimpleNamespace(
        token_ids=[1, 2], logprobs=types.SimpleNamespace(logprobs=[-1.0, float("nan")]), finish_reason="length"
    )

    async def complete(*args: object) -> Any:
        assert sampler.in_flight == 1
        return output

    monkeypatch.setattr("hocket.server.vllm_api.complete", complete)
    _, jobs = await sampler.read(b'{"prompts": [[5]]}')
    with pytest.raises(ApiError, match="log-probs that are not finite") as refused:
        await sampler.complete(jobs[0])
    assert (refused.value.status, sampler.in_flight) == (500, 0)
