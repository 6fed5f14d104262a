"""Read the site as a browser and a reader do: links, what a page loads, the way to an answer.

    python docs/check_site.py site

lists what each page weighs, and the clicks from the first page to the answers of ten questions; it
fails for a link or an anchor that leads nowhere, and for anything that comes from elsewhere.
"""

import re
import sys
from collections import deque
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

# A question, the page and the anchor that answer it, and words of the answer.
QUESTIONS = (
    ("How do I try it?", "quickstart", "", "make demo"),
    ("How do I use it from another folder?", "quickstart", "from-anywhere-else", "PYTHONPATH"),
    ("How do I speed up F.grid_sample in my model?", "migrate", "models-as-they-stand", "with loader.accelerate_torch()"),
    ("What are the hash grid's conventions?", "operators/hash_grid_encoding", "formula", "2654435761"),
    ("Is the gradient deterministic on a GPU?", "operators", "what-all-of-them-do", "use_deterministic_algorithms"),
    ("How do I add an operator of my own?", "adding", "step-by-step", "python -m loader new cube"),
    ("What happens to my notebook if an edit is wrong?", "edits", "what-happens-to-an-edit", "the code before goes on working"),
    ("Where does the cache lie, and how large does it get?", "build", "where", "2 GiB"),
    ("How do I build for nodes without a compiler?", "clusters", "build-once", "--portable"),
    ("My g++ is too new for nvcc. What now?", "troubleshooting", "the-compiler-is-too-new-for-nvcc", "NVCC_CCBIN"),
)  # fmt: skip


@dataclass
class Page(HTMLParser):
    """What a page links to, loads and says."""

    file: Path
    links: list[str] = field(default_factory=list)
    article: list[str] = field(default_factory=list)  # links of the text itself
    loads: set[str] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)
    text: str = ""

    def __post_init__(self):
        super().__init__()
        self.inside = 0
        self.feed(self.file.read_text())

    def handle_starttag(self, tag, attributes):
        """Note links, resources and anchors."""
        found = dict(attributes)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        self.inside += tag == "article"
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
            if self.inside:
                self.article.append(found["href"])
        elif tag in ("script", "img") and found.get("src"):
            self.loads.add(found["src"])
        elif tag == "link" and found.get("href") and "stylesheet" in found.get("rel", ""):
            self.loads.add(found["href"])

    def handle_endtag(self, tag):
        """Note where the text ends."""
        self.inside -= tag == "article"

    def handle_data(self, data):
        """Gather the text."""
        if self.inside:
            self.text += data

    def target(self, link: str) -> Path:
        """The file that a link of this page names."""
        path = unquote(urlsplit(urldefrag(link)[0]).path)
        return (self.file.parent / path).resolve() if path else self.file.resolve()


def read(site: Path) -> dict[Path, Page]:
    """Return all pages by their files."""
    return {file.resolve(): Page(file) for file in sorted(site.rglob("*.html"))}


def broken(pages: dict[Path, Page]) -> list[str]:
    """Return links and anchors that lead nowhere, and what comes from elsewhere."""
    found = []
    for page in pages.values():
        for link in (*page.links, *page.loads):
            if urlsplit(link).scheme or link.startswith("//"):
                if link in page.loads and not link.startswith("data:"):
                    found.append(f"{page.file}: loads {link}")
                continue
            target, anchor = page.target(link), urldefrag(link)[1]
            if not target.exists():
                found.append(f"{page.file}: {link} is not there")
            elif anchor and target in pages and unquote(anchor) not in pages[target].ids:
                found.append(f"{page.file}: {link} has no such anchor")
        for style in filter(Path.is_file, map(page.target, page.loads)):
            if style.suffix == ".css" and re.search(
                r"(url\(|@import )['\"]?(https?:)?//", style.read_text()
            ):
                found.append(f"{style}: loads from elsewhere")
    return found


def weights(pages: dict[Path, Page]) -> dict[str, float]:
    """Return kB of the page and all that it loads, by its name."""
    found = {}
    for file, page in pages.items():
        files = {file, *map(page.target, (x for x in page.loads if not x.startswith("data:")))}
        found[str(page.file)] = sum(f.stat().st_size for f in files) / 1000
    return found


def way(pages: dict[Path, Page], site: Path, name: str) -> list[str]:
    """Return the pages from the first one to one, by links of the text alone, the fewest."""
    first, wanted = ((site / f"{n}.html").resolve() for n in ("index", name))
    ways, waiting = {first: ["index"]}, deque([first])
    while waiting and wanted not in ways:
        at = waiting.popleft()
        for link in pages[at].article:
            target = pages[at].target(link)
            if not urlsplit(link).scheme and target in pages and target not in ways:
                inside = str(target.relative_to(site.resolve()).with_suffix(""))
                ways[target] = [*ways[at], inside]
                waiting.append(target)
    return ways.get(wanted, [])


def unanswered(pages: dict[Path, Page], site: Path) -> list[str]:
    """Return the questions that take more than three clicks, or whose answer is not there."""
    found = []
    for question, name, anchor, words in QUESTIONS:
        page, clicks = pages.get((site / f"{name}.html").resolve()), way(pages, site, name)
        # A click more where the answer is below a heading of its own.
        if not clicks or len(clicks) - 1 + bool(anchor) > 3:
            found.append(f"{question} {clicks}")
        elif (anchor and anchor not in page.ids) or words not in " ".join(page.text.split()):
            found.append(f"{question} {name}#{anchor} does not say {words!r}")
    return found


def main(folder: str) -> int:
    """Print weights and ways; the exit status."""
    site = Path(folder)
    pages = read(site)
    for name, size in weights(pages).items():
        print(f"{size:7.0f} kB  {name}")
    for question, name, anchor, _ in QUESTIONS:
        last = f" > #{anchor}" if anchor else ""
        print(f"{question} {' > '.join(way(pages, site, name))}{last}")
    wrong = broken(pages) + unanswered(pages, site)
    print(*wrong, sep="\n")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
