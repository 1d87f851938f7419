"""How a server ends, or fails to start: nothing is left behind. Tests that share the servers come before."""

import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.engines import error_of, make_model, make_tokenizer, publish
from support.processes import ROOT, START_S, Command, Process, free_port
from support.tiny_server import MAX_LENGTH

pytestmark = [pytest.mark.engine, pytest.mark.long]


def wait_until_gone(processes: list[psutil.Process], timeout_s: float = 30) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_ctrl_c_ends_all_requests_and_processes(servers: Any) -> None:
    server = servers.take("untied float32")
    assert server.health()["status"] == "ready"
    assert server.client.get("/v1/models", headers={"Authorization": "Bearer wrong-token"}).status_code == 401
    assert server.client.get("/health", headers={"Authorization": ""}).status_code == 200
    children = server.children()
    answer = server.in_flight()
    said = len(server.output())
    os.killpg(server.popen.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    assert server.popen.wait(60) == 0
    assert error_of(answer.result(60)) == (503, "shutting_down")
    wait_until_gone(children)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", server.client.base_url.port))
    assert server.output()[said:] == "hocket: stopping\nhocket: stopped\n"


def test_the_engine_ends_with_a_server_that_is_killed(servers: Any) -> None:
    server = servers.take("experts float32")
    children = server.children()
    assert server.engine() in children
    server.stop(signal.SIGKILL)
    wait_until_gone(children)


def test_a_server_that_loses_its_engine_tells_all_who_wait_and_ends_for_whoever_starts_it_again(servers: Any) -> None:
    server = servers.take("tied bfloat16")
    children = server.children()
    publish(server.model, server.root / "v1", 1)
    answer = server.in_flight()
    with ThreadPoolExecutor(2) as thread:
        body = {"prompt": "a", "n": 64, "max_tokens": 400, "model": str(server.root.parent / "model")}
        other = thread.submit(server.client.post, "/v1/completions", json=body)
        loading = thread.submit(server.reload, 1, "v1", in_flight="drain")
        server.wait_until(lambda health: health["status"] == "updating")
        server.engine().kill()
        unloaded = loading.result(60)  # vLLM forgets the calls that wait
        assert error_of(unloaded) == (503, "engine_dead")
        for ended in (answer.result(60), other.result(60)):
            assert error_of(ended) == (503, "engine_dead")
    assert server.popen.wait(60) == 1
    assert server.output().splitlines()[-1].startswith("error: the engine's process ended: it was killed, perhaps for")
    wait_until_gone(children)


def test_ctrl_c_while_loading_ends_it_too(tmp_path: Path) -> None:
    make_model(seed=0).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    command = ["serve", f"server.port={free_port()}", f"model.path={tmp_path}", "model.max_length=300"]
    how = {"program": ("-m", "hocket"), "PYTHONPATH": f"{ROOT}/src"}
    with Process(command, tmp_path / "log", **how) as server:
        # Amid its imports, which take 10 s.
        server.wait_for(lambda: sum(one.cpu_times().user for one in server.members()[1:]) > 1, "the engine's process")
        server.popen.send_signal(signal.SIGINT)
        assert server.wait_end() == 0, server.output()
        server.assert_gone()


def test_a_model_that_the_engine_can_t_run_is_one_sentence_with_the_engine_s_own_words(tmp_path: Path) -> None:
    make_model(seed=0, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    words = [f"server.port={free_port()}", f"model.path={tmp_path}", f"model.max_length={MAX_LENGTH}"]
    with Command(["serve", *words], tmp_path / "log") as server:
        assert server.wait_end(START_S) == 1
    assert "Traceback" not in server.output()
    last = server.output().splitlines()[-1]
    assert last.startswith("error: the engine's process ended: Unsupported CPU attention configuration: head_dim=16")
    assert "start the server again, or with another model.path" in last
    (kept,) = re.findall(r"its traceback is in (\S+txt)", last)
    assert "Traceback (most recent call last)" in Path(kept).read_text()
    Path(kept).unlink()
