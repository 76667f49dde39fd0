# The GPU set in an image: vLLM, verl and aflow-tune, as an ordinary user. Not yet built by us.
# The host needs NVIDIA's driver (580 or newer, for CUDA 13) and its container toolkit.
#
#   docker build -t aflow-tune .
#   mkdir -p ~/.cache/huggingface      # else docker makes it, as root
#   docker run --gpus all --shm-size 16g --user "$(id -u):$(id -g)" -e HOME=/tmp -e USER \
#       -e HF_HOME=/hub -v ~/.cache/huggingface:/hub -v "$PWD:/work" aflow-tune my.yaml
#
# The command starts its own Ray inside. --user: what is written into /work and into the hub's cache
# is yours; HOME and USER, since the image does not know you.
#
# No CUDA image is needed beneath: torch and vLLM bring CUDA's libraries as packages. The C++
# compiler is for Triton, which compiles kernels while it runs.
FROM python:3.12-slim-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 tune \
    && install -d -o tune -g tune /opt/venv /opt/aflow-tune /work

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    UV_LINK_MODE=copy \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN pip install --no-cache-dir uv==0.13.9
USER 1000:1000
WORKDIR /opt/aflow-tune

# The packages first: this layer is built again only when the set changes.
COPY --chown=tune:tune requirements/gpu.txt requirements/gpu-overrides.txt requirements/
RUN --mount=type=cache,target=/home/tune/.cache/uv,uid=1000,gid=1000 \
    uv venv /opt/venv \
    && uv pip install -r requirements/gpu.txt --override requirements/gpu-overrides.txt

COPY --chown=tune:tune . .
RUN uv pip install --no-cache --no-deps -e .

WORKDIR /work
ENTRYPOINT ["aflow-tune"]
CMD ["--help"]
