"""The shape of extras, read from their source."""

from tests.test_contract import FILES, check_needs_only_the_standard_library, named_by


def test_modules_of_extras_that_strings_name_are_there() -> None:
    named = {(module, target) for module in FILES for target in named_by(module) if target.startswith("hocket.extras.")}
    assert {(module, target) for module, target in named if target not in FILES} == set()
    assert len(named) > 20


def test_the_doctor_which_runs_before_there_is_an_environment_needs_only_the_standard_library() -> None:
    check_needs_only_the_standard_library("extras/doctor.py")
