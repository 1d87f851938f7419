"""Draw images of shapes, and ask what is seen: a task for laptops."""

import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

from hocket.data.sources import TASKS, generator, split_of

SIDE = 64  # pixels of an image's side
# Each shape has a place of its own, so none covers another.
PLACES = ("top left", "top right", "bottom left", "bottom right")
CELL = SIDE // 2  # pixels of a place's side
# Shortest and longest side of a shape in pixels: a large one has twice the area of any small one.
SIZES = {"small": (6, 14), "large": (22, 30)}
COLOURS = {
    "red": "#e02020",
    "green": "#20a020",
    "blue": "#2040e0",
    "yellow": "#f0d000",
    "black": "#101010",
}
KINDS = ("rectangle", "ellipse", "triangle")
COUNT = "How many shapes?"
LARGEST = "Which colour is the largest?"


@TASKS.register("shapes")
def shapes(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield images of 1 to 4 shapes, one of them large, with a question and its answer."""
    rng = generator("shapes", split, seed)
    while True:
        image, drawn = _drawn(rng, split)
        question = rng.choice((COUNT, LARGEST))
        if question == COUNT:
            answer = str(len(drawn))
        else:
            answer = next(colour for size, colour in drawn.values() if size == "large")
        yield {"prompt": question, "image": image, "answer": answer}


@TASKS.register("shapes_seen")
def shapes_seen(split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield demonstrations that tell the shape at a place.

    A quarter has the questions of `shapes` with a guess in response: they teach the form of an
    answer, and leave it to training with rewards to get it right.
    """
    rng = generator("shapes_seen", split, seed)
    counts = [str(number + 1) for number in range(len(PLACES))]
    guesses = {COUNT: counts, LARGEST: list(COLOURS)}
    while True:
        image, drawn = _drawn(rng, split)
        place = rng.choice(PLACES)
        place_question = f"What is {place}?"
        question = rng.choice((COUNT, LARGEST) + (place_question,) * 6)
        if question in guesses:
            response = rng.choice(guesses[question])
        else:
            response = " ".join(drawn.get(place, ("nothing",)))
        yield {"prompt": question, "image": image, "response": response}


def _drawn(rng: random.Random, split: str) -> tuple[Image.Image, dict[str, tuple[str, str]]]:
    """Draw an image of a split. Returns it with the (size, colour) at each place with a shape."""
    while True:
        image = Image.new("RGB", (SIDE, SIDE), "white")
        draw = ImageDraw.Draw(image)

        # The first shape is the large one.
        colours = rng.sample(list(COLOURS), rng.randint(1, len(PLACES)))
        places = rng.sample(PLACES, len(colours))
        drawn: dict[str, tuple[str, str]] = {}
        for place, colour in zip(places, colours, strict=True):
            size = "small" if drawn else "large"
            drawn[place] = (size, colour)

        for place, (size, colour) in drawn.items():
            _draw_shape(rng, draw, PLACES.index(place), SIZES[size], COLOURS[colour])
        if split_of(image.tobytes().hex()) == split:
            return image, drawn


def _draw_shape(
    rng: random.Random, draw: ImageDraw.ImageDraw, cell: int, sides: tuple[int, int], fill: str
) -> None:
    """Draw one shape of any kind anywhere in a cell of the image: 0 to 3, row by row."""
    side = rng.randint(sides[0], sides[1])
    left = cell % 2 * CELL + rng.randint(0, CELL - side - 1)
    top = cell // 2 * CELL + rng.randint(0, CELL - side - 1)
    right = left + side
    bottom = top + side
    kind = rng.choice(KINDS)
    if kind == "triangle":
        corners = [(left, bottom), (right, bottom), ((left + right) // 2, top)]
        draw.polygon(corners, fill=fill)
    elif kind == "ellipse":
        draw.ellipse((left, top, right, bottom), fill=fill)
    else:
        draw.rectangle((left, top, right, bottom), fill=fill)
