# The images of Espalier, one per target: service-cpu, service-gpu, trainer, loadtest. docs/operate.md says how to build and run them.
#
# Any base with Python 3.11 or newer and its venv module will do. All stages have the same one, so that an environment made in one of them
# runs in the next. An index of one's own for pip, its password or its certificate come as build secrets, which stay in no layer:
#   docker build --secret id=pip.conf,src=pip.conf --secret id=ca.pem,src=ca.pem …      (in pip.conf: cert = /run/secrets/ca.pem)
ARG BASE_IMAGE=python:3.13-slim-bookworm

# -- dependencies: layers that change with pyproject.toml's requirements and requirements.lock, not with the source code ---------------
#
# What pip installs has a hash in requirements.lock, pip itself included; torch alone has none, because its index can be chosen.

FROM ${BASE_IMAGE} AS requirements
WORKDIR /requirements
COPY pyproject.toml constraints.txt docker/requirements.py ./
RUN python3 requirements.py service otel cpu > service-cpu.txt \
    && python3 requirements.py service otel gpu --without torch > service-gpu.txt \
    && python3 requirements.py training cpu --without torch > trainer.txt \
    && python3 requirements.py load client > loadtest.txt \
    && grep '^torch==' constraints.txt > torch.txt

FROM ${BASE_IMAGE} AS installer
# pip stays outside the environment that it fills, which therefore ends without one.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/espalier
ENV PIP_CACHE_DIR=/var/cache/pip \
    PIP_CONFIG_FILE=/run/secrets/pip.conf \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /requirements
COPY requirements.lock docker/requirements.py docker/sbom.py docker/slim.sh ./
# The pip of a base may be too old to take hashes from constraints.
RUN --mount=type=cache,id=pip,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    sed -n '/^pip==/,/[^\\]$/p' requirements.lock > pip.txt && /opt/pip/bin/pip install --require-hashes -r pip.txt
ENV PIP_PYTHON=/opt/espalier/bin/python

FROM installer AS dependencies-service-cpu
COPY --from=requirements /requirements/service-cpu.txt ./
RUN --mount=type=cache,id=pip,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    /opt/pip/bin/pip install --require-hashes -r service-cpu.txt -c requirements.lock \
    && /opt/espalier/bin/python sbom.py espalier-service-cpu > /opt/espalier/sbom.cdx.json && sh slim.sh

FROM installer AS dependencies-service-gpu
COPY --from=requirements /requirements/service-gpu.txt /requirements/torch.txt ./
RUN --mount=type=cache,id=pip,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    /opt/pip/bin/pip install --require-hashes -r service-gpu.txt -c requirements.lock \
    && /opt/pip/bin/pip install --no-deps -r torch.txt \
    && /opt/espalier/bin/python requirements.py --of torch > of-torch.txt \
    && /opt/pip/bin/pip install --require-hashes -r of-torch.txt -c requirements.lock \
    && /opt/espalier/bin/python sbom.py espalier-service-gpu > /opt/espalier/sbom.cdx.json && sh slim.sh

FROM installer AS dependencies-trainer
# The index of torch's CPU wheels; without it PyPI's torch comes, with several gigabytes of CUDA.
ARG TORCH_INDEX=
COPY --from=requirements /requirements/trainer.txt /requirements/torch.txt ./
RUN --mount=type=cache,id=pip,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    /opt/pip/bin/pip install --require-hashes -r trainer.txt -c requirements.lock \
    && if [ -n "${TORCH_INDEX}" ]; then set -- --index-url "${TORCH_INDEX}"; fi \
    && /opt/pip/bin/pip install --no-deps "$@" -r torch.txt \
    && /opt/espalier/bin/python requirements.py --of torch > of-torch.txt \
    && /opt/pip/bin/pip install --require-hashes -r of-torch.txt -c requirements.lock \
    && /opt/espalier/bin/python sbom.py espalier-trainer > /opt/espalier/sbom.cdx.json && sh slim.sh

FROM installer AS dependencies-loadtest
COPY --from=requirements /requirements/loadtest.txt ./
RUN --mount=type=cache,id=pip,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    /opt/pip/bin/pip install --require-hashes -r loadtest.txt -c requirements.lock \
    && /opt/espalier/bin/python sbom.py espalier-loadtest > /opt/espalier/sbom.cdx.json && sh slim.sh

# -- our own code, compiled here: a read-only file system cannot keep what Python and numba would compile at the start --------------------

FROM ${BASE_IMAGE} AS code
WORKDIR /app
COPY espalier espalier/

