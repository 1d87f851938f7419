"""The parts of a Markdown page: headings, paragraphs, sentences, links, code blocks, and the commands in these."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.joinpath("docs").rglob("*.md"),
        *ROOT.joinpath("benchmarks").glob("*.md"),
        *ROOT.joinpath("examples").rglob("*.md"),
    ]
)
FENCE = re.compile(r"^ *(```+)(.*?)\n(.*?)^ *\1 *$", re.M | re.S)
NAMED = re.compile(r"# ([\w./-]+\.(?:py|yaml|yml|sh|toml))\n")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    language: str
    title: str  # its title, or the file that its first line names; "" without either
    code: str


def blocks(text: str) -> list[Block]:
    """Returns the code blocks of a page."""
    found = []
    for _, info, code in FENCE.findall(text):
        language, _, options = info.partition(" ")
        title = re.findall(r'title="(.*?)"', options)
        named = NAMED.match(code)
        found.append(Block(language, title[0] if title else named[1] if named else "", code))
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(text: str) -> str:
    """Returns a page without code blocks, comments, tables and pictures."""
    text = FENCE.sub("\n", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"(?m)^\s*\|.*$", "\n", text)
    text = re.sub(r"(?m)^\s*<.*$", "\n", text)
    return re.sub(r"!\[.*?\]\(.*?\)", "", text)


def sections(text: str) -> list[tuple[str, list[str]]]:
    """Returns (heading, paragraphs) in order; an item of a list is a paragraph."""
    parts: list[tuple[str, list[str]]] = [("", [])]
    lines: list[str] = []

    def end() -> None:
        if lines:
            parts[-1][1].append(" ".join(lines))
            lines.clear()

    for line in [*prose(text).splitlines(), ""]:
        heading = re.match(r"#{1,6} (.*)", line)
        if heading:
            end()
            parts.append((heading[1], []))
        elif not line.strip():
            end()
        else:
            if ITEM.match(line):
                end()
            lines.append(ITEM.sub("", line, count=1).strip())
    return parts


def words(text: str) -> int:
    """Counts words; a link is its text, code in backticks one word."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    return len(re.findall(r"[^\W\d_][\w'-]*", text))


def sentences(paragraph: str) -> list[str]:
    plain = re.sub(r"`[^`]*`", "CODE", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)).replace("*", "")
    return re.split(r"(?<=[.!?:])[\"')]*\s+(?=[A-Z\"'(])", plain)


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and the site write them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading, _ in sections(text)}


def links(text: str) -> list[str]:
    """Returns the targets of links and pictures."""
    plain = re.sub(r"`[^`]*`", "", FENCE.sub("", text))
    return re.findall(r"\]\(([^)\s]+)\)", plain) + re.findall(r'(?:src|href)="(.*?)"', plain)


def commands(code: str) -> list[list[str]]:
    """Returns the words of each command of a block for the shell."""
    joined = re.sub(r"\\\n", " ", code)
    found = []
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word in (";", "&&", "||", "|", "&"):
                if command:
                    found.append(command)
                command = []
            else:
                command.append(word)
    return found
