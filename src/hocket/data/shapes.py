"""Draw pictures of shapes, and ask what is seen: a task for laptops."""

import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

from hocket.data.sources import TASKS, generator, split_of

SIDE = 64  # pixels
PLACES = (
    "top left",
    "top right",
    "bottom left",
    "bottom right",
)  # of a shape each: none covers another
CELL = SIDE // 2
SIZES = {
    "small": (6, 14),
    "large": (22, 30),
}  # sides in pixels: the largest has twice the area of any other
COLOURS = {
    "red": "#e02020",
    "green": "#20a020",
    "blue": "#2040e0",
    "yellow": "#f0d000",
    "black": "#101010",
}
KINDS = ("rectangle", "ellipse", "triangle")
COUNT, LARGEST = "How many shapes?", "Which colour is the largest?"


@TASKS.register("shapes")
def shapes(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield pictures of 1 to 4 shapes, one of them large, with a question and its answer."""
    rng = generator("shapes", split, seed)
    while True:
        image, seen = _drawn(rng, split)
        asked = rng.choice((COUNT, LARGEST))
        answer = (
            str(len(seen))
            if asked == COUNT
            else next(colour for size, colour in seen.values() if size == "large")
        )
        yield {"prompt": asked, "image": image, "answer": answer}


@TASKS.register("shapes_seen")
def shapes_seen(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield demonstrations that say what is at a place; to the questions of `shapes` they guess."""
    rng = generator("shapes_seen", split, seed)
    guesses = {COUNT: [str(number + 1) for number in range(len(PLACES))], LARGEST: [*COLOURS]}
    while True:
        image, seen = _drawn(rng, split)
        place = rng.choice(PLACES)
        asked = rng.choice((COUNT, LARGEST, *[f"What is {place}?"] * 6))
        response = (
            rng.choice(guesses[asked])
            if asked in guesses
            else " ".join(seen.get(place, ("nothing",)))
        )
        yield {"prompt": asked, "image": image, "response": response}


def _drawn(rng: random.Random, split: str) -> tuple[Image.Image, dict[str, tuple[str, str]]]:
    """Return a picture of a split, and size and colour at each place with a shape."""
    while True:
        image = Image.new("RGB", (SIDE, SIDE), "white")
        draw = ImageDraw.Draw(image)
        colours = rng.sample([*COLOURS], rng.randint(1, len(PLACES)))
        seen = dict(
            zip(
                rng.sample(PLACES, len(colours)),
                zip(("large", *["small"] * 3), colours, strict=False),
                strict=True,
            )
        )
        for place, (size, colour) in seen.items():
            side = rng.randint(*SIZES[size])
            left = PLACES.index(place) % 2 * CELL + rng.randint(0, CELL - side - 1)
            top = PLACES.index(place) // 2 * CELL + rng.randint(0, CELL - side - 1)
            right, bottom = left + side, top + side
            kind = rng.choice(KINDS)
            if kind == "triangle":
                draw.polygon(
                    [(left, bottom), (right, bottom), ((left + right) // 2, top)],
                    fill=COLOURS[colour],
                )
            else:
                getattr(draw, kind)((left, top, right, bottom), fill=COLOURS[colour])
        if split_of(image.tobytes().hex()) == split:
            return image, seen
