"""Give the images of a row to the forward pass; text models don't use this file.

The processor runs where a row is computed: until then, images are the bytes of their files.
Positions of M-RoPE depend on a whole sequence with its images. They are computed for the sequence
with its prefix, and the row takes the positions of the tokens that it has.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import new
from torch import Tensor
from transformers import AutoImageProcessor

from hocket.common.vision import decoded, png
from hocket.trainer.attention import Segments
from hocket.types import Image

BLANK_PIXELS = 32  # width and height of the blank image


class Vision:
    """Makes the arguments of a model's forward pass, its images among them.

    A row without an image gets a blank image at its end. So every rank runs its vision tower, and
    takes part in the sums of its gradients.

    Attributes:
        token: the id of the token that stands for each part of an image.
        blank: the blank image; its length is 0 until `measure_blank`.
    """

    def __init__(self, path: str, model: Any) -> None:
        self.token: int = model.config.image_token_id
        self._processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
        blank = png(new("RGB", (BLANK_PIXELS, BLANK_PIXELS), "white"))
        # It stands behind two tokens where an architecture is checked, and elsewhere in rows.
        self.blank = Image(file=blank, name="", start=2, length=0, placeholder=self.token)

    def measure_blank(self, model: Any) -> Image:
        """Count the tokens of the blank image; call this before any other forward pass.

        Returns the blank as an image that stands behind two tokens.
        """
        device = model.get_input_embeddings().weight.device
        pixels = self._pixels([self.blank], device)
        features = model.base_model.get_image_features(**pixels).pooler_output
        length = len(torch.cat(list(features)))
        self.blank = dataclasses.replace(self.blank, length=length)
        return self.blank

    def alone(self, model: Any, ids_bt: Tensor, images: Sequence[Image]) -> dict[str, Tensor]:
        """Make the arguments for a sequence on its own, as transformers takes them."""
        inputs = {"input_ids": ids_bt} | self._pixels(images, ids_bt.device)
        if _has_mrope(model):
            inputs["mm_token_type_ids"] = (ids_bt == self.token).int()
        return inputs

    def inputs(
        self, model: Any, ids_br: Tensor, segments: Segments, images: Sequence[Image]
    ) -> dict[str, Any]:
        """Make the arguments for a row of sequences.

        The hidden states that they give are longer than the row if it has no image: those of the
        blank image come last.
        """
        if not images:
            images = [dataclasses.replace(self.blank, start=ids_br.shape[1])]
            blank_br = ids_br.new_full((1, self.blank.length), self.token)
            ids_br = torch.cat([ids_br, blank_br], dim=1)
            segments = _with_segment(segments, self.blank.length)
        pixels = self._pixels(images, ids_br.device)
        positions = segments.positions_br
        if _has_mrope(model):
            grids_n3 = pixels["image_grid_thw"].cpu()
            positions = self._mrope(model, ids_br[0].cpu(), segments, images, grids_n3)
        inputs = segments.inputs(ids_br) | pixels
        inputs["position_ids"] = positions.to(ids_br.device)
        return inputs

    def _mrope(
        self,
        model: Any,
        ids_r: Tensor,
        segments: Segments,
        images: Sequence[Image],
        grids_n3: Tensor,
    ) -> Tensor:
        """Compute the positions of time, height and width for each token of a row, [3, 1, r].

        `grids_n3` has the numbers of patches of each image in time, height and width.
        """
        # The places in the row of each sequence, its prefix included.
        key_places = segments.key_places
        if key_places is None:
            key_places = torch.arange(len(ids_r))
        places_of_sequences = torch.split(key_places, list(segments.ends))

        starts_n = torch.tensor([image.start for image in images])
        positions = []
        for places, length in zip(places_of_sequences, segments.lengths, strict=True):
            grids = grids_n3[torch.isin(starts_n, places)]  # of the images within the sequence
            ids_bt = ids_r[places][None]
            is_image_bt = (ids_bt == self.token).int()
            whole, _ = model.base_model.get_rope_index(ids_bt, is_image_bt, image_grid_thw=grids)
            positions.append(whole[..., -length:])  # without the prefix
        return torch.cat(positions, dim=-1)

    def _pixels(self, images: Sequence[Image], device: torch.device) -> dict[str, Tensor]:
        """Run the processor on images; it names the arguments of the vision tower."""
        decoded_images = [decoded(image.data) for image in images]
        tensors = self._processor([decoded_images], return_tensors="pt")
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _has_mrope(model: Any) -> bool:
    """Check whether positions have three numbers: time, height and width."""
    return hasattr(model.base_model, "get_rope_index")


def _with_segment(segments: Segments, length: int) -> Segments:
    """Add a segment at the end of a row, which shares no prefix."""
    key_places = segments.key_places
    if key_places is not None:
        places = sum(segments.lengths) + torch.arange(length)
        key_places = torch.cat([key_places, places])
    # Starts are () where no segment shares a prefix.
    starts = (*segments.starts, 0) if segments.starts else ()
    lengths = (*segments.lengths, length)
    return dataclasses.replace(segments, lengths=lengths, starts=starts, key_places=key_places)
