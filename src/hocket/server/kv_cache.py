"""Choose the size of a CPU server's KV cache; refuse a server whose memory has no room."""

import math

from hocket.common import machine
from hocket.config import Config
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError
from hocket.protocol.model_files import read_headers, weight_files

CPU_KV_CACHE_MIB = 256  # the smallest KV cache of a CPU server, unless server.kv_cache_mib is set
# Tokens in a block of a CPU server's KV cache. vLLM's 128 would be longer than most prompts, and
# only full blocks are shared: every completion of a group would compute its prompt anew.
CPU_BLOCK = 32
CPU_PROMPT = 512  # tokens of a prompt for which the KV cache of a CPU server has room
CPU_KV_SHARE = 0.25  # the most of the free memory that it takes for a step's completions
CPU_BATCHED_TOKENS = 8192
CPU_SEQUENCES = 256


def cpu_kv_cache(config: Config) -> int:
    """Compute the bytes of a CPU server's KV cache: server.kv_cache_mib, or room for a step.

    A step's completions run at the same time if the cache has room for them. A whole sequence
    always has. Raises ConfigError where a sequence of the whole context has no room in
    server.kv_cache_mib, or in this machine's free memory.
    """
    mib = config.server.kv_cache_mib
    block = int(config.server.engine.get("block_size") or CPU_BLOCK)
    block_bytes = _kv_bytes(config) * block
    context = tokenizers.context_length(config.model)
    blocks = 1 + math.ceil(context / block)  # vLLM keeps one block for itself
    needed = block_bytes * blocks
    room = machine.free_memory() if mib is None else mib << 20
    if needed > room:
        # Name the longest context that fits and, if that is the limit, the cache that is needed.
        longest = (room // block_bytes - 1) * block
        place = "this machine's free memory" if mib is None else f"server.kv_cache_mib={mib}"
        advice = f"set model.max_length={max(longest, 1)} or lower"
        if mib is not None:
            advice += f", or server.kv_cache_mib={math.ceil(needed / 2**20)}"
        sequence = f"a sequence of {context:,} tokens, the context of {config.model.path},"
        raise ConfigError(
            f"the KV cache of {sequence} takes {needed >> 20:,} MiB, more than {place} has, "
            f"{room >> 20:,} MiB: {advice}"
        )
    if mib is not None:
        return room

    # Completions of a group share their prompt but for its last, partial block.
    rollout = config.rollout
    groups = min(rollout.prompts_per_step, math.ceil(CPU_SEQUENCES / rollout.group_size))
    prompt = math.ceil(min(CPU_PROMPT, context) / block)
    completion = 1 + math.ceil(min(rollout.max_tokens, context) / block)
    step_bytes = block_bytes * groups * (prompt + rollout.group_size * completion)
    return max(CPU_KV_CACHE_MIB << 20, needed, min(step_bytes, int(CPU_KV_SHARE * room)))


def refuse_large_model(config: Config) -> None:
    """Raise ConfigError where a CPU server's weights and KV cache exceed the free memory.

    Weights that are still to be downloaded are not counted.
    """
    is_16_bit = config.model.dtype in ("bfloat16", "float16")
    shapes, _ = read_headers(weight_files(config.model.path)[0])
    weights = (2 if is_16_bit else 4) * sum(map(math.prod, shapes.values()))
    kv_cache = cpu_kv_cache(config)
    free = machine.free_memory()
    if weights + kv_cache > free:
        advice = "free some memory, or serve a smaller model"
        if config.server.kv_cache_mib is not None:
            advice += ", or lower server.kv_cache_mib"
        if not is_16_bit:
            advice += ", or set model.dtype=bfloat16, which halves the weights"
        raise ConfigError(
            f"the weights of {config.model.path} take {weights >> 20:,} MiB, and the KV cache "
            f"{kv_cache >> 20:,}, more than the {free >> 20:,} MiB of memory that this "
            f"machine has free: {advice}"
        )


def _kv_bytes(config: Config) -> int:
    """Compute the bytes that a token's keys and values take per worker; 0 where that is not known.

    Counts the layers that keep them for the whole context: 2 (keys, values) x layers x heads of one
    worker x size of a head x bytes of a number.
    """
    server = config.server
    text = tokenizers.config_of(config.model.path).get_text_config()
    heads = getattr(text, "num_key_value_heads", None)
    if heads is None or getattr(text, "kv_lora_rank", None):  # another form of attention
        return 0
    if {"num_gpu_blocks_override", "kv_cache_dtype"} & server.engine.keys():  # the user decides
        return 0
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None:
        layers = layer_types.count("full_attention")
    elif getattr(text, "sliding_window", None):
        return 0
    else:
        layers = text.num_hidden_layers
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = 2 if config.model.dtype in ("bfloat16", "float16") else 4
    heads_per_worker = math.ceil(heads / server.tensor_parallel_size)
    return int(2 * layers * heads_per_worker * head_size * itemsize)
