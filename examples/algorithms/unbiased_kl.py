"""The unbiased KL estimate of DeepSeek-V3.2 (arXiv 2512.02556): k3, weighted by the ratio.

Settings: algorithm.kl=unbiased_kl algorithm.kl_coef=0.01 algorithm.minibatches=2
"""

from hocket.algorithm.choices import k3, kl


@kl("unbiased_kl")
def unbiased_kl(log_ratio, ratio_bt):
    """Return r · k3: tokens that an older policy sampled count by their probability under this one."""
    return ratio_bt * k3(log_ratio)
