"""The sections that say where both processes run, and how they work together."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlsplit

import pydantic
from pydantic import Field

from hocket.common.machine import is_any
from hocket.common.processes import SECRET_NAME
from hocket.config.sections import Chosen, Names, Section, UserPath, or_one
from hocket.types import InFlight


def web_url(url: str) -> str:
    """Check a URL, and replace a host of 0.0.0.0 or ::, which is none, by loopback.

    Raises ValueError for what is no URL, or has a secret in it.

    >>> web_url("http://0.0.0.0:8000/x")
    'http://127.0.0.1:8000/x'
    """
    parts = urlsplit(url)
    _ = parts.port  # raises ValueError where it is no number
    parameters = dict(parse_qsl(parts.query))
    has_secret = any(SECRET_NAME.search(name) for name in parameters)
    if parts.username is not None or has_secret:
        raise ValueError(
            "must hold no user, password or key, as files keep it: use key_env, or server.token"
        )
    if not re.fullmatch(r"https?://\S+", url) or not parts.hostname:
        raise ValueError(f"must begin with http:// or https:// and a host, got {url!r:.200}")
    if is_any(parts.hostname):
        loopback = "[::1]" if ":" in parts.hostname else "127.0.0.1"
        return re.sub(r"(?<=//)(\[.*?\]|[^/:?#]+)", loopback, url, count=1)
    return url


WebUrl = Annotated[str, pydantic.AfterValidator(web_url)]
# The URL of a server, to which paths are appended.
Url = Annotated[WebUrl, pydantic.AfterValidator(lambda url: url.rstrip("/"))]
_distinct = pydantic.AfterValidator(lambda urls: tuple(dict.fromkeys(urls)))


class PipelineConfig(Section):
    """Section pipeline: rollouts while the trainer works, or from an earlier run."""

    max_staleness: Annotated[int, Field(ge=0, le=64)] | Literal["auto"] = "auto"
    """Batches ahead; 0 is on-policy. `auto`: 1 with GPUs apart, else 0."""
    replay: UserPath | None = None
    """Run folder whose rollouts are trained on, without a server."""


class SyncConfig(Section):
    """Section sync: how new weights reach the servers, and how that is checked."""

    backend: Chosen = "auto"
    """How new weights go to the servers. `auto`: nccl with GPUs apart, else disk; `delta`: by disk
    what has changed, with copies in RAM and $TMPDIR, option full_every (versions); or your own."""
    root: UserPath | None = None
    """Folder above run.dir, equal on both sides. Default: its parent."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds for one server to load one version; ranks wait for 6x."""
    in_flight: InFlight = "keep"
    """Requests while new weights are loaded: `keep` continues them, `drain` waits for them, `abort`
    has them begin again."""
    take_over: bool = False
    """Take the servers of another trainer, which then stops."""
    upload: bool = False
    """Files go over HTTP, without a shared disk."""
    check_every: int = Field(20, ge=0)
    """Versions between comparisons of log-probs, besides the first two. 0 disables them."""
    max_logprob_gap: float | None = Field(None, gt=0)
    """Highest mean |Δ log-prob| in such a comparison. Default: by the dtype."""
    check_share: float = Field(0.015625, ge=0, le=1)
    """Share of prompts, drawn at random, that are checked besides those that training compares."""
    on_mismatch: Literal["stop", "warn"] = "stop"
    """What a check that fails does to the run."""

    @property
    def transport(self) -> str:
        """Name of the transport, without its options."""
        return self.backend if isinstance(self.backend, str) else str(self.backend["name"])

    @property
    def bucket_timeout_s(self) -> float:
        """Seconds for a server to join NCCL's group, or to take one of a version's buckets.

        The other servers wait for it: it gets a quarter of the time for the whole version.
        """
        return self.timeout_s / 4

    @property
    def collective_timeout_s(self) -> float:
        """Seconds that a rank waits in a collective operation for rank 0.

        Meanwhile rank 0 may sync weights, repeat that, have them compared, and ask for log-probs.
        """
        return self.timeout_s * 6


class ServerConfig(Section):
    """Section server: the generation servers, for both sides."""

    host: str = "127.0.0.1"
    """Address of the server; any but loopback needs a token."""
    port: int = Field(8000, ge=1, le=65535)
    """Port of the server."""
    urls: Annotated[tuple[Url, ...], or_one, _distinct] = ()
    """URLs of the servers. Default: http://host:port."""
    discover: UserPath | None = None
    """Servers that come and go: NAME:PORT, by DNS, or a file of URLs, PATH/FILE."""
    token: str | None = None
    """Bearer token of every route but /health. Default: $HOCKET_TOKEN."""
    plugins: Names = ()
    """Python files with parts of the server (@server_part)."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds to wait for a server."""
    silence_s: float = Field(60.0, gt=0)
    """Seconds of silence until a server is lost."""
    max_requests: int = Field(1024, ge=1)
    """Requests for completions, chat, messages or responses that are answered or wait at once;
    further ones get 429."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs that share one copy of the model."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of GPU memory; with launch.share_gpu leave 2 GiB."""
    kv_cache_mib: int | None = Field(None, ge=16)
    """KV cache in MiB. Default: what a GPU's share allows; on a CPU 256, or what the longest
    sequence takes."""
    engine: dict[str, Any] = Field({})
    """Other arguments of vLLM: {enforce_eager: true, max_num_seqs: 256}."""

    def refuse(self) -> None:
        if self.discover is None:
            return
        if self.urls:
            raise ValueError("discover and urls both name the servers: leave one out")
        name = re.fullmatch(r"[^\s:/]+:(\d{1,5})", self.discover)
        is_file = "/" in self.discover and "://" not in self.discover
        is_name = name is not None and int(name[1]) < 1 << 16
        if not (is_file or is_name):
            raise ValueError(
                f"discover={self.discover} is neither NAME:PORT nor a file with a slash in its "
                "path; a URL goes to urls"
            )


class LaunchConfig(Section):
    """Section launch: which processes `launch` and `quickstart` start here."""

    servers: int | None = Field(None, ge=1)
    """Servers. Default: half of the GPUs, or what `trainers` leaves."""
    trainers: int | None = Field(None, ge=1)
    """Trainer ranks. Default: one per GPU left; 1 on a CPU."""
    gpus_apart: bool | None = None
    """Servers have GPUs of their own. Default: as `launch` plans, else if none
    is on this machine."""
    share_gpu: bool = False
    """One GPU, on which both sides take turns."""
