"""Which source files the compiled code of a package depends on: asked once, when the code is compiled."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from espalier.signatures import FILE, read_signatures


def needed_sources(package: Path) -> dict[str, str]:
    """SHA-256 of the files that the functions of a package's signatures depend on, by `package/path`. Follows names from definition to
    definition, through imports from this package and from espalier.
    """
    this_file = Path(__file__).resolve()  # resolved like the packages: a checkout may have links
    packages = {folder.name: folder for folder in (this_file.parent, package)}
    modules: dict[Path, _Module] = {}
    waiting = [tuple(function.split(":")) for function, _ in read_signatures(package)]
    seen = set(waiting)
    while waiting:
        module, name = waiting.pop()
        file = _file_of(module, packages)
        if file is None:
            continue
        if file not in modules:
            modules[file] = _Module(module, file)
        for definition in modules[file].needs(name):
            if definition not in seen:
                seen.add(definition)
                waiting.append(definition)
    contents = {file: module.content for file, module in modules.items()}
    contents |= {file: file.read_bytes() for file in (package / FILE, this_file.with_name("compiled_code.py"))}
    roots = sorted(packages.values(), key=lambda folder: -len(folder.parts))
    root_of = {file: next(folder.parent for folder in roots if file.is_relative_to(folder)) for file in contents}
    return {str(file.relative_to(root_of[file])): hashlib.sha256(content).hexdigest() for file, content in contents.items()}


class _Module:
    """The (module, name) pairs that each definition of a source file needs."""

    def __init__(self, module: str, file: Path) -> None:
        self.content, self._module = file.read_bytes(), module
        self._package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        self._imports: dict[str, list[tuple[str, str]]] = {}
        self._definitions: dict[str, list[set[str]]] = {}
        tree = ast.parse(self.content)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self._note_import(node)
            elif isinstance(node, ast.FunctionDef):
                node.returns = None
            if isinstance(node, ast.arg | ast.AnnAssign):
                node.annotation = ast.Constant(None)
        for statement in tree.body:
            used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            for name in _bound(statement):
                self._definitions.setdefault(name, []).append(used)

    def needs(self, name: str) -> Iterator[tuple[str, str]]:
        yield from self._imports.get(name, ())
        for used in self._definitions.get(name, ()):
            for needed_name in used:
                if needed_name in self._definitions or needed_name in self._imports:
                    yield self._module, needed_name

    def _note_import(self, node: ast.ImportFrom) -> None:
        base = self._package.split(".")[: len(self._package.split(".")) - max(node.level - 1, 0)] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            self._imports.setdefault(alias.asname or alias.name, []).extend([(module, alias.name), (f"{module}.{alias.name}", "*")])


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines, or adds to as `@overload(name)` does; `*` is every name."""
    yield "*"
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        for decorator in statement.decorator_list:
            for argument in decorator.args if isinstance(decorator, ast.Call) else ():
                yield from (node.id for node in ast.walk(argument) if isinstance(node, ast.Name))


def _file_of(module: str, packages: Mapping[str, Path]) -> Path | None:
    """The source file of a module in some packages; None if there is none."""
    top, *names = module.split(".")
    if top not in packages:
        return None
    path = packages[top].joinpath(*names)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
