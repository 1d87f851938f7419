"""Mutants that no slip of one operator makes, or that once survived; and those that change nothing anybody can see."""

from typing import NamedTuple


class Row(NamedTuple):
    path: str  # below src/hocket
    name: str  # ID: path:meant:name
    before: str  # stands once in the file
    after: str
    meaning: str


MEANT = (
    Row(
        "rollout/collect.py",
        "order",
        "[open_group.ended[number] for number in range(plan.group_size)]",
        "list(open_group.ended.values())",
        "a group's rollouts in the order in which they end",
    ),
    Row(
        "protocol/manifest.py",
        "first-blocks",
        "range(0, len(blocks), _BLOCKS_AT_ONCE)",
        "range(0, min(len(blocks), _BLOCKS_AT_ONCE), _BLOCKS_AT_ONCE)",
        "a checksum of the first 16 MiB of a tensor",
    ),
    Row(
        "protocol/manifest.py",
        "text",
        "hashlib.sha256(text.encode())",
        "hashlib.sha256()",
        "a checkpoint's text left out of its checksum",
    ),
    Row(
        "server/versions.py",
        "newer",
        "described.version != version",
        "described.version < version",
        "a manifest newer than asked for accepted",
    ),
    Row(
        "server/versions.py",
        "max-rank",
        "adapter.r > max_rank",
        "adapter.r >= max_rank",
        "an adapter of exactly max_rank refused",
    ),
    Row(
        "server/versions.py",
        "shape-of-a",
        "(adapter.r, shape[1])",
        "(shape[1], adapter.r)",
        "an adapter's A transposed",
    ),
    Row(
        "server/versions.py",
        "matrix",
        "if adapted and len(shape) == 2:",
        "if adapted:",
        "what is no matrix gets an adapter",
    ),
    Row(
        "server/versions.py",
        "escape",
        "map(re.escape, adapter.target_modules)",
        "adapter.target_modules",
        "a target module's dot stands for any character",
    ),
    Row(
        "server/versions.py",
        "overhead",
        "OVERHEAD_BYTES = 64 << 20",
        "OVERHEAD_BYTES = 0",
        "no room for a version's manifest and headers",
    ),
    Row(
        "sync/publish.py",
        "nobody-up",
        "if self.lock.locked() and self.pool.up:",
        "if self.lock.locked():",
        "a bring-up put off while no server is up",
    ),
    Row(
        "algorithm/advantages.py",
        "other-source",
        "part.get(name, math.nan)",
        "part.get(name, 0.0)",
        "a reward of another source counts as 0",
    ),
    Row(
        "algorithm/advantages.py",
        "tokens",
        'if scale == "batch":',
        'if scale in ("batch", "tokens"):',
        "scale 'tokens' divides by the batch's deviation as well",
    ),
    Row(
        "algorithm/losses.py",
        "advantages",
        "batch.advantages_bt.where(mask_bt, 0.0)",
        "batch.advantages_bt",
        "advantages outside the mask reach the loss",
    ),
    Row(
        "algorithm/losses.py",
        "entropy",
        "entropy_bt.where(mask_bt, 0.0)",
        "entropy_bt",
        "entropy outside the mask reaches what a function may take",
    ),
    Row(
        "algorithm/losses.py",
        "policy-kl",
        "k3(-log_policy_bt)",
        "k3(log_policy_bt)",
        "the divergence of the policies the other way around",
    ),
    Row(
        "algorithm/losses.py",
        "capped",
        '(weight_bt != importance_bt) & (config.correction != "none")',
        "weight_bt != importance_bt",
        "weights count as capped where nothing corrects them",
    ),
    Row(
        "algorithm/credit.py",
        "to-the-end",
        "return sum(rewards[min(place, last) :])",
        "return rewards[min(place, last)]",
        "turns compared over all groups",
    ),
    Row(
        "algorithm/credit.py",
        "same-state",
        "same_state = [(group_n[owner], state) for",
        "same_state = [state for",
        "states compared over all groups",
    ),
    Row(
        "data/stream.py",
        "moves-on",
        "int(self._num_drawn // self._prompts_per_step)",
        "self._num_drawn",
        "a curriculum moves on by draws, not by steps",
    ),
    Row(
        "data/mixture.py",
        "exhausted",
        "del weights[source]",
        "del weights[next(iter(weights))]",
        "another source than the exhausted one is left out",
    ),
    Row(
        "data/mixture.py",
        "pass-rates",
        "any(stream.uses_pass_rates for",
        "all(stream.uses_pass_rates for",
        "pass rates are measured only where all sources use them",
    ),
    Row(
        "data/mixture.py",
        "settled",
        "self._source_of.pop(number)",
        "self._source_of[number]",
        "settled draws stay, and are repeated after a resume",
    ),
    Row(
        "extras/checks/draws.py",
        "nansum",
        "nansum(dim=-1)",
        "sum(dim=-1)",
        "a token of probability 0 makes the spread NaN",
    ),
    Row(
        "trainer/logprobs.py",
        "minus-infinity",
        "logprobs_cv.where(logprobs_cv > -torch.inf, 0.0)",
        "logprobs_cv",
        "a token of probability 0 makes the entropy's gradient NaN",
    ),
)


class Same(NamedTuple):
    id: str
    after: str  # another text at this ID is another mutant
    why: str  # nothing that a test could see differs


EQUIVALENT: tuple[Same, ...] = (
    Same("algorithm/advantages.py:_by_group:call:1", "ids_n", "a group is computed again for each of its rollouts"),
    Same("protocol/manifest.py:tensor_checksum:if:0", "True", "a copy of bytes that lie well has the same sum"),
    Same("protocol/manifest.py:_block_sums:if:1", "False", "without a GPU both ways have the same sums"),
    Same("protocol/manifest.py:model_shapes:call:3", "model.all_tied_weights_keys", "nobody changes the model's own"),
    Same("protocol/manifest.py:specs:plus-one:0", "1", "the sums are the same with any number of threads"),
    Same("sync/publish.py:Transport:flag:0", "True", "a protocol's default is nobody's"),
    Same("trainer/logprobs.py:_columns_of_chunk:if:1", "False", "x / 1 is x"),
    Same("trainer/logprobs.py:_columns_of_chunk:negated:1", "-1", "of two dimensions the last is 1"),
    Same("algorithm/choices.py:Choice:flag:0", "False", "read of a KL alone, which says it"),
    Same("trainer/logprobs.py::plus-one:2", "21", "how much is kept, not what is computed"),
    Same(
        "trainer/logprobs.py:_columns_of_chunk:operand:1",
        "entropy_gradient",
        "without gradients the other formula has the same value",
    ),
    Same("rewards/workers.py::operand:0", "1", "how many workers there are, not what they say"),
    Same("trainer/step.py:accumulate:arithmetic:1", "loss / math.nan", "NaN either way"),
    Same("trainer/packing.py:check_fits:plus-one:2", "1", "alone, each sequence is the first of its row"),
    Same("trainer/batching.py:_blank:flag:0", "True", "no mask of a sequence's first token is read"),
)
