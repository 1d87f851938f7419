"""Process 1: vLLM behind FastAPI. The only package that imports either of them."""
