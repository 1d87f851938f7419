"""Check servers and rollouts against the trainer.

verify.py checks what servers hold and compute, sampling.py how they draw tokens.
"""

from hocket.observe.metrics import Metric, metric_table

# fmt: off
metric_table("checks")(
    (
        Metric("eval/logprob_gap", "sampling/logprob_gap of a random part of the held-out prompts, at least 16"),
        Metric("eval/z", "sampling/z of the sampled answers to a random part of the prompts",
               low=-5, high=5, advice="eval/sampled misleads: see sampling/z"),
        Metric("sampling/logprob_gap", "mean |trainer − engine log-prob| of rollouts, before training"),
        Metric("sampling/surprise", "a fair share of trained tokens: Σ −log p − entropy; 0 on average if drawn from p"),
        Metric("sampling/variance", "Σ variance of log p, the variance of that sum"),
        Metric("sampling/z", "surprise in standard errors, over the last part of the run where it is farthest from 0",
               low=-5, high=5, advice="tokens aren't drawn from what servers report: top_p, top_k, temperature, seeds"),
        Metric("sampling/colder", "−surprise / variance there: share by which the temperature is too low"),
        Metric("sampling/greedy", "log of how much likelier the answers are if an eighth of them is greedy"),
        Metric("sampling/greedy_odds", "the same, over the last part where it is largest",
               high=15, advice="some answers are greedy: look for what sets the temperature"),
        Metric("sampling/equal", "pairs of a prompt's rollouts with equal tokens"),
        Metric("sampling/equal_expected", "their number if drawn independently"),
        Metric("sampling/equal_z", "the excess in standard errors, over the last part where it is largest",
               high=5, advice="servers repeat random numbers: do all rollouts have one seed?"),
        Metric("sync/logprob_gap", "mean |trainer − engine log-prob| of a few completions; the largest of all servers"),
        Metric("sync/missing_share", "share of the last update that a server lacks; 1: it is one behind"),
        Metric("sync/mismatches", "comparisons that broke off or, with on_mismatch=warn, failed",
               high=0, advice="the console has server and cause; samples are not the policy's"),
        Metric("sync/missing_error", "standard error of that share; not told above 0.2: rounding hides the update"),
        Metric("sync/proof_s", "seconds to compare parameters and log-probs"),
        Metric("time/check", "seconds to check rollouts"),
    )
)
# fmt: on
