"""Who may import whom (design, section 4)."""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("config", "files", "images", "captions", "options", "mini", "codebook", "attention")
ROOMS = (*ROOMS, "hosts", "extras", "cli")
ROOMS = [f"avq_diffusers.{room}" for room in ROOMS]  # from the bottom up
FOR_PROGRAMS = {"avq_diffusers", *ROOMS} - {"avq_diffusers.cli"}
MAY_IMPORT = {"avq_diffusers": set()} | {room: {*ROOMS[:i]} for i, room in enumerate(ROOMS)}
MAY_IMPORT |= {"distill": FOR_PROGRAMS, "eval": {*FOR_PROGRAMS, "distill"}}
KNOW_DIFFUSERS = ("distill", "eval", "avq_diffusers.mini.loading", *ROOMS[-3:])
HOSTS = "avq_diffusers.hosts"
# What `hosts` shows, from the bottom up; the packages among these are imported by their door.
HOST_ROOMS = "core", "models", "codebooks", "measuring"
FLOORS = (*HOST_ROOMS, "report", "verbs", "backend", "pipeline")
ADAPTERS = f"{HOSTS}.models"  # its modules know one kind of model each
KINDS = ("UNet", "Transformer", "Joint", "transformers.")  # in names of diffusers, transformers
BACKENDS = {"reference": "reference", "triton": "triton"}
BACKENDS |= dict.fromkeys(("torch_forward", "torch_backward"), "torch")
PATHS = [p for x in ("avq_diffusers", "distill", "eval") for p in (ROOT / x).rglob("*.py")]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PATHS
}


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, also inside functions, and the names of others."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    sources = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in sources for alias in node.names}
    return found | {module_of(name) for name in names}


def module_of(name: str) -> str:
    """The module of ours that `name` is or is defined in; a name of others as it is."""
    parent = name.rpartition(".")[0]
    return parent if parent in MODULES and name not in MODULES else name


def room_of(name: str) -> str:
    """`avq_diffusers.cli` of `avq_diffusers.cli.page`; the package of any other name."""
    return ".".join(name.split(".")[: 1 + name.startswith("avq_diffusers.")])


def inside(name: str, package: str) -> str:
    """The child of `package` that `name` is or is in; empty for other names."""
    return name.removeprefix(f"{package}.").split(".")[0] if name.startswith(f"{package}.") else ""


GRAPH = {module: imports(path) for module, path in MODULES.items()}
PAIRS = [(module, name) for module, names in GRAPH.items() for name in names]


def test_a_class_is_named_once():
    """Catches a second `Call`, `Run` or `Part`: a reader who searches for a class finds one."""
    nodes = (node for path in PATHS for node in ast.parse(path.read_text("utf-8")).body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1] == []


def test_imports_go_down_only():
    """Catches a kernel that knows a host, training that knows evaluation, and a cycle."""
    TopologicalSorter(GRAPH).prepare()
    for module, name in PAIRS:
        room, other = room_of(module), room_of(name)
        ours = other.split(".")[0] in ("avq_diffusers", "distill", "eval")
        assert room == other or not ours or other in MAY_IMPORT.get(room, ()), (module, name)


def test_programs_see_only_the_face_of_hosts():
    """Catches a program that depends on how hosts are made."""
    for module, name in PAIRS:
        assert room_of(module) not in ("distill", "eval") or not inside(name, HOSTS), (module, name)


def test_few_know_diffusers():
    """Catches a kernel or codebook that knows a model, and a host's common part that does."""
    for module, name in PAIRS:
        if room_of(name) in ("diffusers", "transformers"):
            assert {module, room_of(module)} & {*KNOW_DIFFUSERS}, (module, name)
            is_common = room_of(module) == HOSTS and not module.startswith(ADAPTERS)
            assert not is_common or not any(kind in name for kind in KINDS), (module, name)


def test_hosts_are_imported_downwards_by_their_doors():
    """Catches a contract that knows an adapter, and a package whose inside others depend on."""
    for module, name in PAIRS:
        below, above = inside(name, HOSTS), inside(module, HOSTS)
        if below not in FLOORS or below == above:
            continue
        assert below not in HOST_ROOMS or name == f"{HOSTS}.{below}", (module, name)
        assert above not in FLOORS or FLOORS.index(below) < FLOORS.index(above), (module, name)


def test_hosts_show_few_things():
    """Catches a module that belongs into one of the packages."""
    folder = ROOT / "avq_diffusers" / "hosts"
    shown = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py")}
    assert shown - {"__init__", "__pycache__"} == {*FLOORS}
    arrows = {(inside(a, HOSTS), inside(b, HOSTS)) for a, b in PAIRS}
    assert sum(a != b and a in FLOORS and b in FLOORS for a, b in arrows) <= 25


def test_backends_do_not_know_each_other():
    """Catches an oracle that shares code with what it judges."""
    for pair in PAIRS:
        backends = {BACKENDS.get(inside(x, "avq_diffusers.attention")) for x in pair}
        assert len(backends - {None}) < 2, pair
