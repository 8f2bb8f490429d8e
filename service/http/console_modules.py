"""Joins the console's JavaScript modules into one file: separate files would take 50 requests and compress a third worse.

Nothing is built on the disk. Each module becomes a function that runs when the module is first imported and returns its exports. Knows the
few forms of `import` and `export` that the console uses, each on one line, and refuses others. Modules must not import each other in a
circle, because a function cannot return before it has run. Does not know HTTP.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence

COMMENT = re.compile(r"^ *//.*\n", re.M)
"""A line with nothing but a comment. A line of a multi-line string in a module must not begin with `//`, therefore."""
IMPORT = re.compile(r'import \{ ([\w, ]+) \} from "([^"]+)";')
RE_EXPORT = re.compile(r'export \{ ([\w, ]+) \} from "([^"]+)";')
RE_EXPORT_ALL = re.compile(r'export \* from "([^"]+)";')
DEFAULT = re.compile(r"export default (function (\w+)\(.*)")
EXPORT = re.compile(r"export ((?:async )?(?:function\*?|const|class) (\w+).*)")
DYNAMIC_IMPORT = re.compile(r'\bimport\("([^"]+)"\)')

HEAD = """const $modules = {};
const $made = {};
const $need = (name) => ($made[name] ??= $modules[name]());
const $later = async (name) => $need(name);
"""


def join_modules(modules: Mapping[str, str], vendored: Sequence[str], entry_module: str) -> str:
    """One module that holds all others and runs `entry_module`.

    modules   sources by path below the console's folder
    vendored  paths of modules that stay separate files

    Raises ValueError if a module imports or exports in another form, or imports a module that does not exist.
    """
    module_paths = {*modules, *vendored}
    sources = {name: "\n".join(_function_lines(name, text, module_paths)) for name, text in modules.items()}
    vendored_imports = "".join(f'import * as $vendored{number} from "./{name}";\n' for number, name in enumerate(vendored))
    vendored_entries = "".join(f"$made[{_quoted(name)}] = $vendored{number};\n" for number, name in enumerate(vendored))
    functions = "".join(f"$modules[{_quoted(name)}] = () => {{\n{source}\n}};\n" for name, source in sources.items())
    return f"{vendored_imports}{HEAD}{vendored_entries}{functions}$need({_quoted(entry_module)});\n"


def _function_lines(name: str, text: str, module_paths: set[str]) -> Iterator[str]:
    """The lines of a module's function."""
    exported: list[str] = []
    for line in COMMENT.sub("", text).splitlines():
        if not line.startswith(("import ", "import{", "export ", "export{")):
            yield DYNAMIC_IMPORT.sub(lambda dynamic_import: f"$later({_quoted_target(name, dynamic_import[1], module_paths)})", line)
        elif statement := IMPORT.fullmatch(line):
            yield f"const {{ {statement[1].replace(' as ', ': ')} }} = $need({_quoted_target(name, statement[2], module_paths)});"
        elif statement := RE_EXPORT.fullmatch(line):
            target = _quoted_target(name, statement[2], module_paths)
            exported += [f"{export}: $need({target}).{export}" for export in statement[1].split(", ")]
        elif statement := RE_EXPORT_ALL.fullmatch(line):
            exported.append(f"...$need({_quoted_target(name, statement[1], module_paths)})")
        elif statement := DEFAULT.fullmatch(line):
            exported.append(f"default: {statement[2]}")
            yield statement[1]
        elif statement := EXPORT.fullmatch(line):
            exported.append(statement[2])
            yield statement[1]
        else:
            raise ValueError(f"{name}: expected an import or export in a form of the console's, got {line!r}")
    yield f"return {{ {', '.join(exported)} }};"


def _quoted_target(name: str, path: str, module_paths: set[str]) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    if target not in module_paths:
        raise ValueError(f"{name}: there is no module {path}")
    return _quoted(target)


def _quoted(name: str) -> str:
    return f'"{name}"'
