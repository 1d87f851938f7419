"""Files and folders that are whole or not there."""

from pathlib import Path

import pytest

from hocket.common import files
from hocket.common.files import atomic_folder, docs, remove_folder, shipped, unshipped, write_atomically


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    write_atomically(path, "new é\ud800")  # half a surrogate pair has no encoding
    assert path.read_bytes() == "new é?".encode()
    assert list(tmp_path.iterdir()) == [path]

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "newer")
    assert path.read_text(encoding="utf-8") == "new é?"


def test_a_folder_appears_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    for content in ("old", "new"):
        with atomic_folder(path) as partial:
            (partial / "file").write_text(content)
            (partial / "file").chmod(0o600)
            assert not path.exists() or (path / "file").read_text() == "old"
    assert (path / "file").read_text() == "new"
    assert (path / "file").stat().st_mode & 0o777 == path.stat().st_mode & 0o666  # readable for whom the folder is

    def fail() -> None:
        with atomic_folder(path) as partial:
            (partial / "file").touch()
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert (path / "file").read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_removed_folder_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "v1"
    path.mkdir()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed half-way
    remove_folder(path)
    assert not path.exists()
    monkeypatch.undo()
    path.mkdir()
    remove_folder(path)
    assert list(tmp_path.iterdir()) == []


def test_a_shipped_file_is_found_from_any_folder_unless_that_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    for name in ("config/quickstart.yaml", "checkpoints/tiny-sort", "examples/own_everything"):
        assert shipped(name) == str(root / name)
    for name in ("config/none.yaml", "src/hocket", "", ".", "/config/quickstart.yaml", "Qwen/Qwen3-4B"):
        assert shipped(name) == name
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "quickstart.yaml").touch()
    assert shipped("config/quickstart.yaml") == "config/quickstart.yaml"


def test_a_wheel_s_files_come_before_those_of_the_folder_above_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib" / "python3" / "hocket"
    (package / "shipped" / "config").mkdir(parents=True)
    (package / "shipped" / "config" / "sort.yaml").touch()
    monkeypatch.setattr(files, "_PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    assert shipped("config/sort.yaml") == f"{package}/shipped/config/sort.yaml"
    assert unshipped(f"{package}/shipped/config/sort.yaml") == "config/sort.yaml"
    for path in ("checkpoints/mine", f"{tmp_path}/model", "HuggingFaceTB/SmolLM2-135M"):
        assert unshipped(path) == path


def test_a_page_of_the_docs_is_hocket_s_own_even_where_the_folder_has_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    assert docs("index.md") == "docs/index.md"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").touch()
    monkeypatch.chdir(tmp_path)
    assert docs("index.md") == f"{root}/docs/index.md"
    package = tmp_path / "lib" / "hocket"
    (package / "shipped" / "docs").mkdir(parents=True)
    monkeypatch.setattr(files, "_PACKAGE", package)
    assert docs() == "lib/hocket/shipped/docs"
