"""The servers of a command: where they are, what starts before them, and which ones it can use."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hocket.client.discover import find_servers, follow
from hocket.client.pool import ServerPool
from hocket.client.server import ServerClient
from hocket.client.take_over import claim
from hocket.common import machine
from hocket.config import Config
from hocket.data import tokenizer as tokenizers
from hocket.errors import ConfigError, ServerError, program
from hocket.launch import visible_gpus
from hocket.observe.run_folder import trainer_id
from hocket.protocol import Health
from hocket.protocol.manifest import model_shapes
from hocket.sync.share_gpu import put_to_sleep


@dataclasses.dataclass(frozen=True)
class Servers:
    """The servers that a config names, or that a command would start for it."""

    config: Config

    async def urls(self) -> Sequence[str]:
        """Look up the servers' base URLs. Raises ServerError where server.discover has none."""
        where = self.config.server.discover
        return self.config.server_urls if where is None else await find_servers(where)

    async def up(self, say: Callable[[str], None]) -> list[str]:
        """List the URLs at which a server answers; print a line for each at which none does."""
        answering: list[str] = []
        try:
            urls = await self.urls()
        except ServerError as error:  # server.discover has no server yet
            say(str(error))
            return answering
        for url in urls:
            async with ServerClient(url, token=self.config.token) as server:
                try:
                    await server.health()
                except ServerError as error:
                    # Any other code comes from something that listens, maybe another program.
                    if error.code != "unreachable":
                        raise
                    say(f"no server answers at {url} yet; start one with: {program()} serve CONFIG")
                else:
                    answering.append(url)
        return answering

    async def expected(self) -> bool:
        """Check whether there are servers to wait for: the config names some, or one answers.

        If not, the command has to start one.
        """
        return self.config.names_servers or bool(await self.up(lambda line: None))

    async def num_to_come(self) -> int:
        """Count the servers on this machine's CPU that have still to take their memory."""
        number = self.config.launch.servers or 1
        if visible_gpus() or self.config.pipeline.replay is not None:
            return 0
        if machine.FREE_VARIABLE in os.environ:  # a launch has just started them
            return number
        return 0 if await self.expected() else number

    async def wait_for_gpu(self, **callbacks: Callable[..., None]) -> None:
        """Wait until a server that may be on this GPU has started, before any rank takes memory.

        vLLM counts memory that others allocate while it starts as its own, and makes its KV cache
        smaller by that much. With launch.share_gpu the server is then put to sleep.
        `callbacks` are those of `pool`.
        """
        config = self.config
        if self._may_be_on_gpu:
            async with self.pool(trainer_id(config.run_dir), **callbacks) as servers:
                await servers.wait_up()
                if config.launch.share_gpu:
                    await put_to_sleep(servers, config.sync, keep=config.model.lora is not None)

    async def release(self) -> None:
        """Free the servers that `wait_for_gpu` has claimed for a run that can't start."""
        if self._may_be_on_gpu:
            async with self.pool(trainer_id(self.config.run_dir)) as servers:
                await servers.release()

    @property
    def _may_be_on_gpu(self) -> bool:
        """True if a server may be on a GPU of the trainer's machine."""
        if self.config.launch.share_gpu:
            return True
        if self.config.pipeline.replay is not None:
            return False  # a replay needs no server
        return bool(visible_gpus()) and not self.config.gpus_apart

    def pool(self, trainer: str | None = None, **callbacks: Callable[..., None]) -> ServerPool:
        """Make the pool of the servers.

        Args:
            trainer: The id under which a run claims the servers; None in a command that only
                sends requests.
            callbacks: `on_wait` and `say` of `ServerPool`.
        """
        server = self.config.server
        pool = ServerPool(
            self.config.server_urls,
            token=self.config.token,
            trainer=trainer,
            silence_s=server.silence_s,
            start_timeout_s=server.start_timeout_s,
            **callbacks,
        )
        if server.discover is not None:
            follow(pool, partial(find_servers, server.discover))
        if trainer is not None:
            claim(pool, trainer, take_over=self.config.sync.take_over)
        return pool


def refuse_other(config: Config, tokenizer: Any, length: int, health: Health) -> None:
    """Raise ServerError for a server that can't take a run's weights, or `length` tokens."""
    model = config.model

    def refuse(trait: str, theirs: object, ours: object, setting: str) -> None:
        fact = f"the server, of {health.model}, has the {trait} {theirs}, this run {ours}"
        advice = f"start both with the same {setting}; if it is another run's, set server.port"
        raise ServerError(f"{fact}: {advice}", code="other_model")

    # Random weights have no files to read an architecture from. The server compares it when it
    # loads the first version.
    if not model.random_init:
        architecture = model_shapes(model.path).architecture
        if health.architecture != architecture:
            refuse("architecture", health.architecture, architecture, "model.path")

    fingerprint = tokenizers.fingerprint(tokenizer)
    if health.tokenizer_sha256 != fingerprint:
        refuse("tokenizer", health.tokenizer_sha256, fingerprint, "model.path")

    # Files get to the server through a folder that both see, unless they are uploaded.
    root = str(config.sync_root.resolve())
    by_folder = config.sync.transport != "nccl" and not config.sync.upload
    if by_folder and health.root != root:
        refuse("root of versions", health.root, root, "sync.root, or set sync.upload=true")

    # The server may have more of these than the run needs, but not less.
    if health.max_length < length:
        refuse("longest sequence", health.max_length, length, "model.max_length")
    rank = model.lora.rank if model.lora else 0
    if health.max_adapter_rank < rank:
        refuse("highest rank of adapters", health.max_adapter_rank, rank, "model.lora")


def refuse_other_model(config: Config, tokenizer: Any, url: str, health: Health) -> None:
    """Raise ConfigError for a server whose own weights are not those that a command asks for."""
    model = config.model.path
    serves = f"the server at {url} serves {health.model}"
    if health.tokenizer_sha256 != tokenizers.fingerprint(tokenizer):
        other = f"whose tokenizer is not that of model.path={model}"
        raise ConfigError(f"{serves}, {other}; name the same model")
    # A server that no setting names is expected to serve model.path itself.
    is_model = Path(health.model).resolve() == Path(model).resolve()
    if not config.names_servers and not is_model:
        advice = f"to measure that one set server.urls=[{url}], else another server.port"
        raise ConfigError(f"{serves}, not model.path={model}; {advice}")
    root = str(config.sync_root.resolve())
    if not config.names_servers and health.root != root:
        advice = f"to measure it set server.urls=[{url}], else another server.port"
        raise ConfigError(f"{serves} for runs in {health.root}, not in {root}; {advice}")
