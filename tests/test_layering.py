"""The arrows between the packages, and that what serves or shows never loads torch.

    console -> cluster -> transport            engine and transport never see each other
               cluster -> engine.{...}         only the worker's modules import the rest of the engine

An arrow is an import statement in a source file, found without running it; the torch rule is checked by running.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("console", "cluster", "engine", "transport", "profiles")

ENGINE_PLAIN = {
    "engine.request",
    "engine.config",
    "engine.dtypes",
    "engine.memory",
    "engine.benchmark_plan",
    "engine.benchmark_result",
    "engine.step_cost",
    "engine.scheduler",
    "engine.sequence",
    "engine.block_allocator",
    "engine.model_ids",
    "engine.tokenizer",
    "engine.chat_template",
    "engine.downloadable",
    "engine.gguf_convert",
    "engine.gguf_file",
    "engine.gguf_tensors",
}
"""The part of the engine without torch: plain data, what runs in a step, names of models, text."""

CLUSTER_PROCESSES = (
    "cluster.router",
    "cluster.supervisor",
    "cluster.worker",
    "cluster.handoff",
    "cluster.process",
)
"""Beginnings of the names of modules that are a process or a part of one: the console spawns them, never imports."""

WITHOUT_TORCH = (
    "cluster.router",
    "cluster.router_http",
    "cluster.router_main",
    "cluster.supervisor",
    "cluster.supervisor_main",
    "cluster.load",
    "console.app",
    "console.bench_command",
    "console.cli",
    "console.headless",
    "console.interactive",
    "console.load_command",
    "console.plan_trace",
    "console.up",
)


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                own = node.module.split(".")[0] in PACKAGES
                yield (full if own and is_module(full) else node.module), node.lineno


def reachable(*roots: str) -> set[str]:
    """The project's modules that importing these loads."""
    paths = {name: path for package in PACKAGES for name, path in modules(package)}
    found: set[str] = set()
    todo = [name for name in paths if name.startswith(roots)]
    while todo:
        name = todo.pop()
        if name in paths and name not in found:
            found.add(name)
            todo += [imported for imported, _ in imports(paths[name])]
    return found


@functools.cache
def worker_side() -> frozenset[str]:
    """Modules that only the worker process and one that measures load: they alone may use all of the engine."""
    others = reachable("cluster.router_main", "cluster.supervisor_main", "console")
    heavy = reachable("cluster.worker_main", "cluster.codec_measuring", "cluster.transport_measuring")
    return frozenset(heavy - others)


def is_allowed(importer: str, imported: str) -> bool:
    source, target = importer.split(".")[0], imported.split(".")[0]
    if target not in PACKAGES or source == target:
        return True
    match source, target:
        case "console", "cluster":
            return not imported.startswith(CLUSTER_PROCESSES)
        case (("console" | "cluster"), "profiles"):
            return True
        case "console", "engine":
            return imported in ENGINE_PLAIN
        case "cluster", "transport":
            return True
        case "cluster", "engine":
            return imported in ENGINE_PLAIN or importer in worker_side()
    return False


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_follows_an_arrow(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {importer} imports {imported}"
        for importer, path in modules(package)
        for imported, line in imports(path)
        if not is_allowed(importer, imported)
    ]
    assert wrong == []


def test_the_packages_are_all_there() -> None:
    """An empty walk would pass every test above."""
    assert {package: sum(1 for _ in modules(package)) > 2 for package in PACKAGES[:4]} == dict.fromkeys(
        PACKAGES[:4], True
    )


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("engine.engine", "transport.frame"),
        ("transport.frame", "engine.config"),
        ("cluster.router", "engine.engine"),
        ("cluster.metrics", "console.app"),
        ("console.headless", "cluster.supervisor"),
        ("console.app", "transport.frame"),
    ],
)
def test_a_wrong_arrow_would_be_seen(importer: str, imported: str) -> None:
    assert not is_allowed(importer, imported)


def test_the_worker_side_is_known() -> None:
    assert {"cluster.worker", "cluster.worker_main"} <= worker_side()
    assert not worker_side() & {"cluster.router", "cluster.supervisor", "cluster.events", "cluster.profile"}


@pytest.mark.parametrize("package", PACKAGES[:4])
def test_imports_stand_at_the_top_of_a_file(package: str) -> None:
    hidden = [
        f"{path.relative_to(ROOT)}:{inner.lineno}"
        for _, path in modules(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert hidden == []


def test_router_supervisor_and_console_leave_torch_out() -> None:
    """One fresh interpreter each would take half a minute; together they must not load it either."""
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} loads torch'\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_the_command_line_starts_without_textual() -> None:
    code = "import sys, console.cli\nassert console.cli.main(['--version']) == 0\nassert 'textual' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("pdconsole ")
