"""Where vLLM ends a turn by a stop string, and the text that it makes, without an engine."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hocket.protocol import SamplingParams
from hocket.server import vllm_requests
from support.engines import vllm_text
from support.tokenizers import SPECIAL, pieces_of, random_ids, random_text, with_byte_fallback, with_merged_bytes

KINDS = {"merged bytes": with_merged_bytes(), "byte fallback": with_byte_fallback()}
START, END = SPECIAL


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


def written(
    tokenizer: Any, prompt: Sequence[int], token_ids: Sequence[int], *stop: str, begun: int | None = 0, **more: Any
) -> tuple[int | None, str]:
    """Returns how many tokens were sampled until a stop string, or None, and the text.

    begun: None as vLLM's own routes ask.
    """
    params = vllm_requests.sampling_params(SamplingParams(max_tokens=64, stop=stop), 1, begun or 0)
    params.extra_args = params.extra_args if begun is not None else None
    for name, value in more.items():
        setattr(params, name, value)
    text = vllm_text(tokenizer, prompt, params)
    for number, token in enumerate(token_ids, start=1):
        if text.update([token], False) is not None:
            assert text.num_output_tokens() == number
            return number, text.get_next_output_text(True, False)
    return None, text.get_next_output_text(True, False)


@pytest.mark.parametrize("begun", [0, None])
def test_a_prompt_that_ends_within_a_character_is_neither_told_again_nor_stops_the_turn(
    tokenizer: Any, begun: int | None
) -> None:
    ids = pieces_of(tokenizer, "STOP 🤖 and")
    decoded = [tokenizer.decode(ids[:count]) for count in range(len(ids))]
    cuts = [count for count, text in enumerate(decoded) if text.endswith("\ufffd")]
    assert len(cuts) == 3
    for cut in cuts:
        assert written(tokenizer, ids[:cut], ids[cut:], "ZZZ", "STOP", begun=begun) == (None, "🤖 and")


@pytest.mark.parametrize("end", ["", START])
def test_a_broken_character_in_a_prompt_is_not_told_again(tokenizer: Any, end: str) -> None:
    prompt = pieces_of(tokenizer, f"STOP \ufffd{end}")
    assert written(tokenizer, prompt, pieces_of(tokenizer, "the end"), "STOP", begun=None)[1].strip() == "the end"


def test_vllms_routes_keep_the_space_between_prompt_and_answer() -> None:
    tokenizer = KINDS["byte fallback"]
    prompt, answer = pieces_of(tokenizer, "the"), pieces_of(tokenizer, " the end")
    assert written(tokenizer, prompt, answer, "STOP", begun=None) == (None, " the end")
    assert written(tokenizer, prompt, answer, "STOP") == (None, "the end")  # as the text of its tokens alone


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        (f"the{START}b", START, "the"),  # a special token alone
        (f"the{START}b", f"{START}b", "the"),
        (f"the END{START}b", f"ND{START}", "the E"),  # which begins within a token
        (f"the{START}{END}b", f"{START}{END}", "the"),
        (f"🤖{START}b", START, "🤖"),
        (f"a{END}a{START}b", START, "aa"),  # another one is left out of the text, as ever
        (f"a{START}</x>b", "</x>", "a"),
    ],
)
def test_stop_strings_see_special_tokens_that_the_text_leaves_out(
    tokenizer: Any, text: str, stop: str, shown: str
) -> None:
    ids = pieces_of(tokenizer, f"{text}aa")
    count, got = written(tokenizer, [], ids, "ZZZ", stop)
    assert got == shown
    assert stop in tokenizer.decode(ids[:count])
    assert stop not in tokenizer.decode(ids[: count - 1])
    assert written(tokenizer, [], ids, stop, begun=None) == (count, shown), "on vLLM's routes, too"
    assert written(tokenizer, [], ids, stop, include_stop_str_in_output=True)[0] == count
    at_once = vllm_text(tokenizer, [], vllm_requests.sampling_params(SamplingParams(stop=(stop,)), 1))
    assert at_once.update(ids, False) == stop, "also where tokens come several at a time"
    assert (at_once.num_output_tokens(), at_once.get_next_output_text(True, False)) == (count, shown)


def test_a_stop_string_that_only_the_name_of_a_special_token_has_ends_nothing(tokenizer: Any) -> None:
    assert written(tokenizer, [], pieces_of(tokenizer, f"the{START}b"), "start") == (None, "theb")


def test_the_token_that_ended_a_turn_completes_no_stop_string() -> None:
    tokenizer = KINDS["merged bytes"]
    text = vllm_text(tokenizer, [], vllm_requests.sampling_params(SamplingParams(stop=(END,)), 1))
    assert text.update(pieces_of(tokenizer, f"the{END}"), True) is None
    assert text.get_next_output_text(True, False) == "the"


def test_a_stop_string_may_begin_in_the_turns_first_part_and_not_in_the_prompt(tokenizer: Any) -> None:
    prompt, first, later = (pieces_of(tokenizer, text) for text in ("a", "the ST", "OPb"))
    assert written(tokenizer, prompt + first, later, "STOP", begun=len(first)) == (2, "the ")
    assert written(tokenizer, prompt + first, later, "STOP", begun=0) == (None, "OPb")
    assert written(tokenizer, prompt + first, later, "STOP", begun=None) == (None, "OPb")
    more = pieces_of(tokenizer, "a")
    assert written(tokenizer, first + later, more, "STOP", begun=len(first + later)) == (None, "the STOPba")


@pytest.mark.parametrize("begun", [-1, 10**9, "x", None])
def test_a_count_that_a_client_made_up_has_no_effect(begun: Any) -> None:
    tokenizer = KINDS["merged bytes"]
    params = vllm_requests.sampling_params(SamplingParams(stop=("x",)), 1, begun)
    text = vllm_text(tokenizer, pieces_of(tokenizer, "the"), params)
    text.update(pieces_of(tokenizer, " the"), False)
    assert text.get_next_output_text(True, False) == " the"


def test_random_turns_end_where_their_whole_text_has_a_stop_string_however_they_are_cut(tokenizer: Any) -> None:
    rng = random.Random(1)
    ended = 0
    for _ in range(400):
        ids = random_ids(tokenizer, rng)
        stops = [rng.choice((*SPECIAL, random_text(rng, 2), f"a{START}", f"{END}b", "OP")) for _ in range(2)]
        # A reference that decodes everything again after each token.
        count, at, cut_text = None, 0, ""
        for number in range(1, len(ids) + 1):
            shown = tokenizer.decode(ids[:number], skip_special_tokens=True)
            plain = [shown.find(stop) for stop in stops if stop in shown]
            special = [stop for stop in stops if START in stop or END in stop]
            if plain or any(stop in tokenizer.decode(ids[:number]) for stop in special):
                count, at, cut_text = number, min(plain, default=-1), shown
                break
        prompt = pieces_of(tokenizer, "the STOP of a🤖END")
        got = written(tokenizer, prompt, ids, *stops)
        assert got[0] == count
        if count is not None and at >= 0:
            assert got[1] == cut_text[: len(got[1])]
            assert any(cut_text[len(got[1]) :].startswith(stop) for stop in stops)
        cut = rng.randrange(count or len(ids))
        later = written(tokenizer, prompt + ids[:cut], ids[cut:], *stops, begun=cut)
        assert later == (count and count - cut, got[1])
        ended += count is not None
    assert 100 < ended < 400
