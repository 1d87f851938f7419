"""What is trained without servers, each by the command of its name: a loss and a data source on the trainer."""

from typing import Any

from hocket.common.registry import Registry

STAGES: Registry[Any] = Registry("stage", sft="hocket.stages.sft", dpo="hocket.stages.dpo")
"""Makers: a config → its `driver.Stage`."""
