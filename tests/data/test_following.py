"""What an environment says, as tokens of its own: what a whole rendering has there, without what that would spoil."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hocket.config import DataConfig
from hocket.data import Renderer
from hocket.data.prompts import TooLongError

CHATML = (
    "{% for m in messages %}{{ '<im_start>' + m.role + '\n' + m.content + '<im_end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im_start>assistant\n' }}{% endif %}"
)
THINKING = (  # takes the thoughts out of earlier turns, as Qwen3's does
    "{% for m in messages %}{% set c = m.content.split('/think')[-1] if not loop.last else m.content %}"
    "{{ '<im_start>' + m.role + '\n' + c + '<im_end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im_start>assistant\n' }}{% endif %}"
)
STRIPPING = (  # trims contents, and ends the last turn otherwise than those before
    "{% for m in messages %}{{ m.role + ':' + m.content | trim }}"
    "{% if not loop.last or add_generation_prompt %}{{ '<im_end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{{ 'assistant: ' }}"


@pytest.fixture(scope="module")
def merging() -> Any:
    """A tokenizer with merges: "ab" is one token, although the model may as well write "a" and "b"."""
    characters = ["<eos>", "<im_start>", "<im_end>", *map(chr, range(32, 127)), "\n"]
    vocabulary = {token: index for index, token in enumerate([*characters, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="\n", behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", additional_special_tokens=["<im_start>", "<im_end>"]
    )


def renderer(tokenizer: Any, template: str | None) -> Renderer:
    tokenizer.chat_template = template
    return Renderer(DataConfig(chat_template=template is not None), tokenizer)


USER = {"role": "user", "content": "go"}
HINT = [{"role": "user", "content": "cab"}, {"role": "user", "content": "b"}]


@pytest.mark.parametrize("template", [CHATML, STRIPPING])
def test_it_is_what_a_whole_rendering_has_at_that_place(merging: Any, template: str) -> None:
    rendering = renderer(merging, template)
    end = merging.convert_tokens_to_ids("<im_end>")
    prompt, answer = rendering.encode([rendering.render([USER]), "xy"])
    (whole,) = rendering.encode([rendering.render([USER, {"role": "assistant", "content": "xy"}, *HINT])])
    assert [*prompt, *answer, end, *rendering.following(HINT, ended=end)] == whole
    assert [*prompt, *answer, *rendering.following(HINT, ended=None)] == whole  # cut off: the end of turn is added
    eos = merging.eos_token_id  # another end than the template's is kept, and the template's follows it
    assert rendering.following(HINT, ended=eos) == rendering.following(HINT, ended=None)


def test_what_the_model_wrote_is_not_encoded_again(merging: Any) -> None:
    rendering = renderer(merging, CHATML)
    end = merging.convert_tokens_to_ids("<im_end>")
    a, b, ab = merging.convert_tokens_to_ids(["a", "b", "ab"])
    (prompt,) = rendering.encode([rendering.render([USER])])
    sampled = [a, b, end]  # the text "ab" in two tokens
    ours = [*prompt, *sampled, *rendering.following(HINT, ended=end)]
    text = merging.decode(sampled, skip_special_tokens=True).replace(" ", "")
    (whole,) = rendering.encode([rendering.render([USER, {"role": "assistant", "content": text}, *HINT])])
    assert ours[len(prompt) : len(prompt) + 3] == sampled
    assert whole[len(prompt) : len(prompt) + 2] == [ab, end]  # the drift: tokens that the model has never sampled
    assert len(whole) == len(ours) - 1
    assert ours[len(prompt) + 3 :] == whole[len(prompt) + 2 :]


def test_thoughts_that_the_template_would_take_out_stay_where_they_were_sampled(merging: Any) -> None:
    rendering = renderer(merging, THINKING)
    end = merging.convert_tokens_to_ids("<im_end>")
    prompt, sampled = rendering.encode([rendering.render([USER]), "hm/thinkxy"])
    ours = [*prompt, *sampled, end, *rendering.following(HINT, ended=end)]
    assert "hm/thinkxy" in merging.decode(ours).replace(" ", "")
    whole = rendering.render([USER, {"role": "assistant", "content": "hm/thinkxy"}, *HINT])
    assert "hm/think" not in whole


def test_a_template_without_an_end_of_turn_works_too(merging: Any) -> None:
    rendering = renderer(merging, NO_END)
    told = merging.decode(rendering.following(HINT, ended=merging.eos_token_id))
    assert told.replace(" ", "") == "\nuser:cab\nuser:b\nassistant:"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "messages need data.chat_template"),
        ("{{ messages[-1].content }}", "does not show what the model said"),
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
    ],
)
def test_what_can_not_be_rendered_is_refused_with_the_reason(merging: Any, template: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        renderer(merging, template).following(HINT, ended=None)


def test_a_text_that_is_far_too_long_for_so_many_tokens_is_refused_before_it_is_encoded() -> None:
    tools = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "checkpoints" / "tiny-tools")
    longest = "<|endoftext|>"  # 13 characters, one token; no token of this vocabulary has more
    rendering = Renderer(DataConfig(), tools)
    for text in (longest * 5, longest * 20):  # the second has more than 5 tokens: whoever asks sees that
        assert rendering.encode([text], at_most=5) == rendering.encode([text])
    for text in (longest * 21, "a\n" * 10**6):
        with pytest.raises(TooLongError, match="more than 5 tokens"):
            rendering.encode(["short", text], at_most=5)
    with pytest.raises(TooLongError):
        rendering.following([{"role": "user", "content": "x" * 300}], ended=None, at_most=5)
