"""Bring up a server: give it the current weights, and check that it computes with them."""

from collections.abc import Callable

from hocket.pool import Member
from hocket.protocol import Health
from hocket.sync.publish import Publisher


async def bring_up(
    publisher: Publisher,
    check_model: Callable[[Health], None],
    say: Callable[[str], None],
    member: Member,
    health: Health,
) -> None:
    """Give a new or returned server the current version. Raise ServerError for another model, SyncError if refused."""
    if publisher.is_training and publisher.pool.up:
        member.out = "the trainer is at work"  # the pool asks again soon
        return
    async with publisher.lock:
        if member.session is not None:
            return  # brought up while this waited for the lock
        check_model(health)
        publisher.versions.begin(health.version)
        metrics = await publisher.deliver([member])
        if member.session is None:
            return  # lost: `member.out` has the reason
        metrics |= await publisher.check([member])
        if "sync/logprob_gap" not in metrics:
            return  # lost meanwhile
    say(
        f"server {member.url} holds version {publisher.versions.current}: {health.dtype}, "
        f"{metrics['sync/mebibytes']:.1f} MiB in {metrics['sync/prepare_s'] + metrics['sync/transfer_s']:.2f} s, "
        f"parameters compared, mean |Δ log-prob| {metrics['sync/logprob_gap']:.1e}"
    )
