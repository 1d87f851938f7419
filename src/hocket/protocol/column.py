"""Carry long rows of numbers, as a field of a message."""

import base64
from array import array
from collections.abc import Sequence
from typing import Any

import pydantic
from pydantic_core import CoreSchema, core_schema


class Column:
    """Numbers: a list in JSON or, in a `packed` stream, base64 of `dtype`."""

    def __init__(self, listed: Any, dtype: str, code: str) -> None:
        self._listed = listed
        self._dtype = dtype
        self._code = code

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        packed = core_schema.no_info_plain_validator_function(self._read)
        write = core_schema.plain_serializer_function_ser_schema(self._write, info_arg=True, when_used="json")
        return core_schema.union_schema([handler(self._listed), packed], mode="left_to_right", serialization=write)

    def _read(self, value: Any) -> Any:
        if isinstance(value, array):
            return value
        if not isinstance(value, str):
            raise ValueError("must be a list, or base64")
        import numpy as np  # here, as a launcher needs none

        numbers = np.frombuffer(base64.b64decode(value, validate=True), self._dtype)
        if not np.isfinite(numbers).all():
            raise ValueError("must be finite")
        return array(self._code, numbers.astype(self._code).tobytes())

    def _write(self, values: Sequence[float], info: pydantic.SerializationInfo) -> Any:
        if not info.context:
            return tuple(values)
        import numpy as np

        return base64.b64encode(np.array(values, self._dtype).tobytes()).decode()
