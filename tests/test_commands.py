"""What the commands bring together."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hocket.commands import _trainer_id


def test_a_run_has_one_id_on_all_its_ranks_and_after_a_restart_and_another_run_has_another(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with ThreadPoolExecutor(8) as ranks:
        ids = set(ranks.map(lambda _: _trainer_id(folder), range(8)))
    assert ids == {_trainer_id(folder)}
    assert [path.name for path in folder.iterdir()] == ["trainer_id"]
    assert ids != {_trainer_id(tmp_path / "others" / "mine")}
