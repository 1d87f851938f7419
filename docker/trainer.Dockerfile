# Process 2, the trainer: DeepSpeed, without vLLM. docker/compose.yaml builds it; by hand, in the repository:
#   docker build -f docker/trainer.Dockerfile --build-arg DEVICE=cuda -t hocket-trainer:0.1.0-cuda .
# The arguments are those of server.Dockerfile.
ARG BASE=python:3.11-slim-bookworm
FROM scratch AS wheels

FROM ${BASE}
ARG DEVICE=cpu
ARG PIP_INDEX_URL
LABEL org.opencontainers.image.title="hocket trainer" org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.description="The trainer of hocket: DeepSpeed" org.opencontainers.image.licenses="Apache-2.0"
# On a GPU Triton compiles its driver with a C compiler. Nothing else is compiled: no CUDA toolkit, and no g++ on a CPU.
RUN if [ "$DEVICE" = cuda ]; then apt-get update \
        && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi \
    && useradd --uid 1000 --no-create-home hocket && install -d -m 1777 /hocket/runs

COPY requirements /opt/hocket/requirements
RUN --mount=type=cache,target=/root/.cache --mount=type=bind,from=wheels,target=/wheels cd /opt/hocket/requirements \
    && sed '/^# The server alone/,$d' "$DEVICE.lock" > trainer.lock \
    && PIP_FIND_LINKS=/wheels UV_LINK_MODE=copy python lock.py install trainer.lock && pip uninstall --yes uv
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