FROM code AS code-service
COPY service service/
RUN python3 -m compileall -q --invalidation-mode checked-hash . && chmod -R a+rX .

FROM code AS code-trainer
COPY data data/
COPY espalier_cli espalier_cli/
COPY training training/
RUN python3 -m compileall -q --invalidation-mode checked-hash . && chmod -R a+rX .

FROM code AS code-loadtest
COPY espalier_client espalier_client/
COPY loadtest loadtest/
RUN python3 -m compileall -q --invalidation-mode checked-hash . && chmod -R a+rX .

# Compiled code for all usual processors of the machine's kind (`espalier/processors.py`). amd64 is what has been tried; the same lines are
# meant for arm64.
FROM dependencies-service-cpu AS compiled-service-cpu
COPY --from=code-service /app /app
WORKDIR /app
RUN /opt/espalier/bin/python -m espalier.compile --write --baseline espalier && chmod -R a+rX .

FROM dependencies-service-gpu AS compiled-service-gpu
COPY --from=code-service /app /app
WORKDIR /app
RUN /opt/espalier/bin/python -m espalier.compile --write --baseline espalier && chmod -R a+rX .

FROM dependencies-trainer AS compiled-trainer
COPY --from=code-trainer /app /app
WORKDIR /app
RUN /opt/espalier/bin/python -m espalier.compile --write --baseline && chmod -R a+rX .

# -- what runs ---------------------------------------------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS runtime
RUN groupadd --gid 10001 espalier \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin espalier \
    && install --directory --owner 10001 --group 10001 /models /cache
# Everything that is written at run time goes to /models or below /tmp, so the root file system can be read-only. /cache is the GPU image's.
ENV PATH=/opt/espalier/bin:${PATH} \
    HOME=/tmp \
    MPLCONFIGDIR=/tmp/matplotlib \
    ORT_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="Espalier"
WORKDIR /app

FROM runtime AS service
# OpenBLAS would start a thread per core of the machine in each worker, whatever the container may use; the service multiplies nothing large.
ENV ESPALIER_HOST=0.0.0.0 \
    ESPALIER_MODELS=/models \
    ESPALIER_PORT=8000 \
    OPENBLAS_NUM_THREADS=1
# The trained sample: container engines fill an empty volume with what the image has there.
RUN install --directory --owner 10001 --group 10001 /models/debian-depends
COPY --chown=10001:10001 models/debian-depends/1 /models/debian-depends/1
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=4s --start-period=120s --retries=3 CMD ["python", "-m", "service.healthcheck", "/readyz"]
ENTRYPOINT ["python", "-m", "service"]

FROM service AS service-gpu
# Triton compiles a launcher for each kernel at its first use: a C compiler, and Python's headers where the base has none.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && if ! [ -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then \
         apt-get install --yes --no-install-recommends python3-dev; \
       fi \
    && rm -rf /var/lib/apt/lists/*
# What is compiled for this GPU, kept in a volume so that the next start need not do it again.
ENV CUDA_CACHE_PATH=/cache/cuda \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
LABEL org.opencontainers.image.title="espalier-service-gpu" \
      org.opencontainers.image.description="Serves Espalier's models over HTTP, on an NVIDIA GPU"
COPY --from=dependencies-service-gpu /opt/espalier /opt/espalier
COPY --from=compiled-service-gpu /app /app
USER 10001:10001

FROM runtime AS trainer
VOLUME /models
LABEL org.opencontainers.image.title="espalier-trainer" \
      org.opencontainers.image.description="Trains Espalier's models on a CPU, with the embedded sample"
COPY --from=dependencies-trainer /opt/espalier /opt/espalier
COPY --from=compiled-trainer /app /app
USER 10001:10001
CMD ["python", "-m", "training", "--help"]

FROM runtime AS loadtest
LABEL org.opencontainers.image.title="espalier-loadtest" \
      org.opencontainers.image.description="Load tests of Espalier's service"
COPY --from=dependencies-loadtest /opt/espalier /opt/espalier
COPY --from=code-loadtest /app /app
USER 10001:10001
EXPOSE 8089
CMD ["locust", "-f", "loadtest/locustfile.py"]

# The last stage is what `docker build` makes when it is given no target.
FROM service AS service-cpu
LABEL org.opencontainers.image.title="espalier-service-cpu" \
      org.opencontainers.image.description="Serves Espalier's models over HTTP, on a CPU"
COPY --from=dependencies-service-cpu /opt/espalier /opt/espalier
COPY --from=compiled-service-cpu /app /app
USER 10001:10001
