import tomllib

from tests.test_run import check_data

from support.processes import ROOT


def test_the_files_of_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [name for name in project["tool"]["setuptools"]["package-data"]["hocket"] if name.startswith("extras/")]
    assert names
    for name in names:
        check_data(name)
