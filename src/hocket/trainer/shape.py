"""The sizes of a decoder, from its config alone."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Sizes per token: of a mixture, those of the experts that one takes."""

    layers: int
    hidden: int
    heads: int
    query: int  # of all heads
    key: int  # of all heads of keys, and of values
    inner: int  # of the feed-forward layer
    vocab: int

    @classmethod
    def of(cls, model: Any) -> "Shape":
        text = model.config.get_text_config()

        def size(name: str, default: int) -> int:
            return getattr(text, name, None) or default

        heads = text.num_attention_heads
        head = size("head_dim", text.hidden_size // heads)
        inner = size("intermediate_size", 4 * text.hidden_size)
        experts = size("num_experts_per_tok", 0)
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=heads,
            query=head * heads,
            key=head * size("num_key_value_heads", heads),
            inner=experts * size("moe_intermediate_size", inner) if experts else inner,
            vocab=text.vocab_size,
        )
