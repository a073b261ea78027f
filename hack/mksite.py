#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: build/site/html, from docs/ and from the sources.

    python3 hack/mksite.py          # `make site` runs it where mkdocs is installed

Copies docs/ without the lab notebook to build/site/docs. Writes the reference of
commands (--help), Go (go doc), C (ringbatch.h) and Python (docstrings) beside it.
Links that leave the site lead to the repository. mkdocs builds it in strict
mode: a broken link fails. The pages fetch nothing from other hosts.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import links

ROOT = links.ROOT
DOCS, BUILD = ROOT / "docs", ROOT / "build" / "site"
REPOSITORY = "https://github.com/ringbatch/ringbatch"
LEFT_OUT = ("model", "results")  # the checked model and the lab notebook: for contributors, in the repository
GO_PACKAGES = ["client", "client/ringbatchtest", "worker", "tensor", "admin", "admin/alias", "admin/stats", "policy", "status", "broker", "gateway", "relay"]


def to_repository(page: Path, text: str) -> str:
    """Links out of docs/ lead to the repository."""

    def replace(m: re.Match) -> str:
        link = m.group(1)
        if links.OUTSIDE.match(link) or link.startswith(("#", "//")):
            return m.group()
        where, _, anchor = link.partition("#")
        target = (page.parent / where).resolve()
        if target.is_relative_to(DOCS) and target.is_file() and target.relative_to(DOCS).parts[0] not in LEFT_OUT:
            return m.group()
        kind = "tree" if target.is_dir() else "blob"
        url = f"{REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}" + (f"#{anchor}" if anchor else "")
        return m.group().replace(f"({link}", f"({url}")

    pieces = re.split(r"(^```.*?^```[^\n]*$)", text, flags=re.S | re.M)
    return "".join(p if p.startswith("```") else links.LINK.sub(replace, p) for p in pieces)


