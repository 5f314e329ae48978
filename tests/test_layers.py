"""Who may import whom (design, section 4)."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("config", "files", "mini", "codebook", "attention")
ROOMS = (*ROOMS, "plugin", "dit", "vision", "verbs", "extras", "cli")
ROOMS = [f"avq_diffusers.{room}" for room in ROOMS]  # from the bottom up
INNER = {f"avq_diffusers.{room}" for room in ("plugin", "dit", "verbs")}
FOR_PROGRAMS = {"avq_diffusers", *ROOMS} - INNER
MAY_IMPORT = {"avq_diffusers": set()} | {room: {*ROOMS[:i]} for i, room in enumerate(ROOMS)}
MAY_IMPORT |= {"distill": FOR_PROGRAMS, "eval": FOR_PROGRAMS}
KNOW_DIFFUSERS = {"distill", "eval", *ROOMS[-6:]}
BACKENDS = {"reference": "reference", "forward": "torch", "backward": "torch", "triton": "triton"}
PATHS = [p for x in ("avq_diffusers", "distill", "eval") for p in (ROOT / x).rglob("*.py")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, also inside functions."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    sources = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {(node.module, alias.name) for node in sources for alias in node.names}
    return found | {f"{a}.{b}" if f"{a}.{b}" in MODULES else a for a, b in names}


def test_imports_go_down_only():
    """Catches a kernel that knows the plugin, an oracle that shares code, and a cycle."""
    graph = {module: imports(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()
    for pair in ((module, name) for module, names in graph.items() for name in names):
        room, other = (".".join(x.split(".")[: 1 + x.startswith("avq")]) for x in pair)
        assert room == other or other not in MAY_IMPORT or other in MAY_IMPORT[room], pair
        assert other not in ("diffusers", "transformers") or room in KNOW_DIFFUSERS, pair
        backends = {
            BACKENDS.get(x.removeprefix("avq_diffusers.attention.").split(".")[0]) for x in pair
        }
        assert len(backends - {None}) < 2, pair
