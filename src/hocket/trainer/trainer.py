"""The trainer as the loop sees it: one object on rank 0; the other ranks follow and do the same work.

Takes calls on rank 0, refuses what rank 0 can refuse alone, and has all ranks carry out the rest. What they do, with
which models and losses, is work.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from hocket import tokenizer as tokenizers
from hocket import weight_group
from hocket.algorithm.samples import is_measured
from hocket.config import Config
from hocket.errors import TrainerError
from hocket.protocol import AdapterConfig, Health, TensorLayout, TensorSpec
from hocket.trainer import guards, measure
from hocket.trainer.batching import check_fits, num_positions
from hocket.trainer.checkpoint import SavedTensors
from hocket.trainer.ranks import Ranks
from hocket.trainer.work import BatchLoss, Sink, Work
from hocket.types import Measured, StepStats, TokenSequence, TrainSample


class Trainer:
    """Trains the model on samples. Every rank constructs it; rank 0 calls its methods, the others `follow`.

    Each method runs on all ranks at the same time; any thread may call one, while no other runs. What rank 0 can refuse
    alone it refuses before the others start, so that an error leaves everyone ready for `close`. An error within the
    common work ends the run: this process raises it, and the others notice that it is gone.

    Args:
        config: the run's config.
        loss: what is minimised; default: the configured policy loss, with the reference policy and the critic that the
            algorithm asks for.
        temperature: logits are divided by it; default: rollout.temperature.
        ranks: an existing connection to share, left open by `close`; default: a new one.

    Attributes:
        work: what this rank has and does.
    """

    def __init__(
        self,
        config: Config,
        *,
        loss: BatchLoss | None = None,
        temperature: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._config = config.trainer
        self._algorithm = config.algorithm
        self.tokenizer = tokenizers.load(config.model.path)
        self._owns_ranks = ranks is None
        self._ranks = ranks or Ranks(config.trainer.collective_timeout_s)
        self._closed = self._broken = self._away = False
        temperature = config.rollout.temperature if temperature is None else temperature
        try:
            self.work = Work(config, self.tokenizer, self._ranks, loss=loss, temperature=temperature)
        except BaseException:
            if self._owns_ranks:
                self._ranks.destroy()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that may call methods other than `follow`."""
        return self._ranks.is_main

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._ranks.device

    @property
    def num_ranks(self) -> int:
        """Processes that train together."""
        return self._ranks.size

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self.work.policy.parameters())

    @property
    def memory(self) -> str:
        """In words, what a step was estimated to need."""
        return self.work.memory

    @property
    def adapter(self) -> AdapterConfig | None:
        """What the adapter is that is trained, None where all weights are."""
        return self.work.policy.adapter

    def check_same_model(self, health: Health) -> None:
        """Raises TrainerError where the server's vocabulary or tokenizer is not the trainer's."""
        vocab_size = self.work.policy.vocab_size
        if (health.vocab_size, health.tokenizer_sha256) != (vocab_size, tokenizers.fingerprint(self.tokenizer)):
            raise TrainerError(
                f"the server serves {health.model} (vocabulary {health.vocab_size}), which is not the trainer's model "
                f"or tokenizer (vocabulary {vocab_size}); start both with the same model.path"
            )

    def step(self, samples: Sequence[TrainSample], *, keep: Path | None = None) -> StepStats:
        """Takes one optimiser step on all samples. A step that is not finite leaves the weights as they were.

        Args:
            keep: a file for the samples, written where such a step is skipped, with what was not finite in it.

        Raises:
            TrainerError: no sample, a sample too long for a micro-batch, or trainer.max_skipped_steps skipped in a row.
        """
        check_fits(samples, self.work.micro_batch_tokens)
        stats, fault = self._together("step", tuple(samples))
        if fault is not None:
            if keep is not None:
                guards.keep_batch(keep, samples, fault, self.tokenizer.decode)
            if self.work.skipped_in_row >= self._config.max_skipped_steps:
                kept = f" (the samples: {keep})" if keep is not None else ""
                raise TrainerError(
                    f"{self.work.skipped_in_row} steps in a row were skipped because loss or gradient was not finite; "
                    f"not finite in the last one{kept}: {fault}. {fault.advice}"
                )
        result: StepStats = stats
        return result

    def measure(self, sequences: Sequence[TokenSequence]) -> list[Measured]:
        """Returns what the algorithm has to know of each sequence before the step, in their order; [] where nothing.

        A sequence that the algorithm makes no use of is not computed: nothing is known of it.

        Raises:
            TrainerError: a sequence is too long for a micro-batch.
        """
        if not sequences or not self.work.measures:
            return []
        used = [index for index, sequence in enumerate(sequences) if is_measured(sequence, self._algorithm)]
        if not used:
            return [Measured()] * len(sequences)
        samples = measure.samples_of([sequences[index] for index in used])
        check_fits(samples, self.work.micro_batch_tokens)
        measured: dict[int, Measured] = self._together("measure", samples)
        places = {index: place for place, index in enumerate(used)}
        return [measured[places[index]] if index in places else Measured() for index in range(len(sequences))]

    def logprob_gap(self, samples: Sequence[TrainSample]) -> float:
        """Returns the mean absolute difference of the engine's log-probs and the trainer's, over the sampled tokens."""
        check_fits(samples, self.work.micro_batch_tokens)
        gap: float = self._together("logprob_gap", tuple(samples))
        return gap

    def export(self, folder: Path) -> dict[str, TensorSpec]:
        """Writes the weights in Hugging Face format: safetensors in the compute dtype, config.json, tokenizer.

        Where an adapter is trained, only that, in PEFT's format.

        Returns:
            What the files are to hold, of the tensors in memory: a reader can prove the files with it.

        Raises:
            OSError, SafetensorError: it can't be written; the trainer goes on.
        """
        written: dict[str, TensorSpec] | Exception = self._together("export", folder)
        if isinstance(written, Exception):
            raise written
        return written

    def layout(self, max_bytes: int) -> list[list[TensorLayout]]:
        """Describes the buckets that `stream` will give; no rank but 0 is needed for it."""
        buckets = self.work.engine.layout(max_bytes)
        return [weight_group.layout(self.work.policy.as_published(bucket)) for bucket in buckets]

    def stream(self, max_bytes: int, sink: Sink) -> None:
        """Gives the weights to `sink`, bucket after bucket of about max_bytes at most, on the trainer's device.

        What the sink raises is raised here, once the ranks are through with gathering.
        """
        self._into(sink, "stream", max_bytes)

    def beat(self) -> None:
        """Tells the other ranks that rank 0 is well, where it has no work for them; may be called at any time."""
        self._together("beat")

    def offload(self) -> None:
        """Leaves the GPU to others: all training state moves to the CPU's memory. May be repeated."""
        if not self._away:
            self._together("offload")
            self._away = True

    def onload(self) -> None:
        """Comes back to the GPU with the very same state. May be repeated."""
        if self._away:
            self._together("onload")
            self._away = False

    def state(self, sink: Sink) -> dict[str, Any]:
        """Gives all that training goes on from to `sink`, bucket after bucket, and returns the rest, ready for JSON.

        Tensors are copies in the CPU's memory, whole and float32, whatever ranks and ZeRO stage there are. What the
        sink raises is raised here, once the ranks are through with gathering.
        """
        rest: dict[str, Any] = self._into(sink, "state")
        return rest

    def restore(self, saved: SavedTensors, rest: Mapping[str, Any]) -> None:
        """Goes back to what `state` gave, to another number of ranks or at another ZeRO stage, too.

        Raises:
            TrainerError: it is the state of another model; nothing has changed.
        """
        saved.check(
            {f"{name}/{key}": shape for name, e in self.work.engines().items() for key, shape in e.shapes().items()}
        )
        self.work.saved = saved
        self._together("restore", rest)
        self.work.saved = None  # open files could not be removed everywhere

    def close(self) -> None:
        """Releases the other ranks and ends communication. After a failure within common work it only lets go."""
        if self._closed or self._broken:
            return
        if self.is_main:
            self._together("close")

    def follow(self) -> None:
        """Does on ranks above 0 what rank 0 does, until rank 0 closes.

        Raises:
            TrainerError: rank 0 has ended without closing, or was silent for trainer.collective_timeout_s.
        """
        while not self._closed:
            with self._ranks.deadline("waiting for work from rank 0"):
                name, arguments = self._ranks.broadcast(("", ()))
            self._run(name, arguments)

    def _together(self, name: str, *arguments: Any) -> Any:
        if self._closed or self._broken:
            raise TrainerError(f"the trainer can't {name}: it is closed, or broke in an earlier call")
        if not self.is_main:
            raise TrainerError(f"rank {self._ranks.rank} called {name}; ranks above 0 only follow")
        if self._away and name not in ("onload", "close", "beat"):
            raise TrainerError(f"the trainer can't {name}: it is off the GPU; call onload() first")
        with self._ranks.deadline(f"starting to {name}"):
            self._ranks.broadcast((name, arguments))
        return self._run(name, arguments)

    def _into(self, sink: Sink, name: str, *arguments: Any) -> Any:
        """Has all ranks do work that fills rank 0's sink, and raises what that raised."""
        self.work.sink, self.work.sink_failure = sink, None
        result = self._together(name, *arguments)
        self.work.sink = None
        if self.work.sink_failure is not None:
            raise self.work.sink_failure
        return result

    def _run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self._broken = True  # until the work has ended well
        self._ranks.use_this_thread()
        with self._ranks.deadline(f"doing the common {name}"):
            try:
                result = getattr(self.work, name)(*arguments)
            except Exception as error:
                if not guards.is_out_of_memory(error):
                    raise
                samples = arguments[0] if arguments and isinstance(arguments[0], tuple) else ()
                raise guards.out_of_memory(
                    error,
                    self._config,
                    micro_batch_tokens=self.work.micro_batch_tokens,
                    work=name,
                    longest=max(map(num_positions, samples), default=0),
                    vocab_size=self.work.policy.vocab_size,
                    on_gpu=self.device.type == "cuda",
                ) from error
        self._broken = False
        if name == "close":
            if self._owns_ranks:
                self._ranks.close()
            self._closed = True
        return result
