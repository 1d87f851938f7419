"""The sizes of a decoder, from its config alone."""

import copy
from typing import Any, NamedTuple

ALL = 1 << 40  # a window without a bound


class Shape(NamedTuple):
    """Sizes per token: of a mixture, those of the experts that one takes."""

    layers: int
    hidden: int
    heads: int  # of queries
    query: int  # of all heads
    key: int  # of all heads of keys, and of values
    pair: int  # of all heads of queries, and of values: what a token and one that it sees take
    inner: int  # of the feed-forward layer
    experts: int  # that a token takes in each layer; 0: no mixture
    windows: tuple[int, ...]  # per layer: tokens that one sees, itself included

    @property
    def key_share(self) -> float:
        """Memory of a key and a value, in a layer, as a part of that of a position's activations."""
        return 2 * self.key / (3 * self.query + 2 * self.key + 4 * self.inner)

    @classmethod
    def of(cls, model: Any) -> "Shape":
        text = copy.copy(model.config.get_text_config())
        text.allow_global_per_layer_attribute_access = True  # Gemma 4 has wider heads in some layers

        def size(name: str, default: int) -> int:
            return getattr(text, name, None) or default

        heads = size("num_attention_heads", 1)
        head = size("head_dim", text.hidden_size // heads)
        inner = size("intermediate_size", 4 * text.hidden_size)
        if isinstance(inner, list):  # by layer (Gemma 3n)
            inner = max(inner)
        experts = size("num_experts_per_tok", 0)
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
        window = size("sliding_window", ALL)
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=heads,
            query=head * heads,
            key=head * size("num_key_value_heads", heads),
            pair=heads * (size("qk_head_dim", head) + size("v_head_dim", head)),
            inner=experts * size("moe_intermediate_size", inner) if experts else inner,
            experts=experts,
            windows=tuple(window if kind == "sliding_attention" else ALL for kind in kinds),
        )
