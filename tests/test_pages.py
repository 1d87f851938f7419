"""The pages are short enough to be read, their links lead somewhere, and their configs and commands are right."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import hocket
from support import pages
from support.pages import PAGES, ROOT, Block

MAX_PARAGRAPH, MAX_SENTENCE, MAX_SECTION = 80, 35, 120  # words; a section's is the mean of a page
LANGUAGES = {"sh", "text", "yaml", "python", "json", "toml", "html", "bibtex", "dockerfile"}


def texts(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_no_paragraph_is_a_wall_and_no_sentence_a_maze(page: Path) -> None:
    for heading, paragraphs in pages.sections(texts(page)):
        for paragraph in paragraphs:
            assert pages.words(paragraph) <= MAX_PARAGRAPH, f"{heading}: {paragraph}"
            for sentence in pages.sentences(paragraph):
                assert pages.words(sentence) <= MAX_SENTENCE, f"{heading}: {sentence}"


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_a_page_has_a_heading_every_hundred_and_twenty_words(page: Path) -> None:
    sections = [part for part in pages.sections(texts(page)) if part != ("", [])]
    total = sum(pages.words(paragraph) for _, paragraphs in sections for paragraph in paragraphs)
    assert total <= MAX_SECTION * len(sections)


def test_a_sentence_and_a_paragraph_that_are_too_long_are_counted_as_such() -> None:
    text = "# A\n\n" + "word " * 40 + "\n\n- one `x y z` [two three](a.md).\n- Four. Five\n\n```sh\nmany words\n```\n"
    assert pages.sections(text) == [
        ("", []),
        ("A", [("word " * 40).strip(), "one `x y z` [two three](a.md).", "Four. Five"]),
    ]
    assert [pages.words(paragraph) for _, part in pages.sections(text) for paragraph in part] == [40, 4, 2]
    assert pages.sentences("Four `a. B` is. Five") == ["Four CODE is.", "Five"]


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for link in pages.links(texts(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in pages.anchors(texts(target)), link


def test_every_page_of_the_documentation_is_in_the_site_and_in_its_index() -> None:
    listed = re.findall(r"[\w/-]+\.md", texts(ROOT / "mkdocs.yml").partition("nav:")[2])
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents}
    assert sorted(listed) == sorted(there)
    linked = {link.partition("#")[0] for link in pages.links(texts(ROOT / "docs" / "index.md"))}
    assert there - {"index.md"} <= linked


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_code_blocks_are_of_a_known_kind_and_can_be_read(page: Path) -> None:
    for block in pages.blocks(texts(page)):
        assert block.language in LANGUAGES, f"a block without a kind, or of an unknown one:\n{block.code}"
        check(block)


def check(block: Block) -> None:
    """Fails for a block that its language can't read."""
    if block.language == "python":
        ast.parse(block.code)
    elif block.language == "json":
        for line in [block.code] if block.code.startswith(("{\n", "[\n")) else block.code.splitlines():
            json.loads(line)
    elif block.language == "yaml":
        assert list(yaml.safe_load_all(block.code))
    elif block.language == "toml":
        tomllib.loads(block.code)
    elif block.language == "sh":
        for command in pages.commands(block.code):
            assert not set("".join(command)) & set("…"), command


def test_every_setting_that_a_page_names_exists() -> None:
    from hocket import config

    keys = {key for key, _ in config.loading._fields()}
    heads = {key.partition(".")[0] for key in keys} - {"plugins", "env"}
    unknown = []
    for page in PAGES:
        for code in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[=:][^`]*)?`", pages.prose(texts(page))):
            known = any(code == key or key.startswith(f"{code}.") or code.startswith(f"{key}.") for key in keys)
            if (
                code.partition(".")[0] in heads
                and not known
                and not code.endswith((".py", ".md", ".yaml", ".jsonl", ".json"))
            ):
                unknown.append(f"{pages.name(page)}: {code}")
    assert unknown == []


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("CITATION.cff", r"(?m)^version: (.*)$"),
        ("CHANGELOG.md", r"(?m)^## ([\d.]+) "),
        ("docker/server.Dockerfile", r'image\.version="(.*?)"'),
        ("docker/trainer.Dockerfile", r'image\.version="(.*?)"'),
        ("docker/compose.yaml", r"image: hocket-\w+:(.*)-cpu"),
        ("docker/compose.gpu.yaml", r"image: hocket-\w+:(.*)-cuda"),
        ("docs/how-to/docker.md", r"`(\d[\d.]*)-cpu`"),
        ("docs/how-to/kubernetes.md", r"hocket-\w+:(\d[\d.]*)-cuda"),
    ],
)
def test_what_names_the_newest_version_names_that_of_the_package(name: str, pattern: str) -> None:
    found = re.findall(pattern, texts(ROOT / name))
    assert found
    assert found[0] == hocket.__version__
    assert name == "CHANGELOG.md" or set(found) == {hocket.__version__}
