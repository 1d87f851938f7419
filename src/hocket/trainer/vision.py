"""Give the images of a row to the forward pass; text models don't use this file.

The processor runs where a row is computed: until then images are the bytes of their files.
Positions of M-RoPE depend on a whole sequence with its images: they are computed for the sequence,
and the row takes those of the tokens that it has.
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

BLANK_PIXELS = 32  # of a side


class Vision:
    """Makes the arguments of a model's forward pass, its images among them.

    A row without an image gets a blank one behind it: so every rank runs its vision tower, and
    takes part in the sums of its gradients.
    """

    def __init__(self, path: str, model: Any) -> None:
        self.token: int = model.config.image_token_id
        self._processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
        blank = png(new("RGB", (BLANK_PIXELS, BLANK_PIXELS), "white"))
        self.blank = Image(file=blank, name="", start=2, length=0, placeholder=self.token)

    def measure_blank(self, model: Any) -> Image:
        """Count the tokens of the blank image; call this before any other forward pass.

        Returns the blank as an image that stands behind two tokens.
        """
        device = model.get_input_embeddings().weight.device
        features = model.base_model.get_image_features(
            **self._pixels([self.blank], device)
        ).pooler_output
        self.blank = dataclasses.replace(self.blank, length=len(torch.cat(list(features))))
        return self.blank

    def alone(self, model: Any, ids_bt: Tensor, images: Sequence[Image]) -> dict[str, Tensor]:
        """Make the arguments for a sequence without a row, as transformers takes them."""
        inputs = {"input_ids": ids_bt, **self._pixels(images, ids_bt.device)}
        if _has_mrope(model):
            inputs["mm_token_type_ids"] = (ids_bt == self.token).int()
        return inputs

    def inputs(
        self, model: Any, ids_br: Tensor, segments: Segments, images: Sequence[Image]
    ) -> dict[str, Any]:
        """Make the arguments for a row; behind one without an image, the blank."""
        if not images:
            images = [dataclasses.replace(self.blank, start=ids_br.shape[1])]
            ids_br = torch.cat([ids_br, ids_br.new_full((1, self.blank.length), self.token)], dim=1)
            segments = _with_one_more(segments, self.blank.length)
        pixels = self._pixels(images, ids_br.device)
        positions = segments.positions_br
        if _has_mrope(model):
            positions = self._mrope(
                model, ids_br[0].cpu(), segments, images, pixels["image_grid_thw"].cpu()
            )
        return segments.inputs(ids_br) | {"position_ids": positions.to(ids_br.device), **pixels}

    def _mrope(
        self,
        model: Any,
        ids_r: Tensor,
        segments: Segments,
        images: Sequence[Image],
        grids_n3: Tensor,
    ) -> Tensor:
        """Compute the positions of time, height and width, [3, 1, row]."""
        key_places = segments.key_places
        if key_places is None:
            key_places = torch.arange(len(ids_r))
        starts_n = torch.tensor([image.start for image in images])
        positions = []
        for places, length in zip(
            torch.split(key_places, list(segments.ends)), segments.lengths, strict=True
        ):
            grids = grids_n3[torch.isin(starts_n, places)]
            ids_bt = ids_r[places][None]
            is_image_bt = (ids_bt == self.token).int()
            whole, _ = model.base_model.get_rope_index(ids_bt, is_image_bt, image_grid_thw=grids)
            positions.append(whole[..., -length:])
        return torch.cat(positions, dim=-1)

    def _pixels(self, images: Sequence[Image], device: torch.device) -> dict[str, Tensor]:
        made = self._processor([[decoded(image.data) for image in images]], return_tensors="pt")
        return {name: tensor.to(device, non_blocking=True) for name, tensor in made.items()}


def _has_mrope(model: Any) -> bool:
    return hasattr(model.base_model, "get_rope_index")


def _with_one_more(segments: Segments, length: int) -> Segments:
    """Add a segment behind the others that shares no prefix."""
    key_places = segments.key_places
    if key_places is not None:
        key_places = torch.cat([key_places, sum(segments.lengths) + torch.arange(length)])
    starts = (*segments.starts, 0) if segments.starts else ()
    return dataclasses.replace(
        segments, lengths=(*segments.lengths, length), starts=starts, key_places=key_places
    )
