"""The shape of the project, read from its source: which way imports point, and where heavy packages live."""

import ast
import collections
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs import run_code

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"

LAYERS = (  # the rooms by floors: a module imports from floors above its own line, and from its own room
    {"errors", "types"},
    {"common", "formats"},
    {"config", "protocol"},
    {"client", "data", "envs", "observe"},
    {"algorithm", "rewards"},
    {"rollout", "server", "trainer"},
    {"launch", "sync"},
    {"run_part"},
    {"loop"},
    {"commands"},
    {"__main__"},
    {"extras"},
)
SERVED = (
    "extras.agents.sessions",
    "extras.delta.load",
    "extras.http_reward.serve",
    "extras.openai_api",
    "extras.page",
    "extras.upload",
)
HOMES = {  # the only places that may import a package
    "vllm": {
        "server.lora",
        "server.vllm_api",
        "server.vllm_arguments",
        "server.vllm_requests",
        "server.vllm_text",
        "server.vllm_weights",
        "extras.checks.bitwise",
        "extras.openai_api",
    },
    "fastapi": {"server", *SERVED},
    "starlette": {"server", *SERVED},
    "uvicorn": {"server", "extras.public", *SERVED},
    "deepspeed": {"trainer"},
    "peft": {"trainer"},
    "httpx": {"client.server", "extras.http_reward.reward"},
    "rich": {"observe"},
    "prometheus_client": {"server", "extras.gauges", "extras.page"},
    "psutil": {"common.machine", "server"},
}
HEAVY = {"torch", "transformers", "deepspeed", "vllm", "fastapi", "datasets", "safetensors", "httpx"}
BEFORE_ANY_PACKAGE = ("run.py", "common", "errors.py", "types.py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Returns the dotted names a file imports; with `at_import_time` only those that run when it is imported."""

    def nodes(parent: ast.AST) -> Iterator[ast.AST]:
        for node in ast.iter_child_nodes(parent):
            checked_only = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            if at_import_time and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or checked_only):
                continue
            yield node
            yield from nodes(node)

    found = set()
    for node in nodes(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(module: str) -> str:
    """Returns the package or module right under hocket: "server" for hocket.server.app."""
    return module.split(".")[1] if "." in module else ""


def own(names: set[str]) -> set[str]:
    """Returns the hocket modules among imported names; `from hocket.x import y` counts as hocket.x or hocket.x.y."""
    return {name if name in FILES else name.rpartition(".")[0] for name in names if name.startswith("hocket.")}


def reached(module: str) -> set[str]:
    """Returns every hocket module that is imported when `module` is."""
    todo, seen = [module], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in FILES:
            continue
        seen.add(name)
        todo += own(imports(FILES[name], at_import_time=True))
    return seen


def test_every_module_has_a_layer() -> None:
    known = set().union(*LAYERS)
    assert {part(module) for module in FILES} - {""} <= known


@pytest.mark.parametrize("module", [name for name in FILES if part(name)])
def test_imports_point_one_way(module: str) -> None:
    layer = {name: index for index, names in enumerate(LAYERS) for name in names}
    targets = {part(target) for target in own(imports(FILES[module]))} - {"", "extras", part(module)}
    assert [target for target in sorted(targets) if layer[target] >= layer[part(module)]] == []


@pytest.mark.parametrize("module", [name for name in FILES if part(name) != "extras"])
def test_the_core_imports_nothing_of_extras(module: str) -> None:
    """It reaches them by name, through registries, as it reaches a user's plugin."""
    assert {target for target in own(imports(FILES[module])) if part(target) == "extras"} == set()


def test_no_module_is_in_a_circle_of_imports() -> None:
    graph = graphlib.TopologicalSorter({name: own(imports(path)) - {name} for name, path in FILES.items()})
    graph.prepare()  # raises CycleError, which names the circle


def named_by(module: str) -> Iterator[str]:
    """Yields the modules that strings of a module name."""
    for node in ast.walk(tree(FILES[module])):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for name in re.findall(r"(?<!\S)from (hocket[.\w]*) import|^(hocket(?:\.\w+)+)$", node.value):
                yield re.sub(r"\.[A-Z]\w+$", "", "".join(name))  # without its class


@pytest.mark.parametrize("module", sorted(FILES))
def test_modules_that_strings_name_are_there(module: str) -> None:
    for target in named_by(module):
        if not target.startswith("hocket.extras."):  # which may be deleted
            assert target in {*FILES, "hocket.json"}  # a file of .venv


@pytest.mark.parametrize("package", sorted(HOMES))
def test_heavy_packages_have_one_home(package: str) -> None:
    users = [name for name, path in FILES.items() if package in {target.split(".")[0] for target in imports(path)}]
    homes = tuple(f"hocket.{home}." for home in HOMES[package])
    assert [name for name in users if not f"{name}.".startswith(homes)] == []


@pytest.mark.parametrize(
    "package", ["common", "data", "envs", "rewards", "rollout", "client", "config", "protocol.messages"]
)
def test_no_torch_is_needed_for(package: str) -> None:
    modules = [name for name in FILES if f"{name}.".startswith(f"hocket.{package}.")]
    assert modules
    for module in modules:
        for name in reached(module) | {module}:
            assert "torch" not in {target.split(".")[0] for target in imports(FILES[name], at_import_time=True)}, name
        assert "torch" not in {target.split(".")[0] for target in imports(FILES[module])}, module


@pytest.mark.parametrize("module", ["hocket.commands.cli", "hocket.config", "hocket.launch", "hocket.common.registry"])
def test_arguments_are_parsed_before_anything_heavy_is_imported(module: str) -> None:
    for name in reached(module):
        assert not HEAVY & {target.split(".")[0] for target in imports(FILES[name], at_import_time=True)}, name


ENGINES = HEAVY | {"peft", "accelerate", "uvicorn", "openai", "wandb", "mlflow"}
COMPILER = "torch._inductor.lowering"  # half a second of a processor
VLLM = "from hocket.server import main, vllm_arguments; vllm_arguments.import_vllm()"
TRAINER = "import hocket.commands.runs, hocket.trainer.trainer, hocket.loop, hocket.sync.nccl"


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "without"),
    [
        ("import hocket", ENGINES | {"pydantic", "yaml", "numpy", "asyncio"}),
        ("import hocket.commands.cli", ENGINES),
        ("import hocket.server.main", ENGINES),
        pytest.param(VLLM, {COMPILER, "deepspeed", "peft", "datasets"}, marks=pytest.mark.engine),
        pytest.param(TRAINER, {COMPILER, "vllm", "fastapi", "datasets", "peft", "openai"}, marks=pytest.mark.engine),
    ],
)
def test_a_start_imports_nothing_that_it_can_do_without(start: str, without: set[str]) -> None:
    done = run_code(f"{start}\nimport sys\nprint(*sys.modules)", TORCHDYNAMO_DISABLE="1")  # as a server on a CPU
    assert done.returncode == 0, done.stderr
    assert without & set(done.stdout.split()) == set()