def tabs(text: str) -> str:
    """Between `<!-- tabs -->` and `<!-- end of tabs -->` each paragraph that begins with a bold name is a tab."""

    def made(m: re.Match) -> str:
        pieces = re.split(r"^\*\*(\w+)\*\*", m.group(1), flags=re.M)
        out = [pieces[0]]
        for name, body in zip(pieces[1::2], pieces[2::2]):
            out.append(f'=== "{name}"\n\n' + textwrap.indent(body.lstrip(", ").strip(), "    ") + "\n\n")
        return "".join(out)

    return re.sub(r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->\n", made, text, flags=re.S | re.M)


def command_reference() -> str:
    """Every command's --help. `torch` and `onnx` are Python's commands, which need not be installed here."""
    binary = BUILD / "ringbatch"
    subprocess.run(["go", "build", "-o", str(binary), "./cmd/ringbatch"], cwd=ROOT, check=True)
    overview = subprocess.run([str(binary), "help"], capture_output=True, text=True, check=True).stdout.strip()
    out = ["# Commands", "", "```text", overview, "```", ""]
    for name in ("policy", *(n for n in re.findall(r"^  ([a-z]+) +\S", overview, re.M) if n not in ("torch", "onnx"))):
        text = subprocess.run([str(binary), name, "--help"], capture_output=True, text=True).stdout.strip()
        out += [f"## ringbatch {name}", "", "```text", text, "```", ""]
    return "\n".join(out)


def go_reference() -> str:
    out = ["# Go reference", "", "What `go doc -all` says of the packages. Programs need `client` or `worker`, and mostly `tensor`.", ""]
    for package in GO_PACKAGES:
        text = subprocess.run(["go", "doc", "-all", f"./{package}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        head, _, rest = text.partition("\n")
        out += [f"## Package {package}", "", f"```go\n{head}\n```", ""]
        out += go_text(rest)
    return "\n".join(out)


def go_text(text: str) -> list[str]:
    """Declarations stand at the margin, their comments four spaces in. Comments of the package stand at the margin, too."""
    intro, *sections = re.split(r"^(CONSTANTS|VARIABLES|FUNCTIONS|TYPES)$", text, flags=re.M)
    out = ["```text", intro.strip(), "```", ""] if intro.strip() else []
    for title, body in zip(sections[::2], sections[1::2]):
        out += [f"### {title.capitalize()}", "", "```go", body.strip(), "```", ""]
    return out


def c_reference() -> str:
    header = (ROOT / "cbindings" / "ringbatch.h").read_text()
    for more in "weights", "cuda":
        text = (ROOT / "cbindings" / f"ringbatch_{more}.h").read_text()
        header += f"\n/* ---- ringbatch_{more}.h ---- */\n" + text.split('extern "C" {\n#endif', 1)[1]
    head, *sections = re.split(r"^/\* -{2,} (.+?) -{2,} \*/$", header, flags=re.M)
    comment = re.search(r"/\*\n(.*?)\*/", head, re.S)
    intro = "The headers `cbindings/ringbatch*.h`, which are the contract. [The guide](../c-abi.md) says how to build with it."
    out = ["# C reference", "", intro, ""]
    out += ["```text", textwrap.dedent(re.sub(r"^ \* ?", "", comment.group(1), flags=re.M)).strip() if comment else "", "```", ""]
    for title, body in zip(sections[::2], sections[1::2]):
        out += [f"## {title.capitalize()}", "", "```c", body.split("#ifdef __cplusplus")[0].strip(), "```", ""]
    return "\n".join(out)


def python_reference() -> str:
    """From the sources, without running them."""
    package = ROOT / "python" / "ringbatch"
    top = ast.parse((package / "__init__.py").read_text())
    out = ["# Python reference", "", "[The guide](../python.md) explains; this lists.", ""]
    for node in top.body:
        if not isinstance(node, ast.ImportFrom) or node.level == 0 or not node.module or any(a.name == "*" for a in node.names):
            continue
        defined = definitions(package / f"{node.module.replace('.', '/')}.py")
        for name in sorted(a.asname or a.name for a in node.names):
            if name in defined and not name.startswith("_"):
                out += python_item(defined[name], f"ringbatch.{name}", "##")
    for module in "torch", "onnx":
        out += python_item(definitions(package / module / "serving.py")["serve"], f"ringbatch.{module}.serve", "##")
    for module, name in ("__init__", "running"), ("fake", "FakeModel"):
        out += python_item(definitions(package / "testing" / f"{module}.py")[name], f"ringbatch.testing.{name}", "##")
    errors = [n for name, n in definitions(package / "errors.py").items() if isinstance(n, ast.ClassDef) and not name.startswith("_")]
    out += ["## Errors", "", "| | is also | when |", "|---|---|---|"]
    for n in errors:
        bases = ", ".join(ast.unparse(b) for b in n.bases if ast.unparse(b) != "Error")
        out.append(f"| `{n.name}` | {bases and f'`{bases}`'} | {' '.join((ast.get_docstring(n) or '').split()).replace('|', '/')} |")
    for n in ast.parse((package / "errors.py").read_text()).body:
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name):
            out.append(f"| `{ast.unparse(n.targets[0])}` | `{n.value.id}` | another name of it |")
    return "\n".join([*out, ""])


def definitions(module: Path) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """A class has the members, too, that it inherits from a class of another module."""
    body = ast.parse(module.read_text()).body
    found = {n.name: n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    files = {a.name: module.parents[n.level - 1] / f"{(n.module or '').replace('.', '/')}.py"
             for n in body if isinstance(n, ast.ImportFrom) and n.level for a in n.names}  # fmt: skip
    for node in found.values():
        for base in map(ast.unparse, getattr(node, "bases", [])):
            if base in files and files[base].exists() and base in (theirs := definitions(files[base])):
                node.body += theirs[base].body
    return found


def python_item(node: ast.FunctionDef | ast.ClassDef, name: str, level: str) -> list[str]:
    doc = ast.get_docstring(node) or ""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return [f"{level} {name}", "", "```python", f"{node.name}({ast.unparse(node.args)}){returns}", "```", "", *fenced(doc)]
    out = [f"{level} {name}", "", *fenced(doc)]
    for member in node.body:
        if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)) and not member.name.startswith("_"):
            decorators = [ast.unparse(d) for d in member.decorator_list]
            if any(d.endswith(".setter") for d in decorators):
                continue
            is_property = not {"property", "cached_property", "functools.cached_property"}.isdisjoint(decorators)
            arguments = "" if is_property else f"({', '.join(ast.unparse(member.args).split(', ')[1:])})"
            returns = f" -> {ast.unparse(member.returns)}" if member.returns else ""
            about = " ".join(fenced(" ".join((ast.get_docstring(member) or "").split()).replace("::", ":"))).strip()
            out += [f"- `{member.name}{arguments}{returns}`  ", f"  {about}", ""]
    return out


def fenced(doc: str) -> list[str]:
    """A docstring as prose, or as a block if it has code."""
    doc = re.sub(r":(?:attr|meth|func|class):`", "`", doc)
    return (["```text", doc, "```", ""] if "::" in doc or "\n    " in doc else [doc, ""]) if doc else []


def fetched_from_outside(html: Path) -> list[str]:
    """Scripts, styles, fonts and pictures that a reader's browser would fetch from other hosts."""
    found = []
    for page in html.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text()):
            if re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag) and 'rel="canonical"' not in tag:
                found.append(f"{page.relative_to(html)}: {tag}")
    return found


def main() -> int:
    if links.main():
        return 1
    source = BUILD / "docs"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(DOCS, source, ignore=lambda folder, names: LEFT_OUT if Path(folder) == DOCS else [])
    for page in sorted(DOCS.rglob("*.md")):
        if (copied := source / page.relative_to(DOCS)).exists():
            copied.write_text(tabs(to_repository(page, page.read_text())))
    shutil.copy(ROOT / "llms.txt", source)
    (source / "reference").mkdir(exist_ok=True)
    for name, make in {"commands": command_reference, "go": go_reference, "c": c_reference, "python": python_reference}.items():
        (source / "reference" / f"{name}.md").write_text(make())
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")],
        cwd=ROOT)
    outside = fetched_from_outside(BUILD / "html")
    print(*outside, sep="\n", end="\n" if outside else "", file=sys.stderr)
    return built.returncode or bool(outside)


if __name__ == "__main__":
    sys.exit(main())
