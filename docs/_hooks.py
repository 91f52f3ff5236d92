"""Links of the documents to files outside of docs, made to work in the site as they do on a code host.

Documents of the root become pages. A source file that a document links to becomes a page with its text, a picture or
table is copied, and a link to a folder becomes plain text. MkDocs calls the functions that start with `on_`.
"""

import os
import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = {ROOT / name: name for name in DOCUMENTS} | {ROOT / "README.md": "index.md"}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml"}
SOURCES = "source"


def place_in_site(target: Path) -> str | None:
    """Where a file of the repository is among the site's sources; None for a folder."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    if target in PAGES:
        return PAGES[target]
    if target.is_dir():
        return None
    path = f"{SOURCES}/{target.relative_to(ROOT).as_posix()}"
    return f"{path}.md" if target.suffix in LANGUAGES else path


def resolve(document: Path, link: str) -> Path | None:
    """The file that a relative link of a document leads to, or None for another kind of link."""
    if ":" in link or link.startswith("/"):
        return None
    target = Path(os.path.normpath(document.parent / link))
    return target if target.is_relative_to(ROOT) and target.exists() else None


def adapt_links(text: str, document: Path, page: str) -> str:
    """The text of a document as the page of that name, with links as they are in the site."""

    def adapted(match: re.Match[str]) -> str:
        mark, words, link, anchor = match.groups(default="")
        target = resolve(document, link)
        if target is None:
            return match[0]
        place = place_in_site(target)
        if place is None:
            return words
        return f"{mark}[{words}]({os.path.relpath(place, Path(page).parent)}{anchor})"

    return LINK.sub(adapted, text)


def linked_files(document: Path) -> set[Path]:
    """Files outside of docs that a document links to."""
    targets = {resolve(document, match[3]) for match in LINK.finditer(document.read_text())}
    return {path for path in targets if path and path.is_file() and not path.is_relative_to(DOCS) and path not in PAGES}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents of the root, and a page or copy of every other file that is linked to."""
    documents = [*DOCS.rglob("*.md"), *(ROOT / name for name in DOCUMENTS)]
    for name in DOCUMENTS:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for path in sorted(set().union(*map(linked_files, documents))):
        place = place_in_site(path)
        assert place is not None
        if place.endswith(".md"):
            name = path.relative_to(ROOT).as_posix()
            header = f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n"
            code = f"{header}````{LANGUAGES[path.suffix]}\n{path.read_text()}````\n"
            files.append(File.generated(config, place, content=code, inclusion=InclusionLevel.NOT_IN_NAV))
        else:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads the links of a page to where the site has their files."""
    name = page.file.src_uri
    if name.startswith(f"{SOURCES}/"):
        return markdown
    return adapt_links(markdown, ROOT / name if name in DOCUMENTS else DOCS / name, name)


class Parameters(griffe.Extension):
    """Docstrings name a parameter or field at the start of a line, `r: tokens to fuse`: in the site these are lists."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        itemize(func, {parameter.name.lstrip("*") for parameter in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        itemize(cls, set(cls.attributes) | {parameter.name for parameter in cls.parameters})


def itemize(documented: griffe.Object, names: set[str]) -> None:
    """Turns lines of a docstring that begin with one of the names, or several, into items of a list."""
    if documented.docstring is None:
        return
    lines: list[str] = []
    in_list = False
    for line in documented.docstring.value.splitlines():
        head, colon, rest = line.partition(": ")
        if colon and names.issuperset(head.split(", ")):
            lines += ([] if in_list else [""]) + [f"- `{head}`: {rest}"]
            in_list = True
        elif in_list and line and not line.startswith(" "):  # a sentence that goes on in the first column
            lines.append(f"    {line}")
        else:
            in_list = in_list and bool(line)
            lines.append(line)
    documented.docstring.value = "\n".join(lines)
