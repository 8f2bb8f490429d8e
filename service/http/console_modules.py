"""The console's JavaScript modules as one file. Apart they would be 50 requests, and compressed one by one a third larger.

The modules stay as they are written; nothing is built on the disk. Each becomes a function that runs when it is first needed and returns
what the module exports. Knows the few forms of `import` and `export` that the console uses, each on one line, and refuses others. Modules
must not need each other in a circle: a function cannot return before it has run. Does not know HTTP.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence

COMMENT = re.compile(r"^ *//.*\n", re.M)
"""A line that holds nothing but a comment. So no line of a text in a module may begin with `//`."""
IMPORT = re.compile(r'import \{ ([\w, ]+) \} from "([^"]+)";')
PASSED_ON = re.compile(r'export \{ ([\w, ]+) \} from "([^"]+)";')
ALL_PASSED_ON = re.compile(r'export \* from "([^"]+)";')
DEFAULT = re.compile(r"export default (function (\w+)\(.*)")
EXPORT = re.compile(r"export ((?:async )?(?:function\*?|const|class) (\w+).*)")
LATER = re.compile(r'\bimport\("([^"]+)"\)')

HEAD = """const $modules = {};
const $made = {};
const $need = (name) => ($made[name] ??= $modules[name]());
const $later = async (name) => $need(name);
"""


def joined(modules: Mapping[str, str], vendored: Sequence[str], first: str) -> str:
    """All modules in one, which begins by running `first`.

    modules   by their paths below the console's folder
    vendored  paths of modules that are files of their own

    Raises ValueError where a module imports or exports in another form, or needs a module that is not there.
    """
    known = {*modules, *vendored}
    sources = {name: "\n".join(_lines(name, text, known)) for name, text in modules.items()}
    imported = "".join(f'import * as $vendored{place} from "./{name}";\n' for place, name in enumerate(vendored))
    given = "".join(f"$made[{_quoted(name)}] = $vendored{place};\n" for place, name in enumerate(vendored))
    functions = "".join(f"$modules[{_quoted(name)}] = () => {{\n{source}\n}};\n" for name, source in sources.items())
    return f"{imported}{HEAD}{given}{functions}$need({_quoted(first)});\n"


def _lines(name: str, text: str, known: set[str]) -> Iterator[str]:
    """The body of a module's function."""
    exported: list[str] = []
    for line in COMMENT.sub("", text).splitlines():
        if not line.startswith(("import ", "import{", "export ", "export{")):
            yield LATER.sub(lambda later: f"$later({_target(name, later[1], known)})", line)
        elif found := IMPORT.fullmatch(line):
            yield f"const {{ {found[1].replace(' as ', ': ')} }} = $need({_target(name, found[2], known)});"
        elif found := PASSED_ON.fullmatch(line):
            exported += [f"{one}: $need({_target(name, found[2], known)}).{one}" for one in found[1].split(", ")]
        elif found := ALL_PASSED_ON.fullmatch(line):
            exported.append(f"...$need({_target(name, found[1], known)})")
        elif found := DEFAULT.fullmatch(line):
            exported.append(f"default: {found[2]}")
            yield found[1]
        elif found := EXPORT.fullmatch(line):
            exported.append(found[2])
            yield found[1]
        else:
            raise ValueError(f"{name}: expected an import or export in a form of the console's, got {line!r}")
    yield f"return {{ {', '.join(exported)} }};"


def _target(name: str, path: str, known: set[str]) -> str:
    target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    if target not in known:
        raise ValueError(f"{name}: there is no module {path}")
    return _quoted(target)


def _quoted(name: str) -> str:
    return f'"{name}"'
