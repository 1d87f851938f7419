from tests.e2e.test_environments import port, runs  # noqa: F401
