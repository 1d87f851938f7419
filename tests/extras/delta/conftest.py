from tests.server.test_versions import root  # noqa: F401
