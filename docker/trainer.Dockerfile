# Process 2, the trainer: DeepSpeed, without vLLM. docker/compose.yaml builds it; by hand, in the repository:
#   docker build -f docker/trainer.Dockerfile --build-arg DEVICE=cuda -t hocket-trainer:cuda .
# The arguments are those of server.Dockerfile.
ARG BASE=python:3.11-slim-bookworm
FROM scratch AS wheels

FROM ${BASE}
ARG DEVICE=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# On a GPU Triton compiles its driver with a C compiler. Nothing else is compiled: no CUDA toolkit, and no g++ on a CPU.
RUN if [ "$DEVICE" = cuda ]; then apt-get update \
        && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi \
    && useradd --uid 1000 --no-create-home hocket && install -d -m 1777 /hocket/runs

COPY requirements*.txt /opt/hocket/
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels set -e; cd /opt/hocket; \
    if [ "$DEVICE" = cuda ]; then file=requirements.txt; else file=requirements-cpu.txt; \
        pip install --no-deps --find-links /wheels --extra-index-url "$TORCH_INDEX" "$(grep '^torch==' $file)+cpu"; fi; \
    sed '/^# The server alone/,$d' $file > trainer.txt; pip install -r trainer.txt
RUN --mount=type=bind,target=/source,rw pip install --no-cache-dir --no-deps --no-build-isolation /source

WORKDIR /hocket
COPY config config
COPY checkpoints checkpoints
ENV USER=hocket HOME=/tmp HF_HOME=/hocket/runs/huggingface PYTHONUNBUFFERED=1
USER 1000:1000
# Like Ctrl-C: the run closes its files and writes the report. Process 1 would not notice a SIGTERM.
STOPSIGNAL SIGINT
ENTRYPOINT ["hocket"]
CMD ["train", "config/quickstart.yaml"]