def test_rewards_that_ask_others_are_imported_by_their_name_alone() -> None:
    """A run without a judge has nothing of it: the registry's table is the one place that knows it."""
    names = ("code.reward", "http_reward.reward", "judge", "reward_model")
    doors = {f"hocket.extras.{name}" for name in names}
    entered = {name: own(imports(path)) & doors for name, path in FILES.items() if name not in doors}
    assert {name: found for name, found in entered.items() if found} == {}


def test_a_run_without_images_imports_nothing_of_them() -> None:
    """But in the server, which must refuse them."""
    eyes = {name for name in FILES if name.endswith(".vision") and part(name) != "server"}
    others = {name: path for name, path in FILES.items() if name not in eyes and part(name) != "server"}
    found = {name: own(imports(path, at_import_time=True)) & eyes for name, path in others.items()}
    assert {name: users for name, users in found.items() if users} == {}


@pytest.mark.parametrize("name", BEFORE_ANY_PACKAGE)
def test_what_runs_before_there_is_an_environment_needs_only_the_standard_library(name: str) -> None:
    check_needs_only_the_standard_library(name)


def check_needs_only_the_standard_library(name: str) -> None:
    path = ROOT / name if name == "run.py" else SOURCE / "hocket" / name
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    for file in files:
        roots = {target.split(".")[0] for target in imports(file, at_import_time=True)}
        assert roots <= sys.stdlib_module_names | {"hocket", "__future__"}, file


@pytest.mark.parametrize("call", ["prctl", "fsync"])
def test_the_operating_system_is_asked_in_one_place(call: str) -> None:
    nodes = {name: list(ast.walk(tree(path))) for name, path in FILES.items()}
    users = [name for name in nodes for node in nodes[name] if isinstance(node, ast.Attribute) and node.attr == call]
    assert set(users) == {"hocket.common.processes" if call == "prctl" else "hocket.common.files"}


def test_a_model_s_own_code_is_never_trusted() -> None:
    for module, path in FILES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and re.search(r"\bAuto\w+\.from_\w+$", ast.unparse(node.func)):
                given = [ast.unparse(keyword) for keyword in node.keywords]
                assert "trust_remote_code=False" in given, f"{module}:{node.lineno}"


def test_no_capitalised_name_stands_for_two_things() -> None:
    places = collections.defaultdict[str, list[str]](list)
    for name, path in FILES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
        for node in tree(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Name) and re.match("[A-Z][a-z]", target.id):
                    places[target.id].append(name)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_the_import_reader_sees_every_way_to_import(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import a.b\nfrom c import d\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import e\n"
        "def f():\n    import g\n"
        "class H:\n    import i\n"
        "try:\n    import j\nexcept ImportError:\n    pass\n"
    )
    assert imports(file) == {"a.b", "c.d", "typing.TYPE_CHECKING", "e", "g", "i", "j"}
    assert imports(file, at_import_time=True) == {"a.b", "c.d", "typing.TYPE_CHECKING", "i", "j"}
