"""Versions that come file by file: what is taken, what is refused, and what is left on the disk."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from hocket.extras.upload import FOLDER as FOLDERS
from hocket.extras.upload import Uploads
from hocket.protocol import DiskSource
from hocket.server import versions
from hocket.server.errors import ApiError
from support.engines import asking, idle_engine, wrap

NAME = "0123abcd-deltas-v000007"
FOLDER = f"{FOLDERS}-1"  # of the first server


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def send(uploads: Uploads, name: str, file: str, *parts: bytes, max_bytes: int = 100) -> DiskSource:
    return await uploads.receive(name, file, chunks(*parts), max_bytes)


async def test_a_version_appears_when_its_marker_has_come_and_is_there_once(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path / "root")
    for content in (b"a", b"b"):
        for file in ("model-00001-of-00002.safetensors", "manifest.json"):
            assert (await send(uploads, NAME, file, content, b"", b"c")).name == f"{FOLDER}/{NAME}"
        if content == b"a":
            with pytest.raises(ApiError, match="there is no"):
                versions.find(tmp_path / "root", f"{FOLDER}/{NAME}")
        answer = await send(uploads, NAME, "COMPLETE", b"")
    folder = versions.find(tmp_path / "root", answer.name)
    assert (folder / "manifest.json").read_bytes() == b"bc"
    assert os.listdir(folder.parent) == [NAME]


async def test_servers_on_one_root_share_no_folder_and_one_that_ends_leaves_its_own_to_the_next(tmp_path: Path) -> None:
    servers = [Uploads(tmp_path), Uploads(tmp_path)]
    for file in ("model.safetensors", "manifest.json", "COMPLETE"):  # each of them at the same time
        sent = await asyncio.gather(
            *(send(one, NAME, file, bytes(f"{file} {i}", "ascii")) for i, one in enumerate(servers))
        )
    for i, source in enumerate(sent):
        folder = versions.find(tmp_path, source.name)
        assert (folder / "model.safetensors").read_text() == f"model.safetensors {i}"
    del servers[0]
    assert (await send(Uploads(tmp_path), NAME, "manifest.json", b"x")).name == sent[0].name


NO_VERSIONS = ["0123abcd-weights-v00000१", "..", "0123abcd-v000001", f".{NAME}.partial", f"{NAME}/..", f"{NAME}\n"]
NO_FILES = ["../a.safetensors", ".a.safetensors", "a/a.safetensors", "a\\a.safetensors", "config.json"]
NO_FILES += ["a.safetensors\0", "", "x" * 200 + ".safetensors", "é.safetensors"]


@pytest.mark.parametrize(
    ("name", "file"), [*((name, "a.safetensors") for name in NO_VERSIONS), *((NAME, file) for file in NO_FILES)]
)
async def test_names_that_no_version_or_file_has_are_refused(tmp_path: Path, name: str, file: str) -> None:
    with pytest.raises(ApiError) as caught:
        await send(Uploads(tmp_path / "root"), name, file, b"x")
    assert (caught.value.status, caught.value.body.code) == (422, "bad_name")
    assert not (tmp_path / "root").exists()


async def test_all_files_of_a_version_together_are_bounded_which_is_noticed_while_they_come(tmp_path: Path) -> None:
    uploads, read = Uploads(tmp_path), 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 10
            yield b"x" * 10

    for _ in range(2):  # again: it is not counted twice
        await send(uploads, NAME, "a.safetensors", b"x" * 60)
    with pytest.raises(ApiError, match="more than a version can have"):
        await uploads.receive(NAME, "b.safetensors", endless(), 100)
    assert read == 50
    name = "0123abcd-weights-v000008"
    both = [send(uploads, name, f"{number}.safetensors", b"x" * 60) for number in range(2)]  # they share its room
    answers = await asyncio.gather(*both, return_exceptions=True)
    assert [getattr(answer, "status", 200) for answer in answers] == [200, 413]


async def test_a_sender_that_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.extras.upload.SILENCE_S", 0.05)

    async def silent() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    with pytest.raises(ApiError, match=r"nothing came for 0\.05 s") as caught:
        await Uploads(tmp_path).receive(NAME, "model.safetensors", silent(), 100)
    assert caught.value.status == 408


async def test_a_full_disk_is_said_and_what_was_written_is_removed(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    folder = tmp_path / FOLDER / f".{NAME}.partial"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to("/dev/full")  # a real file on which every write fails
    with pytest.raises(ApiError, match="No space left on device") as caught:
        await send(uploads, NAME, "model.safetensors", b"x" * 50)
    assert (caught.value.status, caught.value.body.code) == (507, "disk_full")
    assert "sync.root" in caught.value.body.hint
    assert not folder.exists()


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        (["a.safetensors", "COMPLETE", "COMPLETE", "COMPLETE"], {2, 3}),
        (["COMPLETE", "COMPLETE", "a.safetensors", "a.safetensors", "a.safetensors"], {1, 3, 4}),
    ],
)
async def test_the_newest_versions_and_what_is_no_upload_stay(tmp_path: Path, files: list[str], kept: set[int]) -> None:
    uploads, root = Uploads(tmp_path), tmp_path / FOLDER
    names = [f"0123abcd-weights-v{number:06d}" for number in range(len(files))]
    for number, file in enumerate(files):
        await send(uploads, names[number], file, b"x")
        os.utime(next(root.glob(f"*{names[number]}*")), (number, number))
        (root / "run-of-somebody").mkdir(exist_ok=True)
    await send(uploads, names[-1], files[-1], b"x")  # once more, for a comparison
    left = {names[number] if files[number] == "COMPLETE" else f".{names[number]}.partial" for number in kept}
    assert {path.name for path in root.iterdir()} == left | {"run-of-somebody"}


async def test_an_upload_may_be_large_but_needs_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.server.middleware.MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setattr("hocket.server.versions.max_bytes", lambda shapes: 3 << 20)
    failed = ApiError(503, "reload_failed", "half loaded", "reload")
    engine = idle_engine()
    engine.root, engine.expected = tmp_path, AsyncMock()
    engine.require_ready = Mock(side_effect=failed)  # it must be sent weights that work all the same
    path, body, root = f"/upload/{NAME}/model.safetensors", b"x" * (2 << 20), tmp_path / FOLDER
    async with asking(wrap(engine, token="correct-horse")) as http:
        assert (await http.put(path, content=body)).status_code == 401
        assert not root.exists()
        http.headers["Authorization"] = "Bearer correct-horse"
        answer = await http.put(path, content=body)
        assert (answer.status_code, answer.json()) == (200, {"kind": "disk", "name": f"{FOLDER}/{NAME}"})
        assert (await http.put(path, content=body * 2)).status_code == 413
        assert (await http.put("/generate", content=body)).status_code == 405
        assert (await http.post("/generate", content=body)).status_code == 413
        for leads_out in ("/upload/../model.safetensors", f"/upload/{NAME}/..%2fa.safetensors", "/upload/%2e%2e/a"):
            assert (await http.put(leads_out, content=b"x")).status_code in (404, 422, 503)
    assert [path.parent.parent for path in tmp_path.rglob("*.safetensors")] in ([], [root])
