"""The command export: which folders it takes, and what the hub gets."""

import base64
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from hocket.commands.cli import main
from support.processes import ROOT


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


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the hub: it takes commits of any repository, and keeps their files."""

    files: ClassVar[dict[str, str]] = {}
    private: ClassVar[list[bool]] = []

    def answer(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.headers.get("authorization") != "Bearer hf_known":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path.startswith("/api/whoami"):
            self.answer({"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        else:
            self.answer({"id": "me/sorts", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        if self.path == "/api/repos/create":
            self.private.append(
                json.loads(body).get("visibility", json.loads(body).get("private")) in (True, "private")
            )
            self.answer({"url": f"http://{self.headers['host']}/me/sorts"})
        elif "/preupload/" in self.path:
            named = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in named]}
            )
        elif self.path == "/api/validate-yaml":  # the head of a model card
            self.answer({"warnings": [], "errors": []})
        else:  # a commit, in lines of JSON
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"]).decode(
                        errors="replace"
                    )
            self.answer(
                {
                    "commitUrl": f"http://{self.headers['host']}/me/sorts/commit/1",
                    "commitOid": "1" * 40,
                    "hookOutput": "",
                }
            )

    def log_message(self, *words: object) -> None:
        pass


PUSH = """
import sys
from hocket.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("token", "name", "said"),
    [
        ("hf_known", "me/sorts", "uploaded to"),
        ("hf_other", "me/sorts", "check the network, the name, and that the token may write"),
        ("", "me/sorts", "the hub needs a token: log in with `hf auth login`, or set HF_TOKEN"),
        ("hf_known", "me/too/deep", "a name is USER/MODEL"),
    ],
)
def test_a_run_s_model_is_uploaded_with_a_card_and_without_files_of_hocket(
    token: str, name: str, said: str, tmp_path: Path
) -> None:
    Hub.files.clear()
    Hub.private.clear()
    version = tmp_path / "run" / "weights" / "v000003"
    version.mkdir(parents=True)
    for file in ("config.json", "manifest.json", "COMPLETE", "tokenizer.json"):
        (version / file).write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "config.yaml").write_text("model: {path: somebody/base}\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    if token:
        env["HF_TOKEN"] = token
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--push-to-hub", name, "--private"]
    try:
        command = [sys.executable, "-c", PUSH, *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    finally:
        server.shutdown()
        server.server_close()
    assert said in result.stdout + result.stderr, result.stderr
    if said == "uploaded to":
        assert result.returncode == 0
        assert Hub.private == [True]
        assert sorted(Hub.files) == ["README.md", "config.json", "tokenizer.json"]
        assert "base_model: somebody/base\n" in Hub.files["README.md"]
        assert '"text-generation", "me/sorts"' in Hub.files["README.md"]
    else:
        assert result.returncode == 1
        assert Hub.files == {}
        assert not (tmp_path / "out").exists()  # before anything is written
