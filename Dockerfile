# Octet on GPU machines: CUDA 13.0 with nvcc, torch, and the operators built for the GPUs named.
#
#     docker build -t octet --build-arg ARCH="8.0 9.0" .
#     docker run --rm -it --gpus all -v octet-cache:/home/octet/.cache octet
#
# What is built in a running container lies in the volume, and is there for the next one.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

# Whichever the image's release has: it is that release that pins them.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The image has a user 1000 already, `ubuntu`; ours gets a number of its own.
RUN groupadd --gid 1001 octet && useradd --create-home --uid 1001 --gid 1001 --shell /bin/bash octet \
    && install -d -o octet -g octet /opt/octet /opt/octet/cache /opt/venv
USER 1001:1001
ENV PATH=/opt/venv/bin:$PATH \
    PIP_NO_CACHE_DIR=1

# A layer of its own: torch changes less often than the sources. 2.11 is made with this CUDA.
# hadolint ignore=DL3013
RUN python3 -m venv /opt/venv && pip install 'torch==2.11.*' numpy 'setuptools>=70'

COPY --chown=octet:octet . /opt/octet/source
RUN pip install '/opt/octet/source[progress,watch,notebook]'

# Built once, for any CPU and these GPUs; read by every container, which needs no compiler for it.
ARG ARCH="8.0 9.0"
# hadolint ignore=SC2086
RUN LOADER_CACHE_DIR=/opt/octet/cache python -m loader build --portable --arch $ARCH \
    && rm -rf /opt/octet/cache/work
ENV LOADER_CACHE_DIR=/opt/octet/cache:/home/octet/.cache/octet \
    LOADER_NATIVE=0

RUN mkdir -p /home/octet/.cache/octet && chmod 700 /home/octet/.cache /home/octet/.cache/octet
VOLUME /home/octet/.cache
WORKDIR /home/octet
CMD ["python"]
