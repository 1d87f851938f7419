from pathlib import Path

import pytest

from hocket.commands.cli import main


def test_export_takes_two_folders_and_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hocket.trainer.lora import Adapter

    versions = tmp_path / "weights"
    for file in ("v000001/COMPLETE", "v000002/COMPLETE", "v000002/adapter_config.json", "../metrics.jsonl"):
        (versions / file).parent.mkdir(parents=True, exist_ok=True)
        (versions / file).touch()
    asked: list[object] = []
    monkeypatch.setattr(Adapter, "export", lambda *args, base: asked.append((*map(str, args), base)))
    newest = f"{versions}/v000002"
    assert main(["export", f"{tmp_path}", "out"]) == 0  # a run is its newest version
    assert main(["export", newest, "out", "model.path=elsewhere"]) == 0
    assert asked == [(newest, "out", None), (newest, "out", "elsewhere")]
