"""Tools as TRL's guide to agents describes them: functions with type hints and docstrings, plain or async."""

from hocket.envs import tool


@tool
def multiply(a: int, b: int) -> int:
    """
    Multiply two whole numbers.

    Args:
        a: The first one.
        b: The second one.

    Returns:
        The product.
    """
    return a * b


@tool
async def async_add(a: int, b: int) -> int:
    """
    Add two whole numbers.

    Args:
        a: The first one.
        b: The second one.

    Returns:
        The sum.
    """
    return a + b
