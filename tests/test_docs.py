"""The documentation is what the program itself prints."""

from pathlib import Path

from hocket import config
from hocket.observe import metrics

ROOT = Path(__file__).parents[1]


def test_the_reference_pages_are_up_to_date() -> None:
    for page, content in (("configuration", config.reference()), ("metrics", metrics.reference())):
        written = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        option = "--reference" if page == "configuration" else "--metrics"
        assert written.endswith(content + "\n"), f"refresh docs/{page}.md: python3 run.py config {option}"


def test_every_setting_has_a_description() -> None:
    for section, field in config.Config.model_fields.items():
        model = field.annotation
        if isinstance(model, type) and issubclass(model, config.Section):
            for key, item in model.model_fields.items():
                assert item.description, f"{section}.{key}"
        else:
            assert field.description, section


def test_readme_names_no_file_that_is_not_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme.split("## Reading order")[1].split("```")[1]
    named = {word for word in tree.split() if word.endswith((".py", ".yaml"))}
    assert "loop.py" in named
    assert [name for name in sorted(named) if not list(ROOT.glob(f"**/{name}"))] == []
