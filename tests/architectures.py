"""Try architectures on tiny random models, and write the table of docs/reference/models.md.

The trainer computes log-probs of sampled tokens and their gradients in four ways: packed into rows, with shared
prefixes, with LoRA, and with rows that two ranks divide (here two threads). transformers computes each sequence alone,
with its own attention ("eager"). Differences are printed as shares of the bound for rounding. The status is 1 if the
table has another row for a family.

    PYTHONPATH=src .venv/bin/python tests/architectures.py [--write] [FAMILY ...]
"""

import argparse
import concurrent.futures
import math
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from hocket.config import ModelConfig, TrainerConfig
from hocket.config.sections import LoraConfig
from hocket.errors import HocketError
from hocket.trainer import architecture, memory
from hocket.trainer.attention import WHOLE, RowPart
from hocket.trainer.batching import divide
from hocket.trainer.policy import Policy, skeleton
from hocket.trainer.prefixes import SharingPacker
from hocket.types import TrainSample
from support.numbers import rounding
from support.training import CPU, sample_of, sequence

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- tests/architectures.py --write -->\n\n", "\n<!-- end -->\n"
WAYS = ("packing", "sharing", "LoRA", "sequence parallelism")
# Set where a config has a setting of that name.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 62,
    "bos_token_id": 61,
    "eos_token_id": 63,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "hidden_size_per_layer_input": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_chunk_size": 7,
}
MASKED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
SPARSE = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 2}
MLA = {"head_dim": None, "num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
FAMILIES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # by model_type: what people call it, and more of its config; None: its default
    "llama": ("Llama 2 and 3, Yi, SmolLM 1 and 2", {}),
    "llama4_text": ("Llama 4", {}),
    "mistral": ("Mistral 7B", {}),
    "ministral": ("Ministral 8B", MASKED),
    "ministral3": ("Ministral 3", {}),
    "mixtral": ("Mixtral, with router jitter", {"router_jitter_noise": 0.1}),
    "qwen2": ("Qwen 2 and 2.5, with windows", {}),
    "qwen2_moe": ("Qwen 1.5 and 2 MoE, with windows", {"decoder_sparse_step": 2}),
    "qwen3": ("Qwen 3", {}),
    "qwen3_moe": ("Qwen 3 MoE", {}),
    "qwen3_next": ("Qwen 3 Next", {}),
    "qwen3_5_text": ("Qwen 3.5", {}),
    "gemma": ("Gemma 1", {}),
    "gemma2": ("Gemma 2", {}),
    "gemma3_text": ("Gemma 3", MASKED),
    "gemma3n_text": (
        "Gemma 3n",
        MASKED | SPARSE,
    ),
    "gemma4_text": ("Gemma 4", MASKED | {"global_head_dim": 16, "num_kv_shared_layers": 0}),
    "vaultgemma": ("VaultGemma", {}),
    "phi": ("Phi 1, 1.5 and 2", {}),
    "phi3": ("Phi 3 and 4", {}),
    "phimoe": ("Phi 3.5 MoE", {"input_jitter_noise": 0.1}),
    "gpt2": ("GPT-2", {}),
    "gpt_neo": ("GPT-Neo", {"attention_types": [[["global", "local"], 2]]}),
    "gpt_neox": ("GPT-NeoX, Pythia", {}),
    "gptj": ("GPT-J", {"rotary_dim": 8}),
    "gpt_bigcode": ("StarCoder 1", {}),
    "gpt_oss": ("gpt-oss", {}),
    "codegen": ("CodeGen", {"rotary_dim": 8}),
    "starcoder2": ("StarCoder 2", {}),
    "olmo": ("OLMo 1", {}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", MASKED),
    "olmo_hybrid": ("OLMo Hybrid", {}),
    "olmoe": ("OLMoE", {}),
    "flex_olmo": ("FlexOlmo", {}),
    "granite": ("Granite 3", {"logits_scaling": 8.0, "attention_multiplier": 0.2}),
    "granitemoe": ("Granite 3 MoE", {"logits_scaling": 8.0}),
    "granitemoeshared": ("Granite MoE with shared experts", {}),
    "granitemoehybrid": ("Granite 4", MAMBA),
    "cohere": ("Command R", {}),
    "cohere2": ("Command R7B, Command A", {}),
    "stablelm": ("StableLM 2", {}),
    "falcon": ("Falcon 7B", {"head_dim": None}),
    "falcon_h1": ("Falcon H1", {}),
    "falcon_mamba": ("Falcon Mamba", {}),
    "mpt": ("MPT", {}),
    "bloom": ("BLOOM", {}),
    "opt": ("OPT, with layers dropped", {"layerdrop": 1.0}),
    "biogpt": ("BioGPT", {}),
    "deepseek_v2": ("DeepSeek V2", MLA | {"topk_method": "greedy"}),
    "deepseek_v3": ("DeepSeek V3 and R1, Kimi K2, Moonlight", MLA),
    "deepseek_v32": ("DeepSeek V3.2", MLA),
    "glm": ("GLM 4 9B", {}),
    "glm4": ("GLM 4 0414", {}),
    "glm4_moe": ("GLM 4.5", {}),
    "smollm3": ("SmolLM 3", MASKED),
    "lfm2": ("LFM 2", {"layer_types": ["conv", "full_attention"] * 2}),
    "nemotron": ("Nemotron 4, Minitron", {}),
    "nemotron_h": ("Nemotron H", {}),
    "exaone4": ("EXAONE 4", MASKED),
    "ernie4_5": ("ERNIE 4.5", {}),
    "ernie4_5_moe": ("ERNIE 4.5 MoE", {}),
    "hunyuan_v1_dense": ("Hunyuan", {}),
    "hunyuan_v1_moe": ("Hunyuan MoE", {"moe_topk": 2}),
    "seed_oss": ("Seed-OSS", {}),
    "helium": ("Helium", {}),
    "apertus": ("Apertus", {}),
    "arcee": ("AFM 4.5B", {}),
    "afmoe": ("Trinity", {}),
    "dots1": ("dots.llm1", {"n_shared_experts": 1}),
    "persimmon": ("Persimmon", {}),
    "diffllama": ("DiffLlama", {}),
    "hyperclovax": ("HyperCLOVA X", {}),
    "jetmoe": ("JetMoE", {}),
    "minimax": ("MiniMax-01, M1", {}),
    "minimax_m2": ("MiniMax M2", {}),
    "mamba": ("Mamba", {}),
    "mamba2": ("Mamba 2", {"num_heads": 8, "head_dim": 8}),
    "jamba": ("Jamba", {}),
    "bamba": ("Bamba", MAMBA),
    "zamba2": ("Zamba 2", {"num_hidden_layers": None}),
    "recurrent_gemma": ("RecurrentGemma", {}),
    "rwkv": ("RWKV 4", {}),
}


class Result(NamedTuple):
    """How a family is trained; apart: the largest difference by way, of what rounding explains."""

    refusal: str
    apart: dict[str, float]
    notes: dict[str, str]

    def row(self, family: str) -> str:
        cells = [FAMILIES[family][0], f"`{family}`", "no" if self.refusal else "yes"]
        for way in WAYS:
            is_right = self.apart.get(way, math.inf) <= 1
            cells.append("" if self.refusal else self.notes.get(way) or ("yes" if is_right else "wrong"))
        return f"| {' | '.join([*cells, self.refusal])} |\n"


def make_config(family: str) -> Any:
    """Builds a config of tiny sizes."""
    kind = transformers.CONFIG_MAPPING[family]
    more = FAMILIES[family][1]
    known = {*kind().to_dict(), *kind.attribute_map}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return kind(**{name: value for name, value in (sizes | more).items() if value is not None})


def samples() -> list[TrainSample]:
    """Builds three groups of two sequences that begin alike, longer than any window, and with other lengths."""
    rng = random.Random(0)
    made = []
    for _ in range(3):
        begin = [rng.randrange(60) for _ in range(rng.randint(9, 14))]
        for _ in range(2):
            ids = begin + [rng.randrange(60) for _ in range(rng.randint(6, 20))]
            made.append(sample_of(sequence(ids, len(begin)), rng.gauss(0, 1)))
    return made


def threads(size: int) -> list[RowPart]:
    """Returns the parts of a row that is divided among threads, which stand for ranks."""
    from hocket.extras.ulysses import Split

    class Threads(Split):
        def _all(self, tensor: Tensor) -> list[Tensor]:
            self.group["sent"][self.number] = tensor
            self.group["barrier"].wait()
            received = [self.group["sent"][number] for number in range(self.size)]
            self.group["barrier"].wait()
            return received

        def whole(self, column_bt: Tensor) -> Tensor:
            return torch.stack(self._all(column_bt)).sum(dim=0)

        def _exchanged(self, tensor_xyd: Tensor) -> Tensor:
            parts = tensor_xyd.contiguous().view(self.size, -1, *tensor_xyd.shape[1:])
            received = torch.stack([sent[self.number] for sent in self._all(parts)])
            return received.transpose(0, 1).flatten(1, 2)

    shared: dict[str, Any] = {"sent": {}, "barrier": threading.Barrier(size, timeout=60)}
    return [Threads(size, number, group=shared) for number in range(size)]


Found = tuple[Tensor, dict[str, Tensor]]  # log-probs, and gradients by parameter


def plain(model: Any, made: Sequence[TrainSample]) -> Found:
    """Returns what transformers gives, each sequence alone."""
    logprobs = []
    for sample in made:
        ids_bt = torch.tensor([sample.sequence.token_ids])
        all_btv = model(input_ids=ids_bt[:, :-1], use_cache=False).logits.log_softmax(-1)
        of_tokens = all_btv.gather(-1, ids_bt[:, 1:, None])[0, :, 0]
        logprobs.append(of_tokens[torch.tensor(sample.sequence.mask[1:])])
    advantages = torch.tensor([a for sample in made for a in sample.advantages if a])
    found = torch.cat(logprobs)
    (found * advantages).sum().backward()
    return found.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def trained(policy: Policy, made: Sequence[TrainSample], parts: Sequence[RowPart] = (WHOLE,), **how: Any) -> Found:
    """Returns what the trainer gives."""
    policy.zero_grad()
    logprobs: dict[int, Tensor] = {}
    [share] = divide(made, **{"micro_batch_tokens": 90, "num_ranks": 1, **how})
    for make in share:
        batches = [make(CPU, part) for part in parts]
        with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
            columns, *_ = pool.map(policy, batches)
        [batch, *_] = batches
        (columns[0] * batch.advantages_bt).sum().backward()
        rows = zip(batch.places, *(torch.split(c[0], batch.lengths) for c in (columns[0], batch.mask_bt)), strict=True)
        logprobs |= {place: found.detach()[mask] for place, found, mask in rows}
    gradients = {name.removeprefix("model."): p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return torch.cat([logprobs[place] for place in range(len(made))]), gradients


def apart(found: Found, expected: Found, sums: int) -> float:
    """Returns the larger difference of log-probs and gradients, in what rounding explains at most.

    sums: additions on the way to a log-prob; each product of the forward pass has two in the backward pass.
    """
    assert found[1].keys() == expected[1].keys()
    flat = [torch.cat([grads[name].flatten() for name in expected[1]]) for grads in (found[1], expected[1])]
    pairs = ((found[0], expected[0], sums), (*flat, 3 * sums + len(found[0])))
    return max(float((a - b).abs().max() / b.abs().max()) / rounding(count) for a, b, count in pairs)


@torch.no_grad()
def merged(model: Any, policy: Policy) -> None:
    """Adds an adapter's products to a plain model."""
    for name, layer in policy.model.named_modules():
        if hasattr(layer, "lora_A"):
            update = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
            model.get_submodule(name).weight += update


def load(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def try_family(family: str, folder: str, *, divided: bool = True) -> Result:
    """Tries a family with a model that is written to the folder; `divided`: with rows that ranks divide, too."""
    torch.manual_seed(0)
    config = make_config(family)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    architecture.randomize(model)
    model.save_pretrained(folder)
    settings = ModelConfig(path=folder)
    try:
        memory.estimate(skeleton(settings), TrainerConfig(), dtype=torch.float32, stage=0, num_ranks=1)
    except HocketError as error:
        return Result(str(error).partition("; ")[0], {}, {})
    sums = sum(parameter.shape[-1] for parameter in model.parameters() if parameter.ndim > 1)
    made = samples()
    expected = plain(load(folder), made)
    policy = Policy(settings, dtype=torch.float32, temperature=1.0)
    policy.check_architecture(CPU)
    ways: dict[str, Callable[[], Found]] = {
        "packing": lambda: trained(policy, made),
        "sharing": lambda: trained(policy, made, packer=SharingPacker()),
    }
    if divided:
        ways["sequence parallelism"] = lambda: trained(policy, made, threads(2), packer=SharingPacker())
    numbers = {way: apart(give(), expected, sums) for way, give in ways.items()}
    notes = {}
    try:
        adapted = Policy(settings.model_copy(update={"lora": LoraConfig(rank=4)}), dtype=torch.float32, temperature=1.0)
    except (HocketError, ValueError):
        adapted = None
    layers = adapted.model.named_modules() if adapted else []
    bases = [layer.get_base_layer() for _, layer in layers if hasattr(layer, "lora_A")]
    if adapted is None or not all(isinstance(base, torch.nn.Linear) for base in bases):
        notes["LoRA"] = "untried" if adapted else "no"
    else:
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        whole = load(folder)
        merged(whole, adapted)
        logprobs = plain(whole, made)[0]
        numbers["LoRA"] = apart((trained(adapted, made)[0], {"": logprobs}), (logprobs, {"": logprobs}), sums)
    return Result("", numbers, notes)


def table(families: Sequence[str]) -> Iterator[tuple[str, Result]]:
    """Yields each family's row."""
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            result = try_family(family, folder)
        yield result.row(family), result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model_type; default: all")
    parser.add_argument("--write", action="store_true", help="write the table of docs/reference/models.md")
    args = parser.parse_args()
    torch.set_num_threads(1)  # models are tiny
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for row, result in table(args.families or list(FAMILIES)):
        print(row.rstrip(), {way: f"{value:.2f}" for way, value in result.apart.items()}, flush=True)
        rows.append(row)
    page = PAGE.read_text(encoding="utf-8")
    if args.write:
        start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
        head = f"| models | `model_type` | trained | {' | '.join(WAYS)} | why not |\n" + "|---" * 8 + "|\n"
        PAGE.write_text(page[:start] + head + "".join(rows) + page[end:], encoding="utf-8")
        return 0
    return 0 if all(row in page for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
