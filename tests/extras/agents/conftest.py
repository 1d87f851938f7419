from tests.server.test_app import engine, http, sampler  # noqa: F401
from tests.server.test_vllm_api import model  # noqa: F401
