# Process 1, the generation server: vLLM, without DeepSpeed. docker/compose.yaml builds it; by hand, in the repository:
#   docker build -f docker/server.Dockerfile --build-arg DEVICE=cuda -t hocket-server:0.1.0-cuda .
# DEVICE=cpu or cuda (NVIDIA); BASE: the same Python from your registry, or by digest; PIP_INDEX_URL: a mirror of PyPI. For
# torch from a folder of wheels: --build-context wheels=FOLDER. The locks fix every Python package to the byte, as they do
# for run.py; the patches of Python and Debian are the newest of the day. To run the same bytes again keep the image: push
# it, and name it by its digest.
ARG BASE=python:3.11-slim-bookworm
FROM scratch AS wheels

FROM ${BASE}
ARG DEVICE=cpu
ARG PIP_INDEX_URL
LABEL org.opencontainers.image.title="hocket server" org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.description="The generation server of hocket: vLLM" org.opencontainers.image.licenses="Apache-2.0"
# vLLM on a CPU loads libnuma; on a GPU Triton compiles its driver with a C compiler when the engine starts.
RUN apt-get update \
    && if [ "$DEVICE" = cuda ]; then set -- gcc libc6-dev; else set -- libnuma1; fi \
    && apt-get install -y --no-install-recommends "$@" \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --no-create-home hocket && install -d -m 1777 /hocket/runs

COPY requirements /opt/hocket/requirements
RUN --mount=type=cache,target=/root/.cache --mount=type=bind,from=wheels,target=/wheels cd /opt/hocket/requirements \
    && sed '/^# The trainer alone/,/^$/d; /^# Development alone/,$d' "$DEVICE.lock" > server.lock \
    && PIP_FIND_LINKS=/wheels UV_LINK_MODE=copy python lock.py install server.lock && pip uninstall --yes uv
RUN --mount=type=bind,target=/source,rw pip install --no-cache-dir --no-deps --no-build-isolation /source

# The examples, so that an image works by itself; compose mounts your clone over them, and edits need no build.
WORKDIR /hocket
COPY config config
COPY checkpoints checkpoints
# Any uid may run it: libraries ask for a name, and for folders that they can write to.
ENV USER=hocket HOME=/tmp HF_HOME=/hocket/runs/huggingface PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8000
# It listens once the model is loaded; the first time, that includes the download.
HEALTHCHECK --interval=5s --timeout=10s --start-period=1h --retries=6 CMD python -I -c "import http.client, json; \
    c = http.client.HTTPConnection('127.0.0.1', 8000, timeout=9); c.request('GET', '/health'); \
    raise SystemExit(json.load(c.getresponse())['status'] == 'failed')"
ENTRYPOINT ["hocket"]
CMD ["serve", "config/quickstart.yaml", "server.host=0.0.0.0"]
