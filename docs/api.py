"""The page docs/api.md, from the signatures and docstrings of the public names.

    python docs/api.py --write docs/api.md

Sources are parsed and not imported: the page is the same under every version of Python and of torch.
"""

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "ckv_compile"


class Section(NamedTuple):
    """A part of the page: names of one module, in order; one with a dot is a member of the class before it."""

    title: str
    module: str
    lead: str
    names: str


SECTIONS = (
    Section("Transforming and loading", "model", "In `ckv_compile`.", "transform load Progress"),
    Section(
        "The compiled model",
        "model",
        "`CKVForCausalLM` in `ckv_compile`.",
        "CKVForCausalLM .generate .forward .new_cache .save_cache .load_cache .warm_up .release .save_pretrained "
        ".passes",
    ),
    Section("What a pass did", "pipeline", "In `ckv_compile.pipeline`, an element of `model.passes`.", "PassResult"),
    Section(
        "Configuration",
        "config",
        "`CKVConfig` in `ckv_compile`. Its fields are the options of `transform` and `cache_for`.",
        "CKVConfig .resolve .capacity .to_json .from_json .from_options",
    ),
    Section(
        "The cache",
        "cache",
        "`ClusteredCache` in `ckv_compile`. `model.new_cache` and `cache_for` make it.",
        "ClusteredCache .nbytes .capacity .batch_size .reset .fork .crop .get_seq_length CacheState",
    ),
    Section(
        "The torch.compile backend",
        "backend",
        "`cache_for` in `ckv_compile`. `backend` is found by its name: "
        '`torch.compile(forward, backend="ckv", options={...}, mode=...)`.',
        "cache_for backend",
    ),
    Section(
        "Artifacts",
        "artifact",
        "In `ckv_compile.artifact`. `model.save_pretrained` writes them and `ckv_compile.load` reads them; these look "
        "at them.",
        "is_artifact read_manifest describe Manifest File",
    ),
    Section(
        "Planning memory",
        "plan",
        "In `ckv_compile.plan`, which `ckv plan` and `ckv inspect` print.",
        "measure footprint_of Footprint .shape .full_bytes .prefill_bytes Layer "
        "Plan .row_bytes .needed .largest_batch .longest_context row_bytes slots_of context_of MOST_TOKENS",
    ),
    Section(
        "Loading by name",
        "loading",
        "In `ckv_compile.loading`: what the command line takes for a MODEL.",
        "load_compiled load_model SMOLLM2 Dtype",
    ),
)

ENVIRONMENT = {
    "CKV_DUMP": "Folder to which the graph is written before and after every pass "
    "([logs and dumps](logs-and-dumps.md)). Unset: none.",
    "CKV_CPU_KERNEL": "`0` runs the attention of a decode step on the CPU in PyTorch, without the C++ kernel.",
    "CKV_CACHE": "Folder of GGUF models that were converted to safetensors. Unset: `ckv_compile` under "
    "`$XDG_CACHE_HOME` or `~/.cache`.",
}


def page() -> str:
    """The text of docs/api.md."""
    titles = [*(section.title for section in SECTIONS), "Errors", "Environment variables"]
    blocks = [
        "# API reference",
        "Made by `python docs/api.py --write docs/api.md` from the signatures and docstrings of the sources; change "
        "those. [The guide](guide.md) says what to use when. In shapes, B is the number of rows of a batch, S that of "
        "tokens a row, L of layers, Hkv of KV heads, C of slots, and D is the size of a head.",
        "\n".join(f"- [{title}](#{title.lower().replace(' ', '-').replace('.', '')})" for title in titles),
    ]
    for section in SECTIONS:
        blocks += [f"## {section.title}", section.lead]
        module, owner = Module(section.module), ""
        for name in section.names.split():
            owner = owner if name.startswith(".") else name
            path = owner + name if name.startswith(".") else name
            blocks += [f"### `{path}`", *module.entry(path)]
    blocks += ["## Errors", *errors()]
    rows = [f"| `{name}` | {text} |" for name, text in ENVIRONMENT.items()]
    blocks += ["## Environment variables", "\n".join(["| variable | meaning |", "|---|---|", *rows])]
    return "\n\n".join(blocks) + "\n"


class Module:
    """A source file, and what it says of its names."""

    def __init__(self, name: str) -> None:
        text = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        self.lines = text.splitlines()
        self.tree = ast.parse(text)

    def entry(self, name: str) -> list[str]:
        """Blocks of Markdown on a function, a class, a method, or a constant with a docstring.

        Raises:
            LookupError: if there is no such name, or nothing is said of it.
        """
        body = self.tree.body
        for part in name.split("."):
            found = next((i for i, node in enumerate(body) if part in _names(node)), None)
            if found is None:
                raise LookupError(f"there is no {name}: change the names in docs/api.py")
            node, rest = body[found], body[found + 1 :]
            body = getattr(node, "body", [])
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            code, docstring = self.source(first, node.body[0].lineno - 1).rstrip(":"), ast.get_docstring(node)
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            own = [self.source(each.lineno, each.end_lineno or each.lineno) for each in fields]
            code = self.source(node.lineno, node.body[0].lineno - 1)
            code = "\n".join([code, *(textwrap.indent(each, "    ") for each in own)]) if own else code.rstrip(":")
            docstring = ast.get_docstring(node) or ""
            if not own:  # made by functions alone: what they pass is their business
                docstring = docstring.partition("\nArgs:\n")[0]
        else:
            code = self.source(node.lineno, node.end_lineno or node.lineno)
            docstring = ast.get_docstring(ast.Module(rest, []))
        if not docstring:
            raise LookupError(f"{name} has no docstring")
        return [f"```python\n{code}\n```", *markdown(docstring)]

    def source(self, first: int, last: int) -> str:
        """Lines of the source, without what is meant for tools."""
        text = textwrap.dedent("\n".join(self.lines[first - 1 : last]))
        return re.sub(r"  # (type: ignore|noqa)\S*", "", text)


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement gives."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def markdown(docstring: str) -> Iterator[str]:
    """Blocks of Markdown for a docstring: its text, and its sections as lists."""
    text, *parts = re.split(r"^(Args|Returns|Raises):\n", docstring, flags=re.MULTILINE)
    yield text.strip()
    for title, part in zip(parts[::2], parts[1::2], strict=True):
        if title == "Returns":
            yield f"**Returns** {' '.join(part.split())}"
            continue
        found = re.findall(r"^(\S+): (.*(?:\n {4}.*)*)", textwrap.dedent(part), re.MULTILINE)
        yield f"**{title}**"
        yield "\n".join(f"- `{name}`: {' '.join(meaning.split())}" for name, meaning in found)


def errors() -> Iterator[str]:
    """Blocks of Markdown on the errors."""
    tree = Module("errors").tree
    yield f"In `ckv_compile`. {(ast.get_docstring(tree) or '').partition('. ')[2]}"
    rows = ["| error | is a | |", "|---|---|---|"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            rows.append(f"| `{node.name}` | {bases} | {(ast.get_docstring(node) or '').splitlines()[0]} |")
    yield "\n".join(rows)


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description="The API reference, from signatures and docstrings.")
    parser.add_argument("--write", type=Path, help="write the page to a file instead of printing it")
    written = parser.parse_args().write
    if written is None:
        print(page(), end="")
    else:
        written.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
